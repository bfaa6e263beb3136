"""Convert what callers pass to what a sample holds: read-only arrays of the declared dtype, checked against the table.

Conversion never changes a value: one that does not fit its column raises an error that says where it is. An array that
already has the right dtype is not copied.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from penstock.arrays.columns import COLUMNS, MODES, TOKEN_COLUMNS, TOPK, Array, Cells, Column, allows_all, first_bad
from penstock.arrays.ragged import Ragged, freeze, offsets_of
from penstock.arrays.rollout import text_problem
from penstock.errors import InvalidInput, shown

Values: TypeAlias = Array | Ragged | Sequence[float] | Sequence[int] | Sequence[bool] | Sequence[Sequence[int]] | float
MAX_TEXT = 512
MAX_RUN_NAME = 200
MAX_EXTENT = 1 << 20
"""Bound on each dimension after the token axis. Readers of frames enforce the same bound."""
NO_ARRAY = (TypeError, OverflowError, RuntimeError)
"""What numpy raises for values that are no array. RuntimeError: a tensor that needs a gradient."""


def run_name_problem(name: str) -> str:
    """Return why a run cannot have this name, or "". Names are shown in terminals and become folder names.

    >>> run_name_problem("exp-7 é"), run_name_problem("../x"), run_name_problem("a\\x00")
    ('', "'../x'; a name has no / or \\\\, and is not . or ..", "'a\\\\x00'; a name has printable characters only")
    """
    if len(name) > MAX_RUN_NAME:
        return f"{name[:40]!r}...: {len(name)} characters; a name has at most {MAX_RUN_NAME}"
    if not name.isprintable():  # control characters, marks of writing direction, surrogates
        return f"{name!a}; a name has printable characters only"
    if name in (".", "..") or "/" in name or "\\" in name:
        return f"{name!r}; a name has no / or \\, and is not . or .."
    return ""


def check_text(text: Mapping[str, object], where: str) -> None:
    """Raise unless every text field is a short string without control characters, and the mode is known."""
    if _is_plain(text):
        return
    for name, value in text.items():
        if name == "rollout" and isinstance(value, str):
            problem = text_problem(value)
            if problem:
                raise InvalidInput(f"{where}.rollout: {problem}")
            continue
        if not isinstance(value, str) or len(value) > MAX_TEXT or (name == "id" and not value):
            raise InvalidInput(f"{where}.{name}: {str(value)[:40]!r}; must be a string of 1 to {MAX_TEXT} characters")
        if value and not (value.isascii() and value.isprintable()):
            _check_unicode(value, f"{where}.{name}")
    if text["mode"] not in MODES:
        raise InvalidInput(f"{where}.mode: {text['mode']!r}; must be one of {', '.join(MODES)}")


def _is_plain(text: Mapping[str, object]) -> bool:
    """Return whether all fields are valid for sure: the usual case, in one check of the joined text."""
    if not text.get("id") or text.get("rollout") or text["mode"] not in MODES:
        return False
    try:
        joined = "".join(text.values())  # type: ignore[arg-type]
    except TypeError:
        return False
    return len(joined) <= MAX_TEXT and joined.isascii() and joined.isprintable()


def _check_unicode(value: str, where: str) -> None:
    bad = next((c for c in value if ord(c) < 32 or 0x7F <= ord(c) < 0xA0 or 0xD800 <= ord(c) < 0xE000), None)
    if bad is not None:
        raise InvalidInput(f"{where}: holds the control character U+{ord(bad):04X}; remove it")


def is_number(value: object) -> bool:
    """Return whether a value is a single number rather than one per token. `np.ndim` raises for uneven lists."""
    return not isinstance(value, list | tuple) and np.ndim(value) == 0  # type: ignore[arg-type]


def coerce_columns(
    given: Mapping[str, Values | None], where: str, table: Mapping[str, Column] = TOKEN_COLUMNS
) -> dict[str, Cells]:
    """Return columns as validated read-only arrays, in table order."""
    columns = _present(tuple(given)) if table is TOKEN_COLUMNS else None
    if columns is None:
        columns = _checked_names(given, table, where)
    arrays: dict[str, Cells] = {}
    for column in columns:
        name = column.name
        value = given[name]
        if value is not None:
            ready = _ready_view(column, value)
            arrays[name] = coerce_cells(column, value, f"{where}.{name}") if ready is None else ready
    count = len(arrays["token_ids"]) if "token_ids" in arrays else 0
    if count == 0:
        raise InvalidInput(f"{where}.token_ids: empty; a sample has at least one token")
    mask = arrays.get("loss_mask")
    if mask is None:
        mask = arrays["loss_mask"] = coerce(COLUMNS["loss_mask"], np.zeros(count, np.bool_), where)
        arrays = {name: arrays[name] for name in table if name in arrays}
    for name, values in arrays.items():
        if name in _FREE and len(values) == count:
            continue
        _check_column(table[name], values, count, mask, where)
        if count == 1 and table[name].per == "either" and values.ndim == 1:
            # For a one-token sample, one value per token and one number look the same: keep the number only.
            arrays[name] = values.reshape(())
    if TOPK[0] in arrays or TOPK[1] in arrays:
        _check_topk(arrays, where)
    if "sampling_mask" in arrays:
        check_kept(arrays["sampling_mask"], arrays["token_ids"], where)
    if mask[0]:
        raise InvalidInput(f"{where}.loss_mask[0]: True; nothing predicts a first token, so it cannot be trained")
    return arrays


@lru_cache(maxsize=256)
def _present(names: tuple[str, ...]) -> tuple[Column, ...] | None:
    """Return the columns with these names in the order of `TOKEN_COLUMNS`, or None if one is unknown. Samples of a run
    are given the same columns again and again, and walking the whole table for each took as long as checking them."""
    given = set(names)
    return tuple(c for c in TOKEN_COLUMNS.values() if c.name in given) if given <= TOKEN_COLUMNS.keys() else None


def _checked_names(given: Mapping[str, object], table: Mapping[str, Column], where: str) -> tuple[Column, ...]:
    """Return the columns that are given, in the order of the table. Raises InvalidInput for an unknown name."""
    unknown = given.keys() - table.keys()
    if unknown:
        raise InvalidInput(
            f"{where}: unknown column {sorted(unknown)[0]!r}; known are {', '.join(TOKEN_COLUMNS)}; your own go into "
            "columns={...}"
        )
    return tuple(column for name, column in table.items() if name in given)


def _check_column(column: Column, values: Cells, count: int, mask: NDArray[np.bool_], where: str) -> None:
    scalar = column.per != "token" and values.ndim == 0
    if not scalar and len(values) != count:
        what = "lists" if column.ragged else "values"
        form = "one per token" if column.per == "token" else "one per token or a single number"
        raise InvalidInput(f"{where}.{column.name}: {len(values)} {what} for {count} tokens; give {form}, or omit it")
    if column.ragged:
        _check_lists(column, values, where)
        return
    bad = first_bad(column, values if values.ndim else values.reshape(1))
    where_trained = bad is not None and column.nan == "untrained" and not mask.all()
    if where_trained:
        bad = first_bad(column, values[mask])
    if bad is not None:
        index = int(np.flatnonzero(mask)[bad[0]]) if where_trained else bad[0]
        raise InvalidInput(f"{where}.{column.name}{'' if scalar else f'[{index}]'}: {bad[1]}")


def _check_topk(arrays: Mapping[str, Cells], where: str) -> None:
    shapes = {name: arrays[name].shape[1:] for name in TOPK if name in arrays}
    if shapes and (len(shapes) == 1 or len(set(shapes.values())) > 1):
        found = ", ".join(f"{name} of {shape[0]}" for name, shape in shapes.items())
        raise InvalidInput(f"{where}: {found} per token; give {' and '.join(TOPK)}, both with k values per token")


def _check_lists(column: Column, lists: Ragged, where: str) -> None:
    bad = first_bad(column, lists.values)
    if bad is not None:
        token = int(np.searchsorted(lists.offsets, bad[0], side="right")) - 1
        raise InvalidInput(f"{where}.{column.name}[{token}][{bad[0] - int(lists.offsets[token])}]: {bad[1]}")


def coerce_cells(column: Column, value: Values, where: str) -> Cells:
    """Coerce any column: to an array, or for a ragged column to a `Ragged` with one list per token."""
    return coerce_lists(column, value, where) if column.ragged else coerce(column, value, where)


def coerce_lists(column: Column, value: Values, where: str) -> Ragged:
    """Return one read-only list per token in the column's dtype. The ids of a sampling mask are sorted."""
    lists = as_lists(value, where)
    lists = Ragged(coerce(column, lists.values, where), lists.offsets)
    lists = ascending(lists) if column.name == "sampling_mask" else lists
    freeze(lists)
    return lists


