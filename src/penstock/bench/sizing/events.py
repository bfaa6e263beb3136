"""Discrete events: a clock that jumps from one event to the next, and servers that work off what waits for them."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

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


@dataclass(slots=True)
class Queue:
    """One server: works on one thing at a time, first come, first served. Long work is done in slices, between which
    others have their turn, as threads of one interpreter do."""

    clock: Clock
    slice_s: float = float("inf")
    busy: Busy = field(init=False)
    _waiting: deque[tuple[float, Act]] = field(default_factory=deque)
    _working: bool = False

    def __post_init__(self) -> None:
        self.busy = Busy(self.clock)

    def do(self, seconds: float, then: Act) -> None:
        self._waiting.append((seconds, then))
        if not self._working:
            self._next()

    def _next(self) -> None:
        self._working = bool(self._waiting)
        if not self._working:
            return
        seconds, then = self._waiting.popleft()
        now = min(seconds, self.slice_s)
        self.busy.add(now)
        self.clock.after(now, lambda: self._done(seconds - now, then))

    def _done(self, left: float, then: Act) -> None:
        if left > 0:
            self._waiting.append((left, then))
        else:
            then()
        self._next()


@dataclass(slots=True)
class BatchQueue:
    """A disk: writes all that waits with one sync, up to a limit."""

    clock: Clock
    sync_s: float
    bytes_s: float
    most_bytes: float = 32 << 20
    busy: Busy = field(init=False)
    _waiting: deque[tuple[float, Act]] = field(default_factory=deque)
    _working: bool = False

    def __post_init__(self) -> None:
        self.busy = Busy(self.clock)

    def write(self, size: float, then: Act) -> None:
        self._waiting.append((size, then))
        if not self._working:
            self._next()

    def _next(self) -> None:
        self._working = bool(self._waiting)
        if not self._working:
            return
        size, done = 0.0, []
        while self._waiting and size < self.most_bytes:
            more, then = self._waiting.popleft()
            size += more
            done.append(then)
        seconds = self.sync_s + size / self.bytes_s
        self.busy.add(seconds)
        self.clock.after(seconds, lambda: self._done(done))

    def _done(self, done: list[Act]) -> None:
        for then in done:
            then()
        self._next()


class Countdown:
    """Calls something when it has been told so often."""

    def __init__(self, count: int, then: Act) -> None:
        self._left, self._then = count, then

    def __call__(self) -> None:
        self._left -= 1
        if self._left == 0:
            self._then()
