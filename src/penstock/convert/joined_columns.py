"""Columns along a branch from what its turns have of them: values end to end, and the fill where a turn has none."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from penstock.arrays import Array, Cells, Column, Own, Ragged, coerce_cells, joined, joined_own
from penstock.capture import Turn
from penstock.errors import InvalidInput


class TurnPart(Protocol):
    """The first `keep` tokens of a turn."""

    @property
    def turn(self) -> Turn: ...
    @property
    def keep(self) -> int: ...


def own_columns(parts: Sequence[TurnPart], declared: Own) -> dict[Column, Cells]:
    """The columns that Penstock does not know, as they are declared, or as the turns have them.

    One number of a turn stands for each of its tokens; of a column that is declared per sample all turns must say the
    same.
    """
    seen = [part.turn.own for part in parts if part.turn.own]
    known = {name: declared[name] for own in seen for name in own if name in declared}
    rest = joined_own(({n: _per_token(c) for n, c in own.items() if n not in known} for own in seen), "turns")
    return {column: along(column, parts) for column in (*known.values(), *rest.values())}


def _per_token(column: Column) -> Column:
    """What a number for a turn is along a branch."""
    if column.per != "sample":
        return column
    return Column(column.name, dtype=column.dtype, fill=column.fill, pad=column.pad)


def along(column: Column, parts: Sequence[TurnPart]) -> Cells:
    """One column along the branch."""
    if column.per == "sample":
        return _once(column, parts)
    shape: tuple[int, ...] = ()
    pieces: list[Cells | None] = []
    for part in parts:
        given = part.turn.columns.get(column.name)
        piece = None if given is None else _piece(column, given, part)
        if piece is not None and not column.ragged and part.turn.num_tokens:
            if shape and piece.shape[1:] != shape:
                raise InvalidInput(f"turns: {column.name} has shapes {shape} and {piece.shape[1:]}; give it one shape")
            shape = piece.shape[1:]
        pieces.append(piece)
    return joined(
        [
            _filled(column, part.keep, shape) if piece is None or not part.turn.num_tokens else piece
            for piece, part in zip(pieces, parts, strict=True)
        ]
    )


def _filled(column: Column, count: int, shape: tuple[int, ...]) -> Cells:
    return Ragged.empty(count, column.numpy) if column.ragged else np.full((count, *shape), column.fill, column.numpy)


def _piece(column: Column, given: Cells, part: TurnPart) -> Cells:
    once = not isinstance(given, Ragged) and given.ndim == 0
    values = coerce_cells(column, given.reshape(1) if once else given, f"turn.{column.name}")
    if not once:
        return values[: part.keep]
    repeated: Array = np.full(part.keep, values[0])
    return repeated


def _once(column: Column, parts: Sequence[TurnPart]) -> Array:
    """The number that the turns agree on."""
    given = [part.turn.columns[column.name] for part in parts if column.name in part.turn.columns]
    values = [coerce_cells(column, one, f"turn.{column.name}") for one in given]
    if any(value.tobytes() != values[0].tobytes() for value in values):
        raise InvalidInput(
            f"turns: {column.name} is {values[0]} in one and another in the next; it was declared per sample"
        )
    number: Array = values[0]
    return number