def as_lists(value: Values, where: str) -> Ragged:
    """Build one list per token from a `Ragged`, a sequence of sequences (None = empty), or the rows of an array."""
    if isinstance(value, Ragged):
        return _checked_offsets(value, where)
    if isinstance(value, np.ndarray) and value.ndim == 2:
        return Ragged(value.reshape(-1), np.arange(len(value) + 1) * value.shape[1])
    try:
        rows = [() if row is None else row for row in value]  # type: ignore[union-attr]
        lengths = [len(row) for row in rows]  # type: ignore[arg-type]
        parts = [np.asarray(row) for row, length in zip(rows, lengths, strict=True) if length]
        values = np.concatenate(parts) if parts else np.zeros(0, np.int64)
    except (ValueError, *NO_ARRAY) as error:
        raise InvalidInput(f"{where}: not one list per token ({error}); give a list of lists, or a Ragged") from None
    return Ragged(values, offsets_of(lengths))


def _checked_offsets(lists: Ragged, where: str) -> Ragged:
    offsets, values = np.asarray(lists.offsets), np.asarray(lists.values)
    sound = offsets.ndim == 1 and len(offsets) > 0 and offsets.dtype.kind in "ui" and values.ndim == 1
    if not sound or int(offsets[0]) != 0 or int(offsets[-1]) != len(values) or (offsets[1:] < offsets[:-1]).any():
        raise InvalidInput(
            f"{where}: offsets {offsets.reshape(-1)[:4].tolist()}... for {values.size} values; they must be whole "
            "numbers that rise from 0 to the number of values"
        )
    return Ragged(values, offsets.astype(np.int64))


