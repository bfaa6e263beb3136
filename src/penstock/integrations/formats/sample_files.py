"""Read and write samples as JSON lines and as Parquet. Both hold everything, values bit for bit.

    {"id": "17/0", "group": "17", "token_ids": [5, 6, 7], "loss_mask": [false, true, true], "rewards": 1.0}

In JSON, a column given once per sample is a number, one given per token a list, a ragged one a list of lists. Absent
columns are omitted. JSON has no NaN: in lists NaN is null, alone it is "NaN", and the infinities are "Infinity" and
"-Infinity". Own columns are described in `columns`, by name: dtype, per, trailing dimensions, ragged, fill and padding.

A Parquet file has a row per sample and a list over tokens per column, zstd. A column that a sample lacks is null in its
row. One given once per sample is a list of one value. Own columns are described in the file's metadata, under
`penstock.columns`. Images are structs with hash, grid and position; their bytes stay in the asset store. One row group
is in memory at a time.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from itertools import islice
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from penstock.arrays import (
    NO_COLUMNS,
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
    table_with,
)
from penstock.capture import located, optional_list, read_span
from penstock.errors import CorruptFile, InvalidInput, PenstockError
from penstock.extras import require
from penstock.integrations.formats.shared import Lost, Place, json_lines
from penstock.view import check_row_group, list_array, list_type

if TYPE_CHECKING:
    import pyarrow as pa


# ------------------------------------------------------------------ JSON lines


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


# ------------------------------------------------------------------ Parquet


ROWS = 256
"""Samples per row group."""
_KEY = b"penstock.columns"
_FACTS = (*TEXT_COLUMNS, "policy_version", "images")


def write_table(samples: Iterable[Sample], place: Place, lost: Lost, own: Own = NO_COLUMNS) -> None:  # noqa: ARG001
    """Write one row per sample. `own` are all own columns of the samples: a file has one schema."""
    require("Parquet", "pyarrow")
    import pyarrow.parquet as pq

    layout = _schema(own)
    source = iter(samples)
    with place.writing() as file, pq.ParquetWriter(file, layout, compression="zstd") as writer:
        while rows := list(islice(source, ROWS)):
            _check_own(rows, own)
            writer.write_batch(_batch(rows, own, layout))


def read_table(place: Place, lost: Lost) -> Iterator[Sample]:
    """Yield the samples of a file. Unknown columns are counted and skipped."""
    with _opened(place) as file:
        names = file.schema_arrow.names
        own = _own(file.schema_arrow.metadata or {})
        taken = {*_FACTS, *table_with(own)}
        lost.unread.update({name: file.metadata.num_rows for name in names if name not in taken})
        at = 0
        for group in range(file.num_row_groups):
            check_row_group(file, group)
            table = file.read_row_group(group, [name for name in names if name in taken])
            yield from _rows(table, own, place, at)
            at += len(table)


def columns_of(place: Place) -> list[str]:
    """Return the names of a file's columns."""
    with _opened(place) as file:
        return list(file.schema_arrow.names)


@contextmanager
def _opened(place: Place) -> Iterator[Any]:
    """Open the file. Whatever pyarrow cannot read, now or in the block, becomes CorruptFile."""
    require("Parquet", "pyarrow")
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(place.path) as file:
            yield file
    except (PenstockError, FileNotFoundError):
        raise
    except (pa.ArrowException, OSError, ValueError, TypeError, OverflowError, RecursionError) as error:
        raise CorruptFile(f"{place.name}: {error}; not a readable Parquet file") from None


def own_columns_of(samples: Iterable[Sample]) -> Own:
    found: dict[str, Column] = {}
    for sample in samples:
        for name, column in sample.own.items():
            found.setdefault(name, column)
    return {name: found[name] for name in sorted(found)}


def _check_own(rows: list[Sample], own: Own) -> None:
    for sample in rows:
        for name, column in sample.own.items():
            if name not in own or not own[name].is_like(column):
                raise InvalidInput(
                    f"sample {sample.id!r}: column {name!r} differs from the samples before it, and a Parquet file has "
                    "one schema; convert from a file instead of a stream, or into separate files"
                )


