"""Byte planes: all first bytes, then all second bytes, and so on, so that an entropy coder sees like with like.

A float32 is first rotated left by one bit: its exponent then fills the top byte alone instead of straddling
two, and the sign, constant for log-probabilities, goes to the bottom. On sampler log-probabilities that
saves 4 % after zstd over plain byte planes (`penstock bench wire`).
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.arrays.columns import Array
from penstock.arrays.run_lengths import bit_view


def split_bytes(values: Array) -> NDArray[np.uint8]:
    """[itemsize, N] the byte planes of a one-dimensional array, lowest byte first."""
    size = values.dtype.itemsize
    if values.dtype == np.float32:
        bits = bit_view(values)
        values = (bits << np.uint32(1)) | (bits >> np.uint32(31))
    octets = np.ascontiguousarray(values).view(np.uint8).reshape(-1, size)
    return np.ascontiguousarray(octets.T)


def join_bytes(planes: NDArray[np.uint8], dtype: np.dtype[Any]) -> Array:
    """The array that `split_bytes` was given."""
    values = np.ascontiguousarray(planes.T).reshape(-1)
    if dtype != np.float32:
        return values.view(dtype)
    bits = values.view(np.uint32)
    return ((bits >> np.uint32(1)) | (bits << np.uint32(31))).view(dtype)
