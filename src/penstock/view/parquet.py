"""Write and read records as Parquet: columns of lists, zstd, one row group per micro-batch in memory at a time.

`ParquetFile` is a format for `TokenExporter`. `records_to_parquet` writes any records, with the bytes of their images
if it is given an asset store, for self-contained logs. `upload_records` sends such a file to an object store.
"""

from __future__ import annotations

import json
import math
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import msgspec
import numpy as np

from penstock.arrays import Array, Cells, Ragged, offsets_of
from penstock.assets import INLINE_BYTES
from penstock.atomic import open_file
from penstock.errors import AssetError, CorruptFile, InvalidInput, StorageError
from penstock.extras import require
from penstock.view.record import FIELDS, TABLE, ExportColumn, Record, own_column, without_empty

if TYPE_CHECKING:
    import pyarrow as pa

    from penstock.assets import AssetStore

_RECORDS_PER_GROUP = 64
_IMAGES_PER_GROUP = 8 << 20
"""Image bytes at which a row group is written: 64 records of a rollout with screenshots are 267 MB."""
MAX_GROUP_BYTES = 4 << 30
_WIDTHS = {"BOOLEAN": 1, "INT32": 4, "FLOAT": 4}
PART_BYTES = 8 << 20
"""Bytes of an upload sent, and held in memory, at a time."""
_TEXT = ("rollout", "rule", "images", "columns")
"""Nested fields. Stored as JSON text, so that the schema does not depend on their contents."""


class ParquetFile:
    """Row groups in `rank_<r>.parquet`."""

    suffix = "parquet"
    needs = "pyarrow"

    def __init__(self, file: BinaryIO) -> None:
        self._file, self._table = file, _Table()

    def append(self, records: list[Record]) -> None:
        if records:
            self._table.write(self._file, records, None)

    def finish(self) -> None:
        self._table.close(self._file)


class _Table:
    """A Parquet writer. The first records determine its schema: all records of a step have the same columns."""

    def __init__(self) -> None:
        self._writer: Any = None
        self._own: dict[str, ExportColumn] = {}

    def write(self, where: Any, records: list[Record], inline: list[list[bytes | None]] | None) -> None:
        own = {name: column for record in records for name, column in record.own.items()}
        if self._writer is None:
            self._own = own
            self._writer = self._open(where, with_images=inline is not None)
        for name, column in own.items():
            if self._own.get(name) != column:
                raise InvalidInput(
                    f"column {name!r}: differs from the first records of the file; write these records to another file"
                )
        self._writer.write_batch(_batch(records, self._own, self._writer.schema, inline))

    def _open(self, where: Any, *, with_images: bool) -> Any:
        import pyarrow.parquet as pq

        layout = schema(self._own.values(), with_images=with_images)
        return pq.ParquetWriter(where, layout, compression="zstd", use_dictionary=False)

    def close(self, where: Any = None) -> None:
        """Finish the file. Writes an empty one if there were no records and `where` is given."""
        if self._writer is None and where is not None:
            self._writer = self._open(where, with_images=False)
        if self._writer is not None:
            self._writer.close()


def schema(own: Iterable[ExportColumn] = (), *, with_images: bool = False) -> pa.Schema:
    """Return the schema: fields, then one list per column of the table, then the run's own columns."""
    pa = _arrow()
    of_python = {int: pa.int64(), str: pa.string()}
    fields = [pa.field(name, of_python.get(kind, pa.string())) for name, kind in FIELDS.items()]
    fields += [pa.field(column.name, list_type(column.dtypes[-1], column.depth)) for column in (*TABLE, *own)]
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
    """Write records as they come and return their number. Memory holds one row group. No records, no file.

    With `images`, column `image_bytes` holds the original bytes of each record's images; larger ones than
    `max_image_bytes`, and those that cannot be read, stay null and keep their hash.
    """
    count, table = 0, _Table()
    try:
        for group, inline in _row_groups(records, images, max_image_bytes, records_per_group):
            table.write(path, group, inline)
            count += len(group)
    except BaseException:
        table.close()
        path.unlink(missing_ok=True)
        raise
    table.close()
    return count


