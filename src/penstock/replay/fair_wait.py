"""A queue of threads that wait for something a lock protects: first come, first served.

A plain condition variable wakes a thread that may find its turn taken by one that never waited. Here a thread that
arrives while others wait goes to the end of the queue, so no thread starves.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable

from penstock.errors import Closed, WaitTimeout


class WaitQueue:
    def __init__(self, lock: threading.Lock) -> None:
        self._lock = lock
        self.turns: deque[threading.Condition] = deque()
        """One per waiting thread, the head of the queue first."""
        self.waited_s = 0.0

    def wait(
        self,
        ready: Callable[[], bool],
        *,
        closed: Callable[[], bool],
        timeout: float | None,
        what: Callable[[], str],
    ) -> None:
        """Return once this thread is at the head of the queue and `ready`. Call with the lock held."""
        started = time.monotonic()
        turn = threading.Condition(self._lock)
        self.turns.append(turn)
        try:
            while not closed() and not (self.turns[0] is turn and ready()):
                left = None if timeout is None else started + timeout - time.monotonic()
                if left is not None and left <= 0.0:
                    raise WaitTimeout(f"{what()}; waited {timeout} s")
                turn.wait(left)
            if closed():
                raise Closed(f"{what()}; the table was closed meanwhile")
        finally:
            self.turns.remove(turn)
            self.waited_s += time.monotonic() - started
            self.wake()

    def wake(self) -> None:
        """Let the head of the queue check again. Call with the lock held, after any change.

        A thread that leaves the queue wakes the next, so waking the head reaches every thread that may proceed.
        """
        if self.turns:
            self.turns[0].notify()
