"""Rows of micro-batches whose samples share tokens: families kept together where that is worth more than balance.

Families are cut into pieces (`families`), and pieces are packed into rows as samples are (`rows`). Finer pieces balance
better and compute more tokens twice. Which is worth more cannot be told beforehand, so a few sizes of pieces are tried:
whole families, as many pieces as there are micro-batches, some times that, and single samples, which is the plan
without trees. Each is judged by what its micro-batches then cost, with everything shared that can be; the cheapest is
kept, and of those that cost about the same the one that computes the fewest tokens. So a plan with trees never costs
more than one without.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from penstock.arrays import offsets_of
from penstock.pack.bins import Bin, Caps, Items
from penstock.pack.families import Families, Pieces, cut_families, piece_cost
from penstock.pack.packing import UNLIMITED, Packing
from penstock.pack.rows import Row, rows_of
from penstock.pack.trees import Trees

PIECES_PER_BIN = (1, 2, 4)
"""How many pieces there are for each micro-batch, in the plans that are tried."""
ABOUT_EQUAL = 2e-3
"""Share by which plans may differ in cost and still be chosen by the tokens they compute."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Attempt:
    rows: list[Row]
    cost: float
    tokens: int
    """Computed, shared ones once per micro-batch."""


def tree_rows(items: Items, keys: Sequence[NDArray[np.intp]], packing: Packing, trees: Trees) -> list[Row]:
    """Rows of at most `ranks` bins, costliest row first, as `rows_of` makes them."""
    overhead = packing.cost.overhead
    plain = rows_of(items, keys, packing.ranks, overhead)
    families = [Families.of(items, ids, packing, trees) for ids in keys]
    if not any(family.shared.any() for family in families):
        return plain
    best = _judge([b for row in plain for b in row], items, packing, trees)
    attempts = [best]
    for most_cost in _sizes(families, packing):
        pieces = [cut_families(family, most_cost, items.caps) for family in families]
        attempts.append(_judge(_bins(items, pieces, packing), items, packing, trees))
    cheapest = min(attempt.cost for attempt in attempts)
    close = [a for a in attempts if a.cost <= min(cheapest * (1 + ABOUT_EQUAL), best.cost)]
    return min(close, key=lambda a: (a.tokens, a.cost)).rows


def _sizes(families: Sequence[Families], packing: Packing) -> Iterator[float]:
    """What pieces may cost, in the plans that are tried."""
    yield np.inf
    cost, tokens = sum(f.cost for f in families), sum(f.tokens for f in families)
    fewest = max(-(-tokens // (packing.caps.tokens * packing.ranks)), 1)
    linked = [f.costs[f.again > 0] for f in families]
    share = sum(float(costs.sum()) for costs in linked) / cost
    single = sum(len(f.costs) - len(costs) for f, costs in zip(families, linked, strict=True))
    tried: list[float] = []
    for rows in (fewest, fewest + 1):
        for per_bin in PIECES_PER_BIN:
            wanted = per_bin * rows * packing.ranks * share
            size = piece_cost(families, single + max(wanted, sum(map(len, linked))))
            if all(abs(size - other) > 1e-3 * size for other in tried):
                tried.append(size)
                yield size


def _bins(items: Items, pieces: Sequence[Pieces], packing: Packing) -> list[Bin]:
    """The pieces packed as samples are."""
    members = [b for own in pieces for b in own.members]
    lengths = np.concatenate([own.lengths for own in pieces])
    caps = items.caps
    if caps.samples < UNLIMITED:
        # A piece takes the tokens of as many samples as it has, if that is more: then the cap on samples holds.
        lengths = np.maximum(lengths, -(-np.array([len(b) for b in members]) * caps.tokens // caps.samples))
    as_items = Items.of(
        lengths,
        np.concatenate([own.costs for own in pieces]),
        Caps(tokens=caps.tokens, samples=UNLIMITED, patches=caps.patches),
        np.concatenate([own.patches for own in pieces]),
        np.array([bool(items.alone[b[0]]) for b in members]),
    )
    edges = np.cumsum([len(own.members) for own in pieces])[:-1]
    keys = np.split(np.arange(len(members)), edges)
    rows = rows_of(as_items, keys, packing.ranks, packing.cost.overhead)
    return [[i for piece in b for i in members[piece]] for row in rows for b in row]


def _judge(bins: Sequence[Bin], items: Items, packing: Packing, trees: Trees) -> _Attempt:
    """These bins as rows, sorted by what they cost with all that is shared in them."""
    ordered, shared, patches = trees.common(bins)
    starts = offsets_of([len(b) for b in ordered])[:-1]
    ids = np.array([i for b in ordered for i in b], np.intp)
    costs = np.add.reduceat(items.cost_array[ids] - packing.cost.of_samples(shared, patches), starts)
    tokens = np.add.reduceat(items.length_array[ids] - shared, starts)
    costs += packing.cost.of_samples(-(-tokens // packing.pad_to_multiple_of) * packing.pad_to_multiple_of - tokens)
    first = np.minimum.reduceat(ids, starts)
    by_cost = np.lexsort((first, -costs))
    listed = [ordered[b] for b in by_cost.tolist()]
    rows = [listed[at : at + packing.ranks] for at in range(0, len(listed), packing.ranks)]
    cost = float(costs[by_cost][:: packing.ranks].sum()) + packing.cost.overhead * len(rows)
    return _Attempt(rows=rows, cost=cost, tokens=int(tokens.sum()))
