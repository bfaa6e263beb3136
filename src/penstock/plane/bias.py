"""Mean length and reward of what was put against what is trained: does training favour short or easy answers?

Follows from the log like the rest of the plane's memory, so a restart goes on with the same figures.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from penstock.log import MAX_SHOWN, GroupRow, Log
from penstock.plane.manifest import GroupSummaries


class Bias:
    """Mean length and reward of everything that was put, and of everything that steps train, since the run began.

    What is dropped as stale or trained late differs between the two: a policy that favours short answers shows here."""

    def __init__(self, sums: Mapping[str, tuple[float, float]] | None = None) -> None:
        self.sums = dict(sums or {})
        """Name of a mean -> sum and weight."""

    def put(self, row: GroupRow, rewards: bytes) -> None:
        """Count a group that was accepted for training. `rewards` are those of its samples, as metadata has them."""
        if rewards:
            # The log keeps the rewards of the first samples of a group. A restart must count the same.
            given = np.frombuffer(rewards[: 4 * MAX_SHOWN], "<f4")
            scored = given[np.isfinite(given)]
            self._add("gen/reward_mean", float(scored.sum(dtype=np.float64)), len(scored))
        self._add("gen/length_mean", float(row.tokens), row.samples)

    def put_before(self, log: Log, rows: Iterable[GroupRow]) -> None:
        """Count groups of the log that are no longer in the snapshot's figures."""
        by_op = {row.op: row for row in rows}
        summaries = log.summaries(list(by_op))
        for op, row in by_op.items():
            self.put(row, summaries[op].rewards if op in summaries else b"")

    def planned(self, summaries: GroupSummaries, samples: Sequence[int]) -> None:
        """Count the groups of a planned step, with the number of samples of each."""
        for name in ("length", "reward"):
            for value, count in zip(summaries.numbers(name), samples, strict=False):
                if value is not None:
                    self._add(f"train/{name}_mean", value * count, count)

    def _add(self, name: str, total: float, weight: float) -> None:
        if weight > 0 and math.isfinite(total):
            before = self.sums.get(name, (0.0, 0.0))
            self.sums[name] = (before[0] + total, before[1] + weight)

    def metrics(self) -> dict[str, float]:
        """Return the means, and how far what is trained deviates: relative for lengths, absolute for rewards."""
        found = {name: total / weight for name, (total, weight) in self.sums.items()}
        if found.get("gen/length_mean") and "train/length_mean" in found:
            found["train/length_bias"] = found["train/length_mean"] / found["gen/length_mean"] - 1
        if "gen/reward_mean" in found and "train/reward_mean" in found:
            found["train/reward_bias"] = found["train/reward_mean"] - found["gen/reward_mean"]
        return {name: value for name, value in found.items() if math.isfinite(value)}
