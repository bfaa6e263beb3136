"""The counters of a table, in three separate namespaces: what arrived, what is held, what was trained on.

`gen/` counts inserts only and `train/` samples only, so an item replayed five times counts once as generated and five
times as trained. All numbers of one report are read at one moment, under the lock.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Literal, get_args

import numpy as np
from numpy.typing import NDArray

from penstock.arrays import bounded_sum
from penstock.replay.batch import TIMES, TOKENS, VERSION

Reason = Literal["overflow", "sampled_out", "stale", "replaced", "removed", "cleared"]
"""Why an item left: to make room, after its last use, too old, its key was inserted again, by `remove`, by `clear`."""

REASONS: tuple[Reason, ...] = get_args(Reason)

_FOLD_AFTER = 8192
"""Items noted before their statistics are summed in one pass: 4 us per batch of 512 instead of 19 us. Not higher, so
that they are still in the cache."""


@dataclass(slots=True)
class Counters:
    """Running totals: plain numbers, so that a checkpoint is their list."""

    inserted: int = 0
    inserted_tokens: int = 0
    inserted_bytes: int = 0
    refused_stale: int = 0
    sampled: int = 0
    batches: int = 0
    filled: int = 0
    first_uses: int = 0
    sampled_tokens: int = 0
    staleness_sum: int = 0
    staleness_max: int = 0
    reuse_sum: int = 0
    updates: int = 0
    stale_updates: int = 0
    evicted_unsampled: int = 0
    evicted: dict[Reason, int] = field(default_factory=lambda: dict.fromkeys(REASONS, 0))
    _noted: list[tuple[NDArray[np.int64], int]] = field(default_factory=list)
    """Batches whose statistics are not summed yet, each with the policy version of its draw."""
    _num_noted: int = 0

    def note_batch(self, rows: NDArray[np.int64], policy_version: int, num_filled: int) -> None:
        self.sampled += len(rows)
        self.batches += 1
        self.filled += num_filled
        self._noted.append((rows, policy_version))
        self._num_noted += len(rows)
        if self._num_noted >= _FOLD_AFTER:
            self.fold()

    def fold(self) -> None:
        """Sum the batches noted since the last time."""
        if not self._noted:
            return
        rows = np.concatenate([rows for rows, _ in self._noted])
        now = np.repeat([version for _, version in self._noted], [len(rows) for rows, _ in self._noted])
        self._noted.clear()
        self._num_noted = 0
        staleness = np.maximum(now - rows[:, VERSION], 0)
        # Sum as floats: 1,024 times the highest version (2**53) does not fit in 64 bits. Exact up to 2**53.
        self.staleness_sum = bounded_sum(self.staleness_sum + int(staleness.sum(dtype=np.float64)))
        self.staleness_max = max(self.staleness_max, int(staleness.max()))
        self.sampled_tokens += int(rows[:, TOKENS].sum())
        self.first_uses += int(np.count_nonzero(rows[:, TIMES] == 0))
        self.reuse_sum += int(rows[:, TIMES].sum())

    def to_dict(self) -> dict[str, int]:
        self.fold()
        counts = {name: int(getattr(self, name)) for name in _TOTALS}
        return counts | {f"evicted/{reason}": count for reason, count in self.evicted.items()}

    def restore(self, counts: dict[str, int]) -> None:
        for name in _TOTALS:
            setattr(self, name, counts[name])
        for reason in REASONS:
            self.evicted[reason] = counts[f"evicted/{reason}"]


_TOTALS = [one.name for one in fields(Counters) if one.type == "int" and not one.name.startswith("_")]
