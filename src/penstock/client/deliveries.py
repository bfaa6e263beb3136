"""Puts encoded groups, one or many, directly to storage or through the plane. Repeats puts that must be written again.

Groups of one delivery share a round trip, a write with one sync and a transaction of the log. Each keeps its own place
in the plane's queue for room and its own answer.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Generic, TypeAlias, TypeVar

from penstock.client.async_puts import AsyncPuts
from penstock.client.conversations import Call, Conversation, Pause
from penstock.client.direct import Direct, DirectPut, write_all
from penstock.client.encoded_group import EncodedGroup
from penstock.client.producer_connection import Lost, ProducerConnection, Result, error_of, expected
from penstock.client.put_counts import PutCounts
from penstock.errors import (
    Away,
    Closed,
    DiskFull,
    InvalidInput,
    Overloaded,
    PenstockError,
    PlaneLost,
    PutManyError,
    StorageError,
)
from penstock.protocol import Accepted, PutRequest, Rejected, seconds_of

G = TypeVar("G")
Outcome: TypeAlias = Accepted | PenstockError | Lost
"""The result of a put. `Lost`: no answer, so it may be accepted."""
_WINDOW_BYTES = 128 << 20
"""Bytes of the frames of `put_many` that are encoded and unanswered, if one frame alone is not larger."""


class Deliveries:
    """Puts the groups of one client."""

    def __init__(self, connection: ProducerConnection, direct: Direct, counts: PutCounts) -> None:
        self._connection, self._direct, self._counts = connection, direct, counts

    def one(self, group: EncodedGroup, timeout: float | None) -> Conversation[Accepted]:
        """Put a group and return the plane's answer."""
        (found,) = yield from self.several([group], timeout)
        if isinstance(found, Lost):
            raise found.error
        if isinstance(found, PenstockError):
            raise found
        return found

    def several(self, groups: Sequence[EncodedGroup], timeout: float | None) -> Conversation[list[Outcome]]:
        """Put groups, in order, and return what became of each.

        A group that must be repeated comes after the others: its segment was sealed meanwhile, or storage failed.
        """
        timeout = seconds_of(timeout)
        deadline = math.inf if timeout is None else time.monotonic() + timeout
        found: dict[int, Outcome] = {}
        todo, inline = list(range(len(groups))), frozenset[int]()
        # Usually one turn. Further ones when storage fails here (frames are sent to the plane), when storage is away
        # for the plane too (wait and repeat), or when the segment was sealed meanwhile (write to a new one).
        while todo:
            begun = yield Call(partial(self._begin, groups, todo, inline, deadline))
            requests, write = [one.request for one in begun.ready], partial(_write, begun.ready, deadline)
            try:
                results = yield from self._connection.put(requests, deadline, write)
            except Closed as error:  # before anything was sent
                results = [error] * len(requests)
            found |= begun.invalid
            inline, pause = self._settle(groups, begun.ready, results, found, deadline)
            todo = [place for place in todo if place not in found]
            if pause:
                yield Pause(pause)
        return [found[place] for place in range(len(groups))]

    def _begin(
        self, groups: Sequence[EncodedGroup], places: Sequence[int], inline: frozenset[int], deadline: float
    ) -> _Begun:
        """Choose the path of each group: directly to storage, or as bytes through the plane."""
        ready: list[_Delivery] = []
        invalid: dict[int, Outcome] = {}
        waits = deadline > time.monotonic()
        for place in places:
            try:
                put = None if place in inline else DirectPut.of(self._direct, groups[place])
                ready.append(_Delivery(place, groups[place].request(waits=waits, direct=put is not None), put))
            except PenstockError as error:
                invalid[place] = error
        return _Begun(ready, invalid)

    def _settle(
        self,
        groups: Sequence[EncodedGroup],
        ready: Sequence[_Delivery],
        results: Sequence[Result],
        found: dict[int, Outcome],
        deadline: float,
    ) -> tuple[frozenset[int], float]:
        """Note what became of each group. Those that must be repeated are left out of `found`.

        Returns which of them go through the plane, and how long to wait before."""
        inline, pause, repeats, failed = set[int](), 0.0, list[tuple[DirectPut, Rejected]](), False
        for one, result in zip(ready, results, strict=True):
            if isinstance(result, StorageError) and self._may_go_inline(result, deadline):
                inline.add(one.place)
                if not failed:
                    failed = True
                    self._storage_failed(result)
            elif isinstance(result, Lost | PenstockError):
                found[one.place] = result
            elif wait := self._direct.wait_for(result, deadline):
                pause = wait
            elif one.put is not None and isinstance(result, Rejected) and one.put.must_repeat(result):
                repeats.append((one.put, result))
            else:
                found[one.place] = self._taken(groups[one.place], result)
        if repeats or (not failed and any(one.put is not None for one in ready)):
            self._direct.note_repeats(repeats)
        return frozenset(inline), pause

    def _may_go_inline(self, error: StorageError, deadline: float) -> bool:
        return not (isinstance(error, Away) and time.monotonic() > deadline)

    def _storage_failed(self, error: StorageError) -> None:
        """Switch to sending frames through the plane, because one could not be written from here.

        If the disk is full, the plane may free something. If storage is away from here, it may be reachable for the
        plane. So groups go through the plane for a second. After any other error they all do.
        """
        if isinstance(error, DiskFull | Away):
            self._direct.pause()
        else:
            self._direct.turn_off(error)

    def _taken(self, group: EncodedGroup, answer: object) -> Outcome:
        """Count what became of a group. Returns the plane's error if it was rejected."""
        if isinstance(answer, Rejected):
            return error_of(answer)
        answer = expected(answer, Accepted)
        if answer.stale:
            self._counts.on_stale(group.name, answer.policy_version)
        if answer.late:
            self._counts.on_late(group.name)
        if not answer.duplicate and group.group is not None:
            self._counts.on_put(group.group)
        if any(answer.over_length):
            self._counts.on_over_length(group.name, answer.over_length)
        return answer


