"""One contract for every benchmark: rows of ours against a rival, with a target that can be missed.

A benchmark module defines `run(full=, progress=) -> list[Row]`. Ours and every rival run interleaved on the same
inputs, and what is compared is a ratio, because absolute times depend on the machine. A row whose rival
is not there says so in `skipped`: it neither meets its target nor misses it.
"""

from __future__ import annotations

import gc
import math
import os
import platform
import statistics
import sys
import textwrap
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from importlib import metadata
from typing import Any, Literal, Self

from penstock.version import __version__

WIDTH = 100
"""Characters of a line of the table for people."""
_RIVAL_NAME = 3


@dataclass(frozen=True, slots=True)
class Spread:
    """Minimum, median and 95th percentile of the rounds, in milliseconds."""

    min: float
    median: float
    p95: float
    rounds: int

    @staticmethod
    def of(seconds: Sequence[float]) -> Spread:
        """
        >>> str(Spread.of([0.003, 0.001, 0.002]))
        'min 1, median 2, p95 3 ms of 3'
        """
        ordered = sorted(one * 1e3 for one in seconds)
        p95 = ordered[math.ceil(0.95 * (len(ordered) - 1))]
        return Spread(ordered[0], statistics.median(ordered), p95, len(ordered))

    def __str__(self) -> str:
        return f"min {_number(self.min)}, median {_number(self.median)}, p95 {_number(self.p95)} ms of {self.rounds}"


class Seconds(float):
    """The minimum of the rounds of one call, with their spread."""

    spread: Spread

    def __new__(cls, rounds: Sequence[float]) -> Self:
        made = super().__new__(cls, min(rounds))
        made.spread = Spread.of(rounds)
        return made


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    name: str
    """What was measured."""
    ours: float | None
    """Our value, in `unit`; None where nothing could be measured, and `skipped` says why."""
    rival: float | None = None
    """The rival's value in the same run and unit; None where the row is absolute."""
    rival_name: str = ""
    ratio: float | None = None
    """How many times better ours is than the rival's: above 1 is better, whatever the unit."""
    unit: str = ""
    target: float | None = None
    """What `ratio` must reach, or, when `bound` is "max" or "min", what `ours` must not pass."""
    bound: Literal["ratio", "max", "min"] = "ratio"
    note: str = ""
    skipped: str = ""
    """Why there is no rival, or no figure, in this run; "" where there is."""
    ours_ms: Spread | None = None
    """The rounds that `ours` was chosen from, where it is a time."""
    rival_ms: Spread | None = None

    @property
    def ok(self) -> bool | None:
        if self.target is None or self.skipped:
            return None
        value = self.ratio if self.bound == "ratio" else self.ours
        assert value is not None, f"{self.name}: a target and nothing to compare with it"
        return bool(value <= self.target if self.bound == "max" else value >= self.target)  # of numpy numbers, too


def faster(
    name: str, ours_s: float, rival_s: float, rival_name: str, *, target: float | None = None, note: str = ""
) -> Row:
    """A row of times in milliseconds; the ratio is how many times faster ours is."""
    return Row(
        name=name,
        ours=ours_s * 1e3,
        rival=rival_s * 1e3,
        rival_name=rival_name,
        ratio=rival_s / ours_s,
        unit="ms",
        target=target,
        note=note,
        ours_ms=getattr(ours_s, "spread", None),
        rival_ms=getattr(rival_s, "spread", None),
    )


def skipped(
    name: str,
    why: str,
    *,
    ours: float | None = None,
    unit: str = "",
    rival_name: str = "",
    target: float | None = None,
    bound: Literal["ratio", "max", "min"] = "ratio",
) -> Row:
    """A row whose rival, or whose figure, is missing in this run."""
    return Row(name=name, ours=ours, unit=unit, rival_name=rival_name, target=target, bound=bound, skipped=why)


def smaller(
    name: str, ours: float, rival: float, rival_name: str, *, unit: str = "B", at_most: float | None = None
) -> Row:
    """A row of sizes; the ratio is how many times smaller ours is, the target an upper bound on ours."""
    return Row(
        name=name,
        ours=ours,
        rival=rival,
        rival_name=rival_name,
        ratio=rival / ours,
        unit=unit,
        target=at_most,
        bound="max",
    )


