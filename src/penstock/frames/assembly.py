"""Build samples of many frames straight from ranges of their bytes.

    frame A   samples 0 1 2 3        picks  A: 0 2   B: 1        columns of   A0 A2 B1
    frame B   samples 0 1 2

The result equals `decode(gather(...))` for the same picks, bit for bit. No frame is built in between: each value is
copied once, from where it was read to its place in the column. Large rows of plain bytes (routed experts) are not
copied at all: such a column is `Pieced`, views of the bytes that were read.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from penstock.arrays import (
    LARGE_BYTES,
    TEXT_COLUMNS,
    Array,
    MaskRuns,
    Offsets,
    Pieced,
    Ragged,
    Samples,
    joined_own,
    offsets_of,
    table_with,
    trained_tokens,
)
from penstock.errors import CorruptFrame, InvalidInput
from penstock.frames.gathering import check_kinds
from penstock.frames.parts import Fetch
from penstock.frames.ranges import RangedFrame
from penstock.frames.reading import check_values

RangePicks: TypeAlias = Sequence[tuple[RangedFrame, Sequence[int] | NDArray[np.integer], Fetch]]
"""Which samples of which frames, in order, and where the bytes of each frame come from."""
LARGE_COLUMN = 4 << 20
"""Columns of at least this size use `StepMemory`."""


class StepMemory:
    """Buffers for large columns, reused from step to step.

    The kernel must clear new memory, which for 400 MB takes longer than reading and copying them. So keep one of these
    for the life of a rank. The next step overwrites the samples of this one: copy what must live longer.
    """

    def __init__(self) -> None:
        self._buffers: dict[str, NDArray[np.uint8]] = {}

    def take(self, name: str, size: int) -> NDArray[np.uint8]:
        """Return `size` bytes for a column of this name: the same memory as before if it is large enough."""
        have = self._buffers.get(name)
        if have is None or len(have) < size:
            self._buffers.pop(name, None)  # free the smaller one first
            del have
            # A quarter more, so that steps that grow little by little do not each need new memory.
            have = self._buffers[name] = np.empty(size + size // 4, np.uint8)
        return have[:size]

    @property
    def nbytes(self) -> int:
        return sum(buffer.nbytes for buffer in self._buffers.values())


@dataclass(frozen=True, slots=True)
class _Pick:
    frame: RangedFrame
    rows: list[int]
    index: NDArray[np.intp]
    """The rows as an array."""
    tokens: NDArray[np.int64]
    """[rows] tokens of each sample."""
    fetch: Fetch
    begin: int
    """Its first token in the output."""
    end: int

    def has_all(self, name: str) -> bool:
        """Return whether every sample of the frame has the column per token."""
        column = self.frame.columns.get(name)
        return column is not None and column.spec.rows is None

    def lengths(self, name: str) -> NDArray[np.int64]:
        """Return [rows], the values that each sample has of a column: one per token, or one number."""
        if name in self.frame.columns:
            return self.frame.columns[name].lengths[self.index]
        if name in self.frame.head.columns:
            return self.frame.head.columns[name].lengths[self.index]
        return np.zeros(len(self.rows), np.int64)

    def kind(self, name: str) -> tuple[np.dtype[Any], tuple[int, ...]] | None:
        """Return dtype and trailing shape of a column, or None where the frame lacks it."""
        if name in self.frame.columns:
            part = self.frame.columns[name].part
            return part.dtype, part.shape
        held = self.frame.head.columns.get(name)
        return None if held is None else (held.dtype, held.values.shape[1:])


def assemble(picks: RangePicks, *, memory: StepMemory | None = None) -> Samples:
    """Return the picked samples. Raises CorruptFrame where the bytes contradict the front or hold an invalid value.

    >>> import penstock as ps
    >>> from penstock.frames.ranges import Pieces
    >>> frame = ps.encode([ps.Sample(id=name, token_ids=[1, 2, n]) for n, name in enumerate("abc")])
    >>> ranged = RangedFrame(frame)
    >>> ranges = ranged.ranges([0, 2])
    >>> fetch = Pieces(ranges, [frame[a:b] for a, b in ranges])
    >>> [(sample.id, sample.token_ids.tolist()) for sample in assemble([(ranged, [0, 2], fetch)])]
    [('a', [1, 2, 0]), ('c', [1, 2, 2])]
    """
    return _Assembly(picks, memory).samples()


class _Assembly:
    def __init__(self, picks: RangePicks, memory: StepMemory | None) -> None:
        self._memory = memory
        self._picks: list[_Pick] = []
        at = 0
        for frame, asked, fetch in picks:
            rows = frame.rows(asked)
            if rows:
                index = np.array(rows, np.intp)
                tokens = frame.head.lengths[index]
                end = at + int(np.add.reduce(tokens))
                self._picks.append(_Pick(frame, rows, index, tokens, fetch, at, end))
                at = end
        if not self._picks:
            raise InvalidInput("assemble: no sample was picked; pick at least one")
        self._lengths, self._loss_tokens, self._versions = (
            np.concatenate([getattr(pick.frame.head, name)[pick.index] for pick in self._picks])
            for name in ("lengths", "loss_tokens", "policy_versions")
        )
        self._offsets = offsets_of(self._lengths)
        self._columns: dict[str, Ragged] = {}
        self._masks: dict[int, MaskRuns] = {}
        self._runs: MaskRuns | None = None
        self._trained_tokens: NDArray[np.int64] | None = None

    def samples(self) -> Samples:
        own = joined_own((pick.frame.head.own for pick in self._picks), "assemble")
        # Table order: the loss mask must be there before the columns that are sparse by it.
        present = {name for pick in self._picks for name in (*pick.frame.columns, *pick.frame.head.columns)}
        for name in [name for name in table_with(own) if name in present]:
            kinds = {kind for pick in self._picks if (kind := pick.kind(name)) is not None}
            check_kinds(name, kinds)
            self._columns[name] = self._column(name, *next(iter(kinds)))
        images = tuple(
            () if pick.frame.head.images is None else pick.frame.head.images[i]
            for pick in self._picks
            for i in pick.rows
        )
        made = Samples(
            columns=self._columns,
            text={name: self._text(name) for name in TEXT_COLUMNS},
            policy_versions=self._versions,
            images=images if any(images) else None,
            own=own,
        )
        if self._trained_tokens is not None:
            made.loss_tokens = self._trained_tokens
        check_values(made, self._loss_tokens)
        return made

    def _text(self, name: str) -> tuple[str, ...]:
        out: list[str] = []
        for pick in self._picks:
            found = pick.frame.head.text[name]
            out += [found[i] for i in pick.rows]
        return tuple(out)

    def _column(self, name: str, dtype: np.dtype[Any], shape: tuple[int, ...]) -> Ragged:
        # Where each pick's values begin in the output column: picks with 5, 0 and 3 values have edges [0, 5, 5, 8].
        if all(pick.has_all(name) for pick in self._picks):
            offsets, edges = self._offsets, [*(pick.begin for pick in self._picks), self._picks[-1].end]
        else:
            lengths = [pick.lengths(name) for pick in self._picks]
            offsets = self._shared(np.concatenate(lengths))
            edges = offsets_of([int(own.sum()) for own in lengths]).tolist()
        if any(name in pick.frame.columns and pick.frame.columns[name].counts is not None for pick in self._picks):
            return Ragged(self._lists(name, dtype), offsets)
        if shape and edges[-1] * math.prod(shape) * dtype.itemsize >= LARGE_BYTES and self._is_raw(name):
            return self._pieced(name)
        out = self._empty(name, edges[-1], dtype, shape)
        for k, pick in enumerate(self._picks):
            self._fill(out[edges[k] : edges[k + 1]], name, k, pick)
        return Ragged(out, offsets)

    def _is_raw(self, name: str) -> bool:
        """Return whether every sample has the column per token, as plain bytes."""
        return all(name in pick.frame.columns and pick.frame.columns[name].is_raw for pick in self._picks)

    def _pieced(self, name: str) -> Pieced:
        """Return the rows as they were read: views of the fetched bytes, with a shared prefix once."""
        rows = [row for pick in self._picks for row in pick.frame.columns[name].row_pieces(pick.rows, pick.fetch)]
        return Pieced(rows, self._offsets)

    def _fill(self, out: Array, name: str, k: int, pick: _Pick) -> None:
        column = pick.frame.columns.get(name)
        if column is not None:
            column.read_into(out, pick.rows, pick.fetch, self._mask(k, pick) if column.is_sparse else None)
        elif len(out):
            out[:] = pick.frame.head.columns[name].take(pick.index).values

    def _lists(self, name: str, dtype: np.dtype[Any]) -> Ragged:
        found: list[Ragged] = []
        for k, pick in enumerate(self._picks):
            column = pick.frame.columns.get(name)
            if column is not None:
                trained = self._mask(k, pick) if column.is_sparse else None
                found.append(column.read_lists(pick.rows, pick.fetch, trained))
        out = self._empty(name, sum(len(lists.values) for lists in found), dtype, ())
        np.concatenate([lists.values for lists in found], out=out)
        return Ragged(out, offsets_of(np.concatenate([lists.lengths for lists in found])))

    def _mask(self, k: int, pick: _Pick) -> MaskRuns:
        """Return the loss mask of one pick, after checking that all samples have as many trained tokens as their heads
        say.
        """
        mask = self._columns["loss_mask"].values
        if self._trained_tokens is None:
            # Check here, before the mask decides where sparse values go. `check_values` would be too late.
            self._trained_tokens = trained_tokens(mask, self._offsets, self._lengths)
            if np.count_nonzero(self._trained_tokens != self._loss_tokens):
                raise CorruptFrame("frame: the loss tokens in the header are not those of the mask")
        if k not in self._masks:
            if self._runs is None:
                self._runs = MaskRuns.of(mask)
            self._masks[k] = self._runs.part(pick.begin, pick.end)
        return self._masks[k]

    def _shared(self, lengths: NDArray[np.int64]) -> Offsets:
        """Return row starts; the samples' own where every sample has the column per token, as `decode` shares them."""
        return self._offsets if np.array_equal(lengths, self._lengths) else offsets_of(lengths)

    def _empty(self, name: str, count: int, dtype: np.dtype[Any], shape: tuple[int, ...]) -> Array:
        size = count * math.prod(shape) * dtype.itemsize
        if self._memory is None or size < LARGE_COLUMN:
            return np.empty((count, *shape), dtype)
        return self._memory.take(name, size).view(dtype).reshape(count, *shape)
