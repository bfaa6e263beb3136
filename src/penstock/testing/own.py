"""Columns of a run's own, one of every shape and of many dtypes, and values for them."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.random import Generator

from penstock.arrays import Array, Cells, Column, Ragged, offsets_of

OWN_COLUMNS = (
    Column("token_halves", dtype="float16", fill=0.5, pad=-1.0),
    Column("token_longs", dtype="int64", fill=-1),
    Column("token_flags", dtype="bool", fill=True, pad=False),
    Column("token_bytes", dtype="int8"),
    Column("sample_doubles", dtype="float64", per="sample", fill=math.nan),
    Column("sample_words", dtype="uint64", per="sample", fill=2**64 - 1),
    Column("either_shorts", dtype="uint16", per="either", fill=7),
    Column("row_singles", dtype="float32", trailing=1),
    Column("row_longs", dtype="uint32", trailing=2, fill=3),
    Column("row_bytes", dtype="uint8", trailing=2),
    Column("list_shorts", dtype="int16", ragged=True),
    Column("list_doubles", dtype="float64", ragged=True),
)
"""What tests declare. Rows have the shapes [2] and [2, 3]."""


def values_of(rng: Generator, column: Column, count: int) -> Cells:
    """Values for a sample of `count` tokens; among them the extremes of the dtype, and NaN."""
    if column.ragged:
        lengths = rng.integers(0, 4, count) * (rng.random(count) < 0.7)
        return Ragged(_numbers(rng, column, (int(lengths.sum()),)), offsets_of(lengths))
    if column.per == "sample" or (column.per == "either" and rng.random() < 0.5):
        return _numbers(rng, column, ())
    values = _numbers(rng, column, (count, *(2, 3)[: column.trailing]))
    if count > 2 and rng.random() < 0.3:
        values[rng.integers(count) :] = values[-1]
    return values


def _numbers(rng: Generator, column: Column, shape: tuple[int, ...]) -> Array:
    dtype = column.numpy
    if dtype.kind == "b":
        return np.asarray(rng.random(shape) < 0.5)
    info: Any = np.finfo(dtype) if dtype.kind == "f" else np.iinfo(dtype)
    pool = [0, 1, 2, info.min, info.max] + ([math.nan, -0.0, 0.25, -math.inf] if dtype.kind == "f" else [])
    return np.asarray(np.array(pool, dtype)[rng.integers(0, len(pool), shape)])
