"""Byte planes against plain Python."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.arrays.bits import join_bytes, split_bytes
from penstock.testing import reference


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
