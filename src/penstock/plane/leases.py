"""Renews leases, returns those that run out, and writes what a turn decided about them in one transaction."""

from __future__ import annotations

import heapq
import logging
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import NamedTuple

from penstock.errors import InvalidInput, PenstockError
from penstock.log import GroupOutcome, HandOut, Record, ReturnLeases
from penstock.plane.lease_book import Lease, LeaseBook
from penstock.plane.recorder import Recorder, ends_plane, failure_text
from penstock.protocol import MAX_LEASES, MAX_REASON, GiveBack, Renew, Renewed

logger = logging.getLogger("penstock.plane")
MIN_LEASE_S, MAX_LEASE_S = 0.5, 86_400.0
_WARN_AT = (3, 10, 30, 100, 1000)
"""Times that a lease on the same work ran out, after which the log says so."""
_REMEMBERED = 4096
_STALL_S = 2.0
"""A gap between two turns after which every lease gets its full time again: the plane itself was away."""


class LeaseClock:
    """When leases run out. A turn in which none does costs the same with ten leases and with ten thousand."""

    def __init__(self) -> None:
        self._due: dict[int, float] = {}
        self._heap: list[tuple[float, int]] = []
        """Deadlines as they were when they were added. One that was renewed since is added again when it comes up."""
        self._turned: float | None = None

    def renew(self, lease: Lease, now: float) -> None:
        due = now + lease.lease_s
        if lease.number not in self._due:
            heapq.heappush(self._heap, (due, lease.number))
        self._due[lease.number] = due

    def ran_out(self, leases: Mapping[int, Lease], now: float) -> list[int]:
        """Return the leases that were not renewed in time. They stay due until they are no longer in `leases`."""
        if self._turned is None or now - self._turned > _STALL_S:
            for lease in leases.values():
                self.renew(lease, now)
        self._turned = now
        if len(self._heap) > 2 * len(leases) + 1024:  # most were completed long before they would have run out
            self._due = {number: due for number, due in self._due.items() if number in leases}
            self._heap = [(due, number) for number, due in self._due.items()]
            heapq.heapify(self._heap)
        found = []
        while self._heap and self._heap[0][0] <= now:
            _, number = heapq.heappop(self._heap)
            if number not in leases:
                self._due.pop(number, None)
                continue
            due = self._due[number]
            if due <= now:
                found.append(number)
                due = now  # comes up again in the next turn, in case the return could not be written
            heapq.heappush(self._heap, (max(due, now + 1e-6), number))
        return found


class Returned(NamedTuple):
    """A request to return leases, and what to do when it is decided."""

    leases: tuple[int, ...]
    reason: str
    answer: Callable[[PenstockError | None], None]


Cancels = Callable[[Lease], str]
"""Returns why the result of a lease can no longer be used, or ""."""


