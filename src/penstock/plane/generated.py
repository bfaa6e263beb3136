"""How good what is generated is: reward, length and truncation of what was put since the last step was planned.

Under replay `train/reward` is that of old groups as well as new ones; these numbers are of new ones alone. They are
not in the log: a plane that restarts counts from then on.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping

import numpy as np

from penstock.frames import GroupMetadata

_KEPT_STEPS = 64
"""Steps whose numbers are kept: more than are ever planned and not delivered."""


class Generated:
    """Counts groups as they are accepted, and begins anew with every planned step."""

    def __init__(self) -> None:
        self._open: Counter[str] = Counter()
        self._sums: dict[str, float] = {}
        self._last: dict[str, float] = {}
        self._of_step: dict[int, dict[str, float]] = {}

    def add(self, metadata: GroupMetadata) -> None:
        """A group was accepted to be trained."""
        count = metadata.num_samples
        rewards = np.frombuffer(metadata.rewards, "<f4")
        scored = rewards[np.isfinite(rewards)]
        seconds = [one for one in metadata.seconds if one >= 0]
        self._note("reward", float(scored.sum(dtype=np.float64)), len(scored))
        self._note("length", float(np.frombuffer(metadata.lengths, "<i8").sum(dtype=np.float64)), count)
        trained = np.frombuffer(metadata.loss_tokens, "<i8")
        self._note("completion_length", float(trained.sum(dtype=np.float64)), count)
        self._note("truncated", float(np.frombuffer(metadata.truncated, np.bool_).sum()), count)
        self._note("seconds", sum(seconds), len(seconds))

    def _note(self, name: str, total: float, count: int) -> None:
        if count:
            self._open[name] += count
            self._sums[name] = self._sums.get(name, 0.0) + total

    def close(self, step: int, buffer: Mapping[str, float]) -> None:
        """A step is planned: what comes from now on counts for the next one. `buffer` is what its table holds."""
        self._last = self._means()
        held = {name: buffer[name] for name in ("buffer/items", "buffer/staleness_mean", "buffer/staleness_max")}
        self._of_step[step] = self._last | held
        while len(self._of_step) > _KEPT_STEPS:
            del self._of_step[next(iter(self._of_step))]
        self._open, self._sums = Counter(), {}

    def of_step(self, step: int) -> dict[str, float]:
        """The numbers of the time before a step was planned; empty for one that an earlier plane planned."""
        return self._of_step.get(step, {})

    def metrics(self) -> dict[str, float]:
        """Those of the last step; before the first one, of what was put so far."""
        return self._last or self._means()

    def _means(self) -> dict[str, float]:
        if not self._open:
            return {"gen/samples": 0}
        means = {f"gen/{name}": self._sums[name] / count for name, count in self._open.items()}
        # A producer may have said 1e308 seconds twice: what is no number is left out.
        return {"gen/samples": self._open["length"]} | {n: mean for n, mean in means.items() if math.isfinite(mean)}
