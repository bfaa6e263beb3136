"""Fill the arrays of a rank's micro-batches: one pass per column, every token copied once.

All micro-batches of the rank plan are laid end to end. A column is one `np.concatenate` of views into the samples'
columns, with constant views for missing values and padding, and each micro-batch is a slice of the result. Building a
gather index would cost more than all of the copying. One number per sample is repeated over the sample's tokens: an
advantage is on every token, and `loss_mask` alone decides what is trained.

Columns that are not one value per token (rows of a fixed shape, and lists) are filled per micro-batch. Every
micro-batch of a step has them, in the step's shape, whether or not its samples do; only samples with and without routed
experts are in separate micro-batches.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.arrays import (
    APART,
    MODALITIES,
    MODE_WEIGHTS,
    NO_VERSION,
    WEIGHTS,
    Array,
    Cells,
    Column,
    ImageSpan,
    Ragged,
    Samples,
    copied,
    joined,
    offsets_of,
    words_for,
)
from penstock.errors import InvalidInput
from penstock.packing.forest import Forest, fill_forest
from penstock.packing.micro_batch import MicroBatch, Segments
from penstock.packing.rank_plan import RankPlan

LONG_ENOUGH = 128
"""Average tokens per segment from which one fill per segment is faster than `np.repeat`."""
ALIGNMENT = 64
"""Columns start at multiples of this many bytes: a cache line."""
BORROWED = ("token_ids", "mm_token_type_ids")
"""Columns that a dummy borrows from a sample. Its other columns are padding."""
PADDING = -1
"""The sample number of a padding segment."""


class _Layout:
    """The positions of tokens and segments when the micro-batches of a rank plan are laid end to end."""

    def __init__(self, samples: Samples, rank_plan: RankPlan, take: Callable[[int], NDArray[np.uint8]]) -> None:
        """`take` allocates memory of a given size."""
        self.samples, self.rank_plan, self._take = samples, rank_plan, take
        self._rows: dict[tuple[str, str, tuple[int, ...]], Array] = {}
        self.tokens = offsets_of(rank_plan.laid).tolist()
        """[micro_batches + 1] first token of each micro-batch."""
        self.segments = [0]
        """[micro_batches + 1] first segment of each micro-batch."""
        rows: list[int] = []
        lengths: list[int] = []
        borrowed: list[int] = []
        order, cuts, dummy = rank_plan.order.tolist(), rank_plan.cuts.tolist(), rank_plan.dummy.tolist()
        for m, (a, b) in enumerate(pairwise(rank_plan.starts.tolist())):
            if dummy[m]:
                borrowed += range(len(rows), len(rows) + b - a)
            rows += order[a:b]
            lengths += cuts[a:b]
            padding = self.tokens[m + 1] - self.tokens[m] - sum(cuts[a:b])
            if padding:
                rows.append(PADDING)
                lengths.append(padding)
            self.segments.append(len(rows))
        self.lengths = lengths
        """[segments] tokens of each."""
        self.rows = np.array(rows, np.intp)
        """[segments] the sample of each, or PADDING."""
        self.is_sample = self.rows != PADDING
        """[segments] False for padding."""
        self.is_trained = self.is_sample.copy()
        """[segments] False for padding and for what a dummy borrows."""
        self.is_trained[borrowed] = False

    def room(self, name: str, m: int, dtype: str, shape: tuple[int, ...]) -> Array:
        """Return [tokens, *shape], where the rows of micro-batch m go, for a column with trailing dimensions."""
        key = (name, dtype, shape)
        if key not in self._rows:
            size = self.tokens[-1] * math.prod(shape) * np.dtype(dtype).itemsize
            self._rows[key] = self._take(size).view(dtype).reshape(self.tokens[-1], *shape)
        return self._rows[key][self.tokens[m] : self.tokens[m + 1]]

    def text(self, name: str) -> list[str]:
        """Return [segments], each sample's text (id, group, ...); empty for padding."""
        values = (*self.samples.text[name], "")  # PADDING is -1, which indexes the last entry
        return [values[row] for row in self.rows.tolist()]


