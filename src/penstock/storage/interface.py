"""What a storage engine does: hold the bytes of segments, and return ranges of them.

A *segment* is written by one process, from front to end, and never changed afterwards. Its name is random and never
used again. A *location* names a frame inside a segment:

    3f9c21d07b6a4e58:8192:310284        segment, offset, bytes

Engines never delete anything by themselves. Whoever deletes names each frame and each segment.
"""

from __future__ import annotations

import math
import re
import secrets
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol, TypeAlias

from penstock.errors import Away as Away
from penstock.errors import CorruptFrame, StorageError
from penstock.frames import Buffer

Pieces: TypeAlias = Sequence[Buffer]
"""The buffers that make up one frame, end to end."""
Range: TypeAlias = tuple[int, int]
"""First byte of a frame, and the byte after the last."""
_SEGMENT = re.compile(r"[0-9a-f]{16}")
_LOCATION = re.compile(r"([0-9a-f]{16}):(\d{1,15}):(\d{1,15})")


class Gone(CorruptFrame):
    """The bytes are not in storage: their segment is missing, or shorter than it was."""


class SegmentSealed(StorageError):
    """The plane takes no more frames from this segment: write to a new one."""


@dataclass(frozen=True, slots=True)
class Location:
    """Where a frame is."""

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
    """A file that frames are looked for in: of a folder a whole segment, of an object store one object."""

    name: str
    """For people."""
    size: int
    modified_ns: int
    opened: Callable[[], AbstractContextManager[int]]
    """A descriptor to read it with. Raises OSError."""
    segment: str = ""
    """Empty for a file that is no part of a storage."""
    start: int = 0
    """Where in the segment it begins."""


Wanted: TypeAlias = tuple[Location, int, memoryview]
"""A frame, an offset in its segment that lies in the frame, and where the bytes from there on go."""


def check_wanted(wanted: Sequence[Wanted]) -> None:
    """Raise Gone for bytes that are not of the frame they are asked of."""
    for at, offset, view in wanted:
        if not at.offset <= offset <= offset + len(view) <= at.end:
            raise Gone(f"location {at}: bytes {offset} to {offset + len(view)} are not in it")


def parse_location(text: str) -> Location:
    """
    >>> parse_location("3f9c21d07b6a4e58:8192:310284").size
    310284
    """
    found = _LOCATION.fullmatch(text)
    if found is None:
        raise CorruptFrame(f"location {text[:80]!r}: must be SEGMENT:OFFSET:BYTES")
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
        """Write frames behind the others. Returns their locations when all of them are durable.

        After an error the segment must not be written to again: what the disk kept of it is unknown. An engine that
        tries again after a failure stops at `deadline`, on the monotonic clock.
        """

    def close(self) -> None: ...


class Writable(Protocol):
    """What a process needs that only writes segments."""

    url: str
    """Where it is, as other processes open it."""
    segment_bytes: int
    """A segment that has grown to this is finished."""
    batch_bytes: int
    """Frames that are written together, at most."""
    gather_s: float
    """How long a frame waits for others that are written with it."""

    def create(self, segment: str) -> SegmentFile:
        """Begin a segment. Raises Conflict when one of that name exists."""

    def marker(self) -> bytes | None:
        """The contents of the marker; None when there is none."""

    def close(self) -> None: ...


class Storage(Writable, Protocol):
    """Holds segments. `read` may be called from any thread, also while another one writes."""

    lands_late: bool
    """Whether a write that was given up may still arrive, also in a segment that was deleted meanwhile."""

    def prove(self) -> str:
        """Try out what the rest relies on, before a plane uses it. Returns why nothing may be deleted here, or "".

        Raises StorageError where it cannot be used at all."""

    def read(self, location: str, ranges: Sequence[Range] | None = None) -> list[Buffer]:
        """The bytes of each range of a frame; None reads the whole frame. Raises Gone or Away."""

    def read_into(self, wanted: Sequence[Wanted]) -> None:
        """Read bytes of any number of frames, at the same time where that is faster. Raises Gone or Away."""

    def delete(self, names: Iterable[str]) -> None:
        """Free the bytes of frames (locations) and of whole segments (names). Unknown names are ignored."""

    def segments(self) -> dict[str, int]:
        """Every segment, with the bytes it takes."""

    def set_marker(self, new: bytes, old: bytes | None) -> bool:
        """Replace the marker if it still is `old`; None: only if there is none. False: somebody else was faster."""
