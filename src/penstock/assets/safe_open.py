"""Open a file beneath a root and nowhere else: one path component at a time, never through a symlink.

`openat2(RESOLVE_BENEATH | RESOLVE_NO_SYMLINKS)` does the same in one call, but Python has no binding for it. Walking
with `dir_fd` gives the same guarantee, because the kernel checks each step when it is taken. Comparing path strings
does not: a symlink swapped in between check and open leads out of the root.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import BinaryIO

from penstock.errors import CorruptAsset

_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
# O_NONBLOCK: opening a FIFO without a writer would otherwise hang before it can be rejected.
_FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


@contextmanager
def directory(root: str, parts: Sequence[str], *, create: bool = False) -> Iterator[int]:
    """Yield a descriptor of `root/parts...`. The root itself is trusted, nothing below it is."""
    fd = os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        for part in parts:
            step = _enter(fd, part, create)
            os.close(fd)
            fd = step
        yield fd
    finally:
        os.close(fd)


def _enter(fd: int, part: str, create: bool) -> int:
    if create:
        # mkdir may race with another writer or a lagging network filesystem. All that matters is that open works.
        with suppress(FileExistsError):
            os.mkdir(part, 0o700, dir_fd=fd)
            os.fsync(fd)
    return os.open(part, _DIRECTORY, dir_fd=fd)


@contextmanager
def _open_beneath(root: str, parts: Sequence[str]) -> Iterator[BinaryIO]:
    with directory(root, parts[:-1]) as folder:
        fd = os.open(parts[-1], _FILE, dir_fd=folder)
    with open(fd, "rb", closefd=True) as file:  # noqa: PTH123 - a descriptor, not a path
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise CorruptAsset(f"{parts[-1]}: not a regular file; remove it from the store")
        yield file


def part_beneath(root: str, parts: Sequence[str], *, start: int, size: int) -> bytes:
    """Return some bytes of a regular file, fewer where it ends."""
    with _open_beneath(root, parts) as file:
        file.seek(start)
        return file.read(size)


def read_beneath(root: str, parts: Sequence[str], *, max_bytes: int) -> bytes:
    """Return the bytes of a regular file of at most `max_bytes`. Raises the kernel's OSError, or `CorruptAsset`."""
    with _open_beneath(root, parts) as file:
        info = os.fstat(file.fileno())
        # Read one byte more than allowed, to catch a file that grows meanwhile.
        data = file.read(max_bytes + 1) if info.st_size <= max_bytes else b""
        if info.st_size > max_bytes or len(data) > max_bytes:
            raise CorruptAsset(f"{parts[-1]}: {max(info.st_size, len(data))} bytes; at most {max_bytes} are read")
        return data
