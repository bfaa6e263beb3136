"""Samples that share tokens, as the planner sees them: what a micro-batch of any of them costs, and where to cut.

Samples in depth-first order share with the one before them what they share with their parent, and with any earlier one
the minimum of the lengths between them (`SharedPrefixes`). So for its samples in that order a micro-batch has

    tokens = sum(n_i - s_i)        cost = sum(cost(n_i) - cost(s_i))

where s_i is what sample i shares with the one before it in the micro-batch. Attention over a path of n tokens costs n
squared, and the first s squared of that are already computed.

A family is a run of samples in which each shares something with the one before it. A piece is a run of a family's
samples, and is planned like a sample. It costs what its samples cost, less what they share. Every cut computes what is
shared across it once more. So a family is cut into few pieces of similar cost, and where little is shared: between the
rollouts of a prompt rather than between the branches of a rollout.

    samples     A1   A2   A3   B1   B2       tokens 10 each
    shared       0    8    8    2    8       with the sample before
    cut         (A1   A2   A3) (B1   B2)     14 + 12 = 26 tokens, uncut 24; cut after A2 instead: 32
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.arrays import SampleMetadata, offsets_of
from penstock.packing.bins import Bin, Caps, Items
from penstock.packing.row_targets import Bound
from penstock.packing.settings import Packing

EARLY_CUT = 0.5
"""A piece may fall short of its even cost by this share if less is shared at the earlier cut."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trees:
    """The samples of a step in depth-first order, with what neighbours share."""

    order: NDArray[np.intp]
    """[n] depth first."""
    rank: NDArray[np.intp]
    """[n] the position of each sample in that order."""
    shared: NDArray[np.int64]
    """[n + 1] in that order: tokens that each shares with the one before it, as kept. The last is 0, for reduceat."""
    patches: NDArray[np.int64]
    """[n + 1] image patches among those."""
    kept: NDArray[np.int64]
    """[n] tokens of each sample."""
    own_patches: NDArray[np.int64]
    """[n] patches of each sample."""

    @staticmethod
    def of(metadata: SampleMetadata) -> Trees | None:
        """Build from metadata; None where nothing is shared."""
        if metadata.shared is None or not metadata.shared.lengths.any():
            return None
        order = metadata.shared.depth_first()
        rank = np.empty_like(order)
        rank[order] = np.arange(len(order))
        return Trees(
            order=order,
            rank=rank,
            shared=np.append(metadata.shared.lengths[order], 0),
            patches=np.append(metadata.shared.patches[order], 0),
            kept=metadata.kept,
            own_patches=metadata.patches,
        )

    def common(self, bins: Sequence[Bin]) -> tuple[list[Bin], NDArray[np.int64], NDArray[np.int64]]:
        """Return the bins, each in depth-first order, and for all their samples, bin after bin, the tokens and patches
        that each shares with the one before it in its bin."""
        starts = offsets_of([len(b) for b in bins])
        ids = np.array([i for b in bins for i in b], np.intp)
        bin_of = np.repeat(np.arange(len(bins)), np.diff(starts))
        ids = ids[np.lexsort((self.rank[ids], bin_of))]
        tokens, patches = np.zeros(len(ids), np.int64), np.zeros(len(ids), np.int64)
        later = np.flatnonzero(np.diff(bin_of) == 0) + 1
        if len(later):
            # Two samples of a bin share the minimum over all samples between them in depth-first order. With shared
            # 0 5 2 7 for samples a b c d, the bin (a b d) has b: min(5) = 5, and d: min(2, 7) = 2. reduceat takes
            # [begin, end) pairs flattened; every second result belongs to the gap between two pairs and is dropped.
            between = np.stack([self.rank[ids[later - 1]] + 1, self.rank[ids[later]] + 1], axis=1).reshape(-1)
            here, before = ids[later], ids[later - 1]
            found = np.minimum.reduceat(self.shared, between)[::2]
            tokens[later] = np.minimum(found, np.minimum(self.kept[here], self.kept[before]))
            found = np.minimum.reduceat(self.patches, between)[::2]
            patches[later] = np.minimum(found, np.minimum(self.own_patches[here], self.own_patches[before]))
        listed = ids.tolist()
        return [listed[a:b] for a, b in zip(starts[:-1].tolist(), starts[1:].tolist(), strict=True)], tokens, patches

    def bound(self, items: Items, keys: Sequence[NDArray[np.intp]], packing: Packing, plain: Bound) -> Bound:
        """Return a lower bound for any packing: every token once, evenly over ranks, or the costliest sample alone."""
        bins, shared, patches = self.common([ids.tolist() for ids in keys])
        if not shared.any():
            return plain
        ids = np.concatenate([np.array(b, np.intp) for b in bins])
        work = float(items.cost_array[ids].sum() - packing.cost.of_samples(shared, patches).sum())
        longest = float(items.cost_array[ids].max())
        places = int((items.length_array[ids] - shared).sum())
        beyond = bool(items.beyond_caps(ids).any())
        return Bound(
            cost=max(work / packing.ranks, longest),
            rows=1 if beyond else -(-places // (items.caps.tokens * packing.ranks)),
            by_longest=longest > work / packing.ranks * (1 + 1e-9),
            work=work,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Families:
    """The samples of a key, depth first, as families. All sums run over the key."""

    ids: NDArray[np.intp]
    """[n] the samples."""
    starts: NDArray[np.int64]
    """[families + 1] where each family starts in `ids`."""
    costs: NDArray[np.float64]
    """[families] cost of each as one piece."""
    again: NDArray[np.float64]
    """[families] what the cheapest cut costs; 0 for a single sample."""
    alone: NDArray[np.float64]
    """[n] cost of each sample by itself."""
    shared_cost: NDArray[np.float64]
    """[n] the part of it that the sample before it has computed."""
    lengths: NDArray[np.int64]
    shared: NDArray[np.int64]
    patches: NDArray[np.int64]
    shared_patches: NDArray[np.int64]

    @staticmethod
    def of(items: Items, ids: NDArray[np.intp], packing: Packing, trees: Trees) -> Families:
        """Return the families of the samples of one key. A sample that is alone in its micro-batch shares nothing."""
        alone = items.alone[ids] | items.beyond_caps(ids)
        bins, shared, shared_patches = trees.common([ids[~alone].tolist()])
        order = np.concatenate([np.array(bins[0], np.intp), ids[alone]])
        shared, shared_patches = (np.append(c, np.zeros(int(alone.sum()), np.int64)) for c in (shared, shared_patches))
        shared_cost = packing.cost.of_samples(shared, shared_patches)
        costs = items.cost_array[order]
        return Families(
            ids=order,
            **_families(costs, shared_cost),
            alone=costs,
            shared_cost=shared_cost,
            lengths=items.length_array[order],
            shared=shared,
            patches=items.patch_array[order],
            shared_patches=shared_patches,
        )

    def loosened(self, cost: float) -> Families:
        """Ignore what is shared where that costs at most `cost`: families fall apart into smaller ones."""
        kept = self.shared_cost > cost
        shared_cost = np.where(kept, self.shared_cost, 0.0)
        return replace(
            self,
            **_families(self.alone, shared_cost),
            shared_cost=shared_cost,
            shared=np.where(kept, self.shared, 0),
            shared_patches=np.where(kept, self.shared_patches, 0),
        )

    @property
    def cost(self) -> float:
        """Cost of everything, shared parts once."""
        return float(self.costs.sum())

    @property
    def tokens(self) -> int:
        """Tokens of everything, shared ones once."""
        return int((self.lengths - self.shared).sum())


def _families(alone: NDArray[np.float64], shared_cost: NDArray[np.float64]) -> dict[str, Any]:
    """Return starts, costs and cheapest cuts. A sample that shares nothing with the one before it begins a family."""
    first = np.flatnonzero(shared_cost == 0)
    cheapest = np.minimum.reduceat(np.where(shared_cost > 0, shared_cost, np.inf), first)
    return {
        "starts": np.append(first, len(alone)),
        "costs": np.add.reduceat(alone - shared_cost, first),
        "again": np.where(np.isfinite(cheapest), cheapest, 0.0),
    }


def piece_cost(families: Sequence[Families], pieces: float) -> float:
    """Return the least cost per piece for which families come to at most `pieces` pieces, found by bisection."""
    costs, again = (np.concatenate([getattr(f, name) for f in families]) for name in ("costs", "again"))
    most = np.concatenate([np.diff(f.starts) for f in families])
    low, high = float(again.max()), float(costs.max())
    for _ in range(24):
        middle = (low + high) / 2
        # n pieces of a family cost `costs + (n - 1) * again` in total, because each cut computes `again` once more.
        # With at most `middle` per piece, n >= (costs - again) / (middle - again): (100 - 10) / (40 - 10) = 3.
        room = np.maximum(middle - again, 1e-9)
        if float(np.minimum(np.ceil((costs - again) / room), most).sum()) > pieces:
            low = middle
        else:
            high = middle
    return high


@dataclass(frozen=True, slots=True, kw_only=True)
class Pieces:
    """Families of one key, cut. Planned as if each piece were a sample."""

    members: list[Bin]
    """The samples of each."""
    lengths: NDArray[np.int64]
    patches: NDArray[np.int64]
    costs: NDArray[np.float64]


def cut_families(families: Families, most_cost: float, caps: Caps) -> Pieces:
    """Cut families into pieces of about `most_cost` at most. None is beyond the caps unless it is one sample."""
    cutter = _Cutter(families, caps)
    starts: list[int] = []
    edges = families.starts.tolist()
    for k, is_uncut in enumerate(_uncut(families, most_cost, caps).tolist()):
        starts += [edges[k]] if is_uncut else cutter.cut(edges[k], edges[k + 1], most_cost, float(families.again[k]))
    first = np.array(starts, np.intp)
    shared, shared_patches = families.shared.copy(), families.shared_patches.copy()
    shared_cost = families.shared_cost.copy()
    # The first sample of a piece has nothing before it to share with: it is computed in full.
    for column in (shared, shared_patches, shared_cost):
        column[first] = 0
    listed, ends = families.ids.tolist(), [*starts[1:], len(families.ids)]
    return Pieces(
        members=[listed[a:b] for a, b in zip(starts, ends, strict=True)],
        lengths=np.add.reduceat(families.lengths - shared, first),
        patches=np.add.reduceat(families.patches - shared_patches, first),
        costs=np.add.reduceat(families.alone - shared_cost, first),
    )


class Chain:
    """All families of a key end to end, to be cut into runs."""

    def __init__(self, families: Families, caps: Caps) -> None:
        self._cutter = _Cutter(families, caps)
        self._ids: list[int] = families.ids.tolist()

    def runs(self, most_cost: float, early: float) -> list[Bin]:
        """Return as few runs as possible, none costlier than `most_cost` unless it is one sample."""
        return [self._ids[a:b] for a, b in pairwise([*self._cutter.fill(most_cost, early), len(self._ids)])]

    def count(self, most_cost: float, early: float) -> int:
        """Return how many runs that would be."""
        return len(self._cutter.fill(most_cost, early))


def _uncut(families: Families, most_cost: float, caps: Caps) -> NDArray[np.bool_]:
    """Return [families], which ones need no cut."""
    first = families.starts[:-1]
    tokens = np.add.reduceat(families.lengths - families.shared, first)
    patches = np.add.reduceat(families.patches - families.shared_patches, first)
    count = np.diff(families.starts)
    fits = (tokens <= caps.tokens) & (patches <= caps.patches) & (count <= caps.samples)
    uncut: NDArray[np.bool_] = (fits & (families.costs <= most_cost * (1 + 1e-9))) | (count == 1)
    return uncut


class _Cutter:
    """Cuts one family after the other. Works on running sums of what each sample adds, as plain lists for bisect."""

    def __init__(self, families: Families, caps: Caps) -> None:
        self._caps = caps
        self._alone: list[float] = families.alone.tolist()
        self._shared: list[float] = families.shared_cost.tolist()
        self._lengths, self._patches = families.lengths.tolist(), families.patches.tolist()
        self._costs = _sums(families.alone - families.shared_cost)
        self._tokens = offsets_of(families.lengths - families.shared).tolist()
        self._patch_sums = offsets_of(families.patches - families.shared_patches).tolist()

    def cut(self, begin: int, end: int, most_cost: float, again: float) -> list[int]:
        """Return where the pieces of the family start."""
        starts, at = [begin], begin
        while True:
            # What is left of the family: its first sample in full, the others without what they share. Dividing
            # it again after every cut corrects for pieces that came out larger or smaller than planned.
            rest = self._alone[at] + self._costs[end] - self._costs[at + 1]
            pieces = max(-(-(rest - again) // max(most_cost - again, 1e-9)), 1.0)
            even = (rest + (pieces - 1) * again) / pieces
            limit = self._limit(at, end)
            stop = end if pieces == 1 else self._nearest(at, end, even)
            stop = min(stop, limit)
            if stop >= end:
                return starts
            at = self._back(at, stop, even, EARLY_CUT) if stop > at + 1 else stop
            starts.append(at)

    def fill(self, most_cost: float, early: float) -> list[int]:
        """Return where runs of everything start, each as long as possible, or a little shorter to share less."""
        sums, alone, end = self._costs, self._alone, len(self._alone)
        starts, at = [0], 0
        while True:
            # A run from `at` to `stop` costs alone[at] + sums[stop] - sums[at + 1]. bisect finds that sums[stop].
            wanted = most_cost - alone[at] + sums[at + 1]
            stop = min(max(bisect_right(sums, wanted, at + 1, end + 1) - 1, at + 1), self._limit(at, end))
            if stop >= end:
                return starts
            at = self._back(at, stop, most_cost, early) if early and stop > at + 1 else stop
            starts.append(at)

    def _limit(self, at: int, end: int) -> int:
        """Return where a piece from `at` must end because of the caps. It has at least one sample."""
        caps = self._caps
        tokens = caps.tokens - self._lengths[at] + self._tokens[at + 1]
        patches = caps.patches - self._patches[at] + self._patch_sums[at + 1]
        by_tokens = bisect_right(self._tokens, tokens, at + 1, end + 1) - 1
        by_patches = bisect_right(self._patch_sums, patches, at + 1, end + 1) - 1
        return max(min(by_tokens, by_patches, at + caps.samples), at + 1)

    def _nearest(self, at: int, end: int, cost: float) -> int:
        """Return where a piece from `at` ends that comes closest to this cost."""
        sums = self._costs
        wanted = cost - self._alone[at] + sums[at + 1]
        stop = max(bisect_right(sums, wanted, at + 1, end + 1) - 1, at + 1)
        nearer = stop < end and sums[stop + 1] - wanted < wanted - sums[stop]
        return stop + 1 if nearer else stop

    def _back(self, at: int, stop: int, even: float, early: float) -> int:
        """Return the cut up to `stop`, and not too early, across which least is shared."""
        first = max(self._nearest(at, stop, (1 - early) * even), at + 1)
        shared = self._shared[first : stop + 1]
        # The last of equal minima, for the longest piece. shared 4 2 7 2 at 10 to 13: reversed 2 7 2 4, index 0, so 13.
        return stop - shared[::-1].index(min(shared))


def _sums(values: NDArray[np.float64]) -> list[float]:
    sums: list[float] = np.concatenate(([0.0], np.cumsum(values))).tolist()
    return sums
