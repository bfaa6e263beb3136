"""Target costs of rows, and the least that a step can cost.

A row is one micro-batch index over all ranks; it takes as long as its costliest micro-batch. A row that must hold a
sample costlier than the average has that sample's cost as its target: nothing makes the row cheaper, so its other ranks
may as well be filled up to it. The remaining rows share what is left evenly, like water finding its level:

    costs forced on the rows   9  4    1        18 to place on each rank
    targets                    9  4.5  4.5      not 6 6 6: the first row cannot cost less than 9
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from penstock.packing.bins import Items


def forced_costs(items: Items, longest_first: NDArray[np.intp], count: int) -> NDArray[np.float64]:
    """Return for each of `count` bins the cost it cannot avoid, costliest first."""
    if len(longest_first) == 0:
        return np.zeros(count)
    needed = _bins_needed(items, longest_first)
    # With image patches the longest sample need not be the costliest. The b-th bin holds one of the samples up to the
    # one that first needs b bins, so the cheapest of those is what it cannot avoid.
    cheapest = np.minimum.accumulate(items.cost_array[longest_first])
    bins = min(int(needed[-1]), count)
    forced = np.zeros(count)
    forced[:bins] = cheapest[np.searchsorted(needed, np.arange(1, bins + 1))]
    return forced


def least_bins(items: Items, longest_first: NDArray[np.intp]) -> int:
    """Return a lower bound on the bins that any packing of these samples needs."""
    if len(longest_first) == 0:
        return 0
    tokens = int(items.length_array[longest_first].sum())
    patches = int(items.patch_array[longest_first].sum())
    by_size = max(-(-tokens // items.caps.tokens), -(-patches // items.caps.patches))
    return max(by_size, int(_bins_needed(items, longest_first)[-1]))


def _bins_needed(items: Items, longest_first: NDArray[np.intp]) -> NDArray[np.int64]:
    """Return for each k a lower bound on the bins that the k longest samples need.

    A bin holds at most cap // n samples of n tokens or more, so the k longest samples occupy at least k / (cap // n)
    bins, where n is the shortest of them. With a cap of 10 and lengths 6 6 4 4 3: at most 1 1 2 2 3 per bin, so 1 2 2 2
    2 bins.
    """
    per_bin = np.clip(items.caps.tokens // items.length_array[longest_first], 1, items.caps.samples)
    return np.maximum.accumulate(-(-np.arange(1, len(longest_first) + 1) // per_bin))


def level_rows(forced: Sequence[float] | NDArray[np.float64], total: float) -> list[float]:
    """Return the target of each row, given its forced cost (costliest first) and the sum that the targets must reach.

    >>> level_rows([9.0, 4.0, 1.0], 18.0)
    [9.0, 4.5, 4.5]
    """
    left = total
    for row, cost in enumerate(forced):
        even = left / (len(forced) - row)
        if even >= cost:
            return [*map(float, forced[:row]), *[even] * (len(forced) - row)]
        left -= cost
    return list(map(float, forced))


@dataclass(frozen=True, slots=True, kw_only=True)
class Bound:
    """Lower bounds for any packing of these samples under these caps on these ranks."""

    cost: float
    """Lower bound on the sum over rows of the costliest micro-batch, without overhead."""
    rows: int
    by_longest: bool
    """Whether the rows' unavoidable samples alone cost more than an even share of everything. Then no packing helps,
    only a shorter longest sample, fewer ranks, or splitting a sample over ranks."""
    work: float
    """Cost of what must be computed at least once, on any rank."""


def lower_bound(items: Items, ids: NDArray[np.intp], ranks: int) -> Bound:
    """Return the largest of several bounds, one for each number k of rows.

    The k costliest rows cost at least what is forced on them. They hold at most k * ranks * cap tokens, and so at most
    the cost of that many of the costliest tokens; the other rows must pay for the rest, evenly at best. With k = 0 this
    is the even share of everything, with all rows it is the sum of the forced costs.
    """
    if items.alone.any():  # such a sample fills a bin, as if it had the cap's tokens
        items = replace(items, length_array=np.where(items.alone, items.caps.tokens, items.length_array))
    longest_first = items.longest_first(ids)
    forced = forced_costs(items, longest_first, len(ids))
    # A sample beyond the cap fills a bin by itself, as if it had the cap's tokens.
    tokens = np.minimum(items.length_array[ids], items.caps.tokens)
    costs = items.cost_array[ids]
    costliest_token_first = np.argsort(-costs / tokens, kind="stable")
    held_tokens = np.concatenate(([0], np.cumsum(tokens[costliest_token_first])))
    held_cost = np.concatenate(([0.0], np.cumsum(costs[costliest_token_first])))
    on_rows = np.concatenate(([0.0], np.cumsum(forced[::ranks])))
    # The most cost that k rows can hold: fill their tokens with the costliest tokens first. Interpolation cuts the last
    # sample, which no real packing can, so this stays a bound.
    most_held = np.interp(np.arange(len(on_rows)) * ranks * items.caps.tokens, held_tokens, held_cost)
    even = float(costs.sum()) / ranks
    bins = max(int(np.count_nonzero(forced)), -(-int(tokens.sum()) // items.caps.tokens), 1)
    return Bound(
        cost=float((on_rows + (held_cost[-1] - most_held) / ranks).max()),
        rows=-(-bins // ranks),
        by_longest=bool(on_rows[-1] > even * (1 + 1e-9)),
        work=float(costs.sum()),
    )
