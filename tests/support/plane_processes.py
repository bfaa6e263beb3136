"""For tests with real processes: planes, what they leave behind, what ranks train, and waiting with a deadline."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import penstock as ps
from penstock.protocol.timeouts import Timeouts
from tests.support.groups import named_group

SMALL = ("--ranks=1", "--seq-len=64", "--groups-per-step=1", "--over-length=truncate", "--untrained-groups=accept")
"""The smallest plane."""


def wait_until(condition: Callable[[], bool], timeout_s: float = 120.0) -> None:
    """Wait for something that another process does; its absence after a generous deadline is the failure."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"did not happen within {timeout_s:g} s"
        time.sleep(0.01)


def trained_digests(open_rank: Callable[[int], ps.Source], steps: int) -> list[list[str]]:
    """Of two ranks, each in a thread, committing every step."""

    def train(rank: int) -> list[str]:
        found = []
        with open_rank(rank) as source:
            for _ in range(steps):
                step = source.step(timeout=180)
                found.append(step.digest)
                source.commit(step)
            source.flush(120)
        return found

    with ThreadPoolExecutor() as pool:
        return list(pool.map(train, range(2)))


def embedded_digests(where: str | Path, names: Sequence[str], timeouts: Timeouts) -> list[list[str]]:
    """What two ranks get of these groups, two in a step, from a plane that keeps frames itself."""
    with ps.open(where, ranks=2, seq_len=64, groups_per_step=2, timeouts=timeouts) as plane:
        for name in names:
            plane.put(named_group(name, samples=3, tokens=12))
        return trained_digests(plane.source, len(names) // 2)


def alive(pid: int) -> bool:
    """Whether a process runs; one that only waits to be reaped does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def children(pid: int) -> list[int]:
    try:
        return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except FileNotFoundError:
        return []
