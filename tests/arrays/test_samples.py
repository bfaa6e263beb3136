"""A batch in columns behaves as the sequence of its samples."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.arrays import ImageSpan, Sample, Samples
from penstock.arrays.ragged import arrays_in
from penstock.errors import InvalidInput, UnknownKey
from penstock.frames import encode
from penstock.testing.strategies import batches
from tests.support.reference import record


@settings(max_examples=60)
@given(batches())
def test_a_batch_is_a_sequence_of_its_samples(rows: list[Sample]) -> None:
    batch = Samples.of(rows)
    assert len(batch) == len(rows)
    assert [record(sample) for sample in batch] == [record(row) for row in rows]
    assert list(reversed(batch)) == rows[::-1]
    assert all(row in batch for row in rows)
    assert [batch.index(row) for row in rows] == list(range(len(rows)))
    assert [batch[i] for i in range(-len(rows), 0)] == rows
    assert batch.lengths.tolist() == [row.num_tokens for row in rows]
    assert batch.loss_tokens.tolist() == [row.loss_tokens for row in rows]
    other = Samples.of(rows)
    other.find_loss_tokens()
    assert other.loss_tokens.tolist() == batch.loss_tokens.tolist()
    assert batch.num_tokens == sum(row.num_tokens for row in rows)


@settings(max_examples=60)
@given(batches(), st.data())
def test_taking_samples_equals_joining_them_anew_to_the_byte(rows: list[Sample], data: st.DataObject) -> None:
    order = data.draw(st.lists(st.integers(0, len(rows) - 1), max_size=6)) if rows else []
    taken, joined = Samples.of(rows).take(order), Samples.of(rows[i] for i in order)
    assert taken == joined
    if not any("routed_experts" in row for row in rows):  # u8 rows taken from a u16 column stay u16
        assert encode(taken) == encode(joined)


@settings(max_examples=60)
@given(batches(), st.slices(5))
def test_a_slice_is_a_batch_of_the_slice_of_the_list(rows: list[Sample], part: slice) -> None:
    assert list(Samples.of(rows)[part]) == rows[part]


@settings(max_examples=60)
@given(batches())
def test_a_batch_joined_from_the_samples_of_a_batch_equals_it(rows: list[Sample]) -> None:
    batch = Samples.of(rows)
    assert Samples.of(list(batch)) == batch
    assert Samples.of(batch) is batch


@settings(max_examples=60)
@given(batches().filter(len))
def test_samples_of_a_batch_are_read_only_views_of_its_columns(rows: list[Sample]) -> None:
    batch = Samples.of(rows)
    for sample in batch:
        assert np.shares_memory(sample.token_ids, batch["token_ids"].values)
        assert not any(array.flags.writeable for cells in sample.columns.values() for array in arrays_in(cells))


def test_lengths_of_a_column_say_who_has_it_and_how() -> None:
    rows = [
        Sample(id="a", token_ids=[1, 2, 3], rewards=1.0),
        Sample(id="b", token_ids=[1, 2, 3]),
        Sample(id="c", token_ids=[1, 2], rewards=[0.0, 1.0]),
    ]
    assert Samples.of(rows)["rewards"].lengths.tolist() == [1, 0, 2]


def test_batches_with_one_sample_changed_are_not_equal() -> None:
    rows = [Sample(id="a", token_ids=[1, 2]), Sample(id="b", token_ids=[3])]
    assert Samples.of(rows) != Samples.of([rows[0], rows[1].replace(token_ids=[4])])
    assert Samples.of(rows) != Samples.of(rows[:1])
    assert Samples.of(rows) != rows


def test_experts_of_different_shapes_do_not_share_a_batch() -> None:
    rows = [Sample(token_ids=[1], routed_experts=np.zeros((1, 2, k), np.uint8)) for k in (4, 8)]
    with pytest.raises(InvalidInput, match=r"routed_experts.*\(2, 4\), \(2, 8\)"):
        Samples.of(rows)


def test_a_batch_left_without_images_says_so_as_one_that_never_had_any() -> None:
    image = ImageSpan(hash="0" * 64, grid=(1, 2, 2), offset=0, length=1)
    batch = Samples.of([Sample(id="a", token_ids=[1], images=[image]), Sample(id="b", token_ids=[1])])
    assert batch.images is not None
    assert batch[1:].images is None


def test_a_column_no_sample_has_is_named_with_those_present() -> None:
    with pytest.raises(UnknownKey, match=r"'rewards'; present: token_ids, loss_mask"):
        Samples.of([Sample(token_ids=[1])])["rewards"]


@pytest.mark.parametrize("index", [1, -2])
def test_an_index_outside_the_batch_is_an_index_error(index: int) -> None:
    with pytest.raises(IndexError):
        Samples.of([Sample(token_ids=[1])])[index]