def fill(
    samples: Samples, rank_plan: RankPlan, *, out: NDArray[np.uint8] | None = None, pool: BlockPool | None = None
) -> list[MicroBatch]:
    """Return the micro-batches of one rank, from all samples of the step or from the rank's own (`relative()`).

    `out` is memory to fill, at least `bytes_needed(rank_plan)`; its old content is overwritten. Without it, memory
    comes from `pool` or is allocated, once for all columns: a large block gets huge pages, which makes touching it for
    the first time ten times cheaper.
    """
    if len(rank_plan.order) and int(rank_plan.order.max()) >= len(samples):
        raise InvalidInput(
            f"samples: {len(samples)} given, the rank plan uses number {int(rank_plan.order.max())}; "
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
    layout = _Layout(samples, rank_plan, take)
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
    if rank_plan.oldest_version > 0:
        _mask_stale(layout, columns)
    return _micro_batches(layout, columns)


def bytes_needed(rank_plan: RankPlan) -> int:
    """Return how much memory the columns of a rank plan take (routed experts and lists have their own)."""
    tokens = int(rank_plan.laid.sum())
    return sum(_aligned(tokens * dtype.itemsize) for dtype in _dtypes(rank_plan).values())


def _dtypes(rank_plan: RankPlan) -> dict[str, np.dtype[Any]]:
    """Return the dtypes of the columns, in order. Positions are int64, because models index with that."""
    table = rank_plan.table
    gathered = {name: table[name].numpy for name in rank_plan.columns if _is_flat(table[name])}
    return {**gathered, "position_ids": np.dtype(np.int64)}


def _is_flat(column: Column) -> bool:
    """Return whether a column has one value per token. Then its memory is known in advance."""
    return not column.trailing and not column.ragged


def _aligned(offset: int) -> int:
    return -(-offset // ALIGNMENT) * ALIGNMENT


def _gather(layout: _Layout, column: Column, out: Array) -> None:
    """Fill one column of all micro-batches."""
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


def _mask_stale(layout: _Layout, columns: dict[str, Array]) -> None:
    """Take tokens that too old a policy version sampled out of the loss. Those of an unknown version stay."""
    samples, oldest = layout.samples, layout.rank_plan.oldest_version
    mask, versions, given = columns["loss_mask"], columns.get("weight_versions"), samples.columns.get("weight_versions")
    # A sample without versions per token was sampled by its own version throughout.
    own = np.append(samples.policy_versions, NO_VERSION)[layout.rows]
    if versions is not None and given is not None:  # other ranks may have samples with versions, and this one none
        own[np.append(given.lengths, 0)[layout.rows] > 0] = NO_VERSION
        mask[(versions > NO_VERSION) & (versions < oldest)] = False
    mask[np.repeat((own > NO_VERSION) & (own < oldest), layout.lengths)] = False
    accounts, trained = layout.rank_plan.accounting, int(np.count_nonzero(mask))
    planned = accounts.ranks[layout.rank_plan.rank].loss_tokens
    if len(layout.rank_plan) == accounts.rows and trained != planned:  # else it is one micro-batch of several
        raise InvalidInput(
            f"samples: {trained} trained tokens of policy version {oldest} or later, the rank plan counted {planned}; "
            "pass the samples it was planned for"
        )


def _constants(layout: _Layout, column: Column) -> Array:
    """Return [segments], the value in each segment that has none of its own in this column."""
    out = np.full(len(layout.rows), column.fill, column.numpy)
    if column.name in WEIGHTS:
        by_mode = {mode: weights[WEIGHTS.index(column.name)] for mode, weights in MODE_WEIGHTS.items()}
        out[:] = [by_mode.get(mode, column.pad) for mode in layout.text("mode")]
    out[~layout.is_trained] = layout.rank_plan.pad_id if column.name == "token_ids" else column.pad
    return out


def _repeat(values: Array, lengths: list[int], out: Array) -> None:
    """Repeat each value over its segment."""
    if len(out) < LONG_ENOUGH * len(lengths):
        out[:] = np.repeat(values, lengths)
        return
    # For long segments one fill each is several times faster than np.repeat.
    at = 0
    for value, n in zip(values.tolist(), lengths, strict=True):
        out[at : at + n] = value
        at += n


def _positions(layout: _Layout, out: Array) -> None:
    """Fill positions from 0 in every segment."""
    longest = np.arange(max(layout.lengths), dtype=out.dtype)
    np.concatenate([longest[:n] for n in layout.lengths], out=out)


def _micro_batches(layout: _Layout, columns: dict[str, Array]) -> list[MicroBatch]:
    """Cut the micro-batches out of the columns. Everything in them is a slice of something built once."""
    rank_plan, samples = layout.rank_plan, layout.samples
    text = {name: layout.text(name) for name in ("id", "group", "prompt", "env", "mode", "rollout", "run")}
    lengths = np.array(layout.lengths, np.int64)
    starts = np.repeat(np.array(layout.tokens[:-1], np.int64), np.diff(layout.segments))
    offsets = offsets_of(lengths)[:-1] - starts
    short = lengths.astype(np.int32)
    versions = np.append(samples.policy_versions, NO_VERSION)[layout.rows]
    dummy_tenants, is_forest = iter(rank_plan.dummy_tenants), rank_plan.is_forest.tolist()
    out = []
    for m, (a, b) in enumerate(pairwise(layout.segments)):
        is_dummy = bool(rank_plan.dummy[m])
        held = int(layout.is_sample[a:b].sum())
        own = slice(a, a if is_dummy else a + held)
        parts = {name: values[layout.tokens[m] : layout.tokens[m + 1]] for name, values in columns.items()}
        parts = _in_order(rank_plan, parts, _lists(layout, a, b), _shaped_rows(layout, m, a, b, nodes=not is_forest[m]))
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
                    offsets=offsets[own],
                    lengths=lengths[own],
                ),
                images=_images(samples, layout.rows[a : a + held], lengths[a:b], offsets[a:b]),
                modality=MODALITIES[rank_plan.modality[m]],
                run=next(dummy_tenants) if is_dummy else text["run"][a],
                is_dummy=is_dummy,
                forest=_forest(layout, m, parts) if is_forest[m] else None,
            )
        )
    return out


