"""Slots in order of arrival: append, take out anywhere and step to a neighbour, each in constant time.

A doubly linked list threaded through two lists of slots. Position `end` is the sentinel: the slot after it
is the oldest, the slot before it the newest. Nothing is deleted lazily, so there is never garbage to skip.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


class SlotOrder:
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
        """All slots, oldest first."""
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
