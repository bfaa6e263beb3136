"""Blobs in a folder, written atomically: to a temporary file, synced, then linked to their name.

A blob appears under its name completely or not at all, also after `kill -9` or a power cut. The bytes go to a dot-file
in the same directory and are synced. A hard link gives them their name; it fails if the name is taken, so exactly one
of many writers wins. The directory is synced last.
"""

from __future__ import annotations

import errno
import os
import secrets
import stat
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from penstock.assets.blobs import BlobInfo, check_name
from penstock.assets.safe_open import directory, part_beneath, read_beneath
from penstock.assets.sources import file_url
from penstock.errors import ConfigError, CorruptAsset, MissingAsset, StorageError

_ABSENT = (errno.ENOENT, errno.ENOTDIR)
_OUTSIDE = (errno.ELOOP, errno.ENXIO, errno.EISDIR)
_NO_LINKS = (errno.EPERM, errno.EOPNOTSUPP, errno.EMLINK)
TEMPORARY = ".tmp-"


class LocalFolder:
    """Blobs under one absolute root, made with mode 0700, files 0600.

    >>> import tempfile
    >>> blobs = LocalFolder(tempfile.mkdtemp())
    >>> blobs.put_if_absent("a/b", b"hello"), blobs.put_if_absent("a/b", b"other"), blobs.get("a/b", max_bytes=99)
    (True, False, b'hello')
    """

    def __init__(self, root: str | os.PathLike[str]) -> None:
        text = os.fspath(root)
        if not text or "\0" in text:
            raise ConfigError(f"root {text!r}: not a folder name; give a path")
        # Absolute from the start: a relative root would make URLs that mean something else in another process.
        self.root = Path(text).expanduser().absolute()
        try:
            self.root.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            # exist_ok may still raise on network filesystems; is_dir raises if the name is too long.
            if error.errno == errno.ENAMETOOLONG or not self.root.is_dir():
                raise StorageError(f"root {str(self.root)!r}: {error.strerror}; give a writable folder") from error

    def __repr__(self) -> str:
        return f"LocalFolder({str(self.root)!r})"

    def put_if_absent(self, name: str, data: bytes) -> bool:
        *folder, leaf = check_name(name)
        with _typed(name), directory(str(self.root), folder, create=True) as fd:
            if _exists(leaf, fd):
                os.fsync(fd)  # the other writer may not have synced yet, and our answer means "durable"
                return False
            temporary = f"{TEMPORARY}{os.getpid()}-{secrets.token_hex(8)}"
            try:
                _write(temporary, data, fd)
                created = _publish(temporary, leaf, fd)
            finally:
                with suppress(FileNotFoundError):
                    os.unlink(temporary, dir_fd=fd)
            os.fsync(fd)
            return created

    def get(self, name: str, *, max_bytes: int) -> bytes:
        with _typed(name):
            return read_beneath(str(self.root), check_name(name), max_bytes=max_bytes)

    def part(self, name: str, *, start: int, size: int) -> bytes:
        with _typed(name):
            return part_beneath(str(self.root), check_name(name), start=start, size=size)

    def head(self, name: str) -> BlobInfo | None:
        *folder, leaf = check_name(name)
        try:
            with _typed(name), directory(str(self.root), folder) as fd:
                info = os.stat(leaf, dir_fd=fd, follow_symlinks=False)
        except MissingAsset:
            return None
        if not stat.S_ISREG(info.st_mode):
            raise CorruptAsset(f"{name}: not a regular file; remove it from the store")
        return BlobInfo(name=name, size=info.st_size, modified=info.st_mtime)

    def list(self, prefix: str) -> Iterator[BlobInfo]:
        top = self.root.joinpath(*check_name(prefix)) if prefix else self.root
        for folder, below, files in os.walk(top, followlinks=False):
            below.sort()
            for leaf in sorted(files):
                path = Path(folder, leaf)
                with suppress(FileNotFoundError):
                    info = path.lstat()
                    if stat.S_ISREG(info.st_mode) and not leaf.startswith("."):
                        name = path.relative_to(self.root).as_posix()
                        yield BlobInfo(name=name, size=info.st_size, modified=info.st_mtime)

    def touch(self, name: str) -> bool:
        return self._act(name, lambda leaf, fd: os.utime(leaf, dir_fd=fd, follow_symlinks=False))

    def delete(self, name: str) -> bool:
        return self._act(name, lambda leaf, fd: os.unlink(leaf, dir_fd=fd))

    def move(self, name: str, to: str) -> bool:
        *folder, new = check_name(to)
        with _typed(to), directory(str(self.root), folder, create=True) as target:
            moved = self._act(name, lambda leaf, fd: os.rename(leaf, new, src_dir_fd=fd, dst_dir_fd=target))
            os.fsync(target)
        return moved

    def url(self, name: str) -> str:
        return file_url(str(self.root.joinpath(*check_name(name))))

    def remove_temporaries(self, *, older_than_s: float, now: float | None = None) -> int:
        """Remove files that killed writers left behind. Returns how many."""
        limit = (time.time() if now is None else now) - older_than_s
        count = 0
        for folder, _, files in os.walk(self.root, followlinks=False):
            for leaf in files:
                path = Path(folder, leaf)
                with suppress(FileNotFoundError):
                    if leaf.startswith(TEMPORARY) and path.lstat().st_mtime < limit:
                        path.unlink()
                        count += 1
        return count

    def _act(self, name: str, act: Callable[[str, int], None]) -> bool:
        *folder, leaf = check_name(name)
        try:
            with _typed(name), directory(str(self.root), folder) as fd:
                act(leaf, fd)
        except MissingAsset:
            return False
        return True


def _exists(leaf: str, fd: int) -> bool:
    try:
        os.stat(leaf, dir_fd=fd, follow_symlinks=False)
    except FileNotFoundError:
        return False
    return True


def _write(leaf: str, data: bytes, fd: int) -> None:
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    with open(os.open(leaf, flags, 0o600, dir_fd=fd), "wb") as file:  # noqa: PTH123 - a descriptor, not a path
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _publish(temporary: str, leaf: str, fd: int) -> bool:
    try:
        os.link(temporary, leaf, src_dir_fd=fd, dst_dir_fd=fd, follow_symlinks=False)
    except FileExistsError:
        return False
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
        # This filesystem has no hard links. A rename may replace, which is harmless: equal names mean equal content.
        os.rename(temporary, leaf, src_dir_fd=fd, dst_dir_fd=fd)
    return True


@contextmanager
def _typed(name: str) -> Iterator[None]:
    """Translate the kernel's errors to ours."""
    try:
        yield
    except OSError as error:
        if isinstance(error, StorageError):
            raise
        if error.errno in _ABSENT:
            raise MissingAsset(f"{name}: nothing is stored under that name") from None
        if error.errno in _OUTSIDE:
            raise CorruptAsset(f"{name}: a link, device or folder where a file should be; remove it") from None
        raise StorageError(f"{name}: {error.strerror or type(error).__name__}; check the disk") from error
