"""Selection in a fixed order: `Fifo` and `Lifo` by arrival, `MinPriority` and `MaxPriority` by priority."""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.replay.selector import Draw, Index, Role, certain


@dataclass(frozen=True, slots=True)
class Fifo:
    """Oldest first.

    As a sampler it advances: a cursor moves along the items in order of arrival and starts over at the oldest only when
    it has passed the newest, so no item waits while others repeat. As a remover it removes the oldest item.

    >>> from penstock.replay import Table
    >>> table = Table(capacity=3, sampler=Fifo(), remover=Fifo(), max_times_sampled=None)
    >>> for name in "abc":
    ...     _ = table.insert(name, name)
    >>> table.sample(2).keys.tolist(), table.sample(2).keys.tolist()
    (['a', 'b'], ['c', 'a'])
    """

    def build(self, capacity: int, role: Role) -> Index:  # noqa: ARG002
        return _FifoIndex(capacity)


@dataclass(frozen=True, slots=True)
class Lifo:
    """Newest first. With `max_times_sampled=1` a stack. As a remover it removes the newest item held."""

    def build(self, capacity: int, role: Role) -> Index:  # noqa: ARG002
        return _LifoIndex(capacity)


class _FifoIndex:
    def __init__(self, capacity: int) -> None:
        self._order = SlotOrder(capacity)
        self._next = self._order.end  # `end`: everything was drawn in this pass, so a new item comes next

    def insert(self, slot: int, priority: float, version: int) -> None:  # noqa: ARG002
        self._order.append(slot)
        if self._next == self._order.end:
            self._next = slot

    def remove(self, slots: Sequence[int]) -> None:
        for slot in slots:
            if slot == self._next:
                self._next = self._order.after[slot]
            self._order.take_out(slot)

    def update(self, slots: NDArray[np.int64], priorities: NDArray[np.float64]) -> None:
        pass

    def draw(self, count: int, rng: np.random.Generator, *, replace: bool) -> Draw:  # noqa: ARG002
        after, end, slot = self._order.after, self._order.end, self._next
        drawn = []
        for _ in range(count):
            if slot == end:
                slot = after[end]
            drawn.append(slot)
            slot = after[slot]
        self._next = slot
        return certain(drawn)

    def victim(self, rng: np.random.Generator) -> int:  # noqa: ARG002
        return self._order.after[self._order.end]

    def state(self) -> dict[str, NDArray[Any]]:
        return {"order": self._order.to_array(), "next": np.array([self._next], dtype=np.int64)}

    def restore(self, state: Mapping[str, NDArray[Any]]) -> None:
        self._order.extend(state["order"])
        self._next = int(state["next"][0])


class _LifoIndex:
    def __init__(self, capacity: int) -> None:
        self._order = SlotOrder(capacity)

    def insert(self, slot: int, priority: float, version: int) -> None:  # noqa: ARG002
        self._order.append(slot)

    def remove(self, slots: Sequence[int]) -> None:
        for slot in slots:
            self._order.take_out(slot)

    def update(self, slots: NDArray[np.int64], priorities: NDArray[np.float64]) -> None:
        pass

    def draw(self, count: int, rng: np.random.Generator, *, replace: bool) -> Draw:  # noqa: ARG002
        before, end = self._order.before, self._order.end
        drawn = []
        slot = end
        for _ in range(count):
            slot = before[slot]
            if slot == end:
                slot = before[end]
            drawn.append(slot)
        return certain(drawn)

    def victim(self, rng: np.random.Generator) -> int:  # noqa: ARG002
        return self._order.before[self._order.end]

    def state(self) -> dict[str, NDArray[Any]]:
        return {"order": self._order.to_array()}

    def restore(self, state: Mapping[str, NDArray[Any]]) -> None:
        self._order.extend(state["order"])


class SlotOrder:
    """Slots in order of arrival: append, take out anywhere and step to a neighbour, each in constant time.

    A doubly linked list threaded through two lists of slots. Position `end` is the sentinel: the slot after it is the
    oldest, the slot before it the newest. Slots 0 and 2 in a table of capacity 3 (so end = 3): after[3] = 0, after[0] =
    2, after[2] = 3. Nothing is deleted lazily, so there is never garbage to skip.
    """

    def __init__(self, capacity: int) -> None:
        self.end = capacity
        # Lists, not arrays: one element is read or written in half the time of array.array.
        self.after = [capacity] * (capacity + 1)
        self.before = [capacity] * (capacity + 1)

    def append(self, slot: int) -> None:
        end, after, before = self.end, self.after, self.before
        newest = before[end]
        after[newest] = slot
        before[slot] = newest
        after[slot] = end
        before[end] = slot

    def take_out(self, slot: int) -> None:
        older, newer = self.before[slot], self.after[slot]
        self.after[older] = newer
        self.before[newer] = older

    def to_array(self) -> NDArray[np.int64]:
        """Return all slots, oldest first."""
        found = []
        after, slot = self.after, self.after[self.end]
        while slot != self.end:
            found.append(slot)
            slot = after[slot]
        return np.array(found, dtype=np.int64)

    def extend(self, slots: NDArray[np.int64]) -> None:
        """Fill an empty order with slots, oldest first."""
        for slot in slots.tolist():
            self.append(slot)


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
