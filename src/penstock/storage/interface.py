"""The interface of a storage engine: hold the bytes of segments, and return ranges of them.

A *segment* is written by one process, from start to end, and never changed afterwards. Its name is random and never
used again. A *location* names a frame inside a segment:

    3f9c21d07b6a4e58:8192:310284        segment, offset, bytes

Engines never delete anything by themselves. The caller names each frame and each segment to delete.
"""

from __future__ import annotations

import math
import re
import secrets
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol, TypeAlias

import numpy as np

from penstock.errors import Away as Away
from penstock.errors import CorruptFrame, StorageError
from penstock.frames import Buffer

Pieces: TypeAlias = Sequence[Buffer]
"""The buffers that make up one frame, end to end."""
Range: TypeAlias = tuple[int, int]
"""First byte within a frame, and the byte after the last."""
SCHEMES = {"s3": "s3", "gs": "gs", "az": "az", "azure": "az"}
"""Schemes of object stores, as written -> as we call them."""
_SEGMENT = re.compile(r"[0-9a-f]{16}")
_LOCATION = re.compile(r"([0-9a-f]{16}):(\d{1,15}):(\d{1,15})")


class Gone(CorruptFrame):
    """The bytes are not in storage: their segment is missing, or shorter than when it was written."""


class SegmentSealed(StorageError):
    """The plane accepts no further frames from this segment: write to a new one."""


@dataclass(frozen=True, slots=True)
class Location:
    """The place of a frame in storage."""

    segment: str
    offset: int
    size: int

    @property
    def end(self) -> int:
        return self.offset + self.size

    def __str__(self) -> str:
        return f"{self.segment}:{self.offset}:{self.size}"


@dataclass(frozen=True, slots=True)
class Part:
    """A file to search for frames: a segment of a folder, or an object of an object store."""

    name: str
    """Its name in messages."""
    size: int
    modified_ns: int
    opened: Callable[[], AbstractContextManager[int]]
    """Opens it to read and returns a descriptor. Raises OSError."""
    segment: str = ""
    """Its segment; empty for a file that is not part of a storage."""
    start: int = 0
    """Its offset within the segment."""


Wanted: TypeAlias = tuple[Location, int, memoryview]
"""A frame, an offset in its segment that lies inside the frame, and the buffer to fill with the bytes from there on."""


def check_wanted(wanted: Sequence[Wanted]) -> None:
    """Raise Gone for a range that is not inside its frame."""
    for at, offset, view in wanted:
        if not at.offset <= offset <= offset + len(view) <= at.end:
            raise Gone(f"location {at}: bytes {offset} to {offset + len(view)} are not in it")


def read_ranges(storage: Storage, location: str, ranges: Sequence[Range] | None) -> list[Buffer]:
    """Implement `Storage.read` with `Storage.read_into`."""
    at = parse_location(location)
    wanted = [(0, at.size)] if ranges is None else list(ranges)
    if any(not 0 <= start <= end <= at.size for start, end in wanted):
        raise Gone(f"location {location}: asked for bytes {wanted[:4]}")
    found = [np.empty(end - start, np.uint8).data for start, end in wanted]  # not cleared first, unlike a bytearray
    storage.read_into([(at, at.offset + start, view) for (start, _), view in zip(wanted, found, strict=True)])
    return list(found)


@lru_cache(maxsize=1024)
def parse_location(text: str) -> Location:
    """Parse a location. Raises CorruptFrame if it is none. Cached: a put looks at its location five times.

    >>> parse_location("3f9c21d07b6a4e58:8192:310284").size
    310284
    """
    found = _LOCATION.fullmatch(str(text))  # a damaged log may have bytes
    if found is None:
        raise CorruptFrame(f"location {text!r:.80}: must be SEGMENT:OFFSET:BYTES")
    return Location(found[1], int(found[2]), int(found[3]))


def new_segment_name() -> str:
    return secrets.token_hex(8)


def is_segment_name(text: str) -> bool:
    return _SEGMENT.fullmatch(text) is not None


class SegmentFile(Protocol):
    """A segment that is being written, by one thread of one process."""

    name: str
    end: int
    """Bytes written so far."""

    def append(self, frames: Sequence[Pieces], deadline: float = math.inf) -> list[str]:
        """Append frames. Returns their locations when all of them are durable.

        After an error the segment must not be written to again: it is unknown what reached the disk. An engine that
        retries stops at `deadline`, on the monotonic clock.
        """

    def close(self) -> None: ...


class Writable(Protocol):
    """The part of a storage that is enough to write segments."""

    url: str
    """Its address, as other processes open it."""
    segment_bytes: int
    """Size at which a segment is finished."""
    batch_bytes: int
    """The most bytes of frames that are written together."""
    gather_s: float
    """How long a frame waits for others to be written with it."""

    def create(self, segment: str) -> SegmentFile:
        """Create a segment. Raises Conflict if one of that name exists."""

    def marker(self) -> bytes | None:
        """Return the contents of the marker, or None if there is none."""

    def close(self) -> None: ...


class Storage(Writable, Protocol):
    """Holds segments. `read` may be called from any thread, even while another one writes."""

    lands_late: bool
    """Whether a write that failed or timed out may still arrive, even in a segment that was deleted meanwhile."""

    def prove(self) -> str:
        """Test what deletion relies on, before a plane uses the storage. Returns why nothing may be deleted, or "".

        Raises StorageError if the storage cannot be used at all."""

    def read(self, location: str, ranges: Sequence[Range] | None = None) -> list[Buffer]:
        """Return the bytes of each range of a frame; None reads all of it. Raises Gone or Away."""

    def read_into(self, wanted: Sequence[Wanted]) -> None:
        """Read bytes of any number of frames into buffers, concurrently if that is faster. Raises Gone or Away."""

    def delete(self, names: Iterable[str]) -> None:
        """Free the bytes of frames (by location) and segments (by name). Unknown names are ignored."""

    def segments(self) -> dict[str, int]:
        """Return every segment with the bytes it takes."""

    def set_marker(self, new: bytes, old: bytes | None) -> bool:
        """Replace the marker if it still is `old` (None: if there is none). Returns False if another process was
        faster."""


def is_object_url(text: str) -> bool:
    """Return whether an address names an object store: not a folder, and no address of a plane or a log."""
    scheme, found, _ = text.partition("://")
    return bool(found) and scheme.lower() in SCHEMES
