"""Tokens and cost of a micro-batch whose samples share tokens, for any choice of samples.

Samples in depth-first order share with the one before them what they share with their parent, and with any earlier one
the minimum of the lengths between them (`SharedPrefixes`). So for its samples in that order a micro-batch has

    tokens = sum(n_i - s_i)        cost = sum(cost(n_i) - cost(s_i))

where s_i is what sample i shares with the one before it in the micro-batch. Attention over a path of n tokens costs n
squared, and the first s squared of that are already computed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from penstock.arrays import SampleMetadata, offsets_of
from penstock.packing.bins import Bin, Items
from penstock.packing.row_targets import Bound
from penstock.packing.settings import Packing


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
        """Return what no packing goes below: every token once, evenly over the ranks, or the costliest sample alone."""
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
