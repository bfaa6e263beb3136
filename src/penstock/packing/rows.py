"""Packs samples of one class into rows: one micro-batch per rank, of similar cost, in few rows.

A step waits for the costliest micro-batch of every row, so the planner minimizes the sum over rows of that maximum.

1. Count the bins that each key needs (a key is a set of samples that may share a micro-batch), hence the rows: at least
   what the lengths demand, and where that leaves little room, what best fit decreasing needs.
2. Give spare bins of the last row to the keys with the costliest average bin: splitting is better than a dummy.
3. Give each row a target cost (`row_targets.level_rows`), and spread the samples over the bins towards it
   (`bins.spread`).
4. A key whose caps are too tight for that keeps its best-fit bins, with the costliest halved.
5. Sort the bins by cost and cut them into rows of R. For given bins no arrangement has a lower sum of maxima, because
   the k-th costliest row cannot cost less than the ((k - 1) R + 1)-th costliest bin.
6. Where bins hold many samples, even out each row by exchanges (`bins.polish_row`).
7. If the rows are still above their targets, try the same with a few more rows and keep the cheaper plan.

Bins of cost 9 7 4 3 on R = 2 ranks: rows (9 7) and (4 3) cost 9 + 4 = 13. Rows (9 3) and (7 4) would cost 16.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heapreplace
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from penstock.packing.bins import ENOUGH_PER_BIN, Bin, Items, best_fit, halve_costliest, polish_row, spread
from penstock.packing.row_targets import forced_costs, least_bins, level_rows

Row: TypeAlias = list[Bin]

ROW_OVERHEAD = 0.02
"""Cost of one more row, as a share of an average row, if no overhead is configured: launches, a gather per layer."""

TIGHT = 0.96
"""Share of the rows' tokens in use above which one more row is worth trying."""

ROOMY = 0.985
"""Share of the rows' tokens in use up to which samples can nearly always be spread."""