def _forest(layout: _Layout, m: int, parts: dict[str, Cells]) -> Forest:
    """Build the forest of a micro-batch whose samples share tokens. Its segments are exactly those samples."""
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
    """Return the images of these samples that were not cut off, with spans in the micro-batch's tokens."""
    if samples.images is None:
        return ()
    return tuple(
        span.shifted(offset)
        for row, length, offset in zip(rows.tolist(), lengths.tolist(), offsets.tolist(), strict=False)
        for span in samples.images[row]
        if span.end <= length
    )


def _in_order(rank_plan: RankPlan, *parts: dict[str, Cells]) -> dict[str, Cells]:
    """Return the columns of a micro-batch in table order, positions last."""
    if not any(parts[1:]):
        return parts[0]
    every = {name: values for part in parts for name, values in part.items()}
    return {name: every[name] for name in (*rank_plan.table, "position_ids") if name in every}


def _lists(layout: _Layout, a: int, b: int) -> dict[str, Ragged]:
    """Return the lists of segments a to b. Padding, dummies and samples without lists have empty ones."""
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


def _shaped_rows(layout: _Layout, m: int, a: int, b: int, *, nodes: bool) -> dict[str, Array]:
    """Return the rows of micro-batch m, segments a to b. Without `nodes`, skips columns that its forest holds."""
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
            continue  # the plan comes from a version that did not record shapes
        found[column.name] = _joined(layout, column, given if has.any() else None, shape, m)
    return found


def _joined(
    layout: _Layout, column: Column, given: Ragged | None, shape: tuple[str, tuple[int, ...]] | None, m: int
) -> Array:
    """Join the rows of micro-batch m."""
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
    """Yield the first `n` tokens of a row."""
    for piece in pieces:
        yield piece[:n]
        n -= len(piece)
        if n <= 0:
            return


# ------------------------------------------------------------------ memory


LARGE_BYTES = 32 << 20
"""Blocks of at least this size are kept. The C library reuses smaller ones by itself, once they are freed."""
_MOST = 8
"""Blocks that are kept: a step takes one, and one more for each column with trailing dimensions."""
_ALONE = 3
"""Reference count of an unused block: the list, the loop over it, and the call that counts."""


class BlockPool:
    """A pool of blocks for one thread.

    The kernel must clear new memory: for 400 MB of routed experts that takes longer than reading and copying them. A
    view of a block (a column of a micro-batch, a tensor built from it) holds a reference to it, so a block without
    references is free.

    >>> pool = BlockPool()
    >>> one = pool.take(50 << 20)
    >>> address, other = one.ctypes.data, pool.take(50 << 20)
    >>> other.ctypes.data == address  # still in use
    False
    >>> del one
    >>> pool.take(40 << 20).ctypes.data == address
    True
    """

    def __init__(self) -> None:
        self._blocks: list[NDArray[np.uint8]] = []

    def take(self, size: int) -> NDArray[np.uint8]:
        """Return `size` bytes that are not in use."""
        if size < LARGE_BYTES:
            return np.empty(size, np.uint8)
        small = []
        for block in self._blocks:
            if sys.getrefcount(block) == _ALONE:
                if len(block) >= size:
                    return block[:size]
                small.append(id(block))
        self._blocks = [block for block in self._blocks if id(block) not in small]  # too small for today's steps
        # Allocate a quarter more, so that slowly growing steps do not each need new memory.
        block = np.empty(size + size // 4, np.uint8)
        if len(self._blocks) < _MOST:
            self._blocks.append(block)
        return block[:size]
