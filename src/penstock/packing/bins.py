"""Bins under a cap: how few are needed, how to split them into more, and how to make them even.

**Best fit** decreasing (longest first, into the fullest bin that still has room) needs within half a percent of the
fewest possible bins on realistic lengths. It decides how many micro-batches there are. It does not decide what is in
them, unless the caps are so tight that nothing else fits: its bins are full and uneven.

**Spreading** takes the costliest sample first and puts it into the bin furthest below its target that still has room:
the longest-processing-time rule, with caps and with a target per bin. Two heaps make it n log n: *active* bins that can
take something, by distance to their target, and bins *parked* until samples are short enough for them, by room.

That leaves bins uneven by about one short sample. Where bins hold many samples, **exchanging** one between the
costliest and the cheapest bin of a row removes most of that. Where they hold few, an exchange gains hardly anything
(0.1 %), so none is tried.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush, heapreplace
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

Bin: TypeAlias = list[int]
ENOUGH_PER_BIN = 6
"""Samples per bin on average from which exchanges are tried."""
CLOSE_ENOUGH = 2e-4
"""Exchanges stop when the costliest bin is this close to the row's average, as a share."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Caps:
    """The limits of one micro-batch."""

    tokens: int
    samples: int
    patches: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Items:
    """The samples to pack: as arrays for sorting, and as plain lists for filling bins one item at a time."""

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


def spread(items: Items, costliest_first: NDArray[np.intp], targets: Sequence[float]) -> list[Bin] | None:
    """Return one bin per target, some perhaps empty, or None if a sample found no bin with room."""
    caps, lengths, patches, costs = items.caps, items.lengths, items.patches, items.costs
    bins: list[Bin] = [[] for _ in targets]
    room, patch_room = [caps.tokens] * len(bins), [caps.patches] * len(bins)
    # Heap entries are (cost so far - target, bin): the bin furthest below its target comes first.
    active = [(-target, b) for b, target in enumerate(targets)]
    parked: list[tuple[int, int, float]] = []
    heapify(active)
    most = caps.samples
    for i in costliest_first.tolist():
        length, need = lengths[i], patches[i]
        # Later samples may be shorter: a bin parked with 300 tokens of room returns for a sample of 280.
        while parked and parked[0][0] <= -length:
            _, b, below = heappop(parked)
            heappush(active, (below, b))
        set_aside: list[tuple[float, int]] = []
        while active:
            below, b = active[0]
            if room[b] < length:
                heappop(active)
                if room[b]:
                    # A bin without room is parked, not tested again for every sample. A bin that is exactly full is
                    # dropped.
                    heappush(parked, (-room[b], b, below))
            elif patch_room[b] < need:
                # Too many image patches for this bin: skip it for this sample only. The next one may have none.
                set_aside.append(heappop(active))
            else:
                break
        else:
            return None
        bins[b].append(i)
        room[b] -= length
        patch_room[b] -= need
        if len(bins[b]) < most:
            heapreplace(active, (below + costs[i], b))
        else:
            heappop(active)
        for entry in set_aside:
            heappush(active, entry)
    return bins


def polish_row(items: Items, row: Sequence[Bin], keys: Sequence[int]) -> None:
    """Lower the costliest bin of a row, in place, while an exchange with the cheapest bin of its key can."""
    costs = [items.cost_of(b) for b in row]
    goal = sum(costs) / len(costs) * (1 + CLOSE_ENOUGH)
    places: dict[int, list[int]] = {}
    for place, key in enumerate(keys):
        places.setdefault(key, []).append(place)
    # A bound on the work: each exchange usually brings one bin below the goal.
    for _ in range(4 * len(row)):
        top = max(range(len(row)), key=costs.__getitem__)
        low = min(places[keys[top]], key=costs.__getitem__)
        moved = _exchange(items, row[top], row[low], costs[top] - costs[low]) if costs[top] > goal else 0.0
        if moved == 0.0:
            return
        costs[top] -= moved
        costs[low] += moved


def _exchange(items: Items, costly: Bin, cheap: Bin, gap: float) -> float:
    """Exchange the pair that comes closest to halving the gap. Returns the cost that moved, 0 if no pair helps.

    Bins of cost 10 and 6 have a gap of 4. Exchanging a sample of cost 5 for one of cost 3 moves 2: both cost 8.
    """
    costs, lengths, patches = items.costs, items.lengths, items.patches
    rooms = [items.caps.tokens - sum(map(lengths.__getitem__, b)) for b in (costly, cheap)]
    patch_rooms = [items.caps.patches - sum(map(patches.__getitem__, b)) for b in (costly, cheap)]
    offers = sorted((costs[j], j) for j in cheap)
    # A pair that misses by half the gap moves nothing or the full gap, which only swaps the two bins' costs.
    best, pair = gap / 2 * (1 - 1e-9), None
    for i in costly:
        # The ideal partner costs `gap / 2` less. Only its two neighbours in the sorted list can be the closest.
        at = bisect_left(offers, (costs[i] - gap / 2, -1))
        for cost, j in offers[max(at - 1, 0) : at + 1]:
            miss = abs(costs[i] - cost - gap / 2)
            if (
                miss < best
                and -rooms[0] <= lengths[i] - lengths[j] <= rooms[1]
                and -patch_rooms[0] <= patches[i] - patches[j] <= patch_rooms[1]
            ):
                best, pair = miss, (i, j)
    if pair is None:
        return 0.0
    i, j = pair
    costly[costly.index(i)], cheap[cheap.index(j)] = j, i
    return costs[i] - costs[j]