class Leases:
    """Renews and returns leases in the plane's loop, whatever they are on."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self.clock = LeaseClock()
        self.cancels: dict[str, Cancels] = {}
        """By kind."""
        self.doubts: dict[str, Callable[[Lease], None]] = {}
        """By kind: called with each lease that is returned because the work on it failed."""
        self._returned: list[Returned] = []
        self._records: list[tuple[Record, Callable[[PenstockError | None], None]]] = []
        self.last_words: Callable[[Sequence[Lease]], Sequence[GroupOutcome]] = lambda _lost: ()
        """Returns the events of work that is given up because these leases run out."""
        self._times_lost: dict[str, int] = {}
        """How often the lease on a key ran out since this plane started. Only the latest keys are kept."""

    @property
    def _book(self) -> LeaseBook:
        return self._recorder.state.leases

    def on_renew(self, message: Renew, now: float) -> Renewed:
        _check_number(len(message.leases))
        cancelled = []
        for number in dict.fromkeys(message.leases):
            lease = self._book.open.get(number)
            if lease is None:
                cancelled.append((number, self._book.why_ended(number)))
                continue
            # A cancelled lease is renewed as well: its process works on it until it learns that.
            self.clock.renew(lease, now)
            cancels = self.cancels.get(lease.kind)
            if cancels is not None and (reason := cancels(lease)):
                cancelled.append((number, reason))
        version = self._recorder.state.policy_version
        return Renewed(ticket=message.ticket, cancelled=tuple(cancelled), policy_version=version)

    def on_give_back(self, message: GiveBack, answer: Callable[[PenstockError | None], None]) -> None:
        """Return leases at the end of this turn."""
        _check_number(len(message.leases))
        if len(message.reason) > MAX_REASON:
            raise InvalidInput(f"reason: {len(message.reason):,} characters; give at most {MAX_REASON:,}")
        self._returned.append(Returned(message.leases, message.reason, answer))

    def decide(self, record: Record, answer: Callable[[PenstockError | None], None]) -> None:
        """Write a record in the transaction of this turn. `answer` gets the error, or None when it is durable."""
        self._records.append((record, answer))

    def turn(self, now: float) -> None:
        """Return leases that ran out or were given up, and write what this turn decided, in one transaction."""
        decided, self._records = self._records, []
        returned, self._returned = self._returned, []
        ran_out, events = self.clock.ran_out(self._book.open, now), list[GroupOutcome]()
        if ran_out:
            lost = [self._book.open[number] for number in ran_out]
            events += self.last_words(lost)
            # First in the transaction: no other decision of this turn may change what becomes of them.
            record = ReturnLeases(leases=tuple(ran_out), expired=True)
            decided.insert(0, (record, partial(self._expired, lost, events)))
        gone = set(ran_out)
        for one in returned:
            leases = tuple(number for number in dict.fromkeys(one.leases) if number in self._book.open)
            mine = tuple(number for number in leases if number not in gone)
            gone.update(mine)
            for lease in [self._book.open[number] for number in mine] if one.reason else ():
                if lease.kind in self.doubts:
                    self.doubts[lease.kind](lease)
            if mine:
                decided.append((ReturnLeases(leases=mine, reason=one.reason), one.answer))
            else:
                one.answer(None)
        if decided:
            self._write(decided, events, now)

    def _expired(self, lost: list[Lease], events: Sequence[GroupOutcome], error: PenstockError | None) -> None:
        if error is not None:
            return  # the next turn tries again
        self._recorder.counts["leases_expired"] += len(lost)
        for event in events:
            self._recorder.counts["prompts_expired"] += event.num_events
            for one in event.unlisted:
                logger.warning("prompt %r is given up for this epoch (%s): %s", one.prompt, one.group, event.reason)
        for lease in lost:
            count = self._times_lost.pop(lease.key, 0) + 1
            self._times_lost[lease.key] = count
            if count in _WARN_AT:
                logger.warning(
                    "the lease on %r ran out %d times, last with worker %r: does this work kill its process, or take "
                    "longer than a process may be silent (lease_s %g)?",
                    lease.key,
                    count,
                    lease.worker,
                    lease.lease_s,
                )
        while len(self._times_lost) > _REMEMBERED:
            del self._times_lost[next(iter(self._times_lost))]

    def _write(
        self,
        decided: list[tuple[Record, Callable[[PenstockError | None], None]]],
        events: Sequence[GroupOutcome],
        now: float,
    ) -> None:
        error: PenstockError | None = None
        try:
            ops = self._recorder.decide_all([record for record, _ in decided], events)
        except Exception as failure:
            if ends_plane(failure):
                raise
            if not isinstance(failure, PenstockError):
                # Memory may hold half of it. Only what is in the log happened.
                logger.exception("leases could not be decided")
                self._recorder.counts["decisions_failed"] += 1
                self._recorder.rebuild()
            error = failure if isinstance(failure, PenstockError) else InvalidInput(f"leases: {failure_text(failure)}")
        else:
            for op, (record, _) in zip(ops, decided, strict=True):
                if isinstance(record, HandOut):
                    for number in range(op, op + len(record.keys)):
                        self.clock.renew(self._book.open[number], now)
        for _, answer in decided:
            answer(error)


def _check_number(count: int) -> None:
    if count > MAX_LEASES:
        raise InvalidInput(f"{count:,} leases; name at most {MAX_LEASES:,} with one message")
