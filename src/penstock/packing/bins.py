"""Bins under a cap: how few are needed, and how to split them into more.

Best fit decreasing (longest first, into the fullest bin that still has room) needs within half a percent of the fewest
possible bins on realistic lengths. It decides how many micro-batches there are. It does not decide what is in them,
unless the caps are so tight that nothing else fits: its bins are full and uneven.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

Bin: TypeAlias = list[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Caps:
    """What one micro-batch may hold."""

    tokens: int
    samples: int
    patches: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Items:
    """What is packed: as arrays for sorting, and as plain lists for filling bins one item at a time."""

    lengths: list[int]
    patches: list[int]
    costs: list[float]
    caps: Caps
    length_array: NDArray[np.int64]
    patch_array: NDArray[np.int64]
    cost_array: NDArray[np.float64]
    alone: NDArray[np.bool_]
    """Items that share a bin with nothing, whatever room there is."""

    @staticmethod
    def of(
        lengths: NDArray[np.int64],
        costs: NDArray[np.float64],
        caps: Caps,
        patches: NDArray[np.int64] | None = None,
        alone: NDArray[np.bool_] | None = None,
    ) -> Items:
        patches = np.zeros(len(lengths), np.int64) if patches is None else patches
        return Items(
            lengths=lengths.tolist(),
            patches=patches.tolist(),
            costs=costs.tolist(),
            caps=caps,
            length_array=lengths,
            patch_array=patches,
            cost_array=costs,
            alone=np.zeros(len(lengths), np.bool_) if alone is None else alone,
        )

    def longest_first(self, ids: NDArray[np.intp]) -> NDArray[np.intp]:
        return ids[np.lexsort((ids, -self.cost_array[ids], -self.length_array[ids]))]

    def costliest_first(self, ids: NDArray[np.intp]) -> NDArray[np.intp]:
        return ids[np.lexsort((ids, -self.length_array[ids], -self.cost_array[ids]))]

    def beyond_caps(self, ids: NDArray[np.intp]) -> NDArray[np.bool_]:
        """Return which items do not fit even an empty bin."""
        return (self.length_array[ids] > self.caps.tokens) | (self.patch_array[ids] > self.caps.patches)

    def cost_of(self, ids: Bin) -> float:
        return sum(map(self.costs.__getitem__, ids))


def best_fit(items: Items, longest_first: NDArray[np.intp]) -> list[Bin]:
    """Return bins by best fit; of equally full bins the older one. Every item must fit an empty bin."""
    caps, lengths, patches = items.caps, items.lengths, items.patches
    # Open bins as one integer each, room << shift | number, so that the list sorts by room and compares fast. Room 5 of
    # bin 2 with shift 3 is 42. bisect_left of length << shift finds the fullest bin that fits, the oldest of equals.
    open_bins: list[int] = []
    shift = len(longest_first).bit_length()
    number = (1 << shift) - 1
    bins: list[Bin] = []
    patch_room: list[int] = []
    for i in longest_first.tolist():
        length, need = lengths[i], patches[i]
        at = bisect_left(open_bins, length << shift)
        while at < len(open_bins) and patch_room[open_bins[at] & number] < need:
            at += 1
        if at == len(open_bins):
            room, b = caps.tokens, len(bins)
            bins.append([])
            patch_room.append(caps.patches)
        else:
            room, b = open_bins[at] >> shift, open_bins[at] & number
            del open_bins[at]
        bins[b].append(i)
        patch_room[b] -= need
        if room > length and len(bins[b]) < caps.samples:
            insort(open_bins, (room - length) << shift | b)
    return bins


def halve_costliest(items: Items, bins: Sequence[Bin], count: int) -> list[Bin]:
    """Return `count` bins by halving the costliest repeatedly, as long as one holds two samples."""
    out = list(bins)
    if len(out) >= count:
        return out
    heap = [(-items.cost_of(b), k) for k, b in enumerate(out) if len(b) > 1]
    heapify(heap)
    while len(out) < count and heap:
        k = heappop(heap)[1]
        halves: tuple[Bin, Bin] = ([], [])
        weights = [0.0, 0.0]
        for i in items.costliest_first(np.array(out[k])).tolist():
            side = int(weights[1] < weights[0])
            halves[side].append(i)
            weights[side] += items.costs[i]
        out[k] = halves[0]
        out.append(halves[1])
        for side, at in ((0, k), (1, len(out) - 1)):
            if len(halves[side]) > 1:
                heappush(heap, (-weights[side], at))
    return out
