"""Large rows that stay where they lie: the same bytes, digests and micro-batches as from rows that were joined."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import penstock as ps
from penstock.arrays import Samples
from penstock.arrays import samples as samples_module
from penstock.arrays.digests import sample_digests
from penstock.arrays.ragged import Pieced, Ragged, same_bits
from penstock.arrays.sample_metadata import SampleMetadata
from penstock.errors import InvalidInput
from penstock.frames import assembly, check_group, metadata_of_pieces
from penstock.frames.writing import encode_group
from penstock.packing import Packing, fill, plan
from penstock.testing.strategies import batches
from tests.frames.test_gathering import Picked, picks
from tests.frames.test_ranges import GAPS, assembled, assert_identical, gathered, group


@contextmanager
def everything_large() -> Iterator[None]:
    """Rows of any size stay where they lie."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(samples_module, "LARGE_BYTES", 0)
        patch.setattr(assembly, "LARGE_BYTES", 0)
        yield


@settings(max_examples=150)
@given(batches())
def test_a_frame_of_pieces_is_the_frame_of_joined_columns(samples: list[ps.Sample]) -> None:
    with everything_large():
        made = encode_group(samples)
    assert b"".join(made.pieces) == ps.encode(samples)
    assert sample_digests(made.samples) == sample_digests(Samples.of(samples))
    assert made.samples == Samples.of(samples)


@settings(max_examples=150)
@given(picks(), st.sampled_from(GAPS))
def test_samples_assembled_in_pieces_are_the_decoded_gathered_ones(picked: Picked, gap: int) -> None:
    try:
        expected = gathered(picked)
    except InvalidInput:
        return
    with everything_large():
        assert_identical(assembled(picked, gap), expected)


def test_pieces_are_used_where_rows_are_large() -> None:
    samples = group(16, 512, experts=(48, 8))
    made = encode_group(samples)
    assert isinstance(made.samples["routed_experts"], Pieced)
    assert b"".join(made.pieces) == ps.encode(samples)
    metadata = metadata_of_pieces(made, group="g0", seq_len=4096)
    assert metadata == check_group(ps.encode(samples), group="g0", seq_len=4096)
    large: Picked = [(ps.encode(group(16, 1024, seed=s, experts=(48, 8))), list(range(0, 16, 3))) for s in (1, 2)]
    got = assembled(large)
    assert isinstance(got["routed_experts"], Pieced)
    assert {len(got["routed_experts"].pieces(i)) for i in range(len(got))} == {1, 2}  # the prompt, and the answer
    assert_identical(got, gathered(large))


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16])
def test_rows_of_zeros_and_rows_that_do_not_follow_the_tokens_are_coded_alike(dtype: type) -> None:
    rng = np.random.default_rng(3)
    ids = rng.integers(0, 1000, 100)
    rows: Any
    for rows in (np.zeros((2, 100, 4, 2), dtype), rng.integers(0, 9, (2, 100, 4, 2)).astype(dtype)):
        samples = [ps.Sample(id=f"{i}", group="g", token_ids=ids, routed_experts=one) for i, one in enumerate(rows)]
        with everything_large():
            made = encode_group(samples)
        assert isinstance(made.samples["routed_experts"], Pieced)
        assert b"".join(made.pieces) == ps.encode(samples)


def test_filled_micro_batches_are_those_of_joined_rows() -> None:
    picked: Picked = [(ps.encode(group(8, 64 + 9 * s, seed=s, experts=(3, 2))), list(range(8))) for s in range(3)]
    joined = gathered(picked)
    with everything_large():
        pieced = assembled(picked)
    assert isinstance(pieced["routed_experts"], Pieced)
    for seq_len in (50, 300):  # samples are truncated, within their prompt and behind it; and not
        made = plan(SampleMetadata.of(joined, seq_len), Packing(ranks=2, seq_len=seq_len))
        for rank_plan in made.rank_plans:
            for one, other in zip(fill(pieced, rank_plan), fill(joined, rank_plan), strict=True):
                assert list(one.columns) == list(other.columns)
                assert all(same_bits(one.columns[name], other.columns[name]) for name in one.columns)


def test_a_pieced_column_is_a_ragged_one() -> None:
    rng = np.random.default_rng(0)
    rows: list[list[Any]] = [[rng.integers(0, 9, (n, 2)) for n in sizes] for sizes in ((2, 3), (), (4,), (1, 0, 2))]
    offsets = np.array([0, 5, 5, 9, 12])
    column = Pieced(rows, offsets)
    plain = Ragged(np.concatenate([piece for row in rows for piece in row]), offsets)
    assert (column.dtype, column.trailing, column.nbytes) == (plain.dtype, plain.trailing, plain.nbytes)
    assert len(column) == len(plain) and column.tolist() == plain.tolist()
    for i in range(4):
        assert column[i].shape == plain[i].shape and np.array_equal(column[i], plain[i])
        assert np.array_equal(np.concatenate([*column.pieces(i), plain.values[:0]]), plain[i])
    assert np.array_equal(column[1:3].values, plain[1:3].values)
    assert np.array_equal(column.take(np.array([3, 0])).values, plain.take(np.array([3, 0])).values)