def not_an_array(error: Exception, where: str) -> InvalidInput:
    remedy = "give numbers of one kind; a tensor as tensor.detach().cpu(), a bfloat16 one as tensor.float()"
    return InvalidInput(f"{where}: not an array ({error}); {remedy}")


def coerce(column: Column, value: Values, where: str) -> Array:
    """Return the value as a read-only array of the column's dtype and rank. Raises rather than change a value."""
    ready = _ready_view(column, value)
    if ready is not None:
        return ready
    try:
        with np.errstate(invalid="ignore"):  # converting a signalling NaN is valid and must not warn
            raw = np.asarray(value)
    except (ValueError, *NO_ARRAY) as error:
        raise not_an_array(error, where) from None
    if raw.ndim == 0 and raw.dtype.kind not in "buif":
        raise InvalidInput(f"{where}: {shown(value)}; give a list or an array of numbers")
    _check_rank(column, raw, where)
    dtype = column.numpy
    if raw.size == 0:
        # An empty list is a float64 array to numpy, which an integer column would reject.
        raw = raw.astype(dtype)
    if dtype.kind == "b":
        raw = _as_bool(raw, where)
    elif dtype.kind in "ui":
        raw = _as_int(column, raw, where)
    elif raw.dtype.kind not in "fiu":
        raise InvalidInput(f"{where}: dtype {raw.dtype}; give floats")
    elif raw.dtype != dtype:
        raw = _as_float(raw, dtype, where)
    view = np.ascontiguousarray(raw).reshape(raw.shape).view()
    view.flags.writeable = False
    return view


_PLAIN = {name: column.numpy for name, column in TOKEN_COLUMNS.items() if not column.trailing and not column.ragged}
"""Dtypes of the columns that have one value per token."""
_FREE = frozenset(
    name for name, dtype in _PLAIN.items() if COLUMNS[name].per == "token" and allows_all(COLUMNS[name], dtype)
)
"""Those of them in which every value is valid."""


def _ready_view(column: Column, value: object) -> Array | None:
    """Return a read-only view of an array that needs no conversion, the usual case, or None."""
    # `is`, because comparing dtypes takes as long as the rest: numpy has one object for each of its own dtypes.
    if type(value) is not np.ndarray or value.dtype is not _PLAIN.get(column.name):
        return None
    if value.ndim != 1 or not value.flags.c_contiguous:
        return None
    view = value.view()  # making it read-only leaves the caller's array writable
    view.setflags(False)  # type: ignore[call-arg] # by position: by name it takes twice as long
    return view


def _check_rank(column: Column, raw: Array, where: str) -> None:
    rank = column.trailing + (column.per != "sample")
    if raw.dtype.kind not in "buif":
        raise InvalidInput(f"{where}: dtype {raw.dtype}; give numbers (mixed or too large values become objects)")
    if raw.ndim != rank and not (column.per == "either" and raw.ndim == 0):
        raise InvalidInput(f"{where}: {raw.ndim} dimensions; must have {rank}")
    if not all(0 < size < MAX_EXTENT for size in raw.shape[1:]):
        raise InvalidInput(f"{where}: shape {raw.shape}; must have from 1 to {MAX_EXTENT - 1} values along each axis")


def _as_bool(raw: Array, where: str) -> Array:
    if raw.dtype.kind == "b":
        return raw
    if raw.dtype.kind == "f":
        raise InvalidInput(f"{where}: dtype {raw.dtype}; a mask is boolean, or whole numbers 0 and 1")
    bad = (raw != 0) & (raw != 1)
    if bad.any():
        at = int(bad.argmax())
        raise InvalidInput(f"{where}[{at}]: {raw[at]}; a mask holds only 0 and 1")
    return raw.astype(np.bool_)


