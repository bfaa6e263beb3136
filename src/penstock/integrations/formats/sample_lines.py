"""Read and write samples as JSON lines: one object per sample, columns under their names, floats bit for bit.

    {"id": "17/0", "group": "17", "token_ids": [5, 6, 7], "loss_mask": [false, true, true], "rewards": 1.0}

A column given once per sample is a number, one given per token a list, a ragged one a list of lists. Absent columns are
omitted. JSON has no NaN: in lists NaN is null, alone it is "NaN", and the infinities are "Infinity" and "-Infinity".
Own columns are described in `columns`, by name: dtype, per, trailing dimensions, ragged, fill and padding.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import msgspec
import numpy as np

from penstock.arrays import (
    TEXT_COLUMNS,
    TOKEN_COLUMNS,
    Array,
    Cells,
    Column,
    Description,
    ImageSpan,
    Own,
    Ragged,
    Sample,
    is_number,
    own_of,
)
from penstock.capture import located, optional_list, read_span
from penstock.errors import InvalidInput
from penstock.extras import require
from penstock.integrations.formats.file_or_stream import Lost, Place, json_lines

_FIELDS = (*TEXT_COLUMNS, "policy_version", "images", "columns")
_IMAGE_FIELDS = ImageSpan.__struct_fields__
_DESCRIPTIONS = dict[str, Description]
_NOT_FINITE = ("NaN", "Infinity", "-Infinity")


def write_lines(samples: Iterable[Sample], place: Place, lost: Lost) -> None:  # noqa: ARG001 - nothing is lost
    """Write one line per sample."""
    require("JSON lines", "orjson")
    with place.writing() as file:
        for sample in samples:
            file.writelines(_line(sample))


def read_lines(place: Place, lost: Lost) -> Iterator[Sample]:
    """Yield the samples of a file. Fields that are not columns are counted and skipped.

    A sample without an id is named by its file and line.
    """
    for where, record in json_lines(place):
        with located(where):
            yield _sample({"id": f"{place.short}:{where.rpartition(':')[2]}", **record}, lost)


def _line(sample: Sample) -> Iterator[bytes]:
    facts: dict[str, Any] = {
        name: value for name in TEXT_COLUMNS if (value := getattr(sample, name)) != TEXT_COLUMNS[name].fill
    }
    if sample.rollout:
        facts["rollout"] = msgspec.json.decode(sample.rollout)
    if sample.policy_version is not None:
        facts["policy_version"] = sample.policy_version
    if sample.images:
        facts["images"] = [{name: getattr(span, name) for name in _IMAGE_FIELDS} for span in sample.images]
    if sample.own:
        facts["columns"] = described(sample.own)
    yield json.dumps(facts, allow_nan=False, separators=(",", ":")).encode()[:-1]
    for name, cells in sample.columns.items():
        yield f',"{name}":'.encode()
        yield _encoded(cells)
    yield b"}\n"


def _encoded(cells: Cells) -> bytes:
    import orjson

    if isinstance(cells, Ragged):
        encoded: bytes = orjson.dumps(_plain(cells) if cells.dtype.kind == "f" else cells.tolist())
        return encoded
    array: Array = np.ascontiguousarray(cells).reshape(cells.shape or (1,))
    if array.dtype.kind == "f" and (np.isinf(array).any() or (cells.ndim == 0 and np.isnan(array).any())):
        encoded = orjson.dumps(_plain(array) if cells.ndim else [_text(float(cells))])
    else:
        encoded = orjson.dumps(array, option=orjson.OPT_SERIALIZE_NUMPY)
    return encoded if cells.ndim else encoded[1:-1]


def _plain(values: Any) -> Any:
    """Replace floats in lists that JSON cannot represent."""
    if isinstance(values, float):
        return None if math.isnan(values) else _text(values)
    return [_plain(value) for value in (values if isinstance(values, list) else values.tolist())]


def _text(value: Any) -> Any:
    """Return a finite number unchanged, and the string for any other."""
    if not isinstance(value, float) or math.isfinite(value):
        return value
    return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"


def _number(value: Any) -> Any:
    return math.nan if value is None else float(value) if value in _NOT_FINITE else value


def _sample(record: dict[str, Any], lost: Lost) -> Sample:
    own = read_described(record.get("columns"))
    table: Mapping[str, Column] = {**TOKEN_COLUMNS, **own}
    lost.fields(record, known=(*_FIELDS, *table))
    given = {name: _cells(table[name], record[name]) for name in table if record.get(name) is not None}
    facts = {name: record[name] for name in (*TEXT_COLUMNS, "policy_version") if record.get(name) is not None}
    declared = {column: given.pop(name) for name, column in own.items() if name in given}
    if "token_ids" not in given:
        raise InvalidInput("token_ids: missing; give the ids of every sample")
    images = [read_span(span, f"images[{i}]") for i, span in enumerate(optional_list(record, "images", "sample"))]
    return Sample(**given, **facts, images=images, columns=declared)


def described(own: Own) -> dict[str, list[Any]]:
    """Describe own columns for JSON, by name: [dtype, per, trailing dimensions, ragged, fill, pad]."""
    return {name: [_text(value) for value in column.described()] for name, column in own.items()}


def read_described(given: Any) -> Own:
    """Read the descriptions written by `described`. None means no columns."""
    try:
        plain = {name: [_number(value) for value in form] for name, form in dict(given or {}).items()}
        return own_of(msgspec.convert(plain, _DESCRIPTIONS))
    except (msgspec.ValidationError, TypeError, ValueError) as error:
        raise InvalidInput(
            f"columns: {error}; each is [dtype, per, trailing dimensions, ragged, fill, pad], by name"
        ) from None


def _cells(column: Column, value: Any) -> Any:
    """Restore NaN and infinities. `Sample` checks everything else."""
    try:
        if column.numpy.kind != "f":
            return _uint64(column, value) if column.dtype == "<u8" else value
        if column.ragged:
            lists = [[_number(x) for x in row] for row in value]
            return Ragged.of_lists(lists, column.numpy)
        if is_number(value):
            return np.asarray(_number(value), _wide(column))
        raw = np.asarray(value)
        return raw if raw.dtype.kind in "fiu" else np.array(value, _wide(column))
    except (TypeError, ValueError, OverflowError) as error:
        raise InvalidInput(f'{column.name}: {error}; give numbers, null or "Infinity"') from None


def _uint64(column: Column, value: Any) -> Any:
    """Convert integers up to 2**64 - 1. numpy would turn [1, 2**64 - 1] into floats and lose digits."""
    if column.ragged:
        return Ragged.of_lists(value, np.uint64)
    numbers = np.array(value, object)
    if not all(type(number) is int and 0 <= number < 2**64 for number in numbers.reshape(-1).tolist()):
        raise InvalidInput(f"{column.name}: give whole numbers from 0 to 2**64 - 1")
    return numbers.astype(np.uint64)


def _wide(column: Column) -> np.dtype[Any]:
    """Return a dtype wide enough to notice numbers that do not fit the column."""
    return np.dtype(np.float64) if column.numpy.itemsize < 8 else column.numpy
