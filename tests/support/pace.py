"""Measures how busy this machine is, so that tests with real processes can scale their deadlines.

A deadline of one second means one thing on an idle machine and another where eight processes share two cores. `pace()`
is 1.0 on an idle machine and grows with the load: it is measured, by a fixed piece of work whose seconds on the clock
are compared with its seconds on a core, and by the number of processes that want to run. Use it for what must *not*
happen in a given time (a process counted as dead) and for bounds that a test asserts; a wait for something good needs
no scaling, only a generous limit.

    timeouts = stretched(Timeouts(peer_s=1.0), pace())
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable
from dataclasses import replace

from penstock.protocol.timeouts import Timeouts

_ROUNDS = 400_000
_MARGIN = 1.25
"""Load comes and goes; what was measured may be the lower end."""
_MOST = 6.0
"""A process that mostly sleeps gets its turn long before this many times its usual wait."""
_FRESH_S = 5.0
_QUIET = 1.3
"""Below this the machine counts as idle."""


def _workers() -> int:
    """Return how many processes `pytest --workers N` will start. Plugins measure before pytest has read the option."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--workers", type=int, default=0)
    return int(parser.parse_known_args()[0].workers)


class _Pace:
    def __init__(self) -> None:
        self.first = 0.0
        """At the start of the session."""
        self.value, self.at = 0.0, float("-inf")
        self.expected = _workers()
        """Processes that will run tests, before they are there."""

    def now(self) -> float:
        if time.monotonic() - self.at > _FRESH_S:
            self.value, self.at = max(_stretch(), _crowd(self.expected)), time.monotonic()
            self.first = self.first or self.value
        found = max(self.value, self.first)
        return 1.0 if found < _QUIET else min(found * _MARGIN, _MOST)


def _stretch() -> float:
    """How much longer a piece of work takes than the core time that it needs."""
    wall, core = time.perf_counter(), time.process_time()
    total = 0
    for i in range(_ROUNDS):
        total += i
    return (time.perf_counter() - wall) / max(time.process_time() - core, 1e-6)


def _crowd(expected: int) -> float:
    """Processes that want to run, per core, over the last minute and soon."""
    return (os.getloadavg()[0] + expected) / len(os.sched_getaffinity(0))


_PACE = _Pace()


def workers_are_here() -> None:
    """From now on the machine's load shows the processes that run tests; count them no longer as expected."""
    _PACE.expected = 0


def pace() -> float:
    """1.0 on an idle machine; on a busy one, the factor by which deadlines should grow. Measured now, and at first use.

    >>> pace() >= 1.0
    True
    """
    return _PACE.now()


def stretched(timeouts: Timeouts, factor: float) -> Timeouts:
    """Timeouts with every deadline longer; heartbeats and repeated questions stay as frequent.

    >>> stretched(Timeouts(heartbeat_s=0.2, peer_s=1.0), 3.0).peer_s
    3.0
    """
    return replace(
        timeouts,
        peer_s=timeouts.peer_s * factor,
        delivery_s=timeouts.delivery_s * factor,
        plane_s=timeouts.plane_s * factor,
    )


def eventually(is_so: Callable[[], bool], patience_s: float = 120.0) -> None:
    """Wait until something is so; raises AssertionError if it never is."""
    deadline = time.monotonic() + patience_s
    while not is_so():
        assert time.monotonic() < deadline, "it never came to be so"
        time.sleep(0.05)
