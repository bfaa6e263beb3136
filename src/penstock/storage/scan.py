"""Finds frames in files without knowing where they begin: a frame starts with its magic and holds its own size.

Frames lie end to end in a segment, with holes where some were deleted and perhaps a torn one at the end. A file may
also be damaged, or crafted to mislead. So nothing is trusted before its checksums are verified, sizes are compared with
the file before anything is read, and false starts use up an allowance that depends on the file's size. Without that, a
file full of magics would make the scan quadratic:

    [frame][ hole ][frame][PENSTOCK...torn      two frames, one broken piece
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import xxhash

from penstock.errors import CorruptFrame
from penstock.frames import MAGIC, PREFIX_SIZE, frame_size, read_sizes, split
from penstock.storage.interface import Range

MAX_FRONT_BYTES = 64 << 20
"""Limit of a frame's front. The front of 65,536 samples takes about 15 MB."""
MAX_FRAME_BYTES = 4 << 30
_CHUNK = 1 << 20
_FALSE_START = 4096
"""Bytes of the allowance that a false start uses up, beside those that were hashed for it."""


@dataclass(frozen=True, slots=True)
class Piece:
    """A frame in a file, or the remains of one."""

    offset: int
    size: int
    problem: str = ""
    """Why it is not a sound frame; empty: its checksums are right."""

    @property
    def end(self) -> int:
        return self.offset + self.size


@dataclass(frozen=True, slots=True)
class _Front:
    size: int
    frame_size: int
    body_hash: int


@contextmanager
def reading_file(path: Path) -> Iterator[int]:
    """Open a file to read it by offset. O_NONBLOCK: opening a pipe by mistake must not wait for a writer."""
    file = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        yield file
    finally:
        os.close(file)


def read_at(file: int, offset: int, size: int) -> bytes:
    """Read `size` bytes at an offset; fewer at the end of the file."""
    parts: list[bytes] = []
    while size > 0 and (part := os.pread(file, min(size, 1 << 30), offset)):
        parts.append(part)
        offset, size = offset + len(part), size - len(part)
    return parts[0] if len(parts) == 1 else b"".join(parts)


def find_frames(file: int, known: Iterable[Range] = ()) -> Iterator[Piece]:
    """Yield every frame of a file and every broken piece of one, outside the `known` ranges, in order."""
    found = os.fstat(file)
    # By disk blocks, not by size: a sparse file of a terabyte that takes one block gets the allowance of one block.
    allowance = [4 * min(found.st_size, found.st_blocks * 512) + (256 << 20)]
    for start, end in gaps(found.st_size, known):
        yield from _find_in(file, start, end, allowance)
        if allowance[0] < 0:
            return


def holds_data(file: int) -> bool:
    """Return whether a file holds anything but zeros."""
    at, end = 0, os.fstat(file).st_size
    while at < end:
        at = _skip_hole(file, at, end)
        data = os.pread(file, _CHUNK, at)
        if data.count(0) < len(data):
            return True
        at += max(len(data), 1)
    return False


def gaps(size: int, known: Iterable[Range]) -> Iterator[Range]:
    """Yield the parts of a file that no range covers.

    >>> list(gaps(10, [(6, 8), (0, 2), (1, 4)]))
    [(4, 6), (8, 10)]
    """
    at = 0
    for start, end in sorted(known):
        if start > at:
            yield at, min(start, size)
        at = max(at, end)
        if at >= size:
            return
    if at < size:
        yield at, size


def _find_in(file: int, at: int, end: int, allowance: list[int]) -> Iterator[Piece]:
    while (start := _next_magic(file, at, end)) is not None:
        front = _front_at(file, start, end, allowance)
        if allowance[0] < 0:
            yield Piece(start, end - start, "too many false starts of frames: the rest was not read")
            return
        if front is None:
            at = start + 1
        elif start + front.frame_size > end:
            yield Piece(start, end - start, f"torn: {end - start:,} of {front.frame_size:,} bytes")
            at = start + front.size  # no frame begins inside a sound front
        elif front.frame_size > MAX_FRAME_BYTES:
            yield Piece(start, front.frame_size, f"{front.frame_size:,} bytes; at most {MAX_FRAME_BYTES:,} are read")
            at = start + front.frame_size
        else:
            # The front's checksum is right, so its sizes are too: skip all of a damaged body.
            at = start + front.frame_size
            good = _hash_of(file, start + front.size, at) == front.body_hash
            yield Piece(start, front.frame_size, "" if good else "body checksum does not match")


def _next_magic(file: int, at: int, end: int) -> int | None:
    """Return where the next frame may begin, or None."""
    if end - at >= len(MAGIC) and os.pread(file, len(MAGIC), at) == MAGIC:
        return at  # frames lie end to end: no need to search
    # Start with 4 KiB and double. The next frame is usually near, and a file of false starts must not cost 1 MiB each.
    chunk = 1 << 12
    while end - at >= PREFIX_SIZE:
        at, chunk = _skip_hole(file, at, end), min(2 * chunk, _CHUNK)
        data = os.pread(file, min(chunk, end - at), at)
        if len(data) < len(MAGIC):
            return None
        found = data.find(MAGIC)
        if found >= 0:
            return at + found
        at += len(data) - len(MAGIC) + 1  # the magic may begin in this chunk and end in the next
    return None


def _skip_hole(file: int, at: int, end: int) -> int:
    try:
        return min(os.lseek(file, at, os.SEEK_DATA), end)
    except OSError as error:
        return end if error.errno == errno.ENXIO else at  # ENXIO: only a hole follows


def _front_at(file: int, start: int, end: int, allowance: list[int]) -> _Front | None:
    """Return the front of the frame that begins at `start`, or None if none does: that uses up some allowance."""
    size = 0
    try:
        prefix = read_at(file, start, PREFIX_SIZE)
        header_size, head_size, _ = read_sizes(prefix)
        if PREFIX_SIZE + header_size + head_size <= min(end - start, MAX_FRONT_BYTES):
            size = PREFIX_SIZE + header_size + head_size
            sections = split(read_at(file, start, size), whole=False)
            return _Front(size, frame_size(prefix), sections.body_hash)
    except CorruptFrame:
        pass
    allowance[0] -= size + _FALSE_START
    return None


def _hash_of(file: int, start: int, end: int) -> int:
    state = xxhash.xxh3_64()
    while start < end and (data := os.pread(file, min(_CHUNK, end - start), start)):
        state.update(data)
        start += len(data)
    return state.intdigest()
