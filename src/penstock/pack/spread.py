"""Spread samples over bins so that each bin comes close to its target and none passes its caps.

Dearest sample first, each into the bin furthest below its target that still has room: the longest-processing-time
rule, with caps and with a target per bin. Two heaps make it n log n: bins that can take something, by distance to
their target, and bins parked until samples are short enough for them, by room.
"""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heapify, heappop, heappush, heapreplace

import numpy as np
from numpy.typing import NDArray

from penstock.pack.bins import Bin, Items


def spread(items: Items, dearest_first: NDArray[np.intp], targets: Sequence[float]) -> list[Bin] | None:
    """One bin per target, some perhaps empty; None when a sample found no bin with room."""
    caps, lengths, patches, costs = items.caps, items.lengths, items.patches, items.costs
    bins: list[Bin] = [[] for _ in targets]
    room, patch_room = [caps.tokens] * len(bins), [caps.patches] * len(bins)
    active = [(-target, b) for b, target in enumerate(targets)]
    parked: list[tuple[int, int, float]] = []
    heapify(active)
    most = caps.samples
    for i in dearest_first.tolist():
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
