"""Read sampling masks: the ids that a sampler kept for each token it drew, in the shapes that servers return.

    token_ids, offsets                     vLLM in the same process: set i is token_ids[offsets[i] : offsets[i + 1]]
    ids, counts                            verifiers: sets end to end, and how many ids each has
    [[101, 55], [202], ...]                servers over HTTP: a list per token, null where nothing was left out
    top_p_token_ids, top_p_token_offsets   slime: two fields of the record itself, or with `rollout_` before them

Sets are given per sampled token, in order. An empty one means that all ids were kept, or that the set was not recorded.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from penstock.arrays import COLUMNS, Array, Ragged, coerce, offsets_of
from penstock.capture.records import field_of, numbers_of
from penstock.errors import InvalidInput

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
