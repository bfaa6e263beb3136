"""A ragged column: the values of all rows end to end, and where each row starts.

    values   a0 a1 a2 b0 c0 c1          three rows of lengths 3, 1, 2
    offsets  0        3  4     6

A row of length zero means the column is absent for that sample. Rows are views; nothing is copied until rows
are taken or joined, and then with one `np.concatenate` of views, which is a memcpy per row (measured faster
than building and applying a gather index at every row length from 100 tokens up).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.arrays.columns import Array

Offsets = NDArray[np.int64]


def offsets_of(lengths: NDArray[Any] | Sequence[int]) -> Offsets:
    """Row starts for rows of these lengths, with the total at the end.

    >>> offsets_of([3, 1, 2]).tolist()
    [0, 3, 4, 6]
    """
    offsets = np.zeros(len(lengths) + 1, np.int64)
    np.cumsum(lengths, out=offsets[1:])
    return offsets


@dataclass(frozen=True, slots=True)
class Ragged:
    values: Array
    """[N, *trailing] the rows end to end."""
    offsets: Offsets
    """[rows + 1] where each row starts; offsets[-1] == N."""

    @staticmethod
    def of(rows: Sequence[Array], offsets: Offsets | None = None) -> Ragged:
        """Join rows of one dtype and trailing shape; pass `offsets` to share them with another column."""
        if offsets is None:
            offsets = offsets_of([len(row) for row in rows])
        values = rows[0] if len(rows) == 1 else np.concatenate(rows)
        return Ragged(values, offsets)

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, row: int) -> Array:
        return self.values[self.offsets[row] : self.offsets[row + 1]]

    @property
    def lengths(self) -> NDArray[np.int64]:
        return np.diff(self.offsets)

    def take(self, rows: NDArray[np.intp], offsets: Offsets | None = None) -> Ragged:
        """The chosen rows, in that order, as a new ragged column."""
        starts, ends = self.offsets[rows].tolist(), self.offsets[rows + 1].tolist()
        views = [self.values[a:b] for a, b in zip(starts, ends, strict=True)]
        if not views:
            return Ragged(self.values[:0], np.zeros(1, np.int64) if offsets is None else offsets)
        return Ragged.of(views, offsets)
