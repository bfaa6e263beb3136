"""A ragged column of large rows that stay where they lie, each in one or more pieces.

    row 0    [sample 0]                         a producer: one array per sample
    row 1    [prompt of sample 0] [own part]    a rank: what was read from storage, a shared prefix once

Routed experts take a hundred times the bytes of everything else. Joining them costs a copy, and new memory that the
kernel must clear, which takes longer still. So whoever can work row by row does; `values` joins them for all others.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from penstock.arrays.columns import Array
from penstock.arrays.ragged import Offsets, Ragged

LARGE_BYTES = 1 << 20
"""Columns below this size are joined: it costs less than looking after pieces."""


class Pieced(Ragged):
    """Rows in pieces. Equal to `Ragged(np.concatenate(all pieces), offsets)` in every respect.

    >>> column = Pieced([[np.array([1, 2]), np.array([3])], [np.array([4])]], np.array([0, 3, 4]))
    >>> column[0].tolist(), [piece.tolist() for piece in column.pieces(0)], column.values.tolist()
    ([1, 2, 3], [[1, 2], [3]], [1, 2, 3, 4])
    """

    __slots__ = ("_joined", "_pieces")
    _pieces: Sequence[Sequence[Array]]
    _joined: Array | None

    def __init__(self, pieces: Sequence[Sequence[Array]], offsets: Offsets) -> None:
        """`pieces` of each row, of one dtype and trailing shape; at least one row has one."""
        put = object.__setattr__
        put(self, "_pieces", pieces)
        put(self, "_joined", None)
        put(self, "offsets", offsets)

    @property
    def values(self) -> Array:
        """All rows end to end; joined by the first call."""
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
