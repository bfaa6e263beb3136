"""A ragged column: the values of all rows end to end, and where each row starts.

    values   a0 a1 a2 b0 c0 c1          three rows of lengths 3, 1, 2
    offsets  0        3  4     6

A row of length zero means the column is absent for that sample. Rows are views; nothing is copied until rows
are taken or joined, and then with one `np.concatenate` of views, which is a memcpy per row (measured faster
than building and applying a gather index at every row length from 100 tokens up).

A column in which every token has a list of its own is ragged twice: the values of a batch are then a ragged array
with one row per token. Slices along the tokens are the same for both.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.arrays.columns import Array, Cells

Offsets = NDArray[np.int64]


def offsets_of(lengths: NDArray[Any] | Sequence[int]) -> Offsets:
    """Row starts for rows of these lengths, with the total at the end.

    >>> offsets_of([3, 1, 2]).tolist()
    [0, 3, 4, 6]
    """
    offsets = np.zeros(len(lengths) + 1, np.int64)
    np.cumsum(lengths, out=offsets[1:])
    return offsets


@dataclass(frozen=True, slots=True, eq=False)
class Ragged:
    """Rows of any length.

    >>> lists = Ragged.of_lists([[7, 9], [], [8]])
    >>> len(lists), lists.values.tolist(), lists.lengths.tolist(), lists[1:].tolist()
    (3, [7, 9, 8], [2, 0, 1], [[], [8]])
    """

    values: Cells
    """[N, *trailing] the rows end to end; itself ragged where every token has a list."""
    offsets: Offsets
    """[rows + 1] where each row starts; offsets[0] == 0, offsets[-1] == N."""

    @staticmethod
    def of(rows: Sequence[Cells], offsets: Offsets | None = None) -> Ragged:
        """Join rows of one dtype and trailing shape; pass `offsets` to share them with another column."""
        if offsets is None:
            offsets = offsets_of([len(row) for row in rows])
        return Ragged(joined(rows), offsets)

    @staticmethod
    def of_lists(rows: Sequence[Sequence[Any]], dtype: Any = None) -> Ragged:
        """One row per list."""
        flat: Array = np.array([value for row in rows for value in row], dtype)
        return Ragged(flat if flat.size else flat.astype(dtype or np.int64), offsets_of([len(row) for row in rows]))

    @staticmethod
    def empty(count: int, dtype: Any) -> Ragged:
        """So many rows with nothing in them."""
        return Ragged(np.zeros(0, dtype), np.zeros(count + 1, np.int64))

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, row: int | slice) -> Any:
        """One row; or, for a slice, those rows as a ragged array."""
        if isinstance(row, slice):
            a, b, step = row.indices(len(self))
            assert step == 1
            own = self.offsets[a : max(a, b) + 1]
            return Ragged(self.values[own[0] : own[-1]], own - own[0])
        row = range(len(self))[row]
        return self.values[self.offsets[row] : self.offsets[row + 1]]

    @property
    def lengths(self) -> NDArray[np.int64]:
        return np.diff(self.offsets)

    @property
    def dtype(self) -> np.dtype[Any]:
        dtype: np.dtype[Any] = self.values.dtype
        return dtype

    @property
    def trailing(self) -> tuple[int, ...]:
        """The dimensions behind the token axis; none for lists."""
        return () if isinstance(self.values, Ragged) else self.values.shape[1:]

    def pieces(self, row: int) -> Sequence[Cells]:
        """What a row is made of, end to end."""
        return (self[row],)

    @property
    def nbytes(self) -> int:
        return int(self.values.nbytes) + self.offsets.nbytes

    def tolist(self) -> list[Any]:
        """The rows as lists."""
        flat, edges = self.values.tolist(), self.offsets.tolist()
        return [flat[a:b] for a, b in pairwise(edges)]

    def take(self, rows: NDArray[np.intp], offsets: Offsets | None = None) -> Ragged:
        """The chosen rows, in that order, as a new ragged column."""
        starts, ends = self.offsets[rows].tolist(), self.offsets[rows + 1].tolist()
        views = [self.values[a:b] for a, b in zip(starts, ends, strict=True)]
        if not views:
            return Ragged(self.values[:0], np.zeros(1, np.int64) if offsets is None else offsets)
        return Ragged.of(views, offsets)

    def only(self, mask: NDArray[np.bool_]) -> Ragged:
        """The same rows, those where the mask is False emptied."""
        lengths = self.lengths
        if not lengths[~mask].any():
            return self
        return Ragged(self.values[np.repeat(mask, lengths)], offsets_of(np.where(mask, lengths, 0)))


def joined(parts: Sequence[Cells]) -> Cells:
    """Arrays, or ragged arrays, end to end."""
    if len(parts) == 1:
        return parts[0]
    if isinstance(parts[0], Ragged):
        values = np.concatenate([part.values for part in parts])
        return Ragged(values, offsets_of(np.concatenate([part.lengths for part in parts])))
    return np.concatenate(parts)


def arrays_in(cells: Cells) -> tuple[Array, ...]:
    """The plain arrays that cells are made of."""
    return (cells.values, cells.offsets) if isinstance(cells, Ragged) else (cells,)


def copied(cells: Cells) -> Cells:
    """The same cells in memory of their own."""
    return Ragged(*map(np.array, arrays_in(cells))) if isinstance(cells, Ragged) else np.array(cells)


def freeze(cells: Cells) -> Cells:
    """The same cells, made read-only."""
    for array in arrays_in(cells):
        array.flags.writeable = False
    return cells


def same_bits(a: Cells, b: Cells) -> bool:
    """Equal shapes and values, floats bit for bit (so NaN equals the same NaN)."""
    one, other = arrays_in(a), arrays_in(b)
    return len(one) == len(other) and all(_same_array(x, y) for x, y in zip(one, other, strict=True))


def _same_array(a: Array, b: Array) -> bool:
    if a.shape != b.shape:
        return False
    if a.dtype.kind == "f" and a.dtype == b.dtype:
        bits = np.dtype(f"u{a.dtype.itemsize}")
        return bool(np.array_equal(np.atleast_1d(a).view(bits), np.atleast_1d(b).view(bits)))
    return bool(np.array_equal(a, b))
