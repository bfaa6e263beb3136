"""Draw a packed step: ranks from top to bottom, time from left to right, cost as area, waiting shaded.

Each micro-batch is a bar on its rank's line, as long as its cost. A row ends for all ranks when its costliest
micro-batch does; what lies between a bar and that end is waste: waiting, padding, dummies.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.bench.lengths import draw as draw_lengths
from penstock.bench.list_path import MULTIPLE
from penstock.bench.pack import COST, traits_of
from penstock.bench.packers import ffd_stride
from penstock.pack import Packing, Plan, plan

BARS = ("#3b6ea5", "#6c9bd1")
WASTE = "#e3a79b"


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """How long each micro-batch of a step takes, and how much of that is for samples."""

    taken: NDArray[np.float64]
    """[rows, ranks]"""
    useful: NDArray[np.float64]
    """[rows, ranks] without padding, dummies and overhead."""

    @property
    def total(self) -> float:
        return float(self.taken.max(axis=1).sum())


def timing_of(planned: Plan, packing: Packing) -> Timing:
    """The timing of a plan, from its segments (image patches left out)."""
    shape = (planned.accounting.rows, packing.ranks)
    taken, useful = np.zeros(shape), np.zeros(shape)
    for share in planned.rank_plans:
        costs = packing.cost.of_samples(share.cuts)
        for m in range(len(share)):
            own = slice(int(share.starts[m]), int(share.starts[m + 1]))
            padding = np.array([int(share.padded[m]) - int(share.cuts[own].sum())])
            extra = packing.cost.overhead + float(packing.cost.of_samples(padding)[0])
            taken[m, share.rank] = float(costs[own].sum()) + extra
            useful[m, share.rank] = 0.0 if share.dummy[m] else float(costs[own].sum())
    return Timing(taken=taken, useful=useful)


def draw(steps: Mapping[str, Timing], path: Path) -> None:
    """One panel per step, all on the same time scale, to an image of the kind the path's suffix names."""
    import matplotlib as mpl

    mpl.use("Agg")
    mpl.rcParams["svg.hashsalt"] = "penstock"  # the same picture, the same bytes
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(len(steps), 1, figsize=(9, 2.4 * len(steps)), sharex=True, squeeze=False)
    longest = max(step.total for step in steps.values())
    ideal = min(float(step.useful.sum()) / step.useful.shape[1] for step in steps.values())
    for axis, (title, step) in zip(axes[:, 0], steps.items(), strict=True):
        _panel(axis, title, step, ideal)
        axis.axvline(1.0, color="black", linewidth=0.8, linestyle=":")
        axis.set_xlim(0, longest / ideal * 1.005)
    axes[-1, 0].set_xlabel("time; 1 is an even share of all samples for every rank")
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)
    plt.close(figure)


def _panel(axis: Any, title: str, step: Timing, ideal: float) -> None:
    ranks = np.arange(step.taken.shape[1])
    start = 0.0
    for m, (taken, useful) in enumerate(zip(step.taken / ideal, step.useful / ideal, strict=True)):
        end = start + float(taken.max())
        axis.barh(ranks, end - start, left=start, height=0.86, color=WASTE, linewidth=0)
        axis.barh(ranks, useful, left=start, height=0.86, color=BARS[m % 2], linewidth=0)
        start = end
        axis.axvline(start, color="white", linewidth=1.2)
    waste = 1 - float(step.useful.sum()) / (len(ranks) * step.total)
    axis.set_title(
        f"{title}: {len(step.taken)} micro-batches per rank, {100 * waste:.1f} % of the time lost", loc="left"
    )
    axis.set_ylabel("rank")
    axis.set_yticks(ranks[:: max(1, len(ranks) // 4)])
    axis.invert_yaxis()
    for side in ("top", "right"):
        axis.spines[side].set_visible(False)


def example(path: Path) -> None:
    """The picture of docs/packing.md: one step, packed by first fit decreasing and by us."""
    lengths = draw_lengths("cot", 384)
    packing = Packing(ranks=16, seq_len=32_768, pad_to_multiple_of=MULTIPLE, cost=COST)
    costs = COST.of_samples(lengths)
    grid = ffd_stride(lengths, costs, packing.ranks, packing.cap)
    taken = np.array([[float(costs[b].sum()) for b in row] for row in grid])
    seen = [b for row in grid for b in row]
    first = np.array([b not in seen[:at] for at, b in enumerate(seen)]).reshape(taken.shape)
    copies_idle = Timing(taken=taken, useful=taken * first)
    long_rows = replace(packing, micro_batch_max_tokens=2 * packing.seq_len, long_rows=True)
    draw(
        {
            "first fit decreasing, dealt in turn": copies_idle,
            "penstock": timing_of(plan(traits_of(lengths), packing), packing),
            "penstock, cap twice seq_len": timing_of(plan(traits_of(lengths), long_rows), long_rows),
        },
        path,
    )
