"""Values as typed cells: what goes in comes out, of the same type, without a pickle."""

from __future__ import annotations

from enum import StrEnum
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tensordict.tensorclass import NonTensorStack

from penstock.errors import CorruptFrame, InvalidInput
from penstock.integrations.transfer_queue.typed_cells import _DTYPES, cells_of, decode_value, values_of

pytestmark = pytest.mark.deep


def back(values: Any, rows: int) -> Any:
    cells, pieces = cells_of("x", values, rows)
    return values_of(cells, np.frombuffer(b"".join(pieces), np.uint8).copy())


@pytest.mark.parametrize("name", _DTYPES)
def test_a_tensor_of_every_dtype_comes_back_to_the_bit(name: str) -> None:
    raw = torch.arange(96, dtype=torch.uint8) % (2 if name == "bool" else 251)
    rows = raw.view(getattr(torch, name)).reshape(2, -1)
    found = back(rows, 2)
    assert found.is_nested and found.dtype is rows.dtype
    assert all(torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in zip(found.unbind(), rows, strict=True))


@given(st.lists(st.integers(0, 5), min_size=1, max_size=6), st.sampled_from([(), (3,), (2, 2)]))
def test_rows_of_many_lengths_come_back(lengths: list[int], trailing: tuple[int, ...]) -> None:
    rows = [torch.randn(length, *trailing) for length in lengths]
    found = back(rows, len(rows))
    out = list(found.unbind()) if isinstance(found, torch.Tensor) else found.tolist()
    assert all(torch.equal(a, b) for a, b in zip(out, rows, strict=True))


def test_numbers_are_stacked_and_rows_of_other_shapes_kept_apart() -> None:
    assert torch.equal(back(torch.tensor([3, 1, 2]), 3), torch.tensor([3, 1, 2]))
    odd = [torch.zeros(2, 3), torch.ones(4)]
    found = back(odd, 2)
    assert isinstance(found, NonTensorStack) and torch.equal(found.tolist()[1], odd[1])
    mixed = [torch.zeros(2), None, "text"]
    assert back(mixed, 3).tolist()[1:] == [None, "text"]


PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats(allow_nan=False) | st.text() | st.binary(),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(st.text(max_size=5) | st.integers(0, 9), inner, max_size=3)
    ),
    max_leaves=12,
)


@given(PLAIN)
def test_plain_values_come_back_of_the_same_type(value: Any) -> None:
    found = back([value, value], 2).tolist()
    assert found == [value, value] and type(found[0]) is type(value)


def test_arrays_inside_of_other_values_come_back() -> None:
    value = {"pixels": torch.arange(4.0).reshape(2, 2), "grid": (np.array([1, 2], np.int16), np.float32(0.5))}
    names = np.array(["a", ["b", "c"], None, ["d", "e"]], object)
    found = back([{**value, "names": names}], 1).tolist()[0]
    assert torch.equal(found["pixels"], value["pixels"]) and isinstance(found["grid"], tuple)
    assert found["grid"][0].tolist() == [1, 2] and found["grid"][0].dtype == np.int16
    assert found["grid"][1] == 0.5 and type(found["grid"][1]) is np.float32
    assert found["names"].dtype == object and found["names"].tolist() == names.tolist()


class Status(StrEnum):
    DONE = "done"


def test_text_and_numbers_of_other_types_become_plain_ones_and_numpys_stay() -> None:
    assert back([Status.DONE], 1).tolist() == ["done"] and back(np.array([b"ab", b"c"]), 2).tolist() == [b"ab", b"c"]
    found = back([np.float64(0.5), np.str_("a"), {np.str_("k"): True}], 3).tolist()
    assert type(found[0]) is np.float64 and [type(found[1]), found[2]] == [str, {"k": True}]


def test_a_list_of_one_value_per_row_is_a_column_and_any_other_value_is_every_rows() -> None:
    assert back([[1], [2, 3]], 2).tolist() == [[1], [2, 3]]
    assert back("agent", 2).tolist() == ["agent", "agent"] and back([1, 2, 3], 2).tolist() == [[1, 2, 3]] * 2


def test_changed_bytes_are_found() -> None:
    cells, pieces = cells_of("x", torch.arange(6).reshape(2, 3), 2)
    data = np.frombuffer(b"".join(pieces), np.uint8).copy()
    data[30] ^= 1
    with pytest.raises(CorruptFrame, match="row 1: its checksum differs"):
        values_of(cells, data)


class Strange:
    """Something that only a pickle could hold."""


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ({"image": Strange()}, r"x\[0\]\['image'\]: a .*Strange; give tensors"),
        ([1, {2, 3}], r"x\[0\]\[1\]: a builtins.set"),
        (1 << 64, "must fit 64 bits"),
        ({1.5: 2}, "key 1.5"),
    ],
)
def test_what_only_a_pickle_could_hold_is_refused_by_its_place(value: Any, said: str) -> None:
    with pytest.raises(InvalidInput, match=said):
        cells_of("x", [value], 1)


def test_values_inside_one_another_without_end_are_refused() -> None:
    value: list[Any] = []
    for _ in range(100):
        value = [value]
    with pytest.raises(InvalidInput, match="nested more than 32 levels"):
        cells_of("x", [value], 1)


@given(st.binary(max_size=40))
def test_bytes_that_nobody_wrote_give_our_error_or_a_value(data: bytes) -> None:
    try:
        decode_value(data)
    except CorruptFrame:
        return
