"""The pictures of docs/packing.md, from real plans: `python -m benchmarks.plot_step docs/images`."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import numpy as np

from benchmarks.lengths import draw as draw_lengths
from benchmarks.list_path import MULTIPLE
from benchmarks.pack import COST
from benchmarks.packers import ffd_stride
from benchmarks.tree_cases import grpo
from penstock.arrays import SampleMetadata
from penstock.packing import Packing, plan
from penstock.view.plot_step import Timing, draw, timing_of


def example(path: Path) -> None:
    """One step, packed by first fit decreasing and by us."""
    lengths = draw_lengths("cot", 384)
    packing = Packing(ranks=16, seq_len=32_768, pad_to_multiple_of=MULTIPLE, cost=COST)
    costs = COST.of_samples(lengths)
    grid = ffd_stride(lengths, costs, packing.ranks, packing.cap)
    taken = np.array([[float(costs[b].sum()) for b in row] for row in grid])
    seen = [b for row in grid for b in row]
    first = np.array([b not in seen[:at] for at, b in enumerate(seen)]).reshape(taken.shape)
    copies_idle = Timing(taken=taken, useful=taken * first, shared=np.zeros_like(taken))
    long_rows = replace(packing, micro_batch_max_tokens=2 * packing.seq_len, long_rows=True)
    draw(
        {
            "first fit decreasing, dealt in turn": copies_idle,
            "penstock": timing_of(plan(SampleMetadata.of_lengths(lengths), packing).rank_plans, COST),
            "penstock, cap twice seq_len": timing_of(
                plan(SampleMetadata.of_lengths(lengths), long_rows).rank_plans, COST
            ),
        },
        path,
    )


def tree_example(path: Path) -> None:
    """One step of groups that share long prompts, without trees and with them."""
    metadata = grpo(256, 15_000, 2_000)
    packing = Packing(ranks=8, seq_len=65_536, pad_to_multiple_of=MULTIPLE, cost=COST)
    plans = {"without trees": plan(metadata, packing), "with trees": plan(metadata, replace(packing, trees=True))}
    draw({title: timing_of(made.rank_plans, COST) for title, made in plans.items()}, path)


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    example(folder / "packing.svg")
    tree_example(folder / "trees.svg")
