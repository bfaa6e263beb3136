"""Parquet: the same records as columns of lists, zstd, one row group per micro-batch, never a whole table in memory.

`ParquetFile` is a format for `TokenExporter`; `records_to_parquet` writes any records, with their images' bytes when
an asset store is given, for logs that must stand alone.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import numpy as np

from penstock.arrays.columns import Array
from penstock.assets.offload import INLINE_BYTES
from penstock.errors import AssetError, CorruptFile, StorageError
from penstock.extras import require
from penstock.view.record import FACTS, TABLE, ExportColumn, Record, without_empty

if TYPE_CHECKING:
    import pyarrow as pa

    from penstock.assets import AssetStore

_RECORDS_PER_GROUP = 64
_TEXT = ("rule", "images")
"""Facts with structure; kept as JSON text so that the schema never changes with what is in them."""


class ParquetFile:
    """Row groups in `rank_<r>.parquet`."""

    suffix = "parquet"

    def __init__(self, file: BinaryIO) -> None:
        import pyarrow.parquet as pq

        self._schema = schema()
        self._writer = pq.ParquetWriter(file, self._schema, compression="zstd", use_dictionary=False)

    def append(self, records: list[Record]) -> None:
        if records:
            self._writer.write_batch(_batch(records, self._schema, None))

    def finish(self) -> None:
        self._writer.close()


def schema(*, with_images: bool = False) -> pa.Schema:
    """The schema: facts, then one list per column of the table."""
    pa = _arrow()
    kinds = {"int": pa.int64(), "bool": pa.bool_(), "float": pa.float32()}
    of_python = {int: pa.int64(), str: pa.string()}
    fields = [pa.field(name, of_python.get(kind, pa.string())) for name, kind in FACTS.items()]
    fields += [pa.field(column.name, pa.list_(kinds[column.kind])) for column in TABLE]
    if with_images:
        fields.append(pa.field("image_bytes", pa.list_(pa.binary())))
    return pa.schema(fields)


def records_to_parquet(
    records: Iterable[Record],
    path: Path,
    *,
    images: AssetStore | None = None,
    max_image_bytes: int = INLINE_BYTES,
    records_per_group: int = _RECORDS_PER_GROUP,
) -> int:
    """Write records as they come, and say how many; memory holds one row group. No records, no file.

    With `images`, column `image_bytes` holds the original bytes of each record's images; larger ones than
    `max_image_bytes`, and those that cannot be read, stay null and keep their hash.
    """
    import pyarrow.parquet as pq

    layout = schema(with_images=images is not None)
    count, writer = 0, None
    try:
        source = iter(records)
        while group := list(islice(source, records_per_group)):
            writer = writer or pq.ParquetWriter(path, layout, compression="zstd", use_dictionary=False)
            inline = None if images is None else [_inline(record, images, max_image_bytes) for record in group]
            writer.write_batch(_batch(group, layout, inline))
            count += len(group)
    except BaseException:
        if writer is not None:
            writer.close()
        path.unlink(missing_ok=True)
        raise
    if writer is not None:
        writer.close()
    return count


def read_parquet(path: Path) -> Iterator[Record]:
    """The records of a file, one row group in memory at a time."""
    pa = _arrow()
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(path) as file:
            _check_schema(file.schema_arrow)
            for group in range(file.num_row_groups):
                yield from _rows(file.read_row_group(group))
    except (pa.ArrowException, OSError, ValueError, OverflowError, RecursionError) as error:
        raise CorruptFile(f"{path}: {error}; not a whole Parquet file of records") from None


def _check_schema(found: pa.Schema) -> None:
    """Columns of the record have the record's types; others are left alone."""
    for field in schema():
        if field.name in found.names and found.field(field.name).type != field.type:
            raise ValueError(f"column {field.name} is {found.field(field.name).type}, not {field.type}")
    if not {"token_ids", "loss_mask"} <= set(found.names):
        raise ValueError("no columns token_ids and loss_mask")


def _arrow() -> Any:
    require("Parquet", "pyarrow")
    import pyarrow as pa

    return pa


def _batch(records: list[Record], layout: pa.Schema, inline: list[list[bytes | None]] | None) -> pa.RecordBatch:
    pa = _arrow()
    arrays: list[Any] = []
    for name in FACTS:
        values = [record.facts.get(name) for record in records]
        if name in _TEXT:
            values = [None if value is None else json.dumps(value) for value in values]
        arrays.append(pa.array(values, layout.field(name).type))
    arrays += [_lists(records, column, layout.field(column.name).type) for column in TABLE]
    if inline is not None:
        arrays.append(pa.array(inline, layout.field("image_bytes").type))
    return pa.record_batch(arrays, schema=layout)


def _lists(records: list[Record], column: ExportColumn, kind: pa.DataType) -> pa.ListArray:
    """One column of all records: one buffer of values, and offsets; NaN becomes null, absent becomes a null list."""
    pa = _arrow()
    found = [record.columns.get(column.name) for record in records]
    given = [values for values in found if values is not None]
    joined = np.concatenate(given) if given else np.zeros(0)
    offsets = np.concatenate(([0], np.cumsum([0 if values is None else len(values) for values in found])))
    missing = ~np.isfinite(joined) if column.kind == "float" else None
    values = pa.array(joined.astype(kind.value_type.to_pandas_dtype()), kind.value_type, mask=missing)
    absent = pa.array([values is None for values in found], pa.bool_())
    return pa.ListArray.from_arrays(pa.array(offsets, pa.int32()), values, mask=absent)


def _rows(table: pa.Table) -> Iterator[Record]:
    names = set(table.column_names)
    facts = {name: table[name].to_pylist() if name in names else [None] * len(table) for name in FACTS}
    for name in _TEXT:
        facts[name] = [None if value is None else json.loads(value) for value in facts[name]]
    for row in range(len(table)):
        columns = {column.name: _values(table, column, row) for column in TABLE if column.name in names}
        lengths = {name: len(values) for name, values in columns.items() if values is not None}
        if not {"token_ids", "loss_mask"} <= lengths.keys() or len(set(lengths.values())) > 1:
            raise ValueError(f"row {row}: columns of {lengths} values")
        yield Record(
            facts={name: values[row] for name, values in facts.items()},
            columns=without_empty({name: values for name, values in columns.items() if values is not None}),
        )


_DTYPES: dict[str, Any] = {"token_ids": np.uint32, "position_ids": np.int64, "weight_versions": np.int32}


def _values(table: pa.Table, column: ExportColumn, row: int) -> Array | None:
    cell = table[column.name][row]
    if not cell.is_valid:
        return None
    if column.kind != "float" and cell.values.null_count:
        return None
    values: Array = cell.values.to_numpy(zero_copy_only=False)
    if column.kind == "float":
        return values.astype(np.float32)
    return values.astype(np.bool_ if column.kind == "bool" else _DTYPES[column.name])


def _inline(record: Record, images: AssetStore, max_bytes: int) -> list[bytes | None]:
    return [_read(images, image["hash"], max_bytes) for image in record.facts["images"] or ()]


def _read(images: AssetStore, image: str, max_bytes: int) -> bytes | None:
    try:
        return images.get(image) if images.ref(image).num_bytes <= max_bytes else None
    except (AssetError, StorageError):
        return None  # a log is better with a hash in it than not written
