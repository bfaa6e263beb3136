"""Storage in memory: the specification of the other engines, for tests, notebooks and simulations."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from penstock.errors import Conflict
from penstock.frames import Buffer
from penstock.storage.interface import Gone, Pieces, Range, Wanted, check_wanted, is_segment_name, parse_location


class MemoryStorage:
    """Segments in a dictionary. Nothing survives the process."""

    url = "memory:"
    segment_bytes = 64 << 20
    batch_bytes = 32 << 20
    gather_s = 0.0
    lands_late = False

    def __init__(self) -> None:
        self._frames: dict[str, dict[int, bytes]] = {}
        """Segment -> offset -> frame."""
        self._marker: bytes | None = None

    def prove(self) -> str:
        return ""

    def create(self, segment: str) -> MemorySegment:
        if segment in self._frames:
            raise Conflict(f"segment {segment}: exists; two writers have one name")
        self._frames[segment] = {}
        return MemorySegment(segment, self._frames[segment])

    def read(self, location: str, ranges: Sequence[Range] | None = None) -> list[Buffer]:
        at = parse_location(location)
        frame = self._frames.get(at.segment, {}).get(at.offset, b"")
        if len(frame) != at.size:
            raise Gone(f"location {location}: no such frame")
        if ranges is None:
            return [frame]
        if any(not 0 <= start <= end <= len(frame) for start, end in ranges):
            raise Gone(f"location {location}: {len(frame)} bytes; asked for {list(ranges)[:4]}")
        return [frame[start:end] for start, end in ranges]

    def read_into(self, wanted: Sequence[Wanted]) -> None:
        check_wanted(wanted)
        for at, offset, view in wanted:
            start = offset - at.offset
            view[:] = memoryview(self.read(str(at))[0])[start : start + len(view)]

    def replace(self, location: str, frame: bytes) -> None:
        """Replace a stored frame, as a failing disk would. For tests."""
        at = parse_location(location)
        self._frames[at.segment][at.offset] = frame

    def delete(self, names: Iterable[str]) -> None:
        for name in names:
            if is_segment_name(name):
                self._frames.pop(name, None)
            else:
                at = parse_location(name)
                self._frames.get(at.segment, {}).pop(at.offset, None)

    def segments(self) -> dict[str, int]:
        return {name: sum(map(len, frames.values())) for name, frames in self._frames.items()}

    def marker(self) -> bytes | None:
        return self._marker

    def set_marker(self, new: bytes, old: bytes | None) -> bool:
        if self._marker != old:
            return False
        self._marker = new
        return True

    def close(self) -> None:
        """Nothing is open."""


class MemorySegment:
    def __init__(self, name: str, frames: dict[int, bytes]) -> None:
        self.name, self.end, self._frames = name, 0, frames

    def append(self, frames: Sequence[Pieces], deadline: float = math.inf) -> list[str]:  # noqa: ARG002 - never fails
        locations = []
        for pieces in frames:
            frame = b"".join(pieces)
            self._frames[self.end] = frame
            locations.append(f"{self.name}:{self.end}:{len(frame)}")
            self.end += len(frame)
        return locations

    def close(self) -> None:
        """Nothing is open."""
