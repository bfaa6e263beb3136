"""For tests with real processes: planes, what they leave behind, and waiting with a deadline."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

SMALL = ("--ranks=1", "--seq-len=64", "--groups-per-step=1")
"""The smallest plane."""


def wait_until(condition: Callable[[], bool], timeout_s: float = 120.0) -> None:
    """Wait for something that another process does; its absence after a generous deadline is the failure."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"did not happen within {timeout_s:g} s"
        time.sleep(0.01)


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
