"""Gather the arrays of a rank's micro-batches: one pass per column, every token copied once.

All micro-batches of the rank plan are laid end to end; a column is one `np.concatenate` of views into the samples'
columns, with constant views where a sample lacks it and where padding stands, and each micro-batch is a slice of the
result. A gather index would cost more to build than all of the copying. One number per sample is repeated over the
sample's tokens: an advantage stands on every token, and `loss_mask` alone decides what is trained.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.arrays import (
    MODALITIES,
    MODE_WEIGHTS,
    NO_VERSION,
    WEIGHTS,
    Array,
    Cells,
    Column,
    ImageSpan,
    Samples,
    offsets_of,
    words_for,
)
from penstock.errors import InvalidInput
from penstock.packing.block_pool import BlockPool
from penstock.packing.fill_forest import fill_forest
from penstock.packing.forest import Forest
from penstock.packing.micro_batch import MicroBatch, Segments
from penstock.packing.rank_plan import RankPlan
from penstock.packing.row_layout import Layout
from penstock.packing.shaped import in_order, lists_of, rows_of

LONG_ENOUGH = 128
ALIGNMENT = 64
# What a dummy borrows from a sample; everything else in it is padding.
BORROWED = ("token_ids", "mm_token_type_ids")


def fill(
    samples: Samples, rank_plan: RankPlan, *, out: NDArray[np.uint8] | None = None, pool: BlockPool | None = None
) -> list[MicroBatch]:
    """The micro-batches of one rank, from all samples of the step or (`rank_plan.relative()`) from the rank's own.

    `out` is memory to fill, at least `bytes_needed(rank_plan)`; what was filled into it before is overwritten. Without
    it memory is taken from `pool`, or allocated, once for all columns: one large block is given huge pages, and
    touching it for the first time then costs a tenth.
    """
    if len(rank_plan.order) and int(rank_plan.order.max()) >= len(samples):
        raise InvalidInput(
            f"samples: {len(samples)} given, the rank_plan uses number {int(rank_plan.order.max())}; "
            "pass those it was planned for, or rank_plan.relative() with samples.take(rank_plan.needs)"
        )
    cut_short = rank_plan.cuts > samples.lengths[rank_plan.order]
    if cut_short.any():
        at = int(cut_short.argmax())
        row = int(rank_plan.order[at])
        raise InvalidInput(
            f"samples: number {row} has {int(samples.lengths[row])} tokens, the rank plan takes "
            f"{int(rank_plan.cuts[at])} of it; pass the samples it was planned for"
        )
    for name, column in samples.own.items():
        if name in rank_plan.own and not column.is_like(rank_plan.own[name]):
            raise InvalidInput(
                f"samples: column {name!r} is {words_for(column)}, the rank plan has {words_for(rank_plan.own[name])}; "
                "pass the samples it was planned for"
            )
    if len(rank_plan) == 0:
        return []
    needed, take = bytes_needed(rank_plan), (pool or BlockPool()).take
    if out is None:
        out = take(needed)
    elif len(out) < needed:
        raise InvalidInput(f"out: {len(out)} bytes; this rank plan needs {needed}")
    layout = Layout(samples, rank_plan, take)
    columns: dict[str, Array] = {}
    at = 0
    for name, dtype in _dtypes(rank_plan).items():
        end = at + layout.tokens[-1] * dtype.itemsize
        columns[name] = out[at:end].view(dtype)
        at = _aligned(end)
    for name, values in columns.items():
        if name == "position_ids":
            _positions(layout, values)
        else:
            _gather(layout, rank_plan.table[name], values)
    return _micro_batches(layout, columns)


def bytes_needed(rank_plan: RankPlan) -> int:
    """How much memory the columns of a rank plan take (routed experts and lists have their own)."""
    tokens = int(rank_plan.laid.sum())
    return sum(_aligned(tokens * dtype.itemsize) for dtype in _dtypes(rank_plan).values())


def _dtypes(rank_plan: RankPlan) -> dict[str, np.dtype[Any]]:
    """The columns in order. Positions are int64, because that is what models index with: no copy on the way there."""
    table = rank_plan.table
    gathered = {name: table[name].numpy for name in rank_plan.columns if _is_flat(table[name])}
    return {**gathered, "position_ids": np.dtype(np.int64)}


def _is_flat(column: Column) -> bool:
    """Whether a column has one value per token, so that memory for it can be set aside."""
    return not column.trailing and not column.ragged


def _aligned(offset: int) -> int:
    return -(-offset // ALIGNMENT) * ALIGNMENT


def _gather(layout: Layout, column: Column, out: Array) -> None:
    """One column of all micro-batches."""
    constants = _constants(layout, column)
    ragged = layout.samples.columns.get(column.name)
    if ragged is None or len(ragged) == 0:
        return _repeat(constants, layout.lengths, out)
    rows = layout.rows
    given = ragged.lengths[rows]
    takes = (layout.is_sample if column.name in BORROWED else layout.is_trained) & (given > 0)
    if column.per != "token":
        single = takes & (given == 1)
        constants[single] = ragged.values[ragged.offsets[rows[single]]]
        takes &= given > 1
    if not takes.any():
        return _repeat(constants, layout.lengths, out)
    values, starts = ragged.values, ragged.offsets[rows].tolist()
    views = [
        values[a : a + n] if take else np.full(n, constant)
        for a, n, take, constant in zip(starts, layout.lengths, takes.tolist(), constants, strict=True)
    ]
    np.concatenate(views, out=out)
    return None


def _constants(layout: Layout, column: Column) -> Array:
    """[segments] what stands in each segment that has nothing of its own in this column."""
    out = np.full(len(layout.rows), column.fill, column.numpy)
    if column.name in WEIGHTS:
        by_mode = {mode: weights[WEIGHTS.index(column.name)] for mode, weights in MODE_WEIGHTS.items()}
        out[:] = [by_mode.get(mode, column.pad) for mode in layout.text("mode")]
    out[~layout.is_trained] = layout.rank_plan.pad_id if column.name == "token_ids" else column.pad
    return out


def _repeat(values: Array, lengths: list[int], out: Array) -> None:
    """Each value as often as its length says."""
    if len(out) < LONG_ENOUGH * len(lengths):
        out[:] = np.repeat(values, lengths)
        return
    # For long segments one fill each is several times faster than np.repeat.
    at = 0
    for value, n in zip(values.tolist(), lengths, strict=True):
        out[at : at + n] = value
        at += n


def _positions(layout: Layout, out: Array) -> None:
    """Positions from 0 in every segment."""
    longest = np.arange(max(layout.lengths), dtype=out.dtype)
    np.concatenate([longest[:n] for n in layout.lengths], out=out)


def _micro_batches(layout: Layout, columns: dict[str, Array]) -> list[MicroBatch]:
    """Cut the micro-batches out of the columns; everything in them is a slice of something made once."""
    rank_plan, samples = layout.rank_plan, layout.samples
    text = {name: layout.text(name) for name in ("id", "group", "prompt", "env", "mode", "rollout", "run")}
    lengths = np.array(layout.lengths, np.int64)
    starts = np.repeat(np.array(layout.tokens[:-1], np.int64), np.diff(layout.segments))
    offsets = offsets_of(lengths)[:-1] - starts
    short, zeros = lengths.astype(np.int32), np.zeros(len(lengths), np.int64)
    versions = np.append(samples.policy_versions, NO_VERSION)[layout.rows]
    dummy_runs, is_forest = iter(rank_plan.dummy_runs), rank_plan.is_forest.tolist()
    out = []
    for m, (a, b) in enumerate(pairwise(layout.segments)):
        is_dummy = bool(rank_plan.dummy[m])
        held = int(layout.is_sample[a:b].sum())
        own = slice(a, a if is_dummy else a + held)
        parts = {name: values[layout.tokens[m] : layout.tokens[m + 1]] for name, values in columns.items()}
        parts = in_order(rank_plan, parts, lists_of(layout, a, b), rows_of(layout, m, a, b, nodes=not is_forest[m]))
        out.append(
            MicroBatch(
                columns=parts,
                sequence_lengths=short[a:b],
                segments=Segments(
                    ids=tuple(text["id"][own]),
                    groups=tuple(text["group"][own]),
                    prompts=tuple(text["prompt"][own]),
                    envs=tuple(text["env"][own]),
                    modes=tuple(text["mode"][own]),
                    rollouts=tuple(text["rollout"][own]),
                    policy_versions=versions[own],
                    source_offsets=zeros[own],
                    offsets=offsets[own],
                    lengths=lengths[own],
                ),
                images=_images(samples, layout.rows[a : a + held], lengths[a:b], offsets[a:b]),
                modality=MODALITIES[rank_plan.modality[m]],
                run=next(dummy_runs) if is_dummy else text["run"][a],
                is_dummy=is_dummy,
                forest=_forest(layout, m, parts) if is_forest[m] else None,
            )
        )
    return out


def _forest(layout: Layout, m: int, parts: dict[str, Cells]) -> Forest:
    """The forest of a micro-batch whose samples share tokens: they are all of its segments."""
    rank_plan, own = layout.rank_plan, slice(layout.segments[m], layout.segments[m + 1])
    planned = slice(int(rank_plan.starts[m]), int(rank_plan.starts[m + 1]))
    return fill_forest(
        layout.samples,
        layout.rows[own],
        np.array(layout.lengths[own], np.int64),
        rank_plan.shared[planned].astype(np.int64),
        parts,
        padded=int(rank_plan.padded[m]),
        pad_id=rank_plan.pad_id,
    )


def _images(
    samples: Samples, rows: NDArray[np.intp], lengths: NDArray[np.int64], offsets: NDArray[np.int64]
) -> tuple[ImageSpan, ...]:
    """The images of these samples that were not cut off, in the micro-batch's token space."""
    if samples.images is None:
        return ()
    return tuple(
        span.shifted(offset)
        for row, length, offset in zip(rows.tolist(), lengths.tolist(), offsets.tolist(), strict=False)
        for span in samples.images[row]
        if span.end <= length
    )