def _row_groups(
    records: Iterable[Record], images: AssetStore | None, max_image_bytes: int, most: int
) -> Iterator[tuple[list[Record], list[list[bytes | None]] | None]]:
    """Group records with the bytes of their images: up to `most` records or `_IMAGES_PER_GROUP` bytes."""
    group: list[Record] = []
    inline: list[list[bytes | None]] = []
    size = 0
    for record in records:
        group.append(record)
        if images is not None:
            own = record.fields["images"] or ()
            inline.append([_read(images, image["hash"], max_image_bytes) for image in own])
            size += sum(len(data) for data in inline[-1] if data is not None)
        if len(group) >= most or size >= _IMAGES_PER_GROUP:
            yield group, None if images is None else inline
            group, inline, size = [], [], 0
    if group:
        yield group, None if images is None else inline


def read_parquet(path: Path) -> Iterator[Record]:
    """Yield the records of a file, with one row group in memory at a time."""
    pa = _arrow()
    import pyarrow.parquet as pq

    try:
        with open_file(path) as opened, pq.ParquetFile(opened) as file:
            for group in range(file.num_row_groups):
                check_row_group(file, group)
                yield from _rows(file.read_row_group(group))
    except (pa.ArrowException, OSError, ValueError, OverflowError, RecursionError) as error:
        raise CorruptFile(f"{path}: {error}; not a complete Parquet file of records") from None


def check_row_group(file: Any, group: int) -> None:
    """Raise ValueError for a row group that would unfold to more than `MAX_GROUP_BYTES`: 800 bytes can hold 2^31 equal
    numbers."""
    chunks = file.metadata.row_group(group)
    found = [chunks.column(i) for i in range(chunks.num_columns)]
    size = sum(
        max(chunk.num_values * _WIDTHS.get(chunk.physical_type, 8), chunk.total_uncompressed_size) for chunk in found
    )
    if size > MAX_GROUP_BYTES:
        raise ValueError(f"row group {group} would unfold to {size:,} bytes; at most {MAX_GROUP_BYTES:,} are read")


def _arrow() -> Any:
    require("Parquet", "pyarrow")
    import pyarrow as pa

    return pa


def _batch(
    records: list[Record],
    own: dict[str, ExportColumn],
    layout: pa.Schema,
    inline: list[list[bytes | None]] | None,
) -> pa.RecordBatch:
    pa = _arrow()
    arrays: list[Any] = []
    for name in FIELDS:
        values = [record.fields.get(name) for record in records]
        if name in _TEXT:
            values = [None if value is None else json.dumps(value) for value in values]
        arrays.append(pa.array(values, layout.field(name).type))
    for column in (*TABLE, *own.values()):
        found = [record.columns.get(column.name) for record in records]
        arrays.append(list_array(found, column.dtypes[-1], column.depth, nan_is_null=True))
    if inline is not None:
        arrays.append(pa.array(inline, layout.field("image_bytes").type))
    return pa.record_batch(arrays, schema=layout)


def list_type(dtype: str, depth: int) -> pa.DataType:
    """Return the type of a column: a list along the tokens. Inner lists have 64-bit offsets, for many values."""
    pa = _arrow()
    kind = pa.from_numpy_dtype(np.dtype(dtype))
    for _ in range(depth):
        kind = pa.large_list(kind)
    return pa.list_(kind)


def list_array(found: Sequence[Cells | None], dtype: str, depth: int, *, nan_is_null: bool) -> pa.ListArray:
    """Join one column of all rows: one buffer of values, and offsets. A row without the column is a null list.

    [T=2, layers=3, k=1] becomes lists of 2, of 3 each, of 1 each: offsets are built from the innermost depth outwards.
    """
    pa = _arrow()
    given = [one if isinstance(one, Ragged) else np.atleast_1d(one) for one in found if one is not None]
    leaf = np.dtype(dtype)
    flat = _joined([one.values if isinstance(one, Ragged) else one.reshape(-1) for one in given], leaf)
    missing = ~np.isfinite(flat) if nan_is_null and leaf.kind == "f" else None
    values: Any = pa.array(flat, pa.from_numpy_dtype(leaf), mask=missing)
    for level in range(depth, 0, -1):
        sizes = [one.lengths if isinstance(one, Ragged) else _sizes(one, level) for one in given]
        values = pa.LargeListArray.from_arrays(pa.array(offsets_of(_joined(sizes, np.dtype(np.int64)))), values)
    counts = iter(given)
    lengths = [0 if one is None else len(next(counts)) for one in found]
    absent = pa.array([one is None for one in found], pa.bool_())
    return pa.ListArray.from_arrays(pa.array(offsets_of(lengths), pa.int32()), values, mask=absent)


