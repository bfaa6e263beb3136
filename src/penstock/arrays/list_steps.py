"""Lists that ascend, by their steps: small numbers where the values are large, so that fewer bits tell them apart.

    lists   [7 9 12] [] [3 4]      steps   7 2 3  3 1

Sums are taken over all steps at once, and what came before a list is subtracted from it: in unsigned integers that
wrap around, both are exact.
"""

from __future__ import annotations

import numpy as np

from penstock.arrays.columns import Array
from penstock.arrays.ragged import Offsets, Ragged


def steps_of(lists: Ragged) -> Array | None:
    """[N] by how much each value is larger than the one before it in its list; None where one is smaller."""
    values: Array = lists.values
    starts = lists.offsets[:-1][np.diff(lists.offsets) > 0]
    falls = values[1:] < values[:-1]
    falls[starts[1:] - 1] = False
    if falls.any():
        return None
    steps = values.copy()
    steps[1:] -= values[:-1]
    steps[starts] = values[starts]
    return steps


def lists_of(steps: Array, offsets: Offsets) -> Ragged:
    """The lists that `steps_of` was given."""
    sums = np.cumsum(steps, dtype=steps.dtype)
    lengths = np.diff(offsets)
    starts = offsets[:-1][lengths > 0]
    before = np.zeros(len(starts), steps.dtype)
    before[1:] = sums[starts[1:] - 1]
    return Ragged(sums - np.repeat(before, lengths[lengths > 0]), offsets)
