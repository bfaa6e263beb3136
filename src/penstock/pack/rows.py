"""From samples of one class to rows: one micro-batch per rank, of like cost, in hardly more rows than the caps need.

The step waits for the dearest micro-batch of every row, so what is minimized is the sum over rows of that maximum.

1. Best fit decreasing per key (samples that may share a micro-batch) tells how many bins, hence how many rows.
2. Bins left over in the last row go to the keys with the dearest average bin: splitting beats dummies.
3. Rows get levels (`levels`), and samples are spread over the bins towards them (`spread`).
4. A key whose caps are too tight for that keeps its best-fit bins, the dearest halved.
5. Bins sorted by cost are cut into rows of R. For given bins no arrangement has a lower sum of maxima, because the
   k-th dearest row cannot cost less than the ((k - 1) R + 1)-th dearest bin.
6. Where bins hold many samples, exchanges inside a row even out what is left (`polish`).
7. If the rows still stand above their levels, the same with a few rows more; the cheaper plan is kept.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heapreplace
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from penstock.pack.bins import Bin, Items, best_fit, halve_dearest
from penstock.pack.levels import forced_costs, level_rows
from penstock.pack.polish import ENOUGH_PER_BIN, polish_row
from penstock.pack.spread import spread

Row: TypeAlias = list[Bin]

ROW_OVERHEAD = 0.02
"""Share of an average row that one more row costs when no overhead is given: launches, a gather per layer."""

TIGHT = 0.96
"""Share of the row's tokens in use from which one more row is worth trying."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Key:
    """Samples that may share a micro-batch."""

    alone: NDArray[np.intp]
    """Those beyond a cap: each has a bin of its own."""
    longest_first: NDArray[np.intp]
    """The others."""
    dearest_first: NDArray[np.intp]
    cost: float
    """Of the others."""
    fewest_bins: list[Bin]
    """Best-fit bins of the others: how few are possible."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Attempt:
    rows: list[Row]
    cost: float
    """Sum of the dearest bin of each row."""
    level: float
    """What that sum would be if every row came to its level."""
    fits: bool
    """Whether the caps left room to spread; if not, more rows are worth trying."""


def rows_of(items: Items, keys: Sequence[NDArray[np.intp]], ranks: int, overhead: float) -> list[Row]:
    """Rows of at most `ranks` bins, dearest row first, dearest bin first; every sample in exactly one bin."""
    parts = [_key(items, ids) for ids in keys]
    fewest = -(-sum(len(key.fewest_bins) + len(key.alone) for key in parts) // ranks)
    everything = np.concatenate(keys)
    price = overhead or ROW_OVERHEAD * float(items.cost_array[everything].sum()) / ranks / fewest
    fill = int(items.length_array[everything].sum()) / (fewest * ranks * items.caps.tokens)
    key_of = _key_numbers(parts, len(items.lengths))
    # The more samples, the longer another attempt takes, and the less there is to gain.
    good_enough = max(1e-3, 5e-8 * len(items.lengths))
    best = _attempt(items, parts, key_of, ranks, fewest)
    for count in _more_rows(fewest):
        excess = best.cost - best.level
        if excess <= max(price, good_enough * best.level) or (best.fits and (fill < TIGHT or len(best.rows) > fewest)):
            break
        other = _attempt(items, parts, key_of, ranks, count)
        if other.cost + price * len(other.rows) < best.cost + price * len(best.rows):
            best = other
        elif other.fits:
            break
    return best.rows


def _more_rows(fewest: int) -> list[int]:
    return sorted({fewest + 1, fewest + -(-fewest // 40), fewest + -(-fewest // 20)})


def _key(items: Items, ids: NDArray[np.intp]) -> _Key:
    beyond = items.beyond_caps(ids)
    rest = ids[~beyond]
    longest_first = items.longest_first(rest)
    return _Key(
        alone=ids[beyond],
        longest_first=longest_first,
        dearest_first=items.dearest_first(rest),
        cost=float(items.cost_array[rest].sum()),
        fewest_bins=best_fit(items, longest_first),
    )


def _key_numbers(keys: Sequence[_Key], count: int) -> list[int]:
    """[count] the key of each sample; -1 for those alone, so that nothing is exchanged with a bin beyond its caps."""
    out = np.full(count, -1)
    for k, key in enumerate(keys):
        out[key.longest_first] = k
    return out.tolist()


def _attempt(items: Items, keys: Sequence[_Key], key_of: Sequence[int], ranks: int, count: int) -> _Attempt:
    numbers = _bin_counts(keys, count * ranks)
    targets, level = _targets(items, keys, numbers, ranks)
    bins = [[i] for key in keys for i in key.alone.tolist()]
    fits = True
    for key, target, number in zip(keys, targets, numbers, strict=True):
        made = spread(items, key.dearest_first, target)
        if made is None:
            fits = False
            made = halve_dearest(items, key.fewest_bins, number)
        bins += [b for b in made if b]
    # Where low targets left bins of the last row empty, splitting is still better than a dummy.
    bins = _sorted(items, halve_dearest(items, bins, -(-len(bins) // ranks) * ranks))
    if len(bins) * ENOUGH_PER_BIN <= sum(len(key.longest_first) for key in keys):
        for at in range(0, len(bins), ranks):
            row = bins[at : at + ranks]
            polish_row(items, row, [key_of[b[0]] for b in row])
        bins = _sorted(items, bins)
    return _Attempt(
        rows=[bins[at : at + ranks] for at in range(0, len(bins), ranks)],
        cost=sum(items.cost_of(bins[at]) for at in range(0, len(bins), ranks)),
        level=level,
        fits=fits,
    )


def _sorted(items: Items, bins: Sequence[Bin]) -> list[Bin]:
    """Dearest first; of equals the one with the first sample."""
    return sorted(bins, key=lambda b: (-items.cost_of(b), min(b)))


def _bin_counts(keys: Sequence[_Key], total: int) -> list[int]:
    """How many bins each key gets: what it needs, and of the spare ones those with the dearest average bin."""
    counts = [len(key.fewest_bins) for key in keys]
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
