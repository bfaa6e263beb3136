"""Fuzzing: untrusted bytes for every input of the package, and what must hold whatever they are.

A target takes bytes as a stranger would send them. It may reject them with one of our errors (or a status below 500).
Any other exception is a finding, and so is an input that takes more than a second or more memory than its limits
allow. `scripts/fuzz` searches guided by coverage; `explore` tries mutations of known inputs, from a seed.
"""

from __future__ import annotations

import time
import tracemalloc
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from random import Random
from typing import Protocol

from tests.support.fuzz_frames import Frames, Ranges, RankPlans
from tests.support.fuzz_messages import Messages
from tests.support.fuzz_mutation import Change, change_bytes
from tests.support.fuzz_views import Queries, Records

SECONDS = 1.0
"""Of processor time that one input may take."""
PEAK_BYTES = 64 << 20
"""That one input may allocate: the limits given to decoders here are a tenth of it."""


class Target(Protocol):
    """One door. Made with a folder for what it must have on disk."""

    def seeds(self) -> list[bytes]:
        """Valid inputs to begin with."""

    def mutate(self, rng: Random, data: bytes, change: Change) -> bytes:
        """Return an input that differs from `data` in one thing; `change` mutates parts without structure."""

    def run(self, data: bytes) -> bool:
        """Try an input; True if it was taken. Raises only what must never happen."""

    def close(self) -> None:
        """Give back what it has open."""


TARGETS: dict[str, Callable[[Path], Target]] = {
    "decode": Frames,
    "ranges": Ranges,
    "rank_plans": RankPlans,
    "messages": Messages,
    "records": Records,
    "queries": Queries,
}


class Finding(AssertionError):
    """An input that broke a promise."""


@dataclass(slots=True)
class Tried:
    inputs: int = 0
    taken: int = 0
    """Of those, the ones that were not refused."""
    slowest_s: float = 0.0
    peak_bytes: int = 0


def try_one(target: Target, data: bytes, tried: Tried, *, traced: bool) -> None:
    """Run one input within its bounds; raises `Finding` with what went wrong."""
    before = tracemalloc.get_traced_memory()[0] if traced else 0
    if traced:
        tracemalloc.reset_peak()
    began = time.process_time()
    try:
        taken = target.run(data)
    except Exception as error:
        raise Finding(f"{type(error).__name__}: {error}; input {data[:200]!r} of {len(data)} bytes") from error
    took = time.process_time() - began
    peak = tracemalloc.get_traced_memory()[1] - before if traced else 0
    tried.inputs, tried.taken = tried.inputs + 1, tried.taken + taken
    tried.slowest_s, tried.peak_bytes = max(tried.slowest_s, took), max(tried.peak_bytes, peak)
    if took > SECONDS:
        raise Finding(f"{took:.2f} s of processor time; input {data[:200]!r} of {len(data)} bytes")
    if peak > PEAK_BYTES:
        raise Finding(f"{peak:,} bytes allocated; input {data[:200]!r} of {len(data)} bytes")


def explore(target: Target, corpus: Iterable[bytes], *, inputs: int, seed: int = 0) -> Tried:
    """Try the corpus, then mutations of it and of the seeds; the same ones for the same seed."""
    rng, tried = Random(seed), Tried()
    known = [*target.seeds(), *corpus]
    tracemalloc.start()
    try:
        for data in known:
            try_one(target, data, tried, traced=True)
        for _ in range(inputs):
            data = rng.choice(known)
            for _ in range(rng.choice([1, 1, 2, 4])):
                data = target.mutate(rng, data, partial(change_bytes, rng))
            try_one(target, data, tried, traced=True)
    finally:
        tracemalloc.stop()
    return tried


def read_corpus(folder: Path) -> list[bytes]:
    """The inputs kept for a target: one file each."""
    return [path.read_bytes() for path in sorted(folder.iterdir()) if path.is_file()] if folder.is_dir() else []
