"""Write and read JSONL: one record per line, strict JSON, null for NaN.

Floats are written as the shortest text that reads back to the same value. Arrays are formatted by orjson straight from
their memory, about 30 ns per float where a loop over Python floats takes 500 to 1,000. A column that holds one number,
as advantages and rewards often do, is formatted once and repeated. Other fields go through the standard library,
escaped to ASCII: no name can contain a line separator. Reading checks every line for the types of the table and
columns of equal length.
"""

from __future__ import annotations

import json
import types
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, BinaryIO

import msgspec
import numpy as np

from penstock.arrays import Cells, Ragged
from penstock.errors import InvalidInput
from penstock.extras import require
from penstock.view.record import FIELDS, TABLE, ExportColumn, Record, filled, without_empty


class Jsonl:
    """Lines of JSON in `rank_<r>.jsonl`."""

    suffix = "jsonl"
    needs = "orjson"

    def __init__(self, file: BinaryIO) -> None:
        self._file = file

    def append(self, records: list[Record]) -> None:
        for record in records:
            self._file.writelines(encode_parts(record))

    def finish(self) -> None:
        """Nothing is buffered."""


def encode_line(record: Record) -> bytes:
    return b"".join(encode_parts(record))


def encode_parts(record: Record) -> Iterator[bytes]:
    """Yield a line in parts. Joining a long one would map memory, touch it once and free it."""
    require("token export", "orjson")
    import orjson

    yield json.dumps(record.fields, allow_nan=False, separators=(",", ":")).encode()[:-1]
    for name, values in filled(record).items():
        yield f',"{name}":'.encode()
        yield _encode_cells(values, orjson)
    yield b"}\n"


def _encode_cells(values: Cells, orjson: Any) -> bytes:
    if isinstance(values, Ragged):
        # A list of Python numbers: orjson takes 0.5 us for each small array, more than for the numbers in it.
        lists: bytes = orjson.dumps(values.tolist())
        return lists
    count = len(values)
    # Compared by bits, so that NaN equals itself.
    bits = values.view(np.uint32) if values.dtype == np.float32 else values
    if count > 1 and values.ndim == 1 and bits[0] == bits[-1] and (bits == bits[0]).all():
        one: bytes = orjson.dumps(values[:1], option=orjson.OPT_SERIALIZE_NUMPY)[1:-1]
        return b"[" + (one + b",") * (count - 1) + one + b"]"
    encoded: bytes = orjson.dumps(values, option=orjson.OPT_SERIALIZE_NUMPY)
    return encoded


class MalformedLine(ValueError):
    """A line that is not a record, with the reason."""


def parse_line(line: bytes) -> Record:
    """Parse a record. Raises `MalformedLine` with the reason."""
    try:
        raw: Any = _decoder.decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise MalformedLine(str(error)) from None
    columns: dict[str, Cells] = {}
    for column in TABLE:
        values = getattr(raw, column.name)
        found = None if values is None else _array(column, values)
        if found is None:
            continue
        if len(found) != len(raw.token_ids):
            raise MalformedLine(f"{column.name} has {len(found)} values for {len(raw.token_ids)} tokens")
        columns[column.name] = found
    record = Record(fields={name: getattr(raw, name) for name in FIELDS}, columns=columns)
    return replace(record, columns=without_empty(columns | _own(line, record)))


def _own(line: bytes, record: Record) -> dict[str, Cells]:
    """Return the run's own columns."""
    if not record.fields["columns"]:
        return {}
    try:
        own, raw = record.own, msgspec.json.decode(line)
        found = {name: _array(column, raw[name]) for name, column in own.items() if raw.get(name) is not None}
    except (InvalidInput, TypeError, msgspec.DecodeError) as error:
        raise MalformedLine(str(error)) from None
    for name, values in found.items():
        rank = 1 if values is None or isinstance(values, Ragged) else values.ndim
        if values is not None and (rank != own[name].trailing + 1 or len(values) != record.num_tokens):
            raise MalformedLine(f"{name}: not one value for each of {record.num_tokens} tokens")
    return {name: values for name, values in found.items() if values is not None}


def _array(column: ExportColumn, values: list[Any]) -> Cells | None:
    if column.kind != "float" and None in values:
        return None
    try:
        # numpy turns None into NaN. Numbers beyond float32 become infinite, which our readers skip.
        with np.errstate(over="ignore", invalid="ignore"):
            return column.cells(values)
    except (OverflowError, ValueError, TypeError) as error:
        raise MalformedLine(f"{column.name}: {error}") from None


_KINDS: dict[str, Any] = {"int": int, "bool": bool, "float": float | None}
_NEEDED = ("token_ids", "loss_mask")


def _list_of(column: ExportColumn) -> Any:
    """Return the type of a column in a line: a list along the tokens, of values or nested lists, null where absent."""
    kind = _KINDS[column.kind]
    for _ in range(column.depth):
        kind = _list(kind)
    return _list(kind if column.name in _NEEDED else kind | None)


def _list(of: Any) -> Any:
    return types.GenericAlias(list, (of,))


_Line = msgspec.defstruct(
    "_Line",
    [
        *((c.name, _list_of(c)) for c in TABLE if c.name in _NEEDED),
        *((c.name, _list_of(c) | None, None) for c in TABLE if c.name not in _NEEDED),
        *((name, kind | None, None) for name, kind in FIELDS.items()),
    ],
)
_decoder = msgspec.json.Decoder(_Line)
