"""Selection of the lowest or highest priority, by a heap: `MinPriority` and `MaxPriority`."""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.replay.selector import Draw, Index, Role, certain


@dataclass(frozen=True, slots=True)
class MinPriority:
    """Lowest priority first, the older of equals. As a remover it keeps what is valuable."""

    def build(self, capacity: int, role: Role) -> Index:  # noqa: ARG002
        return _HeapIndex(capacity, sign=1.0)


@dataclass(frozen=True, slots=True)
class MaxPriority:
    """Highest priority first, the older of equals."""

    def build(self, capacity: int, role: Role) -> Index:  # noqa: ARG002
        return _HeapIndex(capacity, sign=-1.0)


_Entry = tuple[float, int, int]
"""Signed priority, arrival, slot: compares by priority, then by age."""


class _HeapIndex:
    """A heap with lazy deletion: an entry is valid only while it is the current one of its slot."""

    def __init__(self, capacity: int, sign: float) -> None:
        self._sign = sign
        self._current: list[_Entry | None] = [None] * capacity
        self._heap: list[_Entry] = []
        self._num_live = 0
        self._num_arrived = 0

    def insert(self, slot: int, priority: float, version: int) -> None:  # noqa: ARG002
        self._num_arrived += 1
        self._num_live += 1
        self._push((self._sign * priority, self._num_arrived, slot))

    def remove(self, slots: Sequence[int]) -> None:
        for slot in slots:
            self._current[slot] = None
        self._num_live -= len(slots)

    def update(self, slots: NDArray[np.int64], priorities: NDArray[np.float64]) -> None:
        for slot, priority in zip(slots.tolist(), priorities.tolist(), strict=True):
            entry = self._current[slot]
            assert entry is not None
            self._push((self._sign * priority, entry[1], slot))

    def draw(self, count: int, rng: np.random.Generator, *, replace: bool) -> Draw:  # noqa: ARG002
        # A deterministic order repeats an item only after all others. Popped entries go back: a draw removes nothing.
        entries: list[_Entry] = []
        for _ in range(min(count, self._num_live)):
            self._drop_outdated()
            entries.append(heapq.heappop(self._heap))
        for entry in entries:
            heapq.heappush(self._heap, entry)
        slots = [slot for _, _, slot in entries]
        return certain([slots[i % len(slots)] for i in range(count)])

    def victim(self, rng: np.random.Generator) -> int:  # noqa: ARG002
        self._drop_outdated()
        return self._heap[0][2]

    def _push(self, entry: _Entry) -> None:
        self._current[entry[2]] = entry
        heapq.heappush(self._heap, entry)
        if len(self._heap) > 2 * self._num_live + 64:
            # Updates leave outdated entries behind. Rebuild when they outnumber the live ones, so the heap stays
            # bounded. A sorted list is a valid heap.
            self._heap = sorted(live for live in self._current if live is not None)

    def _drop_outdated(self) -> None:
        heap, current = self._heap, self._current
        while current[heap[0][2]] is not heap[0]:
            heapq.heappop(heap)

    def state(self) -> dict[str, NDArray[Any]]:
        entries = sorted(entry for entry in self._current if entry is not None)
        return {
            "priorities": np.array([priority for priority, _, _ in entries]),
            "arrivals": np.array([arrival for _, arrival, _ in entries], dtype=np.int64),
            "slots": np.array([slot for _, _, slot in entries], dtype=np.int64),
            "num_arrived": np.array([self._num_arrived], dtype=np.int64),
        }

    def restore(self, state: Mapping[str, NDArray[Any]]) -> None:
        names = ("priorities", "arrivals", "slots")
        self._heap = list(zip(*(state[name].tolist() for name in names), strict=True))
        self._num_live = len(self._heap)
        self._num_arrived = int(state["num_arrived"][0])
        for entry in self._heap:
            self._current[entry[2]] = entry
