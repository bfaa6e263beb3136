"""Draw a packed step: ranks from top to bottom, time from left to right, waste shaded.

Each micro-batch is a bar on its rank's line, as long as its cost. The dark part is tokens that several samples share
and that are computed once. A row ends for all ranks with its costliest micro-batch. The space between a bar and that
end is waste: waiting, padding, dummies.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.errors import InvalidInput
from penstock.extras import require
from penstock.packing import Cost, RankPlan, grow

BARS = ("#3b6ea5", "#6c9bd1")
SHARED = "#1d3d63"
WASTE = "#e3a79b"
KINDS = (".svg", ".png")


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """How long each micro-batch of a step takes, and how much of that is for samples."""

    taken: NDArray[np.float64]
    """[rows, ranks]"""
    useful: NDArray[np.float64]
    """[rows, ranks] without padding, dummies and overhead."""
    shared: NDArray[np.float64]
    """[rows, ranks] the useful part spent on tokens that several samples share."""

    @property
    def total(self) -> float:
        return float(self.taken.max(axis=1).sum())


def timing_of(rank_plans: Sequence[RankPlan], cost: Cost) -> Timing:
    """Compute a step's timing from each rank's part of its plan, without image patches."""
    taken, useful, shared = (np.zeros((len(rank_plans[0]), len(rank_plans))) for _ in range(3))
    for rank, part in enumerate(rank_plans):
        for m in range(len(part)):
            own = slice(int(part.starts[m]), int(part.starts[m + 1]))
            spent = np.zeros(0)
            if own.start < own.stop:
                spent, shared[m, rank] = _by_segment(part.cuts[own], part.shared[own], cost)
            padding = int(part.padded[m]) - int((part.cuts[own] - part.shared[own]).sum())
            taken[m, rank] = float(spent.sum()) + cost.overhead + float(cost.of_samples(np.array(padding)))
            useful[m, rank] = 0.0 if part.dummy[m] else float(spent.sum())
    return Timing(taken=taken, useful=useful, shared=shared)


def _by_segment(lengths: NDArray[Any], common: NDArray[Any], cost: Cost) -> tuple[NDArray[np.float64], float]:
    """Return the cost of each segment of a micro-batch, and the total of segments shared by several samples."""
    forest = grow(lengths.astype(np.int64), common.astype(np.int64), columns={})
    depths, ends = forest.depths.astype(np.int64), forest.depths.astype(np.int64) + forest.lengths
    spent = cost.of_samples(ends) - cost.of_samples(depths)
    passed = np.bincount(forest.paths.values, minlength=len(spent))
    return spent, float(spent[passed > 1].sum())


def draw(steps: Mapping[str, Timing], path: Path) -> None:
    """Draw one panel per step on a common time scale. The path's suffix selects SVG or PNG."""
    with picture(path, height=2.4 * len(steps)) as figure:
        axes = figure.subplots(len(steps), 1, sharex=True, squeeze=False)
        longest = max(step.total for step in steps.values())
        ideal = min(float(step.useful.sum()) / step.useful.shape[1] for step in steps.values()) or 1.0
        for axis, (title, step) in zip(axes[:, 0], steps.items(), strict=True):
            _panel(axis, title, step, ideal)
            axis.axvline(1.0, color="black", linewidth=0.8, linestyle=":")
            axis.set_xlim(0, longest / ideal * 1.005)
        axes[-1, 0].set_xlabel("time; 1 is an even share of all samples for every rank")


@contextmanager
def picture(path: Path, *, height: float) -> Iterator[Any]:
    """Yield a figure of matplotlib, 9 inches wide, and write it at the end. The bytes of an SVG are reproducible."""
    if path.suffix not in KINDS:
        raise InvalidInput(f"plot: {str(path)!r} is not a {' or '.join(KINDS)} file; use one of these suffixes")
    require("--plot", "matplotlib")
    import matplotlib as mpl
    from matplotlib.figure import Figure

    with mpl.rc_context({"svg.hashsalt": "penstock"}):
        figure = Figure(figsize=(9, height))
        yield figure
        figure.tight_layout()
        figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)


def _panel(axis: Any, title: str, step: Timing, ideal: float) -> None:
    ranks = np.arange(step.taken.shape[1])
    start = 0.0
    parts = (step.taken / ideal, step.useful / ideal, step.shared / ideal)
    for m, (taken, useful, shared) in enumerate(zip(*parts, strict=True)):
        end = start + float(taken.max())
        axis.barh(ranks, end - start, left=start, height=0.86, color=WASTE, linewidth=0)
        axis.barh(ranks, useful, left=start, height=0.86, color=BARS[m % 2], linewidth=0)
        if shared.any():
            axis.barh(ranks, shared, left=start, height=0.86, color=SHARED, linewidth=0)
        start = end
        axis.axvline(start, color="white", linewidth=1.2)
    waste = 1 - float(step.useful.sum()) / (len(ranks) * step.total)
    summary = f"{len(step.taken)} micro-batches per rank, {100 * waste:.1f} % of the time lost"
    axis.set_title(f"{title}: {summary}", loc="left")
    axis.set_ylabel("rank")
    axis.set_yticks(ranks[:: max(1, len(ranks) // 4)])
    axis.invert_yaxis()
    for side in ("top", "right"):
        axis.spines[side].set_visible(False)
