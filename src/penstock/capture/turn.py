"""A turn: the tokens one message added to a context, and the columns along them.

A turn holds only what it adds, so a rollout of sixty turns holds each token once. Log-probabilities are stored for the
sampled tokens only; a column that is constant along the turn is stored as one number; the mask is stored only if the
turn is partly sampled. Everything is copied once into read-only arrays of the declared dtype.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Unpack

import numpy as np
from numpy.typing import NDArray

from penstock.arrays import (
    COLUMNS,
    MAX_TEXT,
    NO_COLUMNS,
    TOKEN_COLUMNS,
    TOPK,
    Array,
    Cells,
    Column,
    Given,
    ImageSpan,
    Own,
    Ragged,
    Values,
    bit_view,
    check_kept,
    check_spans,
    coerce,
    coerce_lists,
    copied,
    first_bad,
    freeze,
    is_number,
    offsets_of,
    read_own,
    types_of,
)
from penstock.errors import InvalidInput, shown

if TYPE_CHECKING:
    from penstock.arrays import TurnColumns

TURN_COLUMNS: dict[str, Column] = {
    name: column
    for name, column in TOKEN_COLUMNS.items()
    if name not in ("token_ids", "loss_mask", "logprobs", "rewards")
}
"""What a turn may carry beside its tokens: one value per token, or one number for the turn."""


@dataclass(frozen=True, slots=True, init=False, eq=False, repr=False)
class Turn:
    """Tokens added to a context by one message; sampled by the model, or not.

    A turn is sampled when it has log-probabilities, a mask with a True in it, or `sampled=True`. `mask` says
    which of its tokens the model sampled: a chat template often puts tokens around them. Log-probabilities may
    be given for all tokens or for the sampled ones only. Other columns are given by name, as one value per
    token or one number for the turn: `temperatures`, `weight_versions`, `routed_experts`, `ce_weights`, ...
    `sampling_mask` is one list of ids per token, or per sampled token; `teacher_topk_ids` and `teacher_topk_logprobs`
    are [T, k], or have a row per sampled token. Columns that Penstock does not know go into `columns`, by name or by
    the `Column` that declares them.

    >>> prompt = Turn([5, 6, 7])
    >>> reply = Turn([1, 8, 9], mask=[False, True, True], logprobs=[-0.5, -0.25], temperatures=0.7)
    >>> prompt.sampled, reply.num_tokens, reply.num_sampled, reply.sampled_mask.tolist()
    (False, 3, 2, [False, True, True])
    """

    token_ids: NDArray[np.uint32]
    """[T]"""
    sampled: bool
    """True when a model call produced this turn."""
    mask: NDArray[np.bool_] | None
    """[T] which tokens were sampled; None when all were (or, for a turn that is not sampled, none)."""
    logprobs: NDArray[np.float32] | None
    """[num_sampled] of the sampler, for the sampled tokens in order; None when not recorded."""
    columns: Mapping[str, Cells]
    """Other columns: [T, ...], a `Ragged` with one list per token, or a scalar array for the turn."""
    own: Own
    """Declarations of the columns that are not in the table."""
    images: tuple[ImageSpan, ...]
    """Images this turn introduced; offsets count from the turn's first token."""
    role: str
    """system, user, assistant, tool, or empty."""

    def __init__(
        self,
        token_ids: Values,
        *,
        logprobs: Values | None = None,
        sampled: bool | None = None,
        mask: Values | None = None,
        images: Sequence[ImageSpan] = (),
        role: str = "",
        where: str = "turn",
        columns: Given = NO_COLUMNS,
        **known_columns: Unpack[TurnColumns],
    ) -> None:
        """`where` names this turn in errors."""
        ids = owned(coerce(COLUMNS["token_ids"], token_ids, f"{where}.token_ids"))
        marks = None if mask is None else _mask(mask, len(ids), where)
        if not isinstance(sampled, bool | np.bool_ | None):
            raise InvalidInput(f"{where}.sampled: {shown(sampled)}; must be True, False or None")
        if sampled is None:
            sampled = logprobs is not None or (marks is not None and bool(marks.any()))
        # Infer `sampled` from what was recorded, but never override a caller who contradicts it.
        if not sampled and (logprobs is not None or (marks is not None and marks.any())):
            raise InvalidInput(
                f"{where}.sampled: False, yet logprobs or mask say some tokens were; drop one of the two"
            )
        named: object = role
        if not isinstance(named, str) or len(named) > MAX_TEXT:
            raise InvalidInput(f"{where}.role: {str(named)[:40]!r}; must be a string of at most {MAX_TEXT} characters")
        # A mask that is all True says the same as `sampled`, and equal turns must compare and encode alike.
        keep_mask = sampled and marks is not None and not marks.all()
        put = object.__setattr__
        put(self, "token_ids", ids)
        put(self, "sampled", bool(sampled))
        put(self, "mask", marks if keep_mask else None)
        put(self, "logprobs", None if logprobs is None else _logprobs(logprobs, ids, marks, where))
        cells, own = read_own(columns, NO_COLUMNS, where) if columns else ({}, NO_COLUMNS)
        known = _columns(known_columns, ids, self.sampled_mask, images, where)
        put(self, "columns", {**known, **{name: _own(values, ids, where, name) for name, values in cells.items()}})
        put(self, "own", own)
        put(self, "images", tuple(images))
        put(self, "role", role)

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_sampled(self) -> int:
        if self.mask is not None:
            return int(np.count_nonzero(self.mask))
        return len(self.token_ids) if self.sampled else 0

    @property
    def sampled_mask(self) -> NDArray[np.bool_]:
        """[T] True where the model sampled the token."""
        return np.full(len(self.token_ids), self.sampled) if self.mask is None else self.mask

    def __repr__(self) -> str:
        extra = f", columns={list(self.columns)}" if self.columns else ""
        return f"Turn({self.num_tokens} tokens, {self.num_sampled} sampled, role={self.role!r}{extra})"


