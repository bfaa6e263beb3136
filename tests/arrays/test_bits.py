"""Narrow integers and byte planes against plain Python."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.arrays.bits import (
    WIDTHS,
    join_bytes,
    pack_uints,
    plane_bytes,
    planes_of,
    split_bytes,
    unpack_uints,
    width_of,
)
from tests.support import reference


@pytest.mark.parametrize("width", WIDTHS)
@given(data=st.data())
def test_planes_equal_the_reference_and_unpack_to_the_values(width: int, data: st.DataObject) -> None:
    values = data.draw(st.lists(st.integers(0, 2**width - 1), max_size=40))
    array = np.array(values, np.uint32)
    low, high = pack_uints(array, width)
    assert (low.tobytes(), high.tobytes()) == reference.pack_uints(values, *planes_of(width))
    assert (low.nbytes, high.nbytes) == plane_bytes(width, len(values))
    assert unpack_uints(low, high, width, len(values)).tolist() == values


@pytest.mark.parametrize("width", WIDTHS)
def test_planes_add_up_to_the_width_and_low_planes_are_whole_bytes(width: int) -> None:
    low, high = planes_of(width)
    assert low + high == width
    assert low % 8 == 0


@given(st.integers(0, 2**32 - 1))
def test_width_is_the_narrowest_that_holds_the_value(largest: int) -> None:
    assert width_of(largest) == min(width for width in WIDTHS if largest < 2**width)


def test_values_of_a_strided_array_are_packed_in_their_own_order() -> None:
    strided = np.arange(20, dtype=np.uint32)[::2]
    low, high = pack_uints(strided, 18)
    assert unpack_uints(low, high, 18, 10).tolist() == strided.tolist()


@given(st.lists(st.integers(0, 2**32 - 1), max_size=40))
def test_planes_of_floats_equal_the_reference_and_join_to_the_same_bits(bits: list[int]) -> None:
    values = np.array(bits, np.uint32).view(np.float32)
    planes = split_bytes(values)
    rotated = [reference.rotate_sign_down(b) for b in bits]
    assert [plane.tobytes() for plane in planes] == reference.byte_planes(rotated, 4)
    assert join_bytes(planes, np.dtype("<f4")).view(np.uint32).tolist() == bits


@pytest.mark.parametrize("dtype", ["|u1", "<u2", "<u4", "<i8"])
@given(data=st.data())
def test_planes_of_integers_equal_the_reference_and_join_to_the_same_values(dtype: str, data: st.DataObject) -> None:
    limits = np.iinfo(dtype)
    values = data.draw(st.lists(st.integers(int(limits.min), int(limits.max)), max_size=20))
    size = np.dtype(dtype).itemsize
    planes = split_bytes(np.array(values, dtype))
    assert [p.tobytes() for p in planes] == reference.byte_planes([v % (1 << 8 * size) for v in values], size)
    assert join_bytes(planes, np.dtype(dtype)).tolist() == values
