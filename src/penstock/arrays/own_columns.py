"""A run's own columns: known from their declaration, or inferred from their values.

A sample built with `columns={"turn_weights": [...]}` holds arrays, which have a dtype and a shape. Only a declaration
can say what fills a missing value; it is 0 until one is seen. Declare with a `Column` as the key in place of the name,
or with the `columns` of a plane or of `pack`. Own columns follow those of the table, sorted by name.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any, TypeAlias

import msgspec
import numpy as np

from penstock.arrays.coercion import NO_ARRAY, Values, as_lists, coerce_cells, not_an_array
from penstock.arrays.columns import COLUMNS, TOKEN_COLUMNS, TOPK, Array, Cells, Column, Description, Per
from penstock.arrays.ragged import Ragged
from penstock.errors import ConfigError, InvalidInput, shown

Own: TypeAlias = Mapping[str, Column]
"""Columns that are not in the table, by name, sorted."""
Given: TypeAlias = Mapping[str, Any] | Mapping[Column, Any] | Mapping[str | Column, Any]
"""Values by name, or by the column that declares them."""

NO_COLUMNS: Own = {}
_OF_BATCHES = ("position_ids", "sequence_lengths", "images", "sampling_mask_values", "sampling_mask_offsets")
_OF_TURNS = ("columns", "where", "sampled", "mask", "role")
_OF_TERMS = (
    *("inference_logprobs", "trainer_logprobs", "entropy", "mismatch_kl", "log_importance_ratio", "importance_ratio"),
    *("prob_delta", "loss", "is_masked", "is_masked_high", "is_masked_low"),
)
_OF_RECORDS = (
    *("sample_id", "group_id", "env_name", "run_id", "training_mode", "schema_version", "step", "export_step", "rank"),
    *("micro_step", "micro_sequence_idx", "export_sequence_idx", "staleness", "rule", "texts", "image_bytes"),
)
RESERVED = frozenset((*_OF_BATCHES, *_OF_TURNS, *_OF_TERMS, *_OF_RECORDS))
"""Names that micro-batches, tensors or export records already use for something else."""
_NAME = re.compile(r"[a-z][a-z0-9_]{0,63}")


def table_with(own: Own) -> Mapping[str, Column]:
    """Return the columns along tokens, in order: those of the table, then these."""
    return {**TOKEN_COLUMNS, **own} if own else TOKEN_COLUMNS


def check_name(name: object) -> str:
    """Return the name if an own column may have it. Raises ConfigError otherwise."""
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise ConfigError(f"column {name!r:.80}: a name has lower-case letters, digits and _, up to 64 of them")
    if name in COLUMNS or name in RESERVED:
        raise ConfigError(f"column {name!r}: the name is taken; give the column another one")
    return name


def declared(columns: Iterable[Column]) -> Own:
    """Return the declared columns by name. Raises ConfigError for names that collide."""
    found: dict[str, Column] = {}
    for column in columns:
        if not isinstance(column, Column):
            raise ConfigError(f"columns: a {type(column).__name__}; give penstock.Column objects")
        if check_name(column.name) in found:
            raise ConfigError(f"column {column.name!r}: declared twice; give each column its own name")
        found[column.name] = column
    for name in [name for name, column in found.items() if column.ragged]:
        for tensor in (f"{name}_values", f"{name}_offsets"):
            if tensor in found:
                raise ConfigError(
                    f"column {tensor!r}: {name!r} is ragged and becomes a tensor of that name; rename one"
                )
    return {name: found[name] for name in sorted(found)}


def own_of(described: Mapping[str, Description]) -> Own:
    """Return the described columns by name. Raises ConfigError for an invalid description."""
    return {name: Column.of(check_name(name), described[name]) for name in sorted(described)}


def teacher_topk(teacher: str) -> tuple[Column, Column]:
    """Return the columns for one of several teachers: its k most likely ids per token, and their log-probabilities.

    >>> [column.name for column in teacher_topk("math")]
    ['teacher_topk_ids_math', 'teacher_topk_logprobs_math']
    """
    ids, logprobs = (COLUMNS[name] for name in TOPK)
    return (
        msgspec.structs.replace(ids, name=check_name(f"{ids.name}_{teacher}")),
        msgspec.structs.replace(logprobs, name=check_name(f"{logprobs.name}_{teacher}")),
    )


def joined_own(parts: Iterable[Own], where: str) -> Own:
    """Merge the columns of all parts. Raises InvalidInput where two parts declare one column differently."""
    found: dict[str, Column] = {}
    for part in parts:
        for name, column in part.items():
            other = found.setdefault(name, column)
            if not other.is_like(column):
                raise InvalidInput(
                    f"{where}: column {name!r} is {words_for(other)} in one and {words_for(column)} in another; "
                    "declare it once"
                )
    return {name: found[name] for name in sorted(found)}


def words_for(column: Column) -> str:
    """Describe a column for error messages."""
    shape = "lists of " if column.ragged else f"[{', '.join('?' * column.trailing)}] of " if column.trailing else ""
    return f"{shape}{np.dtype(column.dtype).name} per {column.per}, fill {column.fill}"


def read_own(given: Given, known: Own, where: str) -> tuple[dict[str, Cells], Own]:
    """Read values given by name or by `Column`; `known` holds columns declared elsewhere."""
    cells: dict[str, Cells] = {}
    own: dict[str, Column] = {}
    if not isinstance(given, Mapping):
        raise InvalidInput(f"{where}.columns: {shown(given)}; give values by name, or by Column")
    for key, value in given.items():
        if value is None:
            continue
        try:
            name = check_name(key.name if isinstance(key, Column) else key)
        except ConfigError as error:
            raise InvalidInput(f"{where}: {error}") from None
        if name in own:
            raise InvalidInput(f"{where}.{name}: given twice; give it once")
        at = f"{where}.{name}"
        column = key if isinstance(key, Column) else known.get(name) or _seen_in(name, value, at)
        own[name], cells[name] = column, coerce_cells(column, value, at)
    return {name: cells[name] for name in sorted(cells)}, {name: own[name] for name in sorted(own)}


def _seen_in(name: str, value: Values, where: str) -> Column:
    """Infer the column from values without a declaration."""
    array = _array(value, where)
    if array is None or (array.ndim == 2 and array.shape[1] == 0):
        lists = as_lists(value, where)
        # Lists that are all empty have no dtype of their own: numpy says float64, but ids are what such lists hold.
        flat = lists.values if lists.values.size else lists.values.astype(np.int64)
        return _column(name, flat.dtype, where, ragged=True)
    if array.ndim > 3:
        raise InvalidInput(f"{where}: {array.ndim} dimensions; give one value per token, of up to two dimensions more")
    if array.ndim == 0:
        return _column(name, array.dtype, where, per="sample")
    return _column(name, array.dtype, where, trailing=array.ndim - 1)


def _array(value: Any, where: str) -> Array | None:
    """Return the value as an array, or None for lists of several lengths."""
    if isinstance(value, Ragged):
        return None
    try:
        with np.errstate(invalid="ignore"):
            array = np.asarray(value)
    except ValueError:  # numpy raises this for lists of different lengths
        return None
    except NO_ARRAY as error:
        raise not_an_array(error, where) from None
    has_lists = isinstance(value, list | tuple) and any(row is None or np.iterable(row) for row in value)
    return None if array.dtype == object and has_lists else array


def _column(
    name: str, dtype: np.dtype[np.generic], where: str, *, per: Per = "token", trailing: int = 0, ragged: bool = False
) -> Column:
    try:
        return Column(name, dtype=dtype.str, per=per, trailing=trailing, ragged=ragged)
    except ConfigError as error:
        raise InvalidInput(f"{where}: {error}") from None