def _sizes(values: Array, depth: int) -> Array:
    """Return the lengths of the lists at this depth, which are equal."""
    return np.full(math.prod(values.shape[:depth]), values.shape[depth])


def _joined(parts: list[Array], dtype: np.dtype[Any]) -> Array:
    return np.concatenate(parts).astype(dtype, copy=False) if parts else np.zeros(0, dtype)


def _rows(table: pa.Table) -> Iterator[Record]:
    layout = schema()
    typed = {name: table[name].cast(layout.field(name).type) for name in layout.names if name in table.column_names}
    fields = {name: typed[name].to_pylist() if name in typed else [None] * len(table) for name in FIELDS}
    for name in _TEXT:
        fields[name] = [None if text is None else msgspec.json.decode(text, type=FIELDS[name]) for text in fields[name]]
    for row in range(len(table)):
        found = {column.name: _values(typed[column.name][row], column) for column in TABLE if column.name in typed}
        for name, form in (fields["columns"][row] or {}).items():
            if name in table.column_names:
                found[name] = _values(table[name][row], own_column(name, form))
        columns = {name: values for name, values in found.items() if values is not None}
        if not {"token_ids", "loss_mask"} <= set(columns) or len({len(values) for values in columns.values()}) != 1:
            raise ValueError(f"row {row}: token_ids, loss_mask and the other columns must be of one length")
        yield Record(fields={name: values[row] for name, values in fields.items()}, columns=without_empty(columns))


def _values(cell: pa.ListScalar, column: ExportColumn) -> Cells | None:
    if not cell.is_valid:
        return None
    if column.ragged:
        lengths = cell.values.value_lengths().fill_null(0).to_numpy(zero_copy_only=False)
        flat = cell.values.flatten().to_numpy(zero_copy_only=False)
        return Ragged(column.array(flat), offsets_of(lengths))
    values, shape = cell.values, [len(cell.values)]
    for _ in range(column.trailing):
        flat = values.flatten()
        shape.append(len(flat) // max(len(values), 1))
        values = flat
    if column.kind != "float" and values.null_count:
        return None
    return column.array(values.to_numpy(zero_copy_only=False)).reshape(shape)


def _read(images: AssetStore, image: str, max_bytes: int) -> bytes | None:
    try:
        return images.get(image) if images.ref(image).num_bytes <= max_bytes else None
    except (AssetError, StorageError):
        return None  # a log with only the hash is better than none


# ------------------------------------------------------------------ to an object store


def upload_records(
    records: Iterable[Record],
    store: Any,
    key: str,
    *,
    images: AssetStore | None = None,
    attempts: int = 3,
    wait: Callable[[float], None] = time.sleep,
    temporary: Path | None = None,
) -> int:
    """Write records to `key` of an `obstore` store and return their number. Sends nothing if there are none.

    The file is first written to a temporary folder, so that its length is known and a retry can start over. The folder
    is always removed, also on errors and interrupts.

    >>> from obstore.store import MemoryStore
    >>> upload_records([], MemoryStore(), "tokens/step_1.parquet")
    0
    """
    with tempfile.TemporaryDirectory(prefix="penstock-", dir=temporary) as folder:
        path = Path(folder) / "records.parquet"
        count = records_to_parquet(records, path, images=images)
        if count:
            upload_file(path, store, key, attempts=attempts, wait=wait)
        return count


def upload_file(
    path: Path, store: Any, key: str, *, attempts: int = 3, wait: Callable[[float], None] = time.sleep
) -> None:
    """Send a file in parts of 8 MiB, one at a time. After a failure starts over, 2, 4, ... seconds later."""
    require("upload", "obstore")
    import obstore
    from obstore.exceptions import BaseError

    for attempt in range(1, attempts + 1):
        try:
            obstore.put(store, key, path, chunk_size=PART_BYTES, max_concurrency=1)
        except (BaseError, OSError) as error:
            if attempt == attempts:
                # The client's message may contain headers and addresses, so only its class is shown.
                raise StorageError(
                    f"{key}: {path.stat().st_size} bytes not stored after {attempts} attempts, the last ended with "
                    f"{type(error).__name__}; send it again"
                ) from None
            wait(2.0**attempt)
        else:
            return
