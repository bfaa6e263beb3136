"""One line of an export to a record, checked: strict JSON, the table's types, all columns of one length."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np

from penstock.arrays.columns import Array
from penstock.view.record import COLUMNS, FACTS, TABLE, Record, without_empty

_KINDS: dict[str, Any] = {"int": list[int | None], "bool": list[bool | None], "float": list[float | None]}
_DTYPES: dict[str, Any] = {"token_ids": np.uint32, "position_ids": np.int64, "weight_versions": np.int32}
_NEEDED = ("token_ids", "loss_mask")

_Line = msgspec.defstruct(
    "_Line",
    [
        ("token_ids", list[int]),
        ("loss_mask", list[bool]),
        *((c.name, _KINDS[c.kind] | None, None) for c in TABLE if c.name not in _NEEDED),
        *((name, kind | None, None) for name, kind in FACTS.items()),
    ],
)
_decoder = msgspec.json.Decoder(_Line)


class MalformedLine(ValueError):
    """A line that is not a record, with the reason."""


def parse_line(line: bytes) -> Record:
    """The record in a line; `MalformedLine` says what is wrong with it."""
    try:
        raw: Any = _decoder.decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise MalformedLine(str(error)) from None
    columns: dict[str, Array] = {}
    for name in COLUMNS:
        values = getattr(raw, name)
        found = None if values is None else _array(name, values)
        if found is None:
            continue
        if len(found) != len(raw.token_ids):
            raise MalformedLine(f"{name} has {len(found)} values for {len(raw.token_ids)} tokens")
        columns[name] = found
    return Record(facts={name: getattr(raw, name) for name in FACTS}, columns=without_empty(columns))


def _array(name: str, values: list[Any]) -> Array | None:
    kind = COLUMNS[name].kind
    if kind != "float" and None in values:
        return None
    if kind == "bool":
        return np.array(values, np.bool_)
    try:
        # numpy turns None into NaN. Numbers beyond float32 become infinite, which every reader of ours skips.
        with np.errstate(over="ignore"):
            return np.array(values, np.float32 if kind == "float" else _DTYPES[name])
    except (OverflowError, ValueError, TypeError) as error:
        raise MalformedLine(f"{name}: {error}") from None
