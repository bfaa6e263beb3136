"""The columns of a micro-batch that are no plain array along its tokens: rows of a fixed shape, and lists.

Every micro-batch of a step has them, in the shape that the step has, whether or not its samples do; only samples with
and without routed experts are in micro-batches of their own.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from penstock.arrays import APART, Array, Cells, Column, Ragged, copied, joined
from penstock.errors import InvalidInput
from penstock.packing.rank_plan import RankPlan
from penstock.packing.row_layout import PADDING, Layout


def in_order(rank_plan: RankPlan, *parts: dict[str, Cells]) -> dict[str, Cells]:
    """The columns of a micro-batch in table order, positions last."""
    if not any(parts[1:]):
        return parts[0]
    every = {name: values for part in parts for name, values in part.items()}
    return {name: every[name] for name in (*rank_plan.table, "position_ids") if name in every}


def lists_of(layout: Layout, a: int, b: int) -> dict[str, Ragged]:
    """The lists of segments a to b; those of padding, of dummies and of samples that have none are empty."""
    found: dict[str, Ragged] = {}
    table = layout.rank_plan.table
    for column in (table[name] for name in layout.rank_plan.columns if table[name].ragged):
        given = layout.samples.columns.get(column.name)
        pieces = []
        for segment in range(a, b):
            row, n = int(layout.rows[segment]), layout.lengths[segment]
            own = given[row] if given is not None and layout.is_trained[segment] else ()
            pieces.append(own[:n] if len(own) else Ragged.empty(n, column.numpy))
        found[column.name] = joined(pieces) if len(pieces) > 1 else copied(pieces[0])
    return found


def rows_of(layout: Layout, m: int, a: int, b: int, *, nodes: bool) -> dict[str, Array]:
    """The rows of micro-batch m, which has segments a to b; without `nodes` not those that stand in its forest."""
    rank_plan = layout.rank_plan
    table, found = rank_plan.table, {}
    for column in (table[name] for name in rank_plan.columns if table[name].trailing):
        if column.per_node and not nodes:
            continue
        given = layout.samples.columns.get(column.name)
        own = layout.rows[a:b][layout.is_trained[a:b]]
        has = np.zeros(0, np.bool_) if given is None else given.lengths[own] > 0
        shape = rank_plan.shapes.get(column.name)
        if column.name == APART and not rank_plan.dummy[m]:
            if not has.any():
                continue
            if not has.all():
                raise InvalidInput(
                    f"samples: one has no {column.name} and others of its micro-batch have; plan them apart"
                )
        if shape is None and not has.any():
            continue  # planned by a version that did not say
        found[column.name] = _joined(layout, column, given if has.any() else None, shape, m)
    return found


def _joined(
    layout: Layout, column: Column, given: Ragged | None, shape: tuple[str, tuple[int, ...]] | None, m: int
) -> Array:
    """The rows of micro-batch m."""
    dtype, sizes = shape or ("", ())
    if given is not None:
        seen = given.dtype.str, given.trailing
        if shape is not None and seen != (dtype, tuple(sizes)) and column.name != APART:
            raise InvalidInput(
                f"samples: {column.name} is {seen}, the rank plan has {shape}; pass those it was planned for"
            )
        dtype, sizes = seen
    views: list[Array] = []
    for segment in range(layout.segments[m], layout.segments[m + 1]):
        row, n = int(layout.rows[segment]), layout.lengths[segment]
        trained = bool(layout.is_trained[segment])
        if given is not None and trained and given.offsets[row + 1] > given.offsets[row]:
            views += _first(given.pieces(row), n)
        else:
            views.append(np.full((n, *sizes), column.fill if trained and row != PADDING else column.pad, dtype))
    return np.concatenate(views, out=layout.room(column.name, m, dtype, tuple(sizes)))


def _first(pieces: Sequence[Array], n: int) -> Iterator[Array]:
    """The first `n` tokens of a row."""
    for piece in pieces:
        yield piece[:n]
        n -= len(piece)
        if n <= 0:
            return
