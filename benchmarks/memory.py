"""Measure the memory of every process of a demo run over time: its peak, and whether it grows.

Resident memory is read from /proc, for the command and its descendants. A process is identified by the log file that
its standard error goes to. Growth is the slope of a line through the last two thirds of the training time: by then
everything is imported and every buffer has been used once.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from penstock.errors import PenstockError
from penstock.view.run_files import Metrics

_LOOK_S = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Trend:
    """The result for one role; processes that replaced one another count as one."""

    role: str
    """launcher, forkserver, plane, rank-0, worker-0, ..."""
    peak_mb: float
    """The largest resident set, with shared pages: forked processes share most of theirs."""
    slope_mb_per_min: float
    per_100_steps_mb: float
    """The same growth, per hundred optimizer steps."""


@dataclass(slots=True)
class Series:
    """Measurements of one role."""

    times: list[float] = field(default_factory=list)
    rss_mb: list[float] = field(default_factory=list)
    peak_mb: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    series: dict[str, Series]
    """By role, in the order they appeared."""
    began: float
    """When the first step was trained, in seconds from the start. Times of the series have the same origin."""
    ended: float
    steps: int

    def trends(self) -> list[Trend]:
        minutes = max(self.ended - self.began, 1e-9) / 60
        slopes = {role: slope(one.times, one.rss_mb, self.began, self.ended) for role, one in self.series.items()}
        return [
            Trend(
                role=role,
                peak_mb=one.peak_mb,
                slope_mb_per_min=slopes[role],
                per_100_steps_mb=slopes[role] * minutes / max(self.steps, 1) * 100,
            )
            for role, one in self.series.items()
        ]


def slope(times: list[float], rss_mb: list[float], began: float, ended: float) -> float:
    """Fit a line through the last two thirds, in MB per minute. Returns 0 for fewer than two points.

    >>> round(slope([0, 30, 60, 90], [10, 50, 51, 52], 0, 90), 3)
    2.0
    """
    at: NDArray[np.float64] = np.asarray(times, np.float64)
    late = at >= began + (ended - began) / 3
    if late.sum() < 2:
        return 0.0
    return float(np.polyfit(at[late] / 60, np.asarray(rss_mb, np.float64)[late], 1)[0])


def measure(steps: int, *, arguments: tuple[str, ...] = (), progress: Callable[[int], None] | None = None) -> Measured:
    """Run `penstock demo --steps N`, with more `arguments`, in a temporary folder and watch its processes."""
    with tempfile.TemporaryDirectory(prefix="penstock-memory-") as temporary:
        folder = Path(temporary) / "run"
        command = [sys.executable, "-m", "penstock.cli", "demo", "--json", "--steps", str(steps)]
        with subprocess.Popen(
            [*command, "--folder", str(folder), *arguments],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        ) as process:
            measured = _watch(process, folder, progress or (lambda _: None))
            assert process.stderr is not None
            problems = process.stderr.read()
        if measured.steps < steps:
            raise PenstockError(f"the run ended after {measured.steps} of {steps} steps:\n{problems[-2000:]}")
        return measured


def _watch(process: subprocess.Popen[str], folder: Path, progress: Callable[[int], None]) -> Measured:
    series: dict[str, Series] = {}
    metrics, steps = Metrics(folder / "metrics.jsonl"), 0
    start, began, ended = time.monotonic(), 0.0, 0.0
    while process.poll() is None:
        time.sleep(_LOOK_S)
        now = time.monotonic() - start
        for pid in _tree(process.pid):
            _look(pid, process.pid, now, folder, series)
        done = len(metrics.read())
        if done > steps:
            began, ended, steps = began or now, now, done
            progress(steps)
    return Measured(series=series, began=began, ended=ended, steps=steps)


def _tree(root: int) -> Iterator[int]:
    """Yield a process and its descendants."""
    yield root
    try:
        for task in Path(f"/proc/{root}/task").iterdir():
            for child in (task / "children").read_text().split():
                yield from _tree(int(child))
    except OSError:
        return  # it has ended in the meantime


def _look(pid: int, root: int, now: float, folder: Path, series: dict[str, Series]) -> None:
    try:
        log = Path(f"/proc/{pid}/fd/2").readlink()
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return
    found = dict(line.partition(":")[::2] for line in lines)
    if "VmRSS" not in found:  # a zombie
        return
    if log.parent != folder / "logs" and pid != root:
        return  # multiprocessing's resource tracker
    one = series.setdefault("launcher" if pid == root else log.stem, Series())
    one.times.append(now)
    one.rss_mb.append(int(found["VmRSS"].split()[0]) / 1024)
    one.peak_mb = max(one.peak_mb, int(found["VmHWM"].split()[0]) / 1024)


def plot(measured: Measured, path: Path) -> None:
    """Draw the resident memory of every process. The file's ending selects the format."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4), layout="constrained")
    axes = figure.subplots()
    for role, one in measured.series.items():
        axes.plot(one.times, one.rss_mb, label=role, linewidth=1)
    axes.axvspan(measured.began + (measured.ended - measured.began) / 3, measured.ended, alpha=0.08)
    axes.set(xlabel="seconds", ylabel="resident memory, MB", ylim=(0, None))
    axes.set_title(f"{measured.steps} steps; the slope is that of the shaded part", fontsize=10)
    axes.legend(fontsize=8, ncols=4, loc="lower center")
    figure.savefig(path)
