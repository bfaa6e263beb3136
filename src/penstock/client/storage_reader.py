"""Reads a rank's samples from storage: only their byte ranges, into memory that is reused from step to step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from penstock.arrays import Samples
from penstock.client.direct import reachable
from penstock.errors import CorruptFrame, PenstockError
from penstock.frames import ANY_SIZE, Pieces, Range, RangedFrame, StepMemory, assemble
from penstock.protocol import Attached, PickedGroup, StepPicks
from penstock.storage import Away, Location, Wanted, parse_location

if TYPE_CHECKING:
    from penstock.storage import KeptStorage


class Unreadable(CorruptFrame):
    """A group that cannot be read from storage."""

    def __init__(self, group: str, reason: str) -> None:
        super().__init__(f"group {group!r}: {reason}")
        self.group, self.reason = group, reason


@dataclass(frozen=True, slots=True)
class _Read:
    picked: PickedGroup
    place: Location
    frame: RangedFrame
    ranges: list[Range]

    @property
    def size(self) -> int:
        return sum(b - a for a, b in self.ranges)


class Reach:
    """Finds out, when a rank attaches, whether it can read the plane's storage."""

    def __init__(self) -> None:
        self.reader: StorageReader | None = None
        """Reads samples, or None if they come with each step."""

    def find(self, attached: Attached) -> bool:
        storage = reachable(attached)
        self.reader = None if storage is None else StorageReader(storage)
        return storage is not None


class StorageReader:
    """Reads the samples of steps. Use it from one thread. The next step overwrites the samples: fill batches first."""

    def __init__(self, storage: KeptStorage) -> None:
        self._storage, self._memory = storage, StepMemory()
        self.bytes_read = 0
        """Total."""
        self.picks = StepPicks(groups=())
        """The picks of the last step."""

    def samples(self, picks: StepPicks) -> Samples:
        """Return the rank's samples, in the order of its plan. Raises Unreadable or Away."""
        self.picks = picks
        if not picks.groups:
            return Samples.of([])
        reads = [self._planned(picked) for picked in picks.groups]
        total = sum(read.size for read in reads)
        # One buffer for all ranges of all groups. Example: ranges (100, 150) and (400, 420) of a frame at offset 1000
        # go to buffer[0:50] from file offset 1100 and to buffer[50:70] from 1400.
        buffer, at = self._memory.take("", total).data, 0
        found, wanted = [], []
        for read in reads:
            views = []
            for a, b in read.ranges:
                views.append(buffer[at : at + b - a])
                wanted.append((read.place, read.place.offset + a, views[-1]))
                at += b - a
            found.append((read.frame, read.picked.rows, Pieces(read.ranges, views)))
        self._fetch(wanted, reads)
        self.bytes_read += total
        try:
            return assemble(found, memory=self._memory)
        except PenstockError as error:  # a frame's body does not match its front; find out which one
            raise self._blamed(found, reads, error) from None

    def _planned(self, picked: PickedGroup) -> _Read:
        try:
            frame = RangedFrame(picked.front, limits=ANY_SIZE)
            return _Read(picked, parse_location(picked.location), frame, frame.plan(picked.rows))
        except CorruptFrame as error:
            raise Unreadable(picked.group, str(error)) from None

    def _fetch(self, wanted: list[Wanted], reads: Sequence[_Read]) -> None:
        """Read all ranges at once. If that fails, read one group after the other to find the one at fault."""
        try:
            self._storage.read_into(wanted)
        except Away:
            raise
        except PenstockError:
            for read in reads:
                self._fetch_one(read.picked.group, [one for one in wanted if one[0] is read.place])

    def _fetch_one(self, group: str, wanted: list[Wanted]) -> None:
        try:
            self._storage.read_into(wanted)
        except Away:
            raise
        except PenstockError as error:
            raise Unreadable(group, str(error)) from None

    def _blamed(
        self,
        found: Sequence[tuple[RangedFrame, tuple[int, ...], Pieces]],
        reads: Sequence[_Read],
        error: PenstockError,
    ) -> PenstockError:
        for one, read in zip(found, reads, strict=True):
            try:
                assemble([one])
            except PenstockError as own:
                return Unreadable(read.picked.group, str(own))
        return error  # each frame alone is fine: they do not fit together