# ------------------------------------------------------------------ writing


def _schema(own: Own) -> pa.Schema:
    import pyarrow as pa

    fields = [pa.field(name, pa.string()) for name in TEXT_COLUMNS]
    fields += [pa.field("policy_version", pa.int64()), pa.field("images", pa.list_(_image_type()))]
    for column in table_with(own).values():
        fields.append(pa.field(column.name, list_type(column.dtypes[-1], column.trailing + column.ragged)))
    return pa.schema(fields, metadata={_KEY: msgspec.json.encode(described(own))} if own else None)


def _image_type() -> pa.DataType:
    import pyarrow as pa

    of_python = {"hash": pa.string(), "grid": pa.list_(pa.int64()), "media_type": pa.string()}
    return pa.struct([pa.field(name, of_python.get(name, pa.int64())) for name in ImageSpan.__struct_fields__])


def _batch(rows: list[Sample], own: Own, layout: pa.Schema) -> pa.RecordBatch:
    import pyarrow as pa

    arrays = [pa.array([getattr(row, name) for row in rows], pa.string()) for name in TEXT_COLUMNS]
    arrays.append(pa.array([row.policy_version for row in rows], pa.int64()))
    images = [[msgspec.structs.asdict(span) for span in row.images] or None for row in rows]
    arrays.append(pa.array(images, layout.field("images").type))
    for name, column in table_with(own).items():
        depth = column.trailing + column.ragged
        arrays.append(list_array([row.get(name) for row in rows], column.dtypes[-1], depth, nan_is_null=False))
    return pa.record_batch(arrays, schema=layout)


# ------------------------------------------------------------------ reading


def _own(metadata: dict[bytes, bytes]) -> Own:
    return read_described(msgspec.json.decode(metadata[_KEY])) if _KEY in metadata else NO_COLUMNS


def _rows(table: pa.Table, own: Own, place: Place, first: int) -> Iterator[Sample]:
    facts = {name: table[name].to_pylist() for name in _FACTS if name in table.column_names}
    columns = {
        name: _Lists(table[name].combine_chunks(), column)
        for name, column in table_with(own).items()
        if name in table.column_names
    }
    if "token_ids" not in columns:
        raise InvalidInput(f"{place.name}: no column token_ids; each row needs the ids of one sample")
    for i in range(len(table)):
        given = {name: cells for name, lists in columns.items() if (cells := lists.row(i)) is not None}
        text = {name: values[i] for name, values in facts.items() if name != "images" and values[i] is not None}
        text.setdefault("id", f"{place.short}:{first + i}")
        declared = {column: given.pop(name) for name, column in own.items() if name in given}
        with located(f"{place.name} row {first + i}"):
            images = [read_span(span, "image") for span in (facts["images"][i] if "images" in facts else None) or ()]
            yield Sample(**{"token_ids": (), **given}, **text, images=images, columns=declared)


class _Lists:
    """Slices a column of lists into rows without copying values."""

    def __init__(self, array: Any, column: Column) -> None:
        self._column = column
        self._valid = array.is_valid().to_numpy(zero_copy_only=False)
        self._offsets: list[Array] = []
        while hasattr(array, "offsets"):
            self._offsets.append(array.offsets.to_numpy())
            array = array.values
        self._values = array.to_numpy(zero_copy_only=False)

    def row(self, i: int) -> Cells | None:
        if not self._valid[i]:
            return None
        if not self._offsets:  # one number per row: not written by us, but valid
            return np.asarray(self._values[i])
        a, b = (int(at) for at in self._offsets[0][i : i + 2])
        inner = self._offsets[1:]
        if self._column.ragged and inner:
            edges = inner[0][a : b + 1]
            return Ragged(self._values[edges[0] : edges[-1]], edges - edges[0])
        shape = [b - a]
        for offsets in inner:
            shape.append(int(offsets[a + 1] - offsets[a]) if b > a else 0)
            a, b = int(offsets[a]), int(offsets[b])
        cells = self._values[a:b].reshape(shape)
        return cells.reshape(()) if self._column.per != "token" and len(cells) == 1 else cells
