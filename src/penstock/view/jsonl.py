"""JSONL: one record per line, strict JSON, null for what is not a number, floats as the shortest text that reads back.

Arrays are formatted by orjson straight from their memory, about 30 ns per float where a loop over Python floats takes
500 to 1,000. A column that holds one number, as advantages and rewards often do, is formatted once and repeated.
Facts go through the standard library, escaped to ASCII, so that no name can hold a line separator.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, BinaryIO

import numpy as np

from penstock.arrays.columns import Array
from penstock.extras import require
from penstock.view.record import Record, filled


class Jsonl:
    """Lines of JSON in `rank_<r>.jsonl`."""

    suffix = "jsonl"

    def __init__(self, file: BinaryIO) -> None:
        self._file = file

    def append(self, records: list[Record]) -> None:
        for record in records:
            self._file.writelines(encode_parts(record))

    def finish(self) -> None:
        """Nothing is held back."""


def encode_line(record: Record) -> bytes:
    """The record as one line."""
    return b"".join(encode_parts(record))


def encode_parts(record: Record) -> Iterator[bytes]:
    """The line in parts: joined, a long one would be memory that is mapped, touched once and given back."""
    require("token export", "orjson")
    import orjson

    yield json.dumps(record.facts, allow_nan=False, separators=(",", ":")).encode()[:-1]
    for name, values in filled(record).items():
        yield f',"{name}":'.encode()
        yield _encode_array(values, orjson)
    yield b"}\n"


def _encode_array(values: Array, orjson: Any) -> bytes:
    count = len(values)
    # Compared by bits, so that NaN equals itself.
    bits = values.view(np.uint32) if values.dtype == np.float32 else values
    if count > 1 and bits[0] == bits[-1] and (bits == bits[0]).all():
        one: bytes = orjson.dumps(values[:1], option=orjson.OPT_SERIALIZE_NUMPY)[1:-1]
        return b"[" + (one + b",") * (count - 1) + one + b"]"
    encoded: bytes = orjson.dumps(values, option=orjson.OPT_SERIALIZE_NUMPY)
    return encoded
