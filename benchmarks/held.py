"""Memory of buffered long rollouts: what a 60-turn, 60,000-token rollout costs while it waits."""

from __future__ import annotations

import tracemalloc

import numpy as np

from benchmarks import data
from benchmarks.report import Row
from penstock.capture import from_steps

_COUNT = 3
_BUFFERED = 250


def rows() -> list[Row]:
    """Bytes per token, held as trajectories and as the lists they came in."""
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        inputs = [data.cumulative_steps(np.random.default_rng(seed)) for seed in range(_COUNT)]
        as_lists, _ = tracemalloc.get_traced_memory()
        held = [from_steps(steps, temperature=1.0) for steps in inputs]
        as_deltas, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    tokens = sum(rollout.num_tokens for rollout in held)
    ours, rival = (as_deltas - as_lists) / tokens, (as_lists - before) / tokens
    return [
        Row(
            name="held 60-turn, 60k-token rollout",
            ours=ours,
            rival=rival,
            rival_name="cumulative lists",
            ratio=rival / ours,
            unit="B/token",
            target=10,
            bound="max",
        ),
        Row(
            name=f"{_BUFFERED} of them",
            ours=ours * tokens / _COUNT * _BUFFERED / 1e6,
            unit="MB",
            target=200,
            bound="max",
            note=f"scaled up from {_COUNT}",
        ),
    ]
