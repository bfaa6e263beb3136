"""Read what inference servers report of each token beside its id: the experts it went to, and its sampling mask.

Router replay. No forward pass follows the last sampled token, so a server returns rows for all positions but the last.
The next step of the conversation begins its rows one position earlier and supplies it. If there is none, the row stays
zero. `start` is the position of the first row: servers leave out what an earlier step already had.

    step 0   prompt 3 tokens, completion 2    rows for positions 0 1 2 3, none for 4
    step 1   prompt 7 tokens (5 + 2 new)      rows from start = 4: position 4 is supplied here

Sampling masks: the ids that a sampler kept for each token it drew, in the shapes that servers return.

    token_ids, offsets                     vLLM in the same process: set i is token_ids[offsets[i] : offsets[i + 1]]
    ids, counts                            verifiers: sets end to end, and how many ids each has
    [[101, 55], [202], ...]                servers over HTTP: a list per token, null where nothing was left out
    top_p_token_ids, top_p_token_offsets   slime: two fields of the record itself, or with `rollout_` before them

Sets are given per sampled token, in order. An empty one means that all ids were kept, or that the set was not recorded.
"""

from __future__ import annotations

import base64
import binascii
import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from penstock.arrays import COLUMNS, Array, Ragged, coerce, offsets_of
from penstock.capture.records import ABSENT, field_of, numbers_of
from penstock.errors import InvalidInput

# ------------------------------------------------------------------ experts


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


# ------------------------------------------------------------------ sampling masks


_FLAT = (("token_ids", "offsets"), ("ids", "counts"))
_FIELDS = ("top_p_token_ids", "top_p_token_offsets")


def sampling_mask_of(record: Any, where: str) -> Ragged | None:
    """Return the sampling mask of a response, step or message, wherever its producer puts it, or None.

    >>> sampling_mask_of({"sampling_mask": {"token_ids": [7, 9, 8], "offsets": [0, 2, 2, 3]}}, "step").tolist()
    [[7, 9], [], [8]]
    """
    given = field_of(record, "sampling_mask")
    if given is not None:
        return read_sampling_mask(given, f"{where}.sampling_mask") or None
    for prefix in ("", "rollout_"):
        ids, offsets = (field_of(record, prefix + name) for name in _FIELDS)
        if ids is not None or offsets is not None:
            return _by_offsets(ids, offsets, f"{where}.{prefix}{_FIELDS[0]}")
    return None


def read_sampling_mask(mask: Any, where: str) -> Ragged:
    """Return one set per token, from any of the shapes that one value may have."""
    if isinstance(mask, Ragged):
        return mask
    for ids, bounds in _FLAT:
        if field_of(mask, bounds) is not None:
            read = _by_offsets if bounds == "offsets" else by_counts
            return read(field_of(mask, ids), field_of(mask, bounds), f"{where}.{ids}")
    if not isinstance(mask, list | tuple | np.ndarray) or (isinstance(mask, np.ndarray) and mask.ndim != 2):
        raise InvalidInput(
            f"{where}: a {type(mask).__name__}; must be a list of ids per token, or ids with offsets or counts"
        )
    rows = [_ids([] if row is None else row, f"{where}[{i}]") for i, row in enumerate(mask)]
    return Ragged(np.concatenate([np.zeros(0, np.uint32), *rows]), offsets_of([len(row) for row in rows]))


def _by_offsets(ids: Any, offsets: Any, where: str) -> Ragged:
    flat, bounds = _ids(ids, where), _integers(offsets, f"{where} offsets")
    if len(bounds) == 0 or int(bounds[0]) != 0 or int(bounds[-1]) != len(flat) or (np.diff(bounds) < 0).any():
        raise InvalidInput(
            f"{where}: {len(flat)} ids with offsets {bounds[:3].tolist()}...{bounds[-1:].tolist()}; they must rise "
            "from 0 to the number of ids"
        )
    return Ragged(flat, bounds)


def by_counts(ids: Any, counts: Any, where: str) -> Ragged:
    """Return lists of ids that are given end to end, with the length of each."""
    flat, sizes = _ids(ids, where), _integers(counts, f"{where} counts")
    if (sizes < 0).any() or int(sizes.sum()) != len(flat):
        raise InvalidInput(f"{where}: {len(flat)} ids for counts that add up to {int(sizes.sum())}; must be as many")
    return Ragged(flat, offsets_of(sizes))


def _ids(values: Any, where: str) -> Array:
    if values is None:
        raise InvalidInput(f"{where}: missing beside its offsets; give both, or neither")
    return coerce(COLUMNS["token_ids"], numbers_of(values, where), where)


def _integers(values: Any, where: str) -> Array:
    if values is None:
        raise InvalidInput(f"{where}: missing; give ids and offsets, or neither")
    try:
        found = np.asarray(numbers_of(values, where))
    except ValueError:  # numpy raises this for lists of different lengths
        found = np.zeros((0, 0))
    if found.ndim != 1 or (found.size and found.dtype.kind not in "iu"):
        raise InvalidInput(f"{where}: {found.ndim} dimensions of {found.dtype}; must be a list of whole numbers")
    return found.astype(np.int64)
