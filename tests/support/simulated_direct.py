"""Simulated processes that use storage directly: producers that write, ranks that read, and writers that lie."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING

import xxhash

from penstock.arrays.digests import step_digest
from penstock.errors import PenstockError, PlaneLost
from penstock.protocol.messages import Accepted, OpenSegment, Rejected, Room, SegmentOpened
from penstock.protocol.picks import StepPicks
from penstock.protocol.producer import Answered, PutRequest
from penstock.protocol.rank_session import Arrived
from penstock.storage import MemoryStorage, Writer, parse_location
from tests.support.plain_groups import plain_metadata, run_of_group
from tests.support.simulated import Rank
from tests.support.simulated_producer import Producer
from tests.support.simulated_storage import StorageView

if TYPE_CHECKING:
    from tests.support.storage_simulation import StorageSimulation

PASSING = ("Overloaded", "DiskFull", "StorageError", "Away", "Fenced", "Sealed", "Unseen")
"""What may be answered to an honest put while storage has faults."""


class _NoSegment(PenstockError):
    """The plane has not registered one yet."""


class DirectProducer(Producer):
    """Asks for a segment and for room, writes to storage, and tells the plane where; any of it may fail or be slow."""

    world: StorageSimulation

    def __init__(
        self, world: StorageSimulation, number: int, groups: Iterator[int], *, at_once: int = 1, is_elsewhere: bool
    ) -> None:
        """`is_elsewhere`: it sees a copy of the storage, with a good marker."""
        super().__init__(world, number, groups, at_once=at_once)
        self._elsewhere = MemoryStorage() if is_elsewhere else None
        self._is_direct = True

    def start(self) -> None:
        self._segments: list[str] = []
        self._asked: int | None = None
        """The ticket under which a segment was asked for."""
        self._unwritten: list[int] = []
        """Puts that wait for a segment."""
        view = StorageView(self.world.storage, elsewhere=self._elsewhere)
        self._writer = Writer(view, self._next_segment, clock=lambda: self.world.clock.now)
        super().start()

    def _next_segment(self) -> str:
        if not self._segments:
            raise _NoSegment("ask for one first")
        return self._segments.pop()

    def _put(self, group: str) -> None:
        if not self._is_direct:
            super()._put(group)
            return
        frame, run, now = self._frames[group], run_of_group(group), self.world.clock.now
        request = PutRequest(
            group=group,
            digest=xxhash.xxh3_128_digest(frame),
            size=len(frame),
            run=lambda: run,
            waits=self.world.rng.random() < 0.8,
        )
        (ticket,), events = self._session.put([request], now)
        self._tickets[ticket] = group
        if self.world.cancels():
            self.world.clock.after(self.world.cancel_s(), lambda: self.hears(partial(self.cancel, ticket)))
        self.handle(events)

    # -------------------------------------------------------------- writing

    def _begin_write(self, ticket: int) -> None:
        """The write happens, perhaps later, whether or not this process is still there to see it."""
        group = self._tickets.get(ticket)
        if group is None:
            return
        frame, writer, life = self.frame_to_write(group), self._writer, self.life
        takes_s = self.world.write_s()
        if takes_s:
            self.world.clock.after(takes_s, lambda: self._write(ticket, frame, writer, life))
        else:
            self._write(ticket, frame, writer, life)

    def _write(self, ticket: int, frame: bytes, writer: Writer, life: int) -> None:
        try:
            location = writer.write([[frame]])[0]
        except _NoSegment:
            self.hears(partial(self._wait_for_segment, ticket), life)
        except PenstockError as error:
            self.world.note(f"{self.name} cannot write: {error}")
            self.hears(partial(self._not_written, ticket), life)
        else:
            self.hears(partial(self._written, ticket, location), life)

    def _wait_for_segment(self, ticket: int) -> None:
        self._unwritten.append(ticket)
        if self._asked is None:
            self._asked, events = self._session.ask(lambda t: OpenSegment(ticket=t), self.world.clock.now)
            self.handle(events)

    def _not_written(self, ticket: int) -> None:
        if ticket in self._tickets:
            self.world.oracle.left(self.peer, ticket)
            self.handle(self._session.abandon(ticket))
            self.again(ticket)

    def _written(self, ticket: int, location: str) -> None:
        group = self._tickets.get(ticket)
        if group is None:
            return
        location, metadata = self.vouch(group, location)
        events = self._session.written(ticket, location, metadata, b"", self.world.clock.now)
        if events is None:
            self.again(ticket)
        else:
            self.handle(events)

    def frame_to_write(self, group: str) -> bytes:
        return self._frames[group]

    def vouch(self, group: str, location: str) -> tuple[str, bytes]:
        """What it tells the plane."""
        return location, plain_metadata(group, self._frames[group]).to_bytes()

    # -------------------------------------------------------------- answers

    def answered(self, event: Answered) -> None:
        answer = event.answer
        if isinstance(answer, Room):
            self._begin_write(event.ticket)
        elif event.ticket == self._asked:
            self._asked = None
            if isinstance(answer, SegmentOpened):
                self._segments.append(answer.segment)
            waiting, self._unwritten = self._unwritten, []
            for ticket in waiting:
                (self._begin_write if isinstance(answer, SegmentOpened) else self._not_written)(ticket)
        elif isinstance(answer, Rejected) and event.ticket in self._tickets:
            self.rejected(self._tickets[event.ticket], answer)
            self.again(event.ticket)
        elif isinstance(answer, Accepted):
            self.accepted(self._tickets.get(event.ticket, ""))
            super().answered(event)

    def accepted(self, group: str) -> None:
        """A group counts."""

    def rejected(self, group: str, answer: Rejected) -> None:
        assert answer.kind in self.passing, answer
        self.world.note(f"{self.name}: {group} is rejected: {answer.kind}")
        if answer.kind == "Unseen":
            self._is_direct = False
        elif answer.kind == "Sealed":
            self._writer.finish()

    def failed(self, error: PenstockError) -> None:
        assert isinstance(error, PlaneLost), error
        self._asked, self._unwritten = None, []
        super().failed(error)


class Liar(DirectProducer):
    """A writer that sends false metadata, and sometimes true metadata."""

    LIES = ("metadata", "content", "other", "overlap", "beyond", "again")

    def __init__(self, world: StorageSimulation, number: int, groups: Iterator[int]) -> None:
        super().__init__(world, number, groups, at_once=3, is_elsewhere=False)
        self._lies: dict[str, str] = {}
        """What it says of a group; empty: the truth."""
        self._said: list[str] = []
        """Locations that it has put."""

    def frame_to_write(self, group: str) -> bytes:
        self._lies[group] = lie = self.world.lies.choice(self.LIES) if self.world.lies.random() < 0.6 else ""
        frame = super().frame_to_write(group)
        return bytes(len(frame)) if lie == "content" else frame

    def vouch(self, group: str, location: str) -> tuple[str, bytes]:
        told, metadata = super().vouch(group, location)
        lie = self._lies.get(group, "")
        if lie == "metadata":
            frame = self._frames[group].replace(group.encode(), b"?" * len(group))
            metadata = plain_metadata("?" * len(group), frame).to_bytes()
        elif lie == "other":
            told = self.world.lies.choice(self.world.told) if self.world.told else told
        elif lie == "overlap" and self._said:
            at = parse_location(self.world.lies.choice(self._said[-4:]))
            told = f"{at.segment}:{at.offset + self.world.lies.randrange(3)}:{len(self._frames[group])}"
        elif lie == "beyond":
            at = parse_location(location)
            told = f"{at.segment}:{at.end + 1000}:{at.size}"
        if told != location or lie == "content":
            self.world.note(f"{self.name} lies about {group}: {lie}")
            self.world.lied.add(group)
        self._said.append(told)
        return told, metadata

    def accepted(self, group: str) -> None:
        if self._lies.get(group) == "again":  # once more, elsewhere: known, and the new bytes are free
            frame = self._frames[group]
            self.world.clock.after(0.1, lambda: self.hears(partial(self._once_more, group, frame)))

    def _once_more(self, group: str, frame: bytes) -> None:
        self._frames.setdefault(group, frame)

    def rejected(self, group: str, answer: Rejected) -> None:
        self.world.note(f"{self.name}: {group} is rejected: {answer.kind}")
        if answer.kind not in ("Overloaded", "DiskFull", "Fenced"):
            self._writer.finish()
        if answer.kind == "Conflict":
            self._frames.pop(group, None)


class DirectRank(Rank):
    """Reads the samples of its steps from storage."""

    world: StorageSimulation

    def __init__(self, world: StorageSimulation, rank: int, *, is_bad: bool) -> None:
        """`is_bad`: its mount shows nothing."""
        super().__init__(world, rank)
        self.can_read = True
        self._view = StorageView(world.storage)
        self._view.is_bad = is_bad

    def unpack(self, event: Arrived) -> None:
        if any(len(frame) for frame in event.frames):
            super().unpack(event)
            return
        deliver = event.deliver
        picks = StepPicks.from_bytes(deliver.picks)
        for picked in picks.groups:
            reason = ""
            try:
                frame = self._view.read(picked.location)[0]
                if xxhash.xxh3_128_digest(frame) != picked.digests[0]:
                    reason = "not what was put"
            except PenstockError as error:
                reason = str(error)
            if reason:
                self.world.note(f"{self.name} cannot read {picked.group} of step {deliver.step}: {reason}")
                self.handle(self.rank_session.damaged(deliver.step, picked.group, reason, self.world.clock.now))
                return
        digest = step_digest(deliver.plan, picks.digests)
        assert digest == deliver.digest, "picks are not those of the plan"
        self.fill(deliver.step, digest)
