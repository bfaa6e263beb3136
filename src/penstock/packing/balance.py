"""Even bins: samples spread over bins towards a target each, then exchanges inside a row that lower its maximum.

Spreading: costliest sample first, each into the bin furthest below its target that still has room: the
longest-processing-time rule, with caps and with a target per bin. Two heaps make it n log n: bins that can take
something, by distance to their target, and bins parked until samples are short enough for them, by room.

That leaves bins uneven by about one short sample. Where bins hold many samples, exchanging one between the costliest
and the cheapest bin of a row brings that down to next to nothing; where they hold few, hardly anything is gained
(0.1 %), and nothing is tried.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from heapq import heapify, heappop, heappush, heapreplace

import numpy as np
from numpy.typing import NDArray

from penstock.packing.bins import Bin, Items

ENOUGH_PER_BIN = 6
CLOSE_ENOUGH = 2e-4


def spread(items: Items, costliest_first: NDArray[np.intp], targets: Sequence[float]) -> list[Bin] | None:
    """One bin per target, some perhaps empty; None when a sample found no bin with room."""
    caps, lengths, patches, costs = items.caps, items.lengths, items.patches, items.costs
    bins: list[Bin] = [[] for _ in targets]
    room, patch_room = [caps.tokens] * len(bins), [caps.patches] * len(bins)
    active = [(-target, b) for b, target in enumerate(targets)]
    parked: list[tuple[int, int, float]] = []
    heapify(active)
    most = caps.samples
    for i in costliest_first.tolist():
        length, need = lengths[i], patches[i]
        while parked and parked[0][0] <= -length:
            _, b, below = heappop(parked)
            heappush(active, (below, b))
        set_aside: list[tuple[float, int]] = []
        while active:
            below, b = active[0]
            if room[b] < length:
                heappop(active)
                if room[b]:
                    heappush(parked, (-room[b], b, below))
            elif patch_room[b] < need:
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
    """Lower the costliest bin of the row, in place, while an exchange with the cheapest bin of its key does that."""
    costs = [items.cost_of(b) for b in row]
    goal = sum(costs) / len(costs) * (1 + CLOSE_ENOUGH)
    places: dict[int, list[int]] = {}
    for place, key in enumerate(keys):
        places.setdefault(key, []).append(place)
    for _ in range(4 * len(row)):
        top = max(range(len(row)), key=costs.__getitem__)
        low = min(places[keys[top]], key=costs.__getitem__)
        moved = _exchange(items, row[top], row[low], costs[top] - costs[low]) if costs[top] > goal else 0.0
        if moved == 0.0:
            return
        costs[top] -= moved
        costs[low] += moved


def _exchange(items: Items, costly: Bin, cheap: Bin, gap: float) -> float:
    """Exchange the pair that comes closest to halving the gap; the cost that moved, 0 when no pair helps."""
    costs, lengths, patches = items.costs, items.lengths, items.patches
    rooms = [items.caps.tokens - sum(map(lengths.__getitem__, b)) for b in (costly, cheap)]
    patch_rooms = [items.caps.patches - sum(map(patches.__getitem__, b)) for b in (costly, cheap)]
    offers = sorted((costs[j], j) for j in cheap)
    # A miss of half the gap would only swap the two bins' costs.
    best, pair = gap / 2 * (1 - 1e-9), None
    for i in costly:
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
