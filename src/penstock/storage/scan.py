"""Finds frames in files without knowing where they begin: a frame starts with its magic and says its own size.

Frames lie end to end in a segment, with holes where some were deleted and perhaps a torn one at the end. A file may
also be damaged, or made to mislead. So nothing is believed before its checksums were verified, sizes are compared with
the file before anything is read, and beginnings that turn out to be none use up an allowance that the file's size
bounds:

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
"""Of a frame's front; that of 65,536 samples takes about 15 MB."""
MAX_FRAME_BYTES = 4 << 30
_CHUNK = 1 << 20
_FALSE_START = 4096
"""What a beginning that is none costs of the allowance, beside the bytes that were hashed for it."""


@dataclass(frozen=True, slots=True)
class Piece:
    """A frame in a file, or what is left of one."""

    offset: int
    size: int
    problem: str = ""
    """Why it is not a whole frame; empty: its checksums are right."""

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
    """A descriptor to read a file with. Does not wait where the file is a pipe, which cannot be read by offset."""
    file = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        yield file
    finally:
        os.close(file)


def read_at(file: int, offset: int, size: int) -> bytes:
    """The bytes there; fewer at the end of the file."""
    parts: list[bytes] = []
    while size > 0 and (part := os.pread(file, min(size, 1 << 30), offset)):
        parts.append(part)
        offset, size = offset + len(part), size - len(part)
    return parts[0] if len(parts) == 1 else b"".join(parts)


def find_frames(file: int, known: Iterable[Range] = ()) -> Iterator[Piece]:
    """Every frame of a file and every broken piece of one, outside the `known` ranges, in order."""
    found = os.fstat(file)
    allowance = [4 * min(found.st_size, found.st_blocks * 512) + (256 << 20)]
    for start, end in gaps(found.st_size, known):
        yield from _find_in(file, start, end, allowance)
        if allowance[0] < 0:
            return


def holds_data(file: int) -> bool:
    """Whether there is anything but zeros in a file."""
    at, end = 0, os.fstat(file).st_size
    while at < end:
        at = _skip_hole(file, at, end)
        data = os.pread(file, _CHUNK, at)
        if data.count(0) < len(data):
            return True
        at += max(len(data), 1)
    return False


def gaps(size: int, known: Iterable[Range]) -> Iterator[Range]:
    """What ranges leave free of a file.

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
            yield Piece(start, end - start, "too many false beginnings of frames: the rest was not read")
            return
        if front is None:
            at = start + 1
        elif start + front.frame_size > end:
            yield Piece(start, end - start, f"torn: {end - start:,} of {front.frame_size:,} bytes")
            at = start + front.size  # no frame begins inside a front that is whole
        elif front.frame_size > MAX_FRAME_BYTES:
            yield Piece(start, front.frame_size, f"{front.frame_size:,} bytes; at most {MAX_FRAME_BYTES:,} are read")
            at = start + front.frame_size
        else:
            # The front's checksum is right, so its sizes are: a damaged body is skipped as a whole.
            at = start + front.frame_size
            good = _hash_of(file, start + front.size, at) == front.body_hash
            yield Piece(start, front.frame_size, "" if good else "body checksum does not match")


def _next_magic(file: int, at: int, end: int) -> int | None:
    """Where the next frame may begin."""
    if end - at >= len(MAGIC) and os.pread(file, len(MAGIC), at) == MAGIC:
        return at  # frames lie end to end: no need to search
    chunk = 1 << 12  # the next frame is near, or nowhere: a file of false beginnings must not cost a chunk for each
    while end - at >= PREFIX_SIZE:
        at, chunk = _skip_hole(file, at, end), min(2 * chunk, _CHUNK)
        data = os.pread(file, min(chunk, end - at), at)
        if len(data) < len(MAGIC):
            return None
        found = data.find(MAGIC)
        if found >= 0:
            return at + found
        at += len(data) - len(MAGIC) + 1
    return None


def _skip_hole(file: int, at: int, end: int) -> int:
    try:
        return min(os.lseek(file, at, os.SEEK_DATA), end)
    except OSError as error:
        return end if error.errno == errno.ENXIO else at  # ENXIO: nothing but a hole follows


def _front_at(file: int, start: int, end: int, allowance: list[int]) -> _Front | None:
    """The front of the frame that begins there; None if none does, which uses up some of the allowance."""
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