def _as_int(column: Column, raw: Array, where: str) -> Array:
    if raw.dtype.kind not in "ui":
        raise InvalidInput(f"{where}: dtype {raw.dtype}; give whole numbers")
    if raw.dtype in [np.dtype(d) for d in column.dtypes]:
        return raw
    low, high = (int(raw.min()), int(raw.max())) if raw.size else (0, 0)
    # The narrowest accepted dtype that holds all values: experts 0 to 127 are uint8, 0 to 300 uint16.
    for dtype in column.dtypes:
        limits = np.iinfo(dtype)
        if limits.min <= low and high <= limits.max:
            return raw.astype(dtype)
    limits = np.iinfo(column.dtypes[-1])
    bad = low if low < limits.min else high
    at = int(np.flatnonzero(raw.reshape(-1) == bad)[0])
    raise InvalidInput(f"{where}[{at}]: {bad}; must be from {limits.min} to {limits.max}")


def _as_float(raw: Array, dtype: np.dtype[Any], where: str) -> Array:
    with np.errstate(over="ignore", invalid="ignore"):
        narrow = raw.astype(dtype)
    if raw.dtype.kind == "f" and (np.isinf(narrow) & ~np.isinf(raw)).any():
        at = int(np.flatnonzero(np.isinf(narrow) & ~np.isinf(raw))[0])
        raise InvalidInput(f"{where}[{at}]: {float(raw.reshape(-1)[at]):g} is too large for {dtype.name}")
    return narrow


# ------------------------------------------------------------------ sampling masks
#
# For each sampled token the set of ids that the sampler kept, ascending, including the token itself. A sampler with
# top-p, top-k or min-p draws from a part of the vocabulary, and its log-probabilities are normalized over that part. A
# trainer that normalizes over the full vocabulary compares different numbers. With the set it can do what the sampler
# did. An empty list means that all ids were kept, or that the set was not recorded.


def ascending(lists: Ragged) -> Ragged:
    """Sort the ids of each set.

    >>> ascending(Ragged.of_lists([[9, 7], [], [8]])).tolist()
    [[7, 9], [], [8]]
    """
    if not _falls(lists).any():
        return lists
    # Sort all sets at once by the key token << 32 | id: (0, 9) (0, 7) (2, 8) becomes (0, 7) (0, 9) (2, 8). Ids have 32
    # bits, so the low half of the key is the id again.
    token = np.repeat(np.arange(len(lists), dtype=np.uint64), lists.lengths)
    keys = np.sort(token << np.uint64(32) | lists.values.astype(np.uint64))
    return Ragged(keys.astype(np.uint32), lists.offsets)


def check_kept(kept: Ragged, token_ids: NDArray[np.uint32], where: str) -> None:
    """Raise InvalidInput unless every set ascends without repeats and contains the token that was drawn from it."""
    found = first_bad_set(kept, token_ids)
    if found is not None:
        raise InvalidInput(f"{where}.sampling_mask[{found[0]}]: {found[1]}")


def first_bad_set(kept: Ragged, token_ids: NDArray[np.uint32]) -> tuple[int, str] | None:
    """Return the first token with an invalid set and the reason, or None when all are valid."""
    repeats = np.flatnonzero(_falls(kept, strictly=False))
    if len(repeats):
        token = int(np.searchsorted(kept.offsets, repeats[0], side="right")) - 1
        return token, f"id {int(kept.values[repeats[0]])} twice or out of order; a set holds each id once, ascending"
    lengths = kept.lengths
    hits = kept.values == np.repeat(token_ids, lengths)
    if int(np.count_nonzero(hits)) == int(np.count_nonzero(lengths)):
        return None  # no set has more than one hit, so every set that is not empty has one
    hit = np.zeros(len(kept), np.bool_)
    hit[np.searchsorted(kept.offsets, np.flatnonzero(hits), side="right") - 1] = True
    token = int(np.argmax((lengths > 0) & ~hit))
    return token, (
        f"{int(lengths[token])} ids without {int(token_ids[token])}, the token that was sampled there; record the set "
        "that the token was drawn from, or an empty one"
    )


def _falls(lists: Ragged, *, strictly: bool = True) -> NDArray[np.bool_]:
    """Return [N], where a value is smaller than the one before it in its list, or equal with `strictly=False`."""
    values = lists.values
    falls = np.zeros(len(values), np.bool_)
    (np.less if strictly else np.less_equal)(values[1:], values[:-1], out=falls[1:])
    starts = lists.offsets[:-1]
    falls[starts[starts < len(values)]] = False
    return falls
