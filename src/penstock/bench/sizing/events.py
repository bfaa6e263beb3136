"""Discrete events: a clock that jumps from one event to the next, and servers that work off what waits for them."""

from __future__ import annotations

import heapq
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

Act = Callable[[], None]


class Clock:
    """What happens next, and when. Events of one time happen in the order in which they were planned."""

    def __init__(self) -> None:
        self.now = 0.0
        self._events: list[tuple[float, int, Act]] = []
        self._count = 0

    def after(self, seconds: float, act: Act) -> None:
        self._count += 1
        heapq.heappush(self._events, (self.now + seconds, self._count, act))

    def run(self, until: Callable[[], bool]) -> None:
        """Let happen what happens, until that is so or nothing is left to happen."""
        while self._events and not until():
            self.now, _, act = heapq.heappop(self._events)
            act()


@dataclass(slots=True)
class Busy:
    """For how long something worked since it was last asked."""

    clock: Clock
    seconds: float = 0.0
    since: float = 0.0
    """When counting began."""

    def add(self, seconds: float) -> None:
        self.seconds += seconds

    def restart(self) -> None:
        self.seconds, self.since = 0.0, self.clock.now

    @property
    def share(self) -> float:
        """Of the time since then; what has begun counts in full, so it is capped."""
        return min(self.seconds / max(self.clock.now - self.since, 1e-12), 1.0)


class _Server(ABC):
    """Works off what waits for it, one turn after the other; kinds of servers differ in what a turn does."""

    def __init__(self, clock: Clock) -> None:
        self.clock, self.busy = clock, Busy(clock)
        self._waiting: deque[tuple[float, Act]] = deque()
        self._working = False

    @abstractmethod
    def _turn(self) -> tuple[float, Act]:
        """Take something that waits: how long it is worked on, and what happens then."""

    def _add(self, amount: float, then: Act) -> None:
        self._waiting.append((amount, then))
        if not self._working:
            self._next()

    def _next(self) -> None:
        self._working = bool(self._waiting)
        if self._working:
            seconds, then = self._turn()
            self.busy.add(seconds)
            self.clock.after(seconds, lambda: self._done(then))

    def _done(self, then: Act) -> None:
        then()
        self._next()


class Queue(_Server):
    """Works on one thing at a time, first come, first served. Long work is done in slices, between which others have
    their turn, as threads of one interpreter do."""

    def __init__(self, clock: Clock, slice_s: float = float("inf")) -> None:
        super().__init__(clock)
        self.slice_s = slice_s

    def do(self, seconds: float, then: Act) -> None:
        self._add(seconds, then)

    def _turn(self) -> tuple[float, Act]:
        seconds, then = self._waiting.popleft()
        if seconds <= self.slice_s:
            return seconds, then
        return self.slice_s, lambda: self._waiting.append((seconds - self.slice_s, then))


class BatchQueue(_Server):
    """A disk: writes all that waits with one sync, up to a limit."""

    def __init__(self, clock: Clock, sync_s: float, bytes_s: float, most_bytes: float = 32 << 20) -> None:
        super().__init__(clock)
        self.sync_s, self.bytes_s, self.most_bytes = sync_s, bytes_s, most_bytes

    def write(self, size: float, then: Act) -> None:
        self._add(size, then)

    def _turn(self) -> tuple[float, Act]:
        size, written = 0.0, []
        while self._waiting and size < self.most_bytes:
            more, then = self._waiting.popleft()
            size += more
            written.append(then)

        def done() -> None:
            for then in written:
                then()

        return self.sync_s + size / self.bytes_s, done


class Countdown:
    """Calls something when it has been told so often."""

    def __init__(self, count: int, then: Act) -> None:
        self._left, self._then = count, then

    def __call__(self) -> None:
        self._left -= 1
        if self._left == 0:
            self._then()