def owned(values: Array) -> Array:
    """Return a read-only copy, so that a turn does not keep a larger array of the caller's alive."""
    copy = np.array(values)
    copy.flags.writeable = False
    return copy


def _mask(mask: Values, count: int, where: str) -> NDArray[np.bool_]:
    marks = owned(coerce(COLUMNS["loss_mask"], mask, f"{where}.mask"))
    if len(marks) != count:
        raise InvalidInput(f"{where}.mask: {len(marks)} values for {count} tokens; give one per token")
    return marks


def _logprobs(logprobs: Values, ids: Array, marks: NDArray[np.bool_] | None, where: str) -> NDArray[np.float32]:
    values = coerce(COLUMNS["logprobs"], logprobs, f"{where}.logprobs")
    num_sampled = len(ids) if marks is None else int(np.count_nonzero(marks))
    if len(values) == len(ids) and marks is not None:
        # One value per token was given: drop those of tokens that were not sampled.
        values = values[marks]
    elif len(values) != num_sampled:
        raise InvalidInput(
            f"{where}.logprobs: {len(values)} values for {num_sampled} sampled of {len(ids)} tokens; "
            "record one per sampled token, or one per token"
        )
    bad = first_bad(COLUMNS["logprobs"], values)
    if bad is not None:
        raise InvalidInput(
            f"{where}.logprobs: sampled token {bad[0]} {bad[1]}; leave a token the model did not sample out of the mask"
        )
    return owned(values)


def _columns(
    given: Mapping[str, Any], ids: Array, sampled: NDArray[np.bool_], images: Sequence[ImageSpan], where: str
) -> dict[str, Cells]:
    unknown = given.keys() - TURN_COLUMNS.keys()
    if unknown:
        raise InvalidInput(f"{where}: unknown column {sorted(unknown)[0]!r}; a turn has {', '.join(TURN_COLUMNS)}")
    arrays = {
        name: _column(column, given[name], ids, sampled, where)
        for name, column in TURN_COLUMNS.items()
        if given.get(name) is not None
    }
    types = arrays.get("mm_token_type_ids")
    check_spans(images, len(ids), None if types is None else np.broadcast_to(types, len(ids)), where)
    if images and types is None:
        arrays["mm_token_type_ids"] = types_of(images, len(ids))
    return {name: freeze(copied(_one_number(values))) for name, values in arrays.items()}


def _own(values: Cells, ids: Array, where: str, name: str) -> Cells:
    """Check values of a column that Penstock does not know: one for the turn, or one per token."""
    if (isinstance(values, Ragged) or values.ndim) and len(values) != len(ids):
        raise InvalidInput(f"{where}.{name}: {len(values)} values for {len(ids)} tokens; give one per token")
    return freeze(copied(values))


def _lists(column: Column, value: Any, ids: Array, sampled: NDArray[np.bool_], where: str) -> Ragged:
    """Return one list per token. If given for the sampled tokens only, the others get empty ones."""
    lists = coerce_lists(column, value, f"{where}.{column.name}")
    num_sampled = int(np.count_nonzero(sampled))
    if len(lists) == num_sampled != len(ids):
        # Lists [7 9] [8] for mask 0 1 1 0 get lengths 0 2 1 0. The values stay; only the offsets change.
        lengths = np.zeros(len(ids), np.int64)
        lengths[sampled] = lists.lengths
        lists = Ragged(lists.values, offsets_of(lengths))
    if len(lists) != len(ids):
        raise InvalidInput(
            f"{where}.{column.name}: {len(lists)} lists for {num_sampled} sampled of {len(ids)} tokens; "
            "record one per sampled token, or one per token"
        )
    if column.name == "sampling_mask":
        check_kept(lists, ids, where)
    return lists


def _column(column: Column, value: Any, ids: Array, sampled: NDArray[np.bool_], where: str) -> Cells:
    if column.ragged:
        return _lists(column, value, ids, sampled, where)
    at = f"{where}.{column.name}"
    scalar = column.trailing == 0 and is_number(value)
    values = coerce(column, [value] if scalar else value, at)
    if column.name in TOPK and len(values) == np.count_nonzero(sampled) != len(ids):
        rows = np.full((len(ids), *values.shape[1:]), column.fill, column.numpy)
        rows[sampled] = values
        values = rows
    if not scalar and len(values) != len(sampled):
        raise InvalidInput(f"{at}: {len(values)} values for {len(sampled)} tokens; give one per token, or one number")
    # Teacher log-probabilities may be NaN on tokens that are never trained.
    checked = values[sampled] if column.nan == "untrained" and not scalar else values
    bad = first_bad(column, checked)
    if bad is not None:
        raise InvalidInput(f"{at}[{bad[0]}]: {bad[1]}")
    return values[0].reshape(()) if scalar else values


def _one_number(values: Cells) -> Cells:
    """Return a constant column as a scalar array. Bits are compared, so -0.0 and 0.0 stay different."""
    if isinstance(values, Ragged) or values.ndim != 1 or len(values) == 0:
        return values
    bits = bit_view(values) if values.dtype.kind == "f" else values
    return values[0].reshape(()) if bool((bits == bits[0]).all()) else values