def interleave(*calls: Callable[[], object], repeats: int = 7, budget_s: float = 20.0) -> list[list[float]]:
    """CPU seconds of each call in each round; rounds alternate between the calls so noise hits all alike.

    CPU time rather than wall time: what else runs on the machine then matters less. A first round of every call, ours
    and theirs, warms up and does not count. Stops early when the budget is spent, but never before two rounds.
    """
    times: list[list[float]] = [[] for _ in calls]
    started = time.perf_counter()
    enabled = gc.isenabled()
    gc.disable()
    try:
        for round_number in range(-1, repeats):
            if round_number >= 2 and time.perf_counter() - started > budget_s:
                break
            for call, sink in zip(calls, times, strict=True):
                gc.collect()
                begin = time.process_time_ns()
                call()
                if round_number >= 0:
                    sink.append(max(time.process_time_ns() - begin, 1) / 1e9)
    finally:
        if enabled:
            gc.enable()
    return times


def best(*calls: Callable[[], object], repeats: int = 7, budget_s: float = 20.0) -> list[Seconds]:
    """The minimum CPU seconds of each call over interleaved rounds."""
    return [Seconds(times) for times in interleave(*calls, repeats=repeats, budget_s=budget_s)]


def machine() -> dict[str, Any]:
    """What the numbers were measured on."""
    model = ""
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as lines:  # noqa: PTH123
            model = next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), "")
    except OSError:
        model = platform.processor()
    return {
        "cpu": model or platform.machine(),
        "cores": os.cpu_count(),
        "load": round(os.getloadavg()[0], 2),
        "system": f"{platform.system()} {platform.release()}",
    }


def versions(*packages: str) -> dict[str, str]:
    """Versions of Python and of those packages that are installed."""
    found = {"python": platform.python_version(), "penstock": __version__}
    for name in ("numpy", "msgspec", "zstandard", "xxhash", *packages):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def as_json(bench: str, rows: Sequence[Row], *packages: str) -> dict[str, Any]:
    """The machine-readable report: see `penstock bench --help`."""
    return {
        "bench": bench,
        "machine": machine(),
        "versions": versions(*packages),
        "rows": [{**asdict(row), "ok": row.ok} for row in rows],
    }


def _number(value: float | None) -> str:
    if value is None:
        return ""
    if value != value or abs(value) >= 1e15:
        return str(value)
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.3g}"


def as_table(bench: str, rows: Sequence[Row]) -> str:
    """The same report for people."""
    head = ["", "ours", "rival", "", "ratio", "target", ""]
    body = []
    for row in rows:
        sign = {"ratio": "≥ {}x", "max": "≤ {}", "min": "≥ {}"}[row.bound]
        target = "" if row.target is None else sign.format(_number(row.target))
        verdict = "skipped" if row.skipped else {None: "", True: "ok", False: "MISSED"}[row.ok]
        ratio = "" if row.ratio is None else f"{_number(row.ratio)}x"
        ours = "" if row.ours is None else f"{_number(row.ours)} {row.unit}".strip()
        body.append([row.name, ours, _number(row.rival), row.rival_name, ratio, target, verdict])
    lines = _aligned([head, *body])
    where = machine()
    lines.append("")
    lines += textwrap.wrap(
        f"{bench}: {where['cpu']}, {where['cores']} cores, load {where['load']}, Python {sys.version.split()[0]}",
        WIDTH,
        subsequent_indent="  ",
    )
    notes = [f"{row.name}: {note}" for row in rows if (note := "; ".join(filter(None, (_spreads(row), row.note))))]
    notes += [f"skipped: {why}" for why in dict.fromkeys(row.skipped for row in rows if row.skipped)]
    for note in notes:
        lines += textwrap.wrap(note, WIDTH, initial_indent="  ", subsequent_indent="    ")
    return "\n".join(lines)


def _spreads(row: Row) -> str:
    """The rounds of a row that is a time."""
    found = (("ours", row.ours_ms), (row.rival_name, row.rival_ms))
    return "; ".join(f"{name} {spread}" for name, spread in found if spread is not None)


def _aligned(table: Sequence[Sequence[str]]) -> list[str]:
    """Columns side by side in `WIDTH`; what is measured goes on in a second line where there is not enough room."""
    widths = [max(len(line[i]) for line in table) for i in range(len(table[0]))]
    widths[0] = min(widths[0], max(WIDTH - sum(widths[1:]) - 2 * len(widths[1:]), 20))
    lines = []
    for name, *cells in table:
        first, *more = textwrap.wrap(name, widths[0], subsequent_indent="  ") or [""]
        shown = [
            cell.ljust(w) if i == _RIVAL_NAME else cell.rjust(w)
            for i, (cell, w) in enumerate(zip(cells, widths[1:], strict=True), start=1)
        ]
        lines += ["  ".join([first.ljust(widths[0]), *shown]).rstrip(), *more]
    return lines
