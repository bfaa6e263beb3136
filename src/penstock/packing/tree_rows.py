"""Rows of micro-batches whose samples share tokens: keep families together where that saves more than balance costs.

What is kept together balances worse; what is split is computed twice. Which matters more is not known in advance, so a
few plans are made and the cheapest is kept:

- families in pieces (`trees`), packed into rows like samples (`rows`): uncut families, as many pieces as there are
  micro-batches, twice that many, and families without the members that share little;
- where micro-batches are few, all samples in depth-first order, cut into as many runs of even cost. Every cut splits
  one family at most, and may come early where less is shared;
- samples packed without trees, unless that is bound to cost more.

Each plan is judged by what its micro-batches cost with everything shared that can be. Of plans with about equal cost
the one that computes the fewest tokens wins. A plan with trees never costs more than one without.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from penstock.arrays import offsets_of
from penstock.packing.bins import Bin, Caps, Items
from penstock.packing.row_targets import Bound
from penstock.packing.rows import Row, rows_of
from penstock.packing.settings import UNLIMITED, Packing
from penstock.packing.trees import Chain, Families, Pieces, Trees, cut_families, piece_cost

PIECES_PER_BIN = (1, 2)
"""Numbers of pieces per micro-batch that are tried."""
EARLY_CUTS = (0.0, 0.1, 0.3)
"""How early runs may be cut, as a share of their cost, in the plans that are tried."""
LOOSE = (0.05, 0.1)
"""A sample may be separated from its family if it shares at most this share of a micro-batch's cost."""
FEW_BINS = 128
"""Micro-batches up to which runs and loose members are tried. With more, uncut families balance well enough."""
MANY_BINS = 384
"""Micro-batches from which only one size of pieces is tried beside uncut families: finer ones gain nothing."""
PROBES = 10
"""Bisection steps for the cost of runs."""
ABOUT_EQUAL = 2e-3
"""Plans whose costs differ by at most this share are chosen by the tokens they compute."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Candidate:
    rows: list[Row]
    cost: float
    tokens: int
    """Computed tokens, shared ones once per micro-batch."""


def tree_rows(
    items: Items, keys: Sequence[NDArray[np.intp]], packing: Packing, trees: Trees, without_trees: Bound
) -> list[Row]:
    """Return rows of at most `ranks` bins, like `rows_of`. `without_trees` is the least that plain rows cost."""
    overhead = packing.cost.overhead
    families = [Families.of(items, ids, packing, trees) for ids in keys]
    if not any(family.shared.any() for family in families):
        return rows_of(items, keys, packing.ranks, overhead)
    attempts = [_judge(bins, items, packing, trees) for bins in _even_runs(families, items.caps, packing)]
    for pieces in _cuts(families, items.caps, packing):
        # Even perfectly balanced, these pieces cost `work`. Skip the packing if a plan found earlier is cheaper.
        work = sum(float(own.costs.sum()) for own in pieces) / packing.ranks
        if work < min((a.cost for a in attempts), default=np.inf):
            attempts.append(_judge(pack_pieces(items, pieces, packing), items, packing, trees))
    # Plain rows are only packed if they might win: their lower bound is below the best plan with trees.
    allowed = without_trees.cost + overhead * without_trees.rows
    if min(a.cost for a in attempts) > allowed:
        plain = [b for row in rows_of(items, keys, packing.ranks, overhead) for b in row]
        attempts.append(_judge(plain, items, packing, trees))
        allowed = attempts[-1].cost
    cheapest = min(a.cost for a in attempts)
    close = [a for a in attempts if a.cost <= max(min(cheapest * (1 + ABOUT_EQUAL), allowed), cheapest)]
    return min(close, key=lambda a: (a.tokens, a.cost)).rows


def _fewest_rows(families: Sequence[Families], packing: Packing) -> int:
    tokens = sum(family.tokens for family in families)
    return max(-(-tokens // (packing.caps.tokens * packing.ranks)), 1)


def _even_runs(families: Sequence[Families], caps: Caps, packing: Packing) -> Iterator[list[Bin]]:
    """Cut the samples of each key into runs of even cost, for a few numbers of rows."""
    chains = [Chain(family, caps) for family in families]
    cost = sum(family.cost for family in families)
    fewest, costliest = _fewest_rows(families, packing), max(float(family.alone.max()) for family in families)
    for rows in (fewest, fewest + 1) if fewest * packing.ranks <= FEW_BINS else ():
        bins = rows * packing.ranks
        for early in EARLY_CUTS:
            # Find the smallest cost per run that needs at most `bins` runs. At `high`, every run is at least half full.
            low, high = max(cost / bins, costliest), 2 * cost / bins + costliest
            for _ in range(PROBES):
                middle = (low + high) / 2
                if sum(chain.count(middle, early) for chain in chains) <= bins:
                    high = middle
                else:
                    low = middle
            yield [run for chain in chains for run in chain.runs(high, early)]


def _cuts(families: Sequence[Families], caps: Caps, packing: Packing) -> Iterator[list[Pieces]]:
    """Yield families in pieces: uncut, in pieces of several sizes, and without their loosest members."""
    cost, fewest = sum(family.cost for family in families), _fewest_rows(families, packing)
    yield [cut_families(family, np.inf, caps) for family in families]
    linked = [f.costs[f.again > 0] for f in families]
    share = sum(float(costs.sum()) for costs in linked) / cost
    single = sum(len(f.costs) - len(costs) for f, costs in zip(families, linked, strict=True))
    uncut = sum(map(len, linked))
    many = fewest * packing.ranks > MANY_BINS
    for rows in (fewest,) if many else (fewest, fewest + 1):
        for per_bin in PIECES_PER_BIN[:1] if many else PIECES_PER_BIN:
            wanted = per_bin * rows * packing.ranks * share
            if wanted > uncut:
                most_cost = piece_cost(families, single + wanted)
                yield [cut_families(family, most_cost, caps) for family in families]
    for loose in LOOSE if fewest * packing.ranks <= FEW_BINS else ():
        parted = [family.loosened(loose * cost / (fewest * packing.ranks)) for family in families]
        yield [cut_families(family, np.inf, caps) for family in parted]


def pack_pieces(items: Items, pieces: Sequence[Pieces], packing: Packing) -> list[Bin]:
    """Pack the pieces as if they were samples."""
    members = [b for own in pieces for b in own.members]
    lengths = np.concatenate([own.lengths for own in pieces])
    caps = items.caps
    if caps.samples < UNLIMITED:
        # `rows_of` knows only one item per piece, so express the cap on samples in tokens: with 8,192 tokens and 16
        # samples per micro-batch, a piece of 4 samples counts as at least 2,048 tokens.
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


def _judge(bins: Sequence[Bin], items: Items, packing: Packing, trees: Trees) -> _Candidate:
    """Arrange these bins as rows, sorted by their cost with everything shared in them."""
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
    return _Candidate(rows=rows, cost=cost, tokens=int(tokens.sum()))
