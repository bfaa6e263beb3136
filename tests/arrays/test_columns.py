"""The column table says of every column what stands where nothing was given."""

from __future__ import annotations

import math
import re
from typing import Any

import numpy as np
import pytest

from penstock.arrays import COLUMNS, TOKEN_COLUMNS, Column
from penstock.arrays.columns import first_bad
from penstock.errors import ConfigError


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


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"per": "tokn"}, "column 'x': per 'tokn'; must be one of token, either, sample"),
        ({"dtype": "object"}, "column 'x': dtype 'object'; must be bool, or a number of 8 to 64 bits"),
        ({"dtype": "uint8", "fill": 300}, "column 'x': fill 300; must be a number of uint8"),
        ({"per": "sample", "ragged": True}, "column 'x': ragged per sample; lists are given per token"),
    ],
)
def test_a_column_that_cannot_be_is_refused_where_it_is_declared(given: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(words)):
        Column("x", **given)
