"""A rank's samples, read from storage by byte ranges into memory that is reused from step to step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from penstock.arrays import Samples
from penstock.client.reachable import reachable
from penstock.errors import CorruptFrame, PenstockError
from penstock.frames import ANY_SIZE, Pieces, Range, RangedFrame, StepMemory, assemble
from penstock.protocol import Attached, PickedGroup, StepPicks
from penstock.storage import Away, KeptStorage, Location, Wanted, parse_location


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
    """Whether this process sees the plane's storage, found out when it attaches."""

    def __init__(self) -> None:
        self.reader: StorageReader | None = None
        """Reads samples; None: they come with each step."""

    def find(self, attached: Attached) -> bool:
        storage = reachable(attached)
        self.reader = None if storage is None else StorageReader(storage)
        return storage is not None


class StorageReader:
    """Used by one thread. The samples of a step are overwritten when the next one is read: fill them first."""

    def __init__(self, storage: KeptStorage) -> None:
        self._storage, self._memory = storage, StepMemory()
        self.bytes_read = 0
        """In all."""
        self.picks = StepPicks(groups=())
        """Of the last step."""

    def samples(self, picks: StepPicks) -> Samples:
        """The samples that a rank trains, in the order of its plan; raises Unreadable, or Away."""
        self.picks = picks
        if not picks.groups:
            return Samples.of([])
        reads = [self._planned(picked) for picked in picks.groups]
        total = sum(read.size for read in reads)
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
        except PenstockError as error:  # a body that does not fit its front; which one is found out one by one
            raise self._blamed(found, reads, error) from None

    def _planned(self, picked: PickedGroup) -> _Read:
        try:
            frame = RangedFrame(picked.front, limits=ANY_SIZE)
            return _Read(picked, parse_location(picked.location), frame, frame.plan(picked.rows))
        except CorruptFrame as error:
            raise Unreadable(picked.group, str(error)) from None

    def _fetch(self, wanted: list[Wanted], reads: Sequence[_Read]) -> None:
        """Read all ranges at once; where that fails, one group after the other tells which it is."""
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
        return error  # each is well: they do not go together
