"""What a micro-batch of samples that share tokens holds and costs, for any choice of samples, from two arrays.

Samples in depth-first order share with the one before them what they share with their parent, and with any earlier one
the minimum on the way (`SharedPrefixes`). So a micro-batch has, for its samples in that order,

    tokens = sum(n_i - s_i)        cost = sum(cost(n_i) - cost(s_i))

where s_i is what sample i shares with the one before it in the micro-batch: attention over a path of n tokens is n
squared, and the first s squared of that are computed already.
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
    """The samples of a step, as what they share makes of them."""

    order: NDArray[np.intp]
    """[n] depth first."""
    rank: NDArray[np.intp]
    """[n] of each sample its place in that order."""
    shared: NDArray[np.int64]
    """[n + 1] in that order: what each has in common with the one before it, as kept."""
    patches: NDArray[np.int64]
    """[n + 1] image patches of that."""
    kept: NDArray[np.int64]
    """[n] tokens of each sample."""
    own_patches: NDArray[np.int64]
    """[n] patches of each sample."""

    @staticmethod
    def of(metadata: SampleMetadata) -> Trees | None:
        """None where nothing is shared."""
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
        """The bins, each in depth-first order; and of all their samples, bin after bin, the tokens and patches each
        has in common with the one before it in its bin."""
        starts = offsets_of([len(b) for b in bins])
        ids = np.array([i for b in bins for i in b], np.intp)
        bin_of = np.repeat(np.arange(len(bins)), np.diff(starts))
        ids = ids[np.lexsort((self.rank[ids], bin_of))]
        tokens, patches = np.zeros(len(ids), np.int64), np.zeros(len(ids), np.int64)
        later = np.flatnonzero(np.diff(bin_of) == 0) + 1
        if len(later):
            # reduceat over [a, b) pairs; every second result is of what lies between two pairs.
            between = np.stack([self.rank[ids[later - 1]] + 1, self.rank[ids[later]] + 1], axis=1).reshape(-1)
            here, before = ids[later], ids[later - 1]
            found = np.minimum.reduceat(self.shared, between)[::2]
            tokens[later] = np.minimum(found, np.minimum(self.kept[here], self.kept[before]))
            found = np.minimum.reduceat(self.patches, between)[::2]
            patches[later] = np.minimum(found, np.minimum(self.own_patches[here], self.own_patches[before]))
        listed = ids.tolist()
        return [listed[a:b] for a, b in zip(starts[:-1].tolist(), starts[1:].tolist(), strict=True)], tokens, patches

    def bound(self, items: Items, keys: Sequence[NDArray[np.intp]], packing: Packing, plain: Bound) -> Bound:
        """What no packing goes below: every token once, evenly over the ranks, or the costliest sample alone."""
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
