"""Weights over slots, drawn from in proportion, as a binary tree of float64 sums.

Leaf `i` holds the weight of slot `i`; each inner node holds the sum of its two children and is always
recomputed from them, never adjusted by a difference. The tree is therefore a pure function of its leaves:
nothing drifts, and restoring the leaves restores every later draw bit for bit.

Two measures keep numpy's cost per call low. The upper levels are not walked: the nodes of one level
(`TOP` of them) are searched at once in their cumulative sum, which is kept until something is written; only
the log2(capacity / TOP) levels below are descended, all draws abreast. And writes are deferred: they set
leaves and note the slot; the next draw carries all noted slots upward in one pass. Single writes are
gathered in a dictionary before that, so a slot emptied and filled again is written once.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

TOP = 4096
"""Measured at a million leaves: 1024 costs 10 % when only drawing, 16384 costs 40 % when writes alternate."""

MAX_PENDING = 32_768
"""Deferred writes are carried upward at this many at the latest, which bounds the next draw's delay (1 ms)."""


class SumTree:
    def __init__(self, capacity: int) -> None:
        num_leaves = 1 << max(1, (capacity - 1).bit_length())
        width = min(TOP, num_leaves)
        self._levels = [np.zeros(width)]
        while width < num_leaves:
            width *= 2
            self._levels.append(np.zeros(width))
        self.weights = self._levels[-1]
        """[>= capacity] the leaves. Current after `total`; written through `set` and `set_many` only."""
        self._unwritten: dict[int, float] = {}  # leaves set one by one, not yet in `weights`
        self._pending: list[NDArray[np.int64]] = []  # leaves in `weights`, not yet in the sums above
        self._num_pending = 0
        self._bounds = np.zeros(len(self._levels[0]) + 1)  # cumulative sums of the top level, from 0.0
        self._current = True  # whether _bounds match the leaves
        self.ceiling = 0.0
        """No weight is above this. Raised by every write at once, so it never depends on when sums are made."""

    def set(self, slot: int, weight: float) -> None:
        self._unwritten[slot] = weight
        self._current = False
        if weight > self.ceiling:
            self.ceiling = weight

    def set_many(self, slots: NDArray[np.int64], weights: NDArray[np.float64]) -> None:
        """Set leaves; where a slot appears twice the last weight counts, as numpy assigns in order."""
        if self._unwritten:
            self._write()
        self.weights[slots] = weights
        self.ceiling = max(self.ceiling, float(np.maximum.reduce(weights, initial=0.0)))
        self._pending.append(slots)
        self._num_pending += len(slots)
        self._current = False
        if self._num_pending >= MAX_PENDING:
            self._carry_up()

    def _write(self) -> None:
        count = len(self._unwritten)
        slots = np.fromiter(self._unwritten.keys(), dtype=np.int64, count=count)
        self.weights[slots] = np.fromiter(self._unwritten.values(), dtype=np.float64, count=count)
        self._unwritten.clear()
        self._pending.append(slots)
        self._num_pending += count

    def total(self) -> float:
        """The sum of all weights; exactly 0.0 if and only if every weight is."""
        if not self._current:
            self._carry_up()
            np.cumsum(self._levels[0], out=self._bounds[1:])
            self._current = True
        return float(self._bounds[-1])

    def lower_ceiling(self) -> None:
        """Make the ceiling the largest weight again; reads every leaf."""
        self.total()
        self.ceiling = float(self.weights.max())

    def find(self, targets: NDArray[np.float64]) -> NDArray[np.int64]:
        """For each target in [0, total()) the slot whose stretch of the cumulative weights contains it.

        Weights [1, 0, 2] put slot 0 on [0, 1) and slot 2 on [1, 3). A target within rounding of a boundary
        may land on a slot of weight zero beside it; the caller draws again.
        """
        assert self._current, "total() comes first"
        at = self._bounds[1:].searchsorted(targets, side="right")
        rest = targets - self._bounds.take(at)
        for level in self._levels[1:]:
            at += at  # to the left child; adding takes half the time of shifting by a scalar
            left = level[at]
            goes_right = rest >= left
            left *= goes_right
            rest -= left
            at += goes_right
        return at

    def _carry_up(self) -> None:
        """Recompute every ancestor of the leaves written since the last time."""
        if self._unwritten:
            self._write()
        if not self._pending:
            return
        at = np.concatenate(self._pending)
        self._pending.clear()
        self._num_pending = 0
        for parents, children in zip(self._levels[-2::-1], self._levels[:0:-1], strict=True):
            if len(parents) <= 8 * len(at):  # a contiguous level is cheaper than so many scattered nodes
                np.add(children[::2], children[1::2], out=parents)
                continue
            at >>= 1
            child = at + at
            sums = children[child]
            child += 1
            sums += children[child]
            parents[at] = sums
