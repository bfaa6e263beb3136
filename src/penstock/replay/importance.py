"""Importance weights: they undo a sampler's preference, so that estimates stay unbiased.

A batch drawn with preference over-represents some items. Dividing each item's contribution by how often it is expected
in the batch (its inclusion) corrects for that. With replacement the expectation is n * p. Without replacement it is
not: dividing by n * p is wrong by 50 % in a small example (tests/replay/test_statistics.py), because an item that is in
the batch cannot be drawn again.

Drawing one by one without replacement is the same as giving every item an exponential clock of rate w and taking the n
clocks that ring first. Given the time t at which the next, (n + 1)-th, clock rings, each drawn item was included with
probability 1 - exp(-w t), and sum(f / inclusion) is exactly unbiased (Cohen and Kaplan 2007, rank conditioning). This
costs one random number per batch and needs no approximation.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from penstock.errors import InvalidInput


def inclusion_before(time: float, weights: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the probability that a clock of each rate rings before `time` (infinite: every clock has)."""
    if time == np.inf:
        return np.ones(len(weights))
    inclusion: NDArray[np.float64] = -np.expm1(weights * -time)
    return inclusion


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