@dataclass(frozen=True, slots=True)
class _Delivery:
    """A group that is being put."""

    place: int
    """Its position among the groups."""
    request: PutRequest
    put: DirectPut | None
    """How it is written, or None if its frame is sent to the plane."""


@dataclass(frozen=True, slots=True)
class _Begun:
    ready: Sequence[_Delivery]
    invalid: dict[int, Outcome]


def _write(ready: Sequence[_Delivery], deadline: float, places: Sequence[int]) -> Sequence[tuple[str, bytes, bytes]]:
    return write_all([put for place in places if (put := ready[place].put) is not None], deadline)


# ------------------------------------------------------------------ many groups


class ManyPuts(Generic[G]):
    """One call of `put_many`: encodes and puts groups window by window, in order."""

    def __init__(self, groups: Iterable[G], encode: Callable[[G], EncodedGroup], tenant: Callable[[G], str]) -> None:
        if not isinstance(groups, Iterable):
            raise InvalidInput(f"put_many: {groups!r}; give the groups as a list: plane.put_many([group, ...])")
        self._groups, self._encode, self._tenant = iter(groups), encode, tenant
        self._pending: deque[G] = deque()
        self._results: list[bool | PenstockError] = []

    def deliver(
        self, deliveries: Deliveries, limits: AsyncPuts, timeout: float | None, *, evaluation: bool
    ) -> Conversation[list[bool]]:
        """Put all groups. Raises PutManyError if some are not known to be accepted."""
        timeout = seconds_of(timeout)
        deadline = math.inf if timeout is None else time.monotonic() + timeout
        is_lost = False
        while not is_lost and self._pull(1):
            try:
                places = yield limits.places(self._tenant(self._pending[0]), _left(deadline), evaluation=evaluation)
            except Overloaded as error:
                self._results += [error] * len(self._pending)
                self._pending.clear()
                continue
            try:
                self._pull(places.count)
                window = yield Call(partial(self._encoded, places.count))
                encoded = [one for one in window if isinstance(one, EncodedGroup)]
                outcomes = iter((yield from deliveries.several(encoded, _left(deadline))))
            finally:
                places.release()
            for one in window:
                outcome = one if isinstance(one, PenstockError) else next(outcomes)
                is_lost |= isinstance(outcome, Lost | Closed)
                self._results.append(_result(one, outcome))
        return self._checked()

    def _pull(self, count: int) -> bool:
        """Take groups from the caller until `count` are pending. Returns whether any are."""
        self._pending.extend(islice(self._groups, max(count - len(self._pending), 0)))
        return bool(self._pending)

    def _encoded(self, count: int) -> list[EncodedGroup | PenstockError]:
        """Encode the next groups: at most `count`, and at most `_WINDOW_BYTES` of frames unless one alone is larger."""
        window: list[EncodedGroup | PenstockError] = []
        size = 0
        while self._pending and len(window) < count and size < _WINDOW_BYTES:
            try:
                one = self._encode(self._pending.popleft())
                size += one.size
                window.append(one)
            except PenstockError as error:
                window.append(error)
        return window

    def _checked(self) -> list[bool]:
        """Return whether each group is new, if all are accepted."""
        accepted = [result for result in self._results if isinstance(result, bool)]
        if len(accepted) < len(self._results):
            raise PutManyError.of(self._results)
        return accepted


def _result(group: EncodedGroup | PenstockError, outcome: Outcome) -> bool | PenstockError:
    if isinstance(outcome, Lost):
        name = group.name if isinstance(group, EncodedGroup) else ""
        return PlaneLost(f"group {name!r}: no answer, so it may be accepted; put it again: {outcome.error}")
    return outcome if isinstance(outcome, PenstockError) else not outcome.duplicate


def _left(deadline: float) -> float | None:
    return None if deadline == math.inf else max(deadline - time.monotonic(), 0.0)
