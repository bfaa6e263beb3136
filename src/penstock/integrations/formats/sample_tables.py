"""Read and write samples as Parquet: a row per sample, a list over tokens per column, zstd, values bit for bit.

A column that a sample lacks is null in its row. One given once per sample is a list of one value. Own columns are
described in the file's metadata, under `penstock.columns`. Images are structs with hash, grid and position; their bytes
stay in the asset store. One row group is in memory at a time.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import islice
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from penstock.arrays import (
    NO_COLUMNS,
    TEXT_COLUMNS,
    Array,
    Cells,
    Column,
    ImageSpan,
    Own,
    Ragged,
    Sample,
    offsets_of,
    table_with,
)
from penstock.capture import located, read_span
from penstock.errors import CorruptFile, InvalidInput, PenstockError
from penstock.extras import require
from penstock.integrations.formats.file_or_stream import Lost, Place
from penstock.integrations.formats.sample_lines import described, read_described

if TYPE_CHECKING:
    import pyarrow as pa

ROWS = 256
"""Samples per row group."""
_KEY = b"penstock.columns"
_FIELDS = (*TEXT_COLUMNS, "policy_version", "images")


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
        taken = {*_FIELDS, *table_with(own)}
        lost.unread.update({name: file.metadata.num_rows for name in names if name not in taken})
        at = 0
        for group in range(file.num_row_groups):
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
    """Collect the own columns of all samples."""
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
    fields += [pa.field(column.name, pa.list_(_inner(column))) for column in table_with(own).values()]
    return pa.schema(fields, metadata={_KEY: msgspec.json.encode(described(own))} if own else None)


def _image_type() -> pa.DataType:
    import pyarrow as pa

    of_python = {"hash": pa.string(), "grid": pa.list_(pa.int64()), "media_type": pa.string()}
    return pa.struct([pa.field(name, of_python.get(name, pa.int64())) for name in ImageSpan.__struct_fields__])


def _inner(column: Column) -> pa.DataType:
    """Return the type of a list's element: a value, or nested lists, in the column's widest dtype."""
    import pyarrow as pa

    kind = pa.from_numpy_dtype(np.dtype(column.dtypes[-1]))
    for _ in range(column.trailing + column.ragged):
        kind = pa.large_list(kind)
    return kind


def _batch(rows: list[Sample], own: Own, layout: pa.Schema) -> pa.RecordBatch:
    import pyarrow as pa

    arrays = [pa.array([getattr(row, name) for row in rows], pa.string()) for name in TEXT_COLUMNS]
    arrays.append(pa.array([row.policy_version for row in rows], pa.int64()))
    images = [[msgspec.structs.asdict(span) for span in row.images] or None for row in rows]
    arrays.append(pa.array(images, layout.field("images").type))
    arrays += [_lists([row.get(name) for row in rows], column) for name, column in table_with(own).items()]
    return pa.record_batch(arrays, schema=layout)


def _lists(found: list[Cells | None], column: Column) -> pa.ListArray:
    """Build one column of all rows from concatenated values and offsets.

    [T=2, layers=3, k=1] becomes lists of 2, of 3 each, of 1 each: offsets are built from the innermost depth outwards.
    """
    import pyarrow as pa

    given = [one if isinstance(one, Ragged) else np.atleast_1d(one) for one in found if one is not None]
    leaf = np.dtype(column.dtypes[-1])
    flat = [one.values if isinstance(one, Ragged) else one.reshape(-1) for one in given]
    values: Any = pa.array(np.concatenate([*flat, np.zeros(0, leaf)]).astype(leaf, copy=False))
    for depth in range(column.trailing + column.ragged, 0, -1):
        sizes = [one.lengths if isinstance(one, Ragged) else _sizes(one, depth) for one in given]
        values = pa.LargeListArray.from_arrays(pa.array(offsets_of(np.concatenate([*sizes, np.zeros(0, int)]))), values)
    absent = [one is None for one in found]
    counts = iter(given)
    lengths = [0 if none else len(next(counts)) for none in absent]
    return pa.ListArray.from_arrays(pa.array(offsets_of(lengths), pa.int32()), values, mask=pa.array(absent))


def _sizes(values: Array, depth: int) -> Array:
    """Return the lengths of the lists at this depth, which are all equal."""
    return np.full(math.prod(values.shape[:depth]), values.shape[depth])


# ------------------------------------------------------------------ reading


def _own(metadata: dict[bytes, bytes]) -> Own:
    return read_described(msgspec.json.decode(metadata[_KEY])) if _KEY in metadata else NO_COLUMNS


def _rows(table: pa.Table, own: Own, place: Place, first: int) -> Iterator[Sample]:
    facts = {name: table[name].to_pylist() for name in _FIELDS if name in table.column_names}
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
