"""Files that appear whole or not at all, also after a power cut: written beside, synced, renamed, the folder synced.

The order matters. A rename that reaches the disk before the bytes do leaves an empty file under the final name; a
rename that was never synced may be undone by a crash although the caller was told that the file is there.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO


@contextmanager
def replacing(path: Path, *, buffering: int = 1 << 20) -> Iterator[BinaryIO]:
    """A file to write; it takes `path` when the block ends, and nothing is left of it when the block raises.

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


def beside(path: Path) -> Path:
    """A hidden name in the same folder, of this process, under which `path` is made ready."""
    return path.with_name(f".{path.name}.{os.getpid()}.part")


def rename(part: Path, path: Path) -> None:
    """Give a file or folder that was synced its name; a file of that name is replaced."""
    part.replace(path)
    sync(path.parent)


def sync(path: Path) -> None:
    """Make the bytes of a file, or the names in a folder, durable."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
