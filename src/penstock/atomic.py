"""Atomic file writes: a file appears complete or not at all, even after a power failure.

It is written under a temporary name, synced and renamed, then the folder is synced. The order matters. A rename that
reaches the disk before the bytes leaves an empty file under the final name. A rename that was never synced may be
undone by a crash although the caller already relies on the file.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from penstock.errors import PenstockError, StorageError

REMEDIES = {
    errno.EROFS: "choose a folder on a volume that is not read-only",
    errno.ENOSPC: "free the volume, or choose another folder",
    errno.ENAMETOOLONG: "choose a shorter path",
    errno.ELOOP: "a link leads to itself; remove it, or choose another path",
    **dict.fromkeys((errno.EACCES, errno.EPERM), "choose a folder that this user may write"),
    **dict.fromkeys(
        (errno.EEXIST, errno.ENOTDIR, errno.EISDIR), "a file is where a folder should be, or the reverse; move it away"
    ),
}


@contextmanager
def folder_errors(where: str | Path) -> Iterator[None]:
    """Turn the operating system's errors about a folder into StorageError with a remedy.

    >>> with folder_errors("run"):
    ...     raise OSError(errno.EROFS, "Read-only file system", "run/frames")
    Traceback (most recent call last):
    ...
    penstock.errors.StorageError: run/frames: Read-only file system; choose a folder on a volume that is not read-only
    """
    try:
        yield
    except PenstockError:
        raise
    except OSError as error:
        remedy = REMEDIES.get(error.errno or 0, "choose a folder that can be made and written")
        raise StorageError(f"{error.filename or where}: {error.strerror or error}; {remedy}") from None
    except ValueError as error:  # a path with NUL
        raise StorageError(f"{str(where)!r}: {error}; choose another path") from None


def resolved(folder: str | Path) -> Path:
    """Return an absolute path without links. A link that leads to itself is an OSError, as elsewhere."""
    path = Path(folder)
    try:
        return path.resolve()
    except RuntimeError:  # what pathlib made of it before Python 3.13
        raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), str(path)) from None


@contextmanager
def replacing(path: Path, *, buffering: int = 1 << 20) -> Iterator[BinaryIO]:
    """Yield a file to write. It gets the name `path` when the block ends, and is removed if the block raises.

    >>> import tempfile
    >>> path = Path(tempfile.mkdtemp()) / "state"
    >>> with replacing(path) as file:
    ...     _ = file.write(b"new")
    >>> path.read_bytes(), [each.name for each in path.parent.iterdir()]
    (b'new', ['state'])
    """
    part = beside(path)
    try:
        with part.open("wb", buffering=buffering) as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        rename(part, path)
    finally:
        part.unlink(missing_ok=True)


def open_file(path: Path) -> BinaryIO:
    """Open a file in a folder that others may have made. Raises OSError for what is no file: reading a pipe would wait
    for ever, and a device has no end.

    >>> open_file(Path("/dev/zero"))
    Traceback (most recent call last):
    ...
    OSError: [Errno 22] no regular file: '/dev/zero'
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    mode = os.fstat(descriptor).st_mode
    if stat.S_ISREG(mode):
        return open(descriptor, "rb")  # noqa: PTH123 - a descriptor, for the caller to close
    os.close(descriptor)
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    raise OSError(errno.EINVAL, "no regular file", str(path))


def read_small(path: Path, most: int = 1 << 20) -> bytes:
    """Return the bytes of a small file, opened as by `open_file`. Raises OSError for one that is larger."""
    with open_file(path) as file:
        data = file.read(most + 1)
    if len(data) > most:
        raise OSError(errno.EFBIG, f"larger than {most:,} bytes", str(path))
    return data


def beside(path: Path) -> Path:
    """Return a hidden temporary name for `path` in the same folder, unique to this process."""
    return path.with_name(f".{path.name}.{os.getpid()}.part")


def rename(part: Path, path: Path) -> None:
    """Rename a synced file or folder to its final name. Replaces a file of that name."""
    part.replace(path)
    sync(path.parent)


def sync(path: Path) -> None:
    """Make the bytes of a file, or the names in a folder, durable."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
