"""Ragged columns: the values of all rows end to end, and where each row starts.

    values   a0 a1 a2 b0 c0 c1          three rows of lengths 3, 1, 2
    offsets  0        3  4     6

A row of length zero means that the sample lacks the column. Rows are views. Values are copied only when rows are taken
or joined, with one `np.concatenate` of views, which is one memcpy per row. That is faster than building and applying a
gather index at every row length from 100 tokens up (measured).

A column in which every token has its own list is ragged twice: the values of a batch are then a ragged array with one
row per token. Slicing along the tokens works the same for both.
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
    np.add.accumulate(lengths, out=offsets[1:])
    return offsets


def lengths_of(offsets: Offsets) -> Offsets:
    """Invert `offsets_of`.

    >>> lengths_of(np.array([0, 3, 4, 6])).tolist()
    [3, 1, 2]
    """
    return offsets[1:] - offsets[:-1]  # `np.diff` takes four times as long for sixteen samples


@dataclass(frozen=True, slots=True, eq=False)
class Ragged:
    """Rows of any length.

    >>> lists = Ragged.of_lists([[7, 9], [], [8]])
    >>> len(lists), lists.values.tolist(), lists.lengths.tolist(), lists[1:].tolist()
    (3, [7, 9, 8], [2, 0, 1], [[], [8]])
    """

    values: Cells
    """[N, *trailing] the rows end to end. Itself a `Ragged` where every token has a list."""
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
        """Build one row per list."""
        flat: Array = np.array([value for row in rows for value in row], dtype)
        return Ragged(flat if flat.size else flat.astype(dtype or np.int64), offsets_of([len(row) for row in rows]))

    @staticmethod
    def empty(count: int, dtype: Any) -> Ragged:
        """Build `count` empty rows."""
        return Ragged(np.zeros(0, dtype), np.zeros(count + 1, np.int64))

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, row: int | slice) -> Any:
        """Return one row, or for a slice a ragged array of those rows."""
        if isinstance(row, slice):
            a, b, step = row.indices(len(self))
            assert step == 1
            # offsets [0 3 4 6], rows 1 to 3: own is [3 4 6], so values[3:6] with new offsets [0 1 3].
            # max() keeps one offset for an empty slice such as [2:1].
            own = self.offsets[a : max(a, b) + 1]
            return Ragged(self.values[own[0] : own[-1]], own - own[0])
        row = range(len(self))[row]  # resolves negative rows and raises IndexError, which offsets would not
        return self.values[self.offsets[row] : self.offsets[row + 1]]

    @property
    def lengths(self) -> NDArray[np.int64]:
        return lengths_of(self.offsets)

    @property
    def dtype(self) -> np.dtype[Any]:
        dtype: np.dtype[Any] = self.values.dtype
        return dtype

    @property
    def trailing(self) -> tuple[int, ...]:
        """The dimensions after the token axis; none for lists."""
        return () if isinstance(self.values, Ragged) else self.values.shape[1:]

    def pieces(self, row: int) -> Sequence[Cells]:
        """Return the arrays that make up a row, in order."""
        return (self[row],)

    @property
    def nbytes(self) -> int:
        return int(self.values.nbytes) + self.offsets.nbytes

    def tolist(self) -> list[Any]:
        """Return the rows as lists."""
        flat, edges = self.values.tolist(), self.offsets.tolist()
        return [flat[a:b] for a, b in pairwise(edges)]

    def take(self, rows: NDArray[np.intp], offsets: Offsets | None = None) -> Ragged:
        """Return the chosen rows, in that order, as a new ragged column."""
        starts, ends = self.offsets[rows].tolist(), self.offsets[rows + 1].tolist()
        views = [self.values[a:b] for a, b in zip(starts, ends, strict=True)]
        if not views:
            return Ragged(self.values[:0], np.zeros(1, np.int64) if offsets is None else offsets)
        return Ragged.of(views, offsets)

    def only(self, mask: NDArray[np.bool_]) -> Ragged:
        """Return the same rows, with those where the mask is False emptied."""
        lengths = self.lengths
        if not lengths[~mask].any():
            return self
        return Ragged(self.values[np.repeat(mask, lengths)], offsets_of(np.where(mask, lengths, 0)))


def joined(parts: Sequence[Cells]) -> Cells:
    """Concatenate arrays or ragged arrays."""
    if len(parts) == 1:
        return parts[0]
    if isinstance(parts[0], Ragged):
        values = np.concatenate([part.values for part in parts])
        return Ragged(values, offsets_of(np.concatenate([part.lengths for part in parts])))
    return np.concatenate(parts)


def arrays_in(cells: Cells) -> tuple[Array, ...]:
    """Return the plain arrays that cells consist of."""
    return (cells.values, cells.offsets) if isinstance(cells, Ragged) else (cells,)


def copied(cells: Cells) -> Cells:
    """Copy cells to new memory."""
    return Ragged(*map(np.array, arrays_in(cells))) if isinstance(cells, Ragged) else np.array(cells)


def freeze(cells: Cells) -> Cells:
    """Make cells read-only in place and return them."""
    for array in arrays_in(cells):
        array.setflags(write=False)
    return cells


def same_bits(a: Cells, b: Cells) -> bool:
    """Compare shapes and values; floats bit for bit, so NaN equals the same NaN."""
    one, other = arrays_in(a), arrays_in(b)
    return len(one) == len(other) and all(_same_array(x, y) for x, y in zip(one, other, strict=True))


def _same_array(a: Array, b: Array) -> bool:
    if a.shape != b.shape:
        return False
    if a.dtype.kind == "f" and a.dtype == b.dtype:
        bits = np.dtype(f"u{a.dtype.itemsize}")
        return bool(np.array_equal(np.atleast_1d(a).view(bits), np.atleast_1d(b).view(bits)))
    return bool(np.array_equal(a, b))


LARGE_BYTES = 1 << 20
"""Smaller columns are joined, which costs less than managing pieces."""


class Pieced(Ragged):
    """A ragged column of large rows that are not joined; each row has one or more pieces.

        row 0    [sample 0]                         a producer: one array per sample
        row 1    [prompt of sample 0] [own part]    a rank: what was read from storage, a shared prefix once

    Routed experts take a hundred times the bytes of everything else. Joining them costs a copy, and new memory that the
    kernel must clear, which takes longer still. Code that can work row by row does so; `values` joins the rows for the
    rest. Equal to `Ragged(np.concatenate(all pieces), offsets)` in every respect.

    >>> column = Pieced([[np.array([1, 2]), np.array([3])], [np.array([4])]], np.array([0, 3, 4]))
    >>> column[0].tolist(), [piece.tolist() for piece in column.pieces(0)], column.values.tolist()
    ([1, 2, 3], [[1, 2], [3]], [1, 2, 3, 4])
    """

    __slots__ = ("_joined", "_pieces")
    _pieces: Sequence[Sequence[Array]]
    _joined: Array | None

    def __init__(self, pieces: Sequence[Sequence[Array]], offsets: Offsets) -> None:
        """`pieces` of each row have one dtype and trailing shape. At least one row has a piece."""
        put = object.__setattr__
        put(self, "_pieces", pieces)
        put(self, "_joined", None)
        put(self, "offsets", offsets)

    @property
    def values(self) -> Array:
        """All rows end to end. The first access joins them."""
        found = self._joined
        if found is None:
            found = np.concatenate([piece for row in self._pieces for piece in row])
            object.__setattr__(self, "_joined", found)
        return found

    def __getitem__(self, row: int | slice) -> Any:
        if isinstance(row, slice):
            return super().__getitem__(row)
        found = self._pieces[row]
        if len(found) == 1:
            return found[0]
        return np.concatenate(found) if found else self._example[:0]

    def pieces(self, row: int) -> Sequence[Array]:
        return self._pieces[row]

    @property
    def _example(self) -> Array:
        return next(piece for row in self._pieces for piece in row)

    @property
    def dtype(self) -> np.dtype[Any]:
        return self._example.dtype

    @property
    def trailing(self) -> tuple[int, ...]:
        return self._example.shape[1:]

    @property
    def nbytes(self) -> int:
        return sum(piece.nbytes for row in self._pieces for piece in row) + self.offsets.nbytes
