"""Runs and masks against plain Python."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from numpy.typing import NDArray

from penstock.arrays.run_lengths import MaskRuns, bit_view, decode_runs, encode_runs, has_few_runs, run_starts
from penstock.arrays.samples import trained_tokens
from tests.support import reference

FLOAT_BITS = st.sampled_from([0, 0x80000000, 0x7FC00000, 0x7FC00001, 0x7F800001, 0x3F800000])
masks = hnp.arrays(np.bool_, st.integers(0, 200)) | st.lists(
    st.tuples(st.booleans(), st.integers(1, 90)), max_size=6
).map(lambda parts: np.repeat([on for on, _ in parts], [n for _, n in parts]).astype(np.bool_))


@given(st.lists(FLOAT_BITS, max_size=60))
def test_runs_equal_the_reference_on_the_bits_of_floats(bits: list[int]) -> None:
    values = np.array(bits, np.uint32).view(np.float32)
    run_values, run_lengths = encode_runs(values)
    assert list(zip(bit_view(run_values).tolist(), run_lengths.tolist(), strict=True)) == reference.runs(bits)
    assert bit_view(decode_runs(run_values, run_lengths)).tolist() == bits


@pytest.mark.parametrize("dtype", [np.bool_, np.uint8, np.uint16, np.uint32, np.int64, np.float32])
def test_runs_of_every_dtype_come_back(dtype: type[np.generic]) -> None:
    values = np.repeat(np.array([0, 1, 0, 1]), [3, 1, 5, 2]).astype(dtype)
    run_values, run_lengths = encode_runs(values)
    assert run_lengths.tolist() == [3, 1, 5, 2]
    assert decode_runs(run_values, run_lengths).dtype == dtype
    assert decode_runs(run_values, run_lengths).tolist() == values.tolist()


def test_an_empty_array_has_no_runs() -> None:
    assert run_starts(np.zeros(0, np.float32)).tolist() == []


def test_few_runs_are_recognized_and_many_are_not() -> None:
    assert has_few_runs(np.zeros(10_000, np.uint32))
    assert not has_few_runs(np.arange(10_000, dtype=np.uint32))


@given(masks, st.integers(0, 2**32 - 1))
def test_taking_and_putting_by_runs_equals_a_boolean_index(mask: NDArray[np.bool_], seed: int) -> None:
    values = np.random.default_rng(seed).integers(1, 99, len(mask)).astype(np.float32)
    runs = MaskRuns.of(mask)
    kept = runs.take(values)
    assert kept.tolist() == values[mask].tolist()
    assert runs.put(kept).tolist() == np.where(mask, values, 0).tolist()
    assert runs.count() == int(mask.sum())
    assert runs.is_zero_off(np.where(mask, values, 0).astype(np.float32))


@given(masks, st.data())
def test_counting_trained_tokens_of_samples_equals_a_sum(mask: NDArray[np.bool_], data: st.DataObject) -> None:
    edges = sorted(data.draw(st.lists(st.integers(0, len(mask)), min_size=2, max_size=6)))
    kept = [data.draw(st.integers(0, b - a)) for a, b in pairwise(edges)]
    expected = [int(mask[a : a + n].sum()) for a, n in zip(edges[:-1], kept, strict=True)]
    assert trained_tokens(mask, np.array(edges), np.array(kept, np.int64)).tolist() == expected


@given(masks.filter(lambda m: not m.all()), st.data())
def test_a_single_bit_off_the_mask_is_noticed(mask: NDArray[np.bool_], data: st.DataObject) -> None:
    values = np.zeros(len(mask), np.float32)
    at = data.draw(st.sampled_from(np.flatnonzero(~mask).tolist()))
    values[at] = -0.0
    assert not MaskRuns.of(mask).is_zero_off(values)


@given(masks, st.data())
def test_the_runs_of_a_part_are_those_of_the_part_alone(mask: NDArray[np.bool_], data: st.DataObject) -> None:
    begin = data.draw(st.integers(0, len(mask)))
    end = data.draw(st.integers(begin, len(mask)))
    found, expected = MaskRuns.of(mask).part(begin, end), MaskRuns.of(mask[begin:end])
    assert found.edges.tolist() == expected.edges.tolist()
    assert (found.is_choppy, found.on, found.off) == (expected.is_choppy, expected.on, expected.off)
