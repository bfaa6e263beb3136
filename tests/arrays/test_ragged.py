"""Ragged columns against lists of rows."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from penstock.arrays import Ragged, offsets_of

rows_of_numbers = st.lists(st.lists(st.integers(0, 99), max_size=5), min_size=1, max_size=6)


@given(rows_of_numbers, st.data())
def test_taking_rows_equals_taking_them_from_a_list(rows: list[list[int]], data: st.DataObject) -> None:
    column = Ragged.of([np.array(row, np.uint32) for row in rows])
    order = data.draw(st.lists(st.integers(0, len(rows) - 1), max_size=8))
    taken = column.take(np.array(order, np.intp))
    assert [taken[i].tolist() for i in range(len(taken))] == [rows[i] for i in order]
    assert taken.lengths.tolist() == [len(rows[i]) for i in order]


def test_rows_are_views_of_the_column() -> None:
    column = Ragged.of([np.arange(3), np.arange(2)])
    assert np.shares_memory(column[1], column.values)


def test_taking_no_rows_keeps_the_offsets_it_is_told_to_share() -> None:
    column, shared = Ragged.of([np.arange(3)]), offsets_of([])
    assert column.take(np.zeros(0, np.intp), shared).offsets is shared


def test_trailing_dimensions_stay() -> None:
    column = Ragged.of([np.zeros((2, 4, 8)), np.zeros((1, 4, 8))])
    assert column.take(np.array([1])).values.shape == (1, 4, 8)
