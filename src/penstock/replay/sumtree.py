"""Weights over slots, drawn in proportion, as a binary tree of float64 sums.

    total            6
    inner        1       5
    leaves     1   0   2   3      target 3.5: 3.5 >= 1, so right with 2.5 left; 2.5 >= 2, so right: slot 3

Leaf `i` holds the weight of slot `i`. Each inner node holds the sum of its two children and is always recomputed from
them, never adjusted by a difference. So the tree depends only on its leaves: rounding errors do not accumulate, and
restoring the leaves reproduces every later draw bit for bit.

Two measures keep the number of numpy calls low. The upper levels are not walked: the nodes of one level (`TOP` of them)
are searched at once in their cumulative sum, which is computed on demand and kept until a write. Only the log2(capacity
/ TOP) levels below are descended, for all draws together. And writes are deferred: they set leaves and note the slot,
and the next draw updates the sums above all noted slots in one pass.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

TOP = 4096
"""Measured at a million leaves: 1024 costs 10 % of draws alone, 16384 costs 40 % where writes and draws alternate."""

MAX_PENDING = 32_768
"""Sums are updated after this many deferred writes at the latest, which bounds the next draw's delay (1 ms)."""


class SumTree:
    """The weights of slots 0 .. capacity - 1."""

    def __init__(self, capacity: int) -> None:
        num_leaves = 1 << max(1, (capacity - 1).bit_length())
        width = min(TOP, num_leaves)
        self._levels = [np.zeros(width)]
        while width < num_leaves:
            width *= 2
            self._levels.append(np.zeros(width))
        self.weights = self._levels[-1]
        """[>= capacity] the leaves; written through `set`, `clear` and `set_many` only."""
        self._leaves = self.weights.data.cast("B").cast("d")  # for single writes, which take longer through numpy
        self._noted = array("q")  # leaves written one by one and not yet in the sums above; may repeat
        self._pending: list[NDArray[np.int64]] = []  # the same for leaves written many at once
        self._num_pending = 0
        self._total: float | None = None  # of the top level; None: not computed since it changed
        self._bounds: NDArray[np.float64] | None = None  # its cumulative sums, from 0.0; None likewise
        self.ceiling = 0.0
        """No weight is above this. Every write raises it at once, so it never depends on when sums are computed."""

    def set(self, slot: int, weight: float) -> None:
        self._leaves[slot] = weight
        self._noted.append(slot)
        if weight > self.ceiling:
            self.ceiling = weight
        if len(self._noted) >= MAX_PENDING:
            self._carry_up()

    def clear(self, slots: Sequence[int]) -> None:
        """Set leaves to zero."""
        for slot in slots:
            self._leaves[slot] = 0.0
            self._noted.append(slot)

    def set_many(self, slots: NDArray[np.int64], weights: NDArray[np.float64]) -> None:
        """Set leaves. Where a slot appears twice the last weight counts, because numpy assigns in order."""
        if len(slots) == 0:
            return
        self.weights[slots] = weights
        self.ceiling = max(self.ceiling, float(np.maximum.reduce(weights)))
        self._pending.append(slots)
        self._num_pending += len(slots)
        if self._num_pending >= MAX_PENDING:
            self._carry_up()

    def total(self) -> float:
        """Return the sum of all weights; exactly 0.0 if and only if every weight is."""
        if self._noted or self._pending:
            self._carry_up()
        if self._total is None:
            self._total = float(np.add.reduce(self._levels[0]))
        return self._total

    def lower_ceiling(self) -> None:
        """Set the ceiling to the largest weight again. Reads every leaf."""
        self.total()
        self.ceiling = float(self.weights.max())

    def find(self, targets: NDArray[np.float64]) -> NDArray[np.int64]:
        """Return for each target in [0, total()) the slot whose interval of the cumulative weights contains it.

        Weights [1, 0, 2] put slot 0 on [0, 1) and slot 2 on [1, 3). A target within rounding of a boundary may land on
        a slot of weight zero beside it; the caller draws again.
        """
        assert not self._noted and not self._pending, "total() comes first"
        if self._bounds is None:  # computed only here: it takes 20 us, and draws by proposal do not need it
            self._bounds = np.concatenate(((0.0,), np.cumsum(self._levels[0])))
            self._bounds[-1] = np.inf  # `total` may be above this sum, because the two round differently
        at = self._bounds[1:].searchsorted(targets, side="right")
        # Bounds 0 1 6 for a top level of 1 and 5: target 3.5 falls into node 1, and 3.5 - 1 = 2.5 is left inside it.
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
        at = np.concatenate([*self._pending, np.frombuffer(self._noted, dtype=np.int64)])
        self._noted, self._total, self._bounds = array("q"), None, None
        self._pending.clear()
        self._num_pending = 0
        # From the leaves up: of levels a b c, first (b, c), then (a, b).
        for parents, children in zip(self._levels[-2::-1], self._levels[:0:-1], strict=True):
            # Recomputing a contiguous level is cheaper than many scattered nodes. The levels above are shorter, so they
            # are recomputed too, and `at` is not needed any more.
            if len(parents) <= 8 * len(at):
                np.add(children[::2], children[1::2], out=parents)
                continue
            at >>= 1
            child = at + at
            sums = children[child]
            child += 1
            sums += children[child]
            parents[at] = sums
