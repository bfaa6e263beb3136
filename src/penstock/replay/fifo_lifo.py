"""Selection by order of arrival: `Fifo` oldest first, `Lifo` newest first."""

from __future__ import annotations

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
