"""How long the plane's work takes: a histogram for each kind, and a log line for whatever takes too long.

A plane that stalls for half a second costs every rank half a second, and nothing else shows it: processor time stays
low while a disk or a database is slow. So loop turns, log commits and storage writes are timed where they happen.
"""

from __future__ import annotations

import logging
import threading
import time
from bisect import bisect_left
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

logger = logging.getLogger("penstock.plane")
BOUNDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0)
"""Upper bounds of the buckets in seconds; one more bucket has no bound."""
SLOW_S = 0.1
WORK = ("turn", "commit", "write")
"""A turn of the loop, a transaction of the log, a write of frames by the plane itself."""


@dataclass(slots=True)
class Histogram:
    """Counts of durations, by bucket."""

    counts: list[int] = field(default_factory=lambda: [0] * (len(BOUNDS) + 1))
    total_s: float = 0.0

    def add(self, seconds: float) -> None:
        self.counts[bisect_left(BOUNDS, seconds)] += 1
        self.total_s += seconds

    def as_dict(self) -> dict[str, Any]:
        return {"counts": list(self.counts), "total_s": self.total_s}


class Marks:
    """Where a turn of the loop spent its time, should somebody ask."""

    def __init__(self) -> None:
        self._marks: list[tuple[str, float]] = []

    def begin(self) -> None:
        self._marks = [("", time.perf_counter())]

    def mark(self, part: str) -> None:
        """The part of this name ends here."""
        self._marks.append((part, time.perf_counter()))

    def longest(self) -> str:
        """The part that took longest, with its share."""
        parts = [(at - before, part) for (_, before), (part, at) in pairwise(self._marks)]
        seconds, part = max(parts, default=(0.0, ""))
        return f"{part} {seconds * 1000:.0f} ms" if part else ""


class Durations:
    """Histograms of a plane's work. Any thread may add to them."""

    def __init__(self, slow_s: float = SLOW_S) -> None:
        self._slow_s = slow_s
        self._lock = threading.Lock()
        self._histograms = {work: Histogram() for work in WORK}
        self._slow = dict.fromkeys(WORK, 0)

    @contextmanager
    def timed(self, work: str, doing: str = "") -> Iterator[None]:
        """Time a block. `doing` says what it was, should it take long."""
        started = time.perf_counter()
        try:
            yield
        finally:
            self.add(work, time.perf_counter() - started, doing)

    def add(self, work: str, seconds: float, doing: str | Callable[[], str] = "") -> None:
        with self._lock:
            self._histograms[work].add(seconds)
            if seconds < self._slow_s:
                return
            self._slow[work] += 1
            count = self._slow[work]
        if count <= 10 or str(count).rstrip("0") == "1":  # the first ten, then every tenfold: a slow disk is slow often
            said = doing() if callable(doing) else doing
            what = f", {said}" if said else ""
            logger.warning("slow %s: %.0f ms%s (%d so far)", work, seconds * 1000, what, count)

    def as_dict(self) -> dict[str, Any]:
        """For `status()`: the bounds of the buckets once, and the counts of each kind of work."""
        with self._lock:
            return {"bounds": list(BOUNDS), **{work: found.as_dict() for work, found in self._histograms.items()}}
