"""Build one frame from chosen samples of many frames, copying straight from their bytes into the output.

    frame A   samples 0 1 2 3        picks  A: 0 2   B: 1        output   A0 A2 B1
    frame B   samples 0 1 2

Small columns are decoded, joined and coded again, which costs little. Three kinds are never decoded: token ids, columns
with values on trained tokens only (log-probabilities), and columns with trailing dimensions (routed experts: a hundred
times the bytes of the rest). What a source frame stores of a sample is copied piece by piece. A prefix that a picked
sample shares with a sample that was not picked is copied with it. A prefix that it shares with another picked sample is
stored once.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from penstock.arrays import (
    TEXT_COLUMNS,
    Array,
    Cells,
    ImageSpan,
    MaskRuns,
    Ragged,
    Samples,
    joined_own,
    offsets_of,
    table_with,
)
from penstock.errors import InvalidInput
from penstock.frames.head import DEFAULT_LIMITS, Head, Limits
from penstock.frames.layout import Buffer, join
from penstock.frames.prefixes import Gathered, Prefixes, Stored
from penstock.frames.reading import open_stored
from penstock.frames.writing import frame_pieces

Picks: TypeAlias = Sequence[tuple["OpenFrame", NDArray[np.intp]]]
"""Which samples of which frames, in order. Those of one frame ascend."""


@dataclass(frozen=True, slots=True)
class OpenFrame:
    """A frame opened for gathering."""

    head: Head
    samples: Samples
    """Without the columns in `stored` and `sparse`."""
    stored: dict[str, Stored]
    """Token ids and columns with trailing dimensions, as the frame stores them."""
    sparse: dict[str, Stored]
    """Columns stored with values on trained tokens only."""

    def column(self, name: str) -> Ragged | None:
        """Return a small column, with a value for every token of every sample that has it."""
        if name not in self.sparse:
            return self.samples.columns.get(name)
        mask = self.samples.columns["loss_mask"]
        return Ragged(MaskRuns.of(mask.values).put(self.sparse[name].values), mask.offsets)


def open_frame(data: Buffer, *, limits: Limits = DEFAULT_LIMITS) -> OpenFrame:
    """Open a frame that was checked before. Token ids and heavy columns are not decoded."""
    return OpenFrame(*open_stored(data, limits=limits))


def gather(picks: Picks) -> memoryview:
    """Return one frame of the picked samples.

    >>> import penstock as ps
    >>> made = ps.encode([ps.Sample(id=name, token_ids=[1, 2, n]) for n, name in enumerate("abc")])
    >>> [(s.id, s.token_ids.tolist()) for s in ps.decode(gather([(open_frame(made), np.array([0, 2]))]))]
    [('a', [1, 2, 0]), ('c', [1, 2, 2])]
    """
    picks = [(frame, rows) for frame, rows in picks if len(rows)]
    if not picks:
        raise InvalidInput("gather: no sample was picked; pick at least one")
    prefixes = _prefixes(picks)
    # Copy a column sparsely only if every frame has it so. With one dense source, the output must be dense as well.
    everywhere = [name for name in picks[0][0].sparse if all(name in frame.sparse for frame, _ in picks)]
    sparse = {name: _sparse_pieces(name, picks) for name in everywhere}
    batch = _light(picks, everywhere)
    stored = [name for name in batch.table if any(name in frame.stored for frame, _ in picks)]
    heavy = {name: _pieces(name, picks, prefixes) for name in stored}
    return join(frame_pieces(batch, prefixes, heavy | sparse))


def _light(picks: Picks, without: Collection[str]) -> Samples:
    """Build the picked samples with every small column except these. Token ids stay empty: they are copied later."""
    lengths = np.concatenate([frame.head.lengths[rows] for frame, rows in picks])
    offsets = offsets_of(lengths)
    names = {name for frame, _ in picks for name in (*frame.samples.columns, *frame.sparse)} - {*without}
    own = joined_own((frame.head.own for frame, _ in picks), "gather")
    columns = {name: _column(name, picks, offsets) for name in names}
    columns["token_ids"] = Ragged(np.zeros(0, np.uint32), offsets)
    images = tuple(spans for frame, rows in picks for spans in _images(frame.samples, rows))
    return Samples(
        columns={name: columns[name] for name in table_with(own) if name in columns},
        text={
            name: tuple(frame.samples.text[name][i] for frame, rows in picks for i in rows.tolist())
            for name in TEXT_COLUMNS
        },
        policy_versions=np.concatenate([frame.samples.policy_versions[rows] for frame, rows in picks]),
        images=images if any(images) else None,
        own=own,
    )


def _images(samples: Samples, rows: NDArray[np.intp]) -> list[tuple[ImageSpan, ...]]:
    return [() if samples.images is None else samples.images[i] for i in rows.tolist()]


def _column(name: str, picks: Picks, offsets: NDArray[np.int64]) -> Ragged:
    """Build one small column of the picked samples, in one copy."""
    views: list[Cells] = []
    lengths: list[int] = []
    for frame, rows in picks:
        column = frame.column(name)
        if column is None:
            lengths += [0] * len(rows)
            continue
        starts, ends = column.offsets[rows].tolist(), column.offsets[rows + 1].tolist()
        views += [column.values[a:b] for a, b in zip(starts, ends, strict=True)]
        lengths += [b - a for a, b in zip(starts, ends, strict=True)]
    _check_kinds(name, views)
    # Share the samples' offsets where every sample has the column per token: the encoder then writes no row kinds.
    own = offsets_of(lengths)
    return Ragged.of(views, offsets if np.array_equal(own, offsets) else own)


def _sparse_pieces(name: str, picks: Picks) -> Gathered:
    """Collect a column that all frames store on trained tokens only. The output stores it the same way."""
    pieces: list[Array] = []
    for frame, rows in picks:
        stored = frame.sparse[name]
        starts, ends = stored.starts[rows].tolist(), stored.starts[rows + 1].tolist()
        pieces += [stored.values[a:b] for a, b in zip(starts, ends, strict=True)]
    _check_kinds(name, pieces)
    lengths = np.concatenate([frame.head.lengths[rows] for frame, rows in picks])
    return Gathered(pieces, lengths, picks[0][0].sparse[name].values, shares_prefixes=False, is_sparse=True)


def _check_kinds(name: str, parts: Sequence[Cells]) -> None:
    """Raise where parts of a column cannot be joined."""
    check_kinds(name, {(part.dtype, () if isinstance(part, Ragged) else part.shape[1:]) for part in parts})


def check_kinds(name: str, kinds: Collection[tuple[np.dtype[Any], tuple[int, ...]]]) -> None:
    """Raise where frames have a column in more than one dtype and shape."""
    if len(kinds) > 1:
        found = sorted(f"{dtype}{list(shape)}" for dtype, shape in kinds)
        raise InvalidInput(f"{name}: frames have {' and '.join(found)} per token; give them one dtype and shape")


def _prefixes(picks: Picks) -> Prefixes:
    """Find which picked sample repeats the beginning of an earlier one, as far as the source frames know."""
    count = sum(len(rows) for _, rows in picks)
    parents, shared = np.full(count, -1, np.int64), np.zeros(count, np.int64)
    at = 0
    for frame, rows in picks:
        found = frame.stored["token_ids"].prefixes
        if found is not None and all(stored.shares_prefixes for stored in frame.stored.values()):
            _within(found, rows.tolist(), at, parents, shared)
        at += len(rows)
    return Prefixes(parents, shared)


def _within(found: Prefixes, rows: list[int], at: int, parents: NDArray[np.int64], shared: NDArray[np.int64]) -> None:
    tree, lengths = found.parents.tolist(), found.shared.tolist()
    for k in range(1, len(rows)):
        # Compare with the first and the previous picked sample only: one shares the prompt, the other usually the
        # longest branch. Trying all would be quadratic in the picks.
        for candidate in {0, k - 1}:
            common = _common(tree, lengths, rows[k], rows[candidate])
            if common > shared[at + k]:
                parents[at + k], shared[at + k] = at + candidate, common


def _common(tree: list[int], shared: list[int], a: int, b: int) -> int:
    """Return how many first tokens two samples of a frame are known to share, through their common ancestors.

    With tree [-1, 0, 1, 0] and shared [0, 9, 12, 5], samples 2 and 3 meet at sample 0: 2 shares 12 with 1, 1 shares 9
    with 0, 3 shares 5 with 0, so they have min(12, 9, 5) = 5 in common.
    """
    common: int | None = None
    while a != b:
        # Parents come before children, so always move the later sample up.
        if a < b:
            a, b = b, a
        if tree[a] < 0:
            return 0
        common = shared[a] if common is None else min(common, shared[a])
        a = tree[a]
    return common or 0


def _pieces(name: str, picks: Picks, prefixes: Prefixes) -> Gathered:
    """Collect what the output stores of a column that is not decoded: for each sample, the part no earlier one has."""
    sources = [(frame.stored.get(name), frame.head.lengths, rows.tolist()) for frame, rows in picks]
    given = [stored for stored, _, _ in sources if stored is not None]
    _check_kinds(name, [stored.values for stored in given])
    # Leave out shared tokens only if every picked sample has the column. Otherwise a parent might lack what its child
    # leaves out.
    full = all(stored is not None and all(map(stored.has, rows)) for stored, _, rows in sources)
    skip = prefixes.shared.tolist() if full and prefixes.any else [0] * len(prefixes.shared)
    pieces: list[Array] = []
    lengths: list[int] = []
    for stored, tokens, rows in sources:
        for i in rows:
            has, length = stored is not None and stored.has(i), int(tokens[i])
            if stored is not None and has:
                stored.collect(i, skip[len(lengths)], length, pieces)
            lengths.append(length if has else 0)
    return Gathered(pieces, np.array(lengths, np.int64), given[0].values, full and prefixes.any)
