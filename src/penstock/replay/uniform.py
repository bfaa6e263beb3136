"""Selection with equal chances, from a dense set of slots: `Uniform`."""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.replay.selector import Draw, Index, Role


@dataclass(frozen=True, slots=True)
class Uniform:
    """Draws every item with the same probability, for sampling and for removal."""

    def build(self, capacity: int, role: Role) -> Index:  # noqa: ARG002
        return _UniformIndex(capacity)


class SlotSet:
    """A set of slots stored without gaps, so that a uniform draw is one lookup.

    The last slot takes the place of one that leaves: removing 3 from [5, 3, 8, 6] gives [5, 6, 8]. So the layout
    depends on history and must be saved with the state.
    """

    def __init__(self, capacity: int) -> None:
        self.size = 0
        self._slots = array("q", bytes(8 * capacity))
        self._view = np.frombuffer(self._slots, dtype=np.int64)
        self._place = [-1] * capacity

    def __contains__(self, slot: int) -> bool:
        return self._place[slot] >= 0

    def add(self, slot: int) -> None:
        self._slots[self.size] = slot
        self._place[slot] = self.size
        self.size += 1

    def discard(self, slot: int) -> None:
        self.size -= 1
        last = self._slots[self.size]
        place = self._place[slot]
        self._slots[place] = last
        self._place[last] = place
        self._place[slot] = -1

    def members(self) -> NDArray[np.int64]:
        """Return a view. Copy it before the set changes."""
        return self._view[: self.size]

    def extend(self, slots: NDArray[np.int64]) -> None:
        """Fill an empty set in the given layout."""
        for slot in slots.tolist():
            self.add(slot)

    def draw(self, count: int, rng: np.random.Generator, *, replace: bool) -> NDArray[np.int64]:
        if replace:
            return self._view.take(rng.integers(0, self.size, count))
        return self._view.take(rng.choice(self.size, count, replace=False))


class _UniformIndex:
    def __init__(self, capacity: int) -> None:
        self._live = SlotSet(capacity)

    def insert(self, slot: int, priority: float, version: int) -> None:  # noqa: ARG002
        self._live.add(slot)

    def remove(self, slots: Sequence[int]) -> None:
        for slot in slots:
            self._live.discard(slot)

    def update(self, slots: NDArray[np.int64], priorities: NDArray[np.float64]) -> None:
        pass

    def draw(self, count: int, rng: np.random.Generator, *, replace: bool) -> Draw:
        slots = self._live.draw(count, rng, replace=replace)
        size = self._live.size
        return Draw(slots, np.full(count, 1.0 / size), np.full(count, count / size))

    def victim(self, rng: np.random.Generator) -> int:
        return int(self._live.members()[rng.integers(0, self._live.size)])

    def state(self) -> dict[str, NDArray[Any]]:
        return {"live": self._live.members().copy()}

    def restore(self, state: Mapping[str, NDArray[Any]]) -> None:
        self._live.extend(state["live"])
