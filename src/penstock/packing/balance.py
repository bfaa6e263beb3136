"""Even bins: spread samples over bins towards a target each, then lower a row's maximum by exchanges.

Spreading takes the costliest sample first and puts it into the bin furthest below its target that still has room: the
longest-processing-time rule, with caps and with a target per bin. Two heaps make it n log n: *active* bins that can
take something, by distance to their target, and bins *parked* until samples are short enough for them, by room.

That leaves bins uneven by about one short sample. Where bins hold many samples, exchanging one between the costliest
and the cheapest bin of a row removes most of that. Where they hold few, an exchange gains hardly anything (0.1 %), so
none is tried.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from heapq import heapify, heappop, heappush, heapreplace

import numpy as np
from numpy.typing import NDArray

from penstock.packing.bins import Bin, Items

ENOUGH_PER_BIN = 6
"""Samples per bin on average from which exchanges are tried."""
CLOSE_ENOUGH = 2e-4
"""Exchanges stop when the costliest bin is this close to the row's average, as a share."""


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
    """Lower the costliest bin of the row, in place, as long as an exchange with the cheapest bin of its key
    does that.
    """
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