GOOD_ENOUGH = 3e-3
"""Excess over the target costs, as a share, below which the search ends if there are many rows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Key:
    """Samples that may share a micro-batch."""

    alone: NDArray[np.intp]
    """Samples beyond a cap, and those that share with nothing: each gets a bin of its own."""
    longest_first: NDArray[np.intp]
    """The others."""
    costliest_first: NDArray[np.intp]
    cost: float
    """Total cost of the others."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Problem:
    items: Items
    keys: list[_Key]
    key_of: list[int]
    """The key of each sample; -1 for those alone, so that nothing is exchanged with a bin beyond its caps."""
    ranks: int

    def rows_for(self, bins: Sequence[int]) -> int:
        """Return the rows for these bins per key, plus the samples that are alone."""
        return -(-(sum(bins) + sum(len(key.alone) for key in self.keys)) // self.ranks)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Attempt:
    rows: list[Row]
    cost: float
    """Sum of the costliest bin of each row."""
    level: float
    """That sum if every row reached its target."""
    fits: bool
    """Whether the caps left room to spread; if not, more rows are worth trying."""


def rows_of(items: Items, keys: Sequence[NDArray[np.intp]], ranks: int, overhead: float) -> list[Row]:
    """Return rows of at most `ranks` bins, costliest row and costliest bin first. Every sample is in one bin."""
    parts = [_key(items, ids) for ids in keys]
    problem = _Problem(items=items, keys=parts, key_of=_key_numbers(parts, len(items.lengths)), ranks=ranks)
    everything = np.concatenate(keys)
    # How many rows the tokens would fill completely, and what a rank computes if work were divided evenly.
    row_tokens = int(items.length_array[everything].sum()) / (ranks * items.caps.tokens)
    even = float(items.cost_array[everything].sum()) / ranks
    roomy = _attempt_with_room(problem, row_tokens, even, overhead)
    if roomy is not None:
        return roomy.rows
    return _best_of_several(problem, [best_fit(items, key.longest_first) for key in parts], even, overhead).rows


def _attempt_with_room(problem: _Problem, full_rows: float, even: float, overhead: float) -> _Attempt | None:
    """Try the fewest rows that lengths allow, if they leave room. Of many rows, allow 2 % more to make room.

    This skips best fit, a third of the planning time, and attempts that are bound to fail.
    """
    least = [least_bins(problem.items, key.longest_first) for key in problem.keys]
    fewest = problem.rows_for(least)
    count = max(fewest, math.ceil(full_rows / ROOMY))
    if full_rows < TIGHT * fewest:
        return _attempt(problem, least, fewest, None)
    if (count - fewest) * 50 > fewest or full_rows > ROOMY * count or overhead > ROW_OVERHEAD * even / fewest:
        return None
    made = _attempt(problem, least, count, None)
    return made if made is not None and made.cost - made.level <= GOOD_ENOUGH * made.level else None


def _best_of_several(problem: _Problem, fewest_bins: list[list[Bin]], even: float, overhead: float) -> _Attempt:
    """Return the cheapest of a few numbers of rows, from the fewest that best fit finds."""
    least = [len(bins) for bins in fewest_bins]
    fewest = problem.rows_for(least)
    price = overhead or ROW_OVERHEAD * even / fewest
    # With more samples another attempt takes longer and gains less.
    good_enough = max(1e-3, 5e-8 * len(problem.items.lengths))
    best = _attempt(problem, least, fewest, fewest_bins)
    assert best is not None
    for count in _more_rows(fewest):
        if best.cost - best.level <= max(price, good_enough * best.level) or (best.fits and len(best.rows) > fewest):
            break
        other = _attempt(problem, least, count, fewest_bins)
        assert other is not None
        if other.cost + price * len(other.rows) < best.cost + price * len(best.rows):
            best = other
        elif other.fits:
            break
    return best


def _more_rows(fewest: int) -> list[int]:
    """Return the row counts to try next: one more, 2.5 % more and 5 % more. For 100 rows: 101, 103, 105."""
    return sorted({fewest + 1, fewest + -(-fewest // 40), fewest + -(-fewest // 20)})


def _key(items: Items, ids: NDArray[np.intp]) -> _Key:
    alone = items.beyond_caps(ids) | items.alone[ids]
    rest = ids[~alone]
    return _Key(
        alone=ids[alone],
        longest_first=items.longest_first(rest),
        costliest_first=items.costliest_first(rest),
        cost=float(items.cost_array[rest].sum()),
    )


def _key_numbers(keys: Sequence[_Key], count: int) -> list[int]:
    out = np.full(count, -1)
    for k, key in enumerate(keys):
        out[key.longest_first] = k
    return out.tolist()


def _attempt(
    problem: _Problem, least: Sequence[int], count: int, fewest_bins: Sequence[list[Bin]] | None
) -> _Attempt | None:
    """Build `count` rows. A key that cannot be spread gets its `fewest_bins`; without these, returns None."""
    items, keys, ranks = problem.items, problem.keys, problem.ranks
    numbers = _bin_counts(keys, least, count * ranks)
    targets, level = _targets(items, keys, numbers, ranks)
    bins = [[i] for key in keys for i in key.alone.tolist()]
    fits = True
    for k, key in enumerate(keys):
        made = spread(items, key.costliest_first, targets[k])
        if made is None:
            if fewest_bins is None:
                return None
            fits = False
            made = halve_costliest(items, fewest_bins[k], numbers[k])
        bins += [b for b in made if b]
    # Low targets may leave bins of the last row empty. Halving a costly bin is still better than a dummy.
    bins = _sorted(items, halve_costliest(items, bins, -(-len(bins) // ranks) * ranks))
    # Polishing pays only where bins hold several samples to choose from (see `bins`).
    if len(bins) * ENOUGH_PER_BIN <= sum(len(key.longest_first) for key in keys):
        for at in range(0, len(bins), ranks):
            row = bins[at : at + ranks]
            polish_row(items, row, [problem.key_of[b[0]] for b in row])
        bins = _sorted(items, bins)
    return _Attempt(
        rows=[bins[at : at + ranks] for at in range(0, len(bins), ranks)],
        cost=sum(items.cost_of(bins[at]) for at in range(0, len(bins), ranks)),
        level=level,
        fits=fits,
    )


def _sorted(items: Items, bins: Sequence[Bin]) -> list[Bin]:
    """Sort bins, costliest first. Equal ones sort by their first sample, so that the plan is deterministic."""
    return sorted(bins, key=lambda b: (-items.cost_of(b), min(b)))


def _bin_counts(keys: Sequence[_Key], least: Sequence[int], total: int) -> list[int]:
    """Return how many bins each key gets: what it needs, then spare bins one by one to the costliest average bin.

    Keys of cost 12 in 2 bins and 10 in 1 bin, with one spare bin: averages are 6 and 10, so the second key gets it.
    """
    counts = list(least)
    heap = [(-key.cost / counts[k], k) for k, key in enumerate(keys) if counts[k] < len(key.longest_first)]
    heapify(heap)
    for _ in range(total - sum(counts) - sum(len(key.alone) for key in keys)):
        if not heap:
            break
        k = heap[0][1]
        counts[k] += 1
        if counts[k] < len(keys[k].longest_first):
            heapreplace(heap, (-keys[k].cost / counts[k], k))
        else:
            heappop(heap)
    return counts


def _targets(items: Items, keys: Sequence[_Key], counts: Sequence[int], ranks: int) -> tuple[list[list[float]], float]:
    """Return the target cost of each bin of each key, and the sum of the rows' targets."""
    forced = [forced_costs(items, key.longest_first, count) for key, count in zip(keys, counts, strict=True)]
    alone = items.cost_array[np.concatenate([key.alone for key in keys])]
    joined = np.concatenate([*forced, alone])
    # Sorted by forced cost, every `ranks`-th bin opens a row, and its cost is what that row cannot avoid.
    order = np.argsort(-joined, kind="stable")
    levels = level_rows(joined[order][::ranks].tolist(), (sum(key.cost for key in keys) + float(alone.sum())) / ranks)
    targets = np.empty(len(joined))
    targets[order] = np.repeat(levels, ranks)[: len(joined)]
    return [part.tolist() for part in np.split(targets, np.cumsum(counts))[:-1]], sum(levels)
