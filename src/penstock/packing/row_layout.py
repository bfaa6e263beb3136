"""Where everything lies when the micro-batches of a rank plan stand end to end."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from penstock.arrays import Array, Samples, offsets_of
from penstock.packing.rank_plan import RankPlan

PADDING = -1


class Layout:
    """Segments of a rank plan's micro-batches, end to end."""

    def __init__(self, samples: Samples, rank_plan: RankPlan, take: Callable[[int], NDArray[np.uint8]]) -> None:
        """`take` returns memory of a size."""
        self.samples, self.rank_plan, self._take = samples, rank_plan, take
        self._rows: dict[tuple[str, str, tuple[int, ...]], Array] = {}
        self.tokens = offsets_of(rank_plan.laid).tolist()
        """[micro_batches + 1] first token of each micro-batch."""
        self.segments = [0]
        """[micro_batches + 1] first segment of each micro-batch."""
        rows: list[int] = []
        lengths: list[int] = []
        borrowed: list[int] = []
        order, cuts, dummy = rank_plan.order.tolist(), rank_plan.cuts.tolist(), rank_plan.dummy.tolist()
        for m, (a, b) in enumerate(pairwise(rank_plan.starts.tolist())):
            if dummy[m]:
                borrowed += range(len(rows), len(rows) + b - a)
            rows += order[a:b]
            lengths += cuts[a:b]
            padding = self.tokens[m + 1] - self.tokens[m] - sum(cuts[a:b])
            if padding:
                rows.append(PADDING)
                lengths.append(padding)
            self.segments.append(len(rows))
        self.lengths = lengths
        """[segments] tokens of each."""
        self.rows = np.array(rows, np.intp)
        """[segments] the sample of each, or PADDING."""
        self.is_sample = self.rows != PADDING
        """[segments] False for padding."""
        self.is_trained = self.is_sample.copy()
        """[segments] False for padding and for what a dummy borrows."""
        self.is_trained[borrowed] = False

    def room(self, name: str, m: int, dtype: str, shape: tuple[int, ...]) -> Array:
        """[tokens, *shape] where the rows of micro-batch m go, of a column with trailing dimensions."""
        key = (name, dtype, shape)
        if key not in self._rows:
            size = self.tokens[-1] * math.prod(shape) * np.dtype(dtype).itemsize
            self._rows[key] = self._take(size).view(dtype).reshape(self.tokens[-1], *shape)
        return self._rows[key][self.tokens[m] : self.tokens[m + 1]]

    def text(self, name: str) -> list[str]:
        """[segments] the sample's id, group or the like; empty for padding."""
        values = (*self.samples.text[name], "")
        return [values[row] for row in self.rows.tolist()]
