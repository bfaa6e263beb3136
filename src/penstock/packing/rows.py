"""From samples of one class to rows: one micro-batch per rank, of like cost, in hardly more rows than the caps need.

The step waits for the costliest micro-batch of every row, so what is minimized is the sum over rows of that maximum.

1. How many bins does each key (samples that may share a micro-batch) need, hence how many rows? At least what the
   lengths demand; when that leaves little room, what best fit decreasing needs.
2. Bins left over in the last row go to the keys with the costliest average bin: splitting beats dummies.
3. Rows get levels (`row_targets.level_rows`), and samples are spread over the bins towards them (`balance.spread`).
4. A key whose caps are too tight for that keeps its best-fit bins, the costliest halved.
5. Bins sorted by cost are cut into rows of R. For given bins no arrangement has a lower sum of maxima, because the
   k-th costliest row cannot cost less than the ((k - 1) R + 1)-th costliest bin.
6. Where bins hold many samples, exchanges inside a row even out what is left (`balance.polish_row`).
7. If the rows still stand above their levels, the same with a few rows more; the cheaper plan is kept.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heapreplace
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from penstock.packing.balance import ENOUGH_PER_BIN, polish_row, spread
from penstock.packing.bins import Bin, Items, best_fit, halve_costliest
from penstock.packing.row_targets import forced_costs, least_bins, level_rows

Row: TypeAlias = list[Bin]

ROW_OVERHEAD = 0.02
"""Share of an average row that one more row costs when no overhead is given: launches, a gather per layer."""

TIGHT = 0.96
"""Share of the rows' tokens in use from which one more row is worth trying."""

ROOMY = 0.985
"""Share of the rows' tokens in use up to which samples can nearly always be spread."""

GOOD_ENOUGH = 3e-3
"""Share above the levels that ends the search where there are many rows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Key:
    """Samples that may share a micro-batch."""

    alone: NDArray[np.intp]
    """Those beyond a cap, and those that share with nothing: each has a bin of its own."""
    longest_first: NDArray[np.intp]
    """The others."""
    costliest_first: NDArray[np.intp]
    cost: float
    """Of the others."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Problem:
    items: Items
    keys: list[_Key]
    key_of: list[int]
    """The key of each sample; -1 for those alone, so that nothing is exchanged with a bin beyond its caps."""
    ranks: int

    def rows_for(self, bins: Sequence[int]) -> int:
        """Rows that these many bins per key make, with those that stand alone."""
        return -(-(sum(bins) + sum(len(key.alone) for key in self.keys)) // self.ranks)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Attempt:
    rows: list[Row]
    cost: float
    """Sum of the costliest bin of each row."""
    level: float
    """What that sum would be if every row came to its level."""
    fits: bool
    """Whether the caps left room to spread; if not, more rows are worth trying."""


def rows_of(items: Items, keys: Sequence[NDArray[np.intp]], ranks: int, overhead: float) -> list[Row]:
    """Rows of at most `ranks` bins, costliest row first, costliest bin first; every sample in exactly one bin."""
    parts = [_key(items, ids) for ids in keys]
    problem = _Problem(items=items, keys=parts, key_of=_key_numbers(parts, len(items.lengths)), ranks=ranks)
    everything = np.concatenate(keys)
    row_tokens = int(items.length_array[everything].sum()) / (ranks * items.caps.tokens)
    even = float(items.cost_array[everything].sum()) / ranks
    roomy = _attempt_with_room(problem, row_tokens, even, overhead)
    if roomy is not None:
        return roomy.rows
    return _best_of_several(problem, [best_fit(items, key.longest_first) for key in parts], even, overhead).rows


def _attempt_with_room(problem: _Problem, full_rows: float, even: float, overhead: float) -> _Attempt | None:
    """The fewest rows that lengths allow, if they leave room; with many rows, up to 2 % more to make that room.

    Spares asking best fit how few rows there can be, a third of the time, and attempts that are bound to fail.
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
    """The cheapest of a few numbers of rows, from the fewest that best fit finds."""
    least = [len(bins) for bins in fewest_bins]
    fewest = problem.rows_for(least)
    price = overhead or ROW_OVERHEAD * even / fewest
    # The more samples, the longer another attempt takes, and the less there is to gain.
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
    """`count` rows; a key that cannot be spread falls back to its fewest bins, or without those to None."""
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
    # Where low targets left bins of the last row empty, splitting is still better than a dummy.
    bins = _sorted(items, halve_costliest(items, bins, -(-len(bins) // ranks) * ranks))
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
    """Costliest first; of equals the one with the first sample."""
    return sorted(bins, key=lambda b: (-items.cost_of(b), min(b)))


def _bin_counts(keys: Sequence[_Key], least: Sequence[int], total: int) -> list[int]:
    """How many bins each key gets: what it needs, and of the spare ones those with the costliest average bin."""
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
    """The target cost of each bin of each key, and the sum of the rows' levels."""
    forced = [forced_costs(items, key.longest_first, count) for key, count in zip(keys, counts, strict=True)]
    alone = items.cost_array[np.concatenate([key.alone for key in keys])]
    joined = np.concatenate([*forced, alone])
    order = np.argsort(-joined, kind="stable")
    levels = level_rows(joined[order][::ranks].tolist(), (sum(key.cost for key in keys) + float(alone.sum())) / ranks)
    targets = np.empty(len(joined))
    targets[order] = np.repeat(levels, ranks)[: len(joined)]
    return [part.tolist() for part in np.split(targets, np.cumsum(counts))[:-1]], sum(levels)
