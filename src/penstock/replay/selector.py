"""A selector chooses items: to sample them, or to remove them to make room.

`Selector` is the recipe a user passes to a table, a small frozen record such as `Fifo()` or `Prioritized(0.6)`. A table
builds one `Index` from it per role. The index holds the state and sees slots, never items. So one recipe may serve any
number of tables, as sampler and as remover at once.

To write your own, implement these two protocols and run `penstock.testing.checks.check_selector` on it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

Role = Literal["sample", "remove"]
"""The purpose of an index. `Prioritized` samples the most valuable items and removes the least valuable."""


class Draw(NamedTuple):
    """The slots that one call drew, and how likely that was."""

    slots: NDArray[np.int64]
    """[n] in the order drawn."""
    probabilities: NDArray[np.float64]
    """[n] probability with which a single draw picks the slot; 1.0 where the choice is not random."""
    inclusion: NDArray[np.float64]
    """[n] how often the slot is expected in such a batch. Dividing by it makes estimates unbiased."""
    num_filled: int = 0
    """How many of them are outside the selector's own preference (zero priority, outside the window)."""


class Index(Protocol):
    """The live slots of one table, ordered for one role. The table's lock protects every call."""

    def insert(self, slot: int, priority: float, version: int) -> None:
        """Add a slot that is not live."""

    def remove(self, slots: Sequence[int]) -> None:
        """Forget live slots. They may return later with other items."""

    def update(self, slots: NDArray[np.int64], priorities: NDArray[np.float64]) -> None:
        """Give live slots new priorities. Where a slot appears twice the last one counts."""

    def draw(self, count: int, rng: np.random.Generator, *, replace: bool) -> Draw:
        """Return exactly `count` live slots, distinct unless `replace`. The table never asks for too many."""

    def victim(self, rng: np.random.Generator) -> int:
        """Return the live slot to remove first."""

    def state(self) -> dict[str, NDArray[Any]]:
        """Return everything needed to continue identically, as arrays that share nothing with the index."""

    def restore(self, state: Mapping[str, NDArray[Any]]) -> None:
        """Continue from `state`; called once, on a fresh index of the same capacity."""


@runtime_checkable
class Selector(Protocol):
    """A recipe for an index."""

    def build(self, capacity: int, role: Role) -> Index:
        """Build an empty index over slots 0 .. capacity - 1."""


def certain(slots: Sequence[int]) -> Draw:
    """Return a draw in which nothing was random."""
    ones = np.ones(len(slots))
    return Draw(np.array(slots, dtype=np.int64), ones, ones)


def joined(draws: Sequence[Draw]) -> Draw:
    """Combine consecutive draws into one."""
    return Draw(
        np.concatenate([draw.slots for draw in draws]),
        np.concatenate([draw.probabilities for draw in draws]),
        np.concatenate([draw.inclusion for draw in draws]),
        sum(draw.num_filled for draw in draws),
    )
