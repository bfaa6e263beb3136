"""Heads of few samples are coded without numpy: the same bytes, values and errors as by the general path.

The general path is the same code with `FEW` at 0, which sends every array through numpy.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from penstock.arrays import MaskRuns, encode_runs, has_few_runs, run_starts
from penstock.errors import CorruptFrame
from penstock.frames import codings, head
from penstock.frames.codings import CONSTANT, NARROW, RUNS, Reader, Writer
from penstock.frames.layout import Block

DTYPES = ("<u2", "<u4", "<i4", "<u8", "<i8")
SAME = settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@st.composite
def integers(draw: st.DrawFn) -> np.ndarray[Any, np.dtype[Any]]:
    """Up to 70 numbers of any width and sign, with runs of any length."""
    dtype = np.dtype(draw(st.sampled_from(DTYPES)))
    limits = np.iinfo(dtype.str)
    bits = draw(st.integers(1, 8 * dtype.itemsize - (dtype.kind == "i")))
    low = limits.min if draw(st.booleans()) and dtype.kind == "i" else 0
    values = st.integers(max(low, limits.min), min(2**bits - 1, limits.max))
    runs = draw(st.lists(st.tuples(values, st.integers(1, 9)), min_size=1, max_size=70))
    return np.array([value for value, times in runs for _ in range(times)][:70], dtype)


def in_both(monkeypatch: pytest.MonkeyPatch, call: Callable[[], Any]) -> tuple[Any, Any]:
    """Return the result of a call with the fast path and without, or the error of each."""

    def result() -> Any:
        try:
            return call()
        except CorruptFrame as error:
            return str(error)

    fast = result()
    with monkeypatch.context() as patch:
        patch.setattr(codings, "FEW", 0)
        patch.setattr(head, "FEW", 0)
        return fast, result()


def written(values: Any, *, align: bool, profile: codings.Profile) -> tuple[Block, bytes]:
    writer = Writer(profile, align=align)
    block = writer.write(values)
    return block, b"".join(writer.pieces)


@given(values=integers(), align=st.booleans(), profile=st.sampled_from(["fast", "small"]))
@SAME
def test_few_numbers_are_written_and_read_as_many_are(
    monkeypatch: pytest.MonkeyPatch, values: Any, align: bool, profile: codings.Profile
) -> None:
    fast, general = in_both(monkeypatch, lambda: written(values, align=align, profile=profile))
    assert fast == general
    block, data = fast
    read = [
        Reader(memoryview(data), align=align).read(block, values.dtype, len(values), "numbers"),
        in_both(monkeypatch, lambda: Reader(memoryview(data), align=align).read(block, values.dtype, len(values), "x"))[
            1
        ],
    ]
    for found in read:
        assert found.dtype == values.dtype
        assert found.tolist() == values.tolist()
    assert Reader(memoryview(data), align=align).integers(block, values.dtype, len(values), "x") == values.tolist()


@given(
    data=st.binary(max_size=96),
    coding=st.sampled_from([CONSTANT, NARROW, RUNS]),
    arg=st.integers(-1, 40),
    inner=st.tuples(st.sampled_from([CONSTANT, NARROW, RUNS]), st.sampled_from([0, 1, 2, 4, 8, 9, 16, 17, 18, 32])),
    count=st.integers(0, 64),
    dtype=st.sampled_from(DTYPES),
)
@SAME
def test_hostile_numbers_have_the_same_values_or_the_same_error(
    monkeypatch: pytest.MonkeyPatch,
    data: bytes,
    coding: int,
    arg: int,
    inner: tuple[int, int],
    count: int,
    dtype: str,
) -> None:
    block = Block(coding, arg, (), (Block(*inner),) if coding == RUNS else ())

    def read() -> list[int]:
        values: list[int] = Reader(memoryview(data), align=False).read(block, np.dtype(dtype), count, "x").tolist()
        return values

    fast, general = in_both(monkeypatch, read)
    assert fast == general


@given(runs=st.lists(st.integers(1, 300), min_size=0, max_size=60), first=st.booleans())
@SAME
def test_a_mask_with_known_runs_is_written_as_any_mask(runs: list[int], first: bool) -> None:
    mask = np.repeat((np.arange(len(runs)) + first) % 2, runs).astype(np.bool_)
    known, plain = Writer("fast", align=True), Writer("fast", align=True)
    trained = MaskRuns.of(mask)
    assert known.write_mask(trained) == plain.write(mask)
    assert b"".join(known.pieces) == b"".join(plain.pieces)
    assert has_few_runs(mask, starts=trained.edges[:-1]) == has_few_runs(mask)
    assert trained.edges[-1] == len(mask)
    values, lengths = encode_runs(mask, run_starts(mask))
    assert lengths.tolist() == runs
    assert np.array_equal(np.repeat(values, lengths), mask)
