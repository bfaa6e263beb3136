"""The column table says of every column what stands where nothing was given."""

from __future__ import annotations

import math

import numpy as np
import pytest

from penstock.arrays import COLUMNS, TOKEN_COLUMNS, Column
from penstock.arrays.columns import first_bad


@pytest.mark.parametrize("column", COLUMNS.values(), ids=lambda column: column.name)
def test_fill_and_pad_are_values_the_column_itself_allows(column: Column) -> None:
    if column.is_text:
        assert isinstance(column.fill, str)
        return
    for value in (column.fill, column.pad):
        stored = np.array([value]).astype(column.dtype)
        assert value is not None and (math.isnan(float(value)) or stored[0] == value)
        assert first_bad(column, stored) is None


def test_padding_never_reaches_the_loss() -> None:
    assert COLUMNS["loss_mask"].pad is False
    weights = [name for name in TOKEN_COLUMNS if name.endswith("_weights")]
    assert weights
    assert all(COLUMNS[name].pad == 0.0 for name in weights)


@pytest.mark.parametrize(
    ("name", "value", "reason"),
    [
        ("logprobs", 0.5, "must be at most"),
        ("logprobs", math.nan, "NaN"),
        ("logprobs", -math.inf, "finite"),
        ("temperatures", 0.0, "greater than 0"),
        ("temperatures", -1.0, "greater than 0"),
        ("advantages", math.inf, "finite"),
        ("advantages", math.nan, "NaN"),
        ("rewards", math.inf, "finite"),
    ],
)
def test_the_first_value_a_column_does_not_allow_is_found(name: str, value: float, reason: str) -> None:
    values = np.array([COLUMNS[name].fill] * 3, np.float32)
    values[1:] = value
    found = first_bad(COLUMNS[name], values)
    assert found is not None
    assert found[0] == 1
    assert reason in found[1]


def test_rounding_above_zero_is_a_logprob_and_nan_is_a_reward() -> None:
    assert first_bad(COLUMNS["logprobs"], np.array([1e-6], np.float32)) is None
    assert first_bad(COLUMNS["rewards"], np.array([math.nan, 1.0], np.float32)) is None
