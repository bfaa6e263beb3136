"""Router replay: which experts each token went to, as inference servers report it, with one row missing.

No forward pass follows the last sampled token, so a server returns rows for all positions but the last. The next step
of the conversation begins its rows one position earlier and supplies it. If there is none, the row stays zero. `start`
is the position of the first row: servers leave out what an earlier step already had.

    step 0   prompt 3 tokens, completion 2    rows for positions 0 1 2 3, none for 4
    step 1   prompt 7 tokens (5 + 2 new)      rows from start = 4: position 4 is supplied here
"""

from __future__ import annotations

import base64
import binascii
import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from penstock.arrays import COLUMNS, Array, coerce
from penstock.capture.records import ABSENT, field_of
from penstock.errors import InvalidInput

_DTYPES = ("uint8", "uint16", "int16", "int32")


@dataclass(frozen=True, slots=True)
class Routing:
    """Rows of experts for the positions `start` to `stop` of one step's prompt and completion."""

    values: Array
    """[rows, layers, top_k]"""
    start: int

    @property
    def stop(self) -> int:
        return self.start + len(self.values)

    def rows(self, start: int, stop: int) -> Array:
        """Return the rows of some positions; a zero row for the one after the last."""
        known = self.values[start - self.start : stop - self.start]
        short = (stop - start) - len(known)
        assert 0 <= short <= 1
        return np.concatenate([known, np.zeros((short, *known.shape[1:]), known.dtype)]) if short else known


def read_routing(payload: Any, where: str) -> Routing | None:
    """Read `{data, shape, start, dtype}` with base64 or raw bytes, or an array of all rows."""
    if payload is None:
        return None
    if isinstance(payload, np.ndarray):
        return Routing(coerce(COLUMNS["routed_experts"], payload, where), 0)
    start = field_of(payload, "start", 0) or 0
    if type(start) is not int or start < 0:
        raise InvalidInput(f"{where}.start: {start!r}; must be a position from 0 up")
    return Routing(coerce(COLUMNS["routed_experts"], _array(payload, where), where), start)


def _array(payload: Any, where: str) -> Array:
    shape, dtype = field_of(payload, "shape", ABSENT), field_of(payload, "dtype") or "uint8"
    if str(dtype) not in _DTYPES:
        raise InvalidInput(f"{where}.dtype: {dtype!r}; must be one of {', '.join(_DTYPES)}")
    if not isinstance(shape, list | tuple) or len(shape) != 3 or not all(type(n) is int and n >= 0 for n in shape):
        raise InvalidInput(f"{where}.shape: {shape!r}; must be [rows, layers, top_k]")
    size = math.prod(shape) * np.dtype(str(dtype)).itemsize
    data = _bytes(field_of(payload, "data", ABSENT), size, where)
    if len(data) != size:
        raise InvalidInput(f"{where}.data: {len(data)} bytes for shape {list(shape)} of {dtype}; must be {size}")
    return np.frombuffer(data, str(dtype)).reshape(shape)


def _bytes(data: Any, size: int, where: str) -> bytes:
    if isinstance(data, bytes | bytearray | memoryview) and len(data) == size:
        return bytes(data)
    if not isinstance(data, str | bytes | bytearray):
        raise InvalidInput(f"{where}.data: {type(data).__name__}; must be base64 text or the bytes themselves")
    try:
        return base64.b64decode(data, validate=True)
    except (binascii.Error, ValueError):
        raise InvalidInput(f"{where}.data: neither {size} bytes nor base64") from None
