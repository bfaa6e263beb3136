"""Draw items one at a time, for a caller that learns from each item whether the batch is full.

`Table.sample(n)` needs to know `n`. For a batch of a thousand tokens it is unknown: how many items fill it depends on
which ones the sampler picks. A `Drawing` picks distinct items in the sampler's order until the caller has enough. The
caller then takes them as one batch, or undoes everything. Picking again from the same state returns the same items, so
a restart that knows how many were taken finds the same ones.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from penstock.errors import InvalidInput
from penstock.replay.batch import Key
from penstock.replay.core import Store
from penstock.replay.selector import Draw


class Drawing:
    """Picks from one table. Nothing else may use the table before `take` or `undo`."""

    def __init__(self, store: Store, done: Callable[[], None], *, undoable: bool) -> None:
        self._store, self._done = store, done
        self._held = len(store.slots)
        self._reach = store.reach()
        self._before = (store.rng.bit_generator.state, store.sampling.state()) if undoable else None
        self._picked: dict[int, None] = {}
        self._pending: list[tuple[int, bool]] = []
        """Slots that were drawn together with one that was picked, and whether each is filled; in order."""
        self._num_filled = 0

    def __len__(self) -> int:
        return len(self._picked)

    def pick(self) -> Key | None:
        """Pick one more item and return its key, or None when none is left or the limiter allows no further item."""
        count, store = len(self._picked) + 1, self._store
        if count > self._reach:
            return None
        most = store.settings.limiter.max_batch
        if most is not None and count > most:
            raise InvalidInput(
                f"a batch of {count} items or more with {store.settings.limiter}; such a batch can never be filled"
            )
        if not store.settings.limiter.may_sample(count, store.counters.inserted, store.counters.sampled, self._held):
            return None
        slot, filled = self._next()
        self._picked[slot] = None
        self._num_filled += filled
        key: Key = store.slots.keys[slot]
        return key

    def _next(self) -> tuple[int, bool]:
        """Return the next slot in the sampler's order that is not picked yet."""
        while self._pending:
            found = self._pending.pop(0)
            if found[0] not in self._picked:
                return found
        # One at a time, so that a cursor (Fifo) moves only past what is taken.
        first = self._draw(1)[0]
        if first[0] not in self._picked:
            return first
        # A sampler without a cursor may draw the same item again, by chance or always. A longer draw contains items not
        # picked yet. Drawing too many does no harm, because such a sampler does not remember draws.
        drawn = self._draw(min(2 * len(self._picked) + 2, self._held))
        self._pending = [found for found in drawn if found[0] not in self._picked]
        return self._pending.pop(0)

    def _draw(self, count: int) -> list[tuple[int, bool]]:
        draw = self._store.sampling.draw(count, self._store.rng, replace=False)
        inside = count - draw.num_filled
        return [(slot, i >= inside) for i, slot in enumerate(draw.slots.tolist())]

    def take(self) -> list[tuple[Key, Any]]:
        """Take the picked items as one batch. Returns keys and items."""
        if not self._picked:
            return []
        slots = np.fromiter(self._picked, np.int64, len(self._picked))
        ones = np.ones(len(slots))
        found = self._store.take(Draw(slots, ones, ones, self._num_filled), replace=False)
        self._done()
        return list(zip(found.keys.tolist(), found.items.tolist(), strict=True))

    def undo(self) -> None:
        """Restore the state from before the drawing."""
        assert self._before is not None
        store, (state, index) = self._store, self._before
        store.rng.bit_generator.state = state
        store.sampling = store.settings.sampler.build(store.settings.capacity, "sample")
        store.sampling.restore(index)
