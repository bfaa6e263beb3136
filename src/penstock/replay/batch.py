"""The result of sampling: items, their identity, how likely they were to be drawn, and weights that correct for that.

A batch drawn with preference over-represents some items. Dividing each item's contribution by how often it is expected
in the batch (its inclusion) corrects for that, so that estimates stay unbiased. With replacement the expectation is
n * p. Without replacement it is not: dividing by n * p is wrong by 50 % in a small example
(tests/replay/test_statistics.py), because an item that is in the batch cannot be drawn again. `prioritized.py` says how
its inclusion is found.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from penstock.errors import InvalidInput

Key = str | int
"""The caller's name for an item."""

VERSION, TIMES, BYTES, TOKENS = range(4)
"""Columns of a row. One row per slot, not one array per column: a draw touches one cache line per item."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """Sampled items. Arrays are copies: nothing the table does later changes a batch."""

    keys: NDArray[np.object_]
    """[n] the caller's keys, in the order drawn."""
    items: NDArray[np.object_]
    """[n] the same objects that were inserted."""
    handles: NDArray[np.int64]
    """[n] for `Table.update_handles`. Unlike keys these never refer to a later item."""
    rows: NDArray[np.int64]
    """[n, 4] the items' rows as they were before this use, with the columns above; read-only."""
    arrivals: NDArray[np.int64]
    """[n] the number of the insert that added the item."""
    probabilities: NDArray[np.float64]
    """[n] probability with which a single draw picks the item; 1.0 where the sampler is not random."""
    inclusion: NDArray[np.float64]
    """[n] how often the item is expected in such a batch: n * p, or without replacement its inclusion probability."""
    last_use: NDArray[np.bool_]
    """[n] True where the item left the table with this use."""
    num_filled: int
    """How many were taken only because the sampler's preferred items did not suffice."""
    num_inserted: int
    """Inserts the table had seen."""
    policy_version: int
    """The table's version at the time of the draw."""

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def policy_versions(self) -> NDArray[np.int64]:
        """[n] the version that generated each item."""
        return self.rows[:, VERSION]

    @property
    def times_sampled(self) -> NDArray[np.int64]:
        """[n] uses before this one."""
        return self.rows[:, TIMES]

    @property
    def staleness(self) -> NDArray[np.int64]:
        """[n] versions between the one that generated the item and the table's."""
        return np.maximum(self.policy_version - self.policy_versions, 0)

    @property
    def ages(self) -> NDArray[np.int64]:
        """[n] inserts since the item's own."""
        return self.num_inserted - self.arrivals

    @property
    def weights(self) -> NDArray[np.float64]:
        """[n] importance weights; the largest of the batch is 1.0."""
        return importance_weights(self.inclusion)

    def importance_weights(self, beta: float) -> NDArray[np.float64]:
        """Return [n] weights ** beta, to phase the correction in."""
        return importance_weights(self.inclusion, beta)


def importance_weights(inclusion: NDArray[np.float64], beta: float = 1.0) -> NDArray[np.float64]:
    """Return (1 / inclusion) ** beta, divided by the largest of the batch, so that weights only scale down.

    Divided by the batch's largest, not the table's: one rare item anywhere in the table would otherwise shrink every
    weight of every batch.

    >>> importance_weights(np.array([0.5, 0.25]))
    array([0.5, 1. ])
    """
    if not 0.0 <= beta <= 1.0:
        raise InvalidInput(f"importance_weights: beta {beta}; give a number from 0 (off) to 1 (full correction)")
    weights: NDArray[np.float64] = np.minimum.reduce(inclusion) / inclusion
    return weights if beta == 1.0 else weights**beta
