"""A recorded run, read back: what was decided, in order, and frames on demand.

The fronts of all segments are read first, a few hundred bytes for each group; frames are fetched one by one.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from penstock.archive.places import open_place
from penstock.archive.segment import (
    HEADER_BYTES,
    FrameEntry,
    Front,
    GroupEntry,
    RecordEntry,
    StepEntry,
    check_frame,
    checksum_of,
    front_size,
    name_of,
    read_front,
)
from penstock.assets.blobs import Blobs
from penstock.errors import CorruptFile, InvalidInput

_FIRST_BYTES = 64 << 10
"""Of a segment; enough for most fronts."""


@dataclass(frozen=True, slots=True)
class Segment:
    """A segment whose front was read."""

    front: Front
    checksum: bytes
    start: int
    """Where its frames begin."""


def segment_of(blobs: Blobs, number: int) -> Segment:
    """The front of a segment; raises CorruptFile when it is not as it was written."""
    where = blobs.url(name_of(number))
    data = blobs.part(name_of(number), start=0, size=_FIRST_BYTES)
    size = HEADER_BYTES + front_size(data, where)
    if size > len(data):
        data = blobs.part(name_of(number), start=0, size=size)
    front = read_front(data, where)
    if front.number != number:
        raise CorruptFile(f"{where}: says that it is segment {front.number}; the object was renamed or copied")
    return Segment(front, checksum_of(data), size)


def numbers_of(blobs: Blobs) -> list[int]:
    """The segments that are there, in order."""
    names = (info.name.removeprefix("segments/") for info in blobs.list("segments"))
    return sorted(int(name) for name in names if name.isdigit())


@dataclass(frozen=True, slots=True)
class _Place:
    number: int
    start: int
    """Where the frames of its segment begin."""
    entry: FrameEntry


@dataclass(slots=True)
class RecordedRun:
    """What an archive says of a run."""

    blobs: Blobs
    run: str = ""
    run_id: str = ""
    settings: list[tuple[int, str]] = field(default_factory=list)
    """(first decision they hold for, plane.toml), in order."""
    groups: dict[int, GroupEntry] = field(default_factory=dict)
    records: dict[int, RecordEntry] = field(default_factory=dict)
    steps: dict[int, StepEntry] = field(default_factory=dict)
    """By number."""
    missing: set[int] = field(default_factory=set)
    """Groups whose frames were given back before they were archived."""
    num_segments: int = 0
    _frames: dict[int, _Place] = field(default_factory=dict)

    @classmethod
    def open(cls, where: str) -> RecordedRun:
        """Read what an archive says; raises CorruptFile when it is damaged, InvalidInput when there is none."""
        found = cls(open_place(where))
        numbers = numbers_of(found.blobs)
        if not numbers:
            raise InvalidInput(f"{where}: no archive of a run there; give what `archive` was set to")
        previous = b""
        for expected, number in enumerate(numbers, start=1):
            if number != expected:
                raise CorruptFile(f"{found.blobs.url(name_of(expected))}: missing; there is segment {number} behind it")
            segment = segment_of(found.blobs, number)
            if segment.front.previous != previous:
                raise CorruptFile(f"{found.blobs.url(name_of(number))}: does not follow the segment before it")
            previous = segment.checksum
            found._add(segment.front, segment.start)
        return found

    def _add(self, front: Front, start: int) -> None:
        if not self.settings or self.settings[-1][1] != front.settings:
            ops = [*(entry.op for entry in front.groups), *(entry.op for entry in front.records)]
            self.settings.append((min(ops, default=0), front.settings))
        self.run, self.run_id = front.run, front.run_id
        self.groups.update((entry.op, entry) for entry in front.groups)
        self.records.update((entry.op, entry) for entry in front.records)
        self.steps.update((entry.step, entry) for entry in front.steps)
        self.missing.update(front.missing)
        for entry in front.frames:
            self._frames.setdefault(entry.op, _Place(front.number, start, entry))
        self.num_segments += 1

    def has_frame(self, op: int) -> bool:
        return op in self._frames

    @property
    def num_frames(self) -> int:
        return len(self._frames)

    @property
    def num_bytes(self) -> int:
        """Of all frames."""
        return sum(place.entry.size for place in self._frames.values())

    def frame(self, op: int) -> bytes:
        """A group's frame; raises CorruptFile when it is not as it was written."""
        place = self._frames[op]
        name = name_of(place.number)
        data = self.blobs.part(name, start=place.start + place.entry.offset, size=place.entry.size)
        return check_frame(data, place.entry, self.blobs.url(name))

    def in_order(self) -> Iterator[GroupEntry]:
        """The groups whose frames are here, as they arrived."""
        return (self.groups[op] for op in sorted(self._frames) if op in self.groups)

    def verify(self) -> int:
        """Read every frame; how many. Raises CorruptFile at the first that is not as it was written."""
        for op in sorted(self._frames):
            self.frame(op)
        return len(self._frames)
