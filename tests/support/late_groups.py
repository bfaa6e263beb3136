"""Groups whose rewards come after the put, and judges for them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

import penstock as ps

LATE: dict[str, Any] = {"needs": ("rewards",), "needs_deadline_s": 600.0}
"""Settings of a plane that waits for rewards."""


def rollout(rng: np.random.Generator, reward: float | None = None, **more: Any) -> ps.Trajectory:
    """A rollout of a few tokens."""
    answer = rng.integers(0, 50_000, int(rng.integers(1, 6)))
    turns = [ps.Turn(rng.integers(0, 50_000, 3)), ps.Turn(answer, logprobs=-rng.random(len(answer)))]
    return ps.Trajectory(turns=turns, reward=reward, **more)


def put_late(
    plane: ps.Plane, name: str, rollouts: int = 2, *, advantage: str | None = "grpo", **more: Any
) -> Sequence[str]:
    """Put a group without rewards. Returns the ids of its samples."""
    rng = np.random.default_rng(len(name))
    with plane.group("prompt", id=name, advantage=advantage, **more) as group:
        for _ in range(rollouts):
            group.add(rollout(rng))
    return [f"{name}/{i}" for i in range(rollouts)]


def taken(plane: ps.Plane, **more: Any) -> tuple[list[dict[str, Any]], ps.Step]:
    """Take, commit and return one step of one rank: its arrays by micro-batch."""
    source = plane.source(rank=0, **more)
    step = source.step(timeout=120)
    found = [arrays_of(batch) for batch in step]
    source.commit(step)
    source.flush(120)
    source.close()
    return found, step


def nothing_to_delete(plane: ps.Plane) -> bool:
    """Return whether storage has deleted what was freed. A plane deletes after each decision, so this makes one."""
    plane.discard("tick", 1)
    return not plane.status()["storage"]["to_delete"]


def arrays_of(batch: ps.MicroBatch) -> dict[str, Any]:
    """Return what a micro-batch has, to compare."""
    columns = {name: np.asarray(values).tolist() for name, values in batch.columns.items()}
    return columns | {"ids": batch.segments.ids, "rollouts": batch.segments.rollouts}


def scores(names: Sequence[str]) -> Mapping[str, float]:
    return {name: float(i) for i, name in enumerate(names)}
