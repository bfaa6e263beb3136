"""Compute which bytes of a frame some of its samples need, from its front alone.

    front    prefix, header, head: stored with the group's metadata
    body     token_ids | loss_mask | logprobs | routed_experts ...
                 ==            ====        =        ========            what sample 3 needs of each

A reader of one sample in sixteen fetches a tenth of the frame. Nothing in a front is trusted: sizes are compared with
the frame's size and the reader's limits, and an inconsistent front raises CorruptFrame.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from penstock.arrays import Array, MaskRuns, Offsets, Ragged, lists_of, offsets_of
from penstock.errors import CorruptFrame
from penstock.frames.codings import DELTAS, RAW, SPARSE
from penstock.frames.head import DEFAULT_LIMITS, Head, Limits, parse_head
from penstock.frames.layout import ALIGN, Block, Buffer, ColumnBlock, front_and_frame_size, split
from penstock.frames.parts import Fetch, Part, Range, merged
from penstock.frames.prefixes import Prefixes

GAP = 16 << 10
"""Ranges closer than this are read as one: a request costs more than these bytes."""
SMALL_FRAME = 1 << 20
"""Frames below this size are read completely."""
WHOLE_FROM = 0.75
"""Frames are read completely where ranges would take at least this share of them."""
_U4 = np.dtype("<u4")


class Pieces:
    """Serves `fetch` from ranges that were read. `buffers` holds the bytes of each range.

    >>> fetch = Pieces([(10, 14), (20, 22)], [b"abcd", b"xy"])
    >>> bytes(fetch(11, 13)), bytes(fetch(20, 22))
    (b'bc', b'xy')
    """

    def __init__(self, ranges: Sequence[Range], buffers: Sequence[Buffer]) -> None:
        if len(ranges) != len(buffers):
            raise CorruptFrame(f"frame: {len(buffers)} buffers for {len(ranges)} ranges")
        found = [(one, memoryview(buffer)) for one, buffer in zip(ranges, buffers, strict=True)]
        if len(found) > 1:
            found.sort(key=lambda one: one[0])
        for (a, b), view in found:
            if view.nbytes != b - a:
                raise CorruptFrame(f"frame: {view.nbytes} bytes were read of the range {a} to {b}")
        self._starts = [a for (a, _), _ in found]
        self._views = [view.cast("B") if view.nbytes else memoryview(b"") for _, view in found]

    def __call__(self, a: int, b: int) -> memoryview:
        # The last range that starts at or before `a` is the only one that can contain it: ranges do not overlap.
        k = bisect_right(self._starts, a) - 1
        if k < 0 or b - self._starts[k] > len(self._views[k]):
            raise CorruptFrame(f"frame: bytes {a} to {b} were not fetched; fetch the ranges of all rows that are read")
        return self._views[k][a - self._starts[k] : b - self._starts[k]]


class RangedColumn:
    """A column of a frame's body: where each sample's values lie."""

    def __init__(self, spec: ColumnBlock, head: Head, at: int, *, after_mask: bool) -> None:
        self.spec = spec
        self._listed: list[int] | None = None
        self._listed_tree: tuple[list[int], list[int], list[int]] | None = None
        dtype = np.dtype(spec.dtype)
        first = spec.values if spec.counts is None else spec.counts
        self.lengths, self.starts, self.prefixes = _rows_held(spec, head)
        """[n] tokens of each sample that the column has; [n + 1] where each sample's own ones are stored."""
        self.is_sparse = first.coding == SPARSE
        """Whether only trained tokens are stored; all others are zero."""
        if self.is_sparse:
            self.starts = offsets_of(head.loss_tokens)
            first = _trained_only(spec, first, int(self.starts[-1]), after_mask=after_mask)
        count = int(self.starts[-1])
        self.counts: Part | None = None
        """Of a column of lists: the part with the lengths of the lists."""
        self.items: Offsets | None = None
        """[n + 1] where each sample's list items begin; None for other columns, and where the frame does not say."""
        if spec.counts is None:
            self.part = Part.place(spec.name, first, dtype, count, at, spec.trailing)
            return
        self.counts = Part.place(spec.name, first, _U4, count, at)
        self.items = None if spec.items is None else offsets_of(spec.items)
        values = spec.values
        if values.coding == DELTAS:
            if len(values.parts) != 1 or dtype.kind != "u":
                raise CorruptFrame(f"{spec.name}: {len(values.parts)} parts of {dtype} in lists that ascend")
            values = values.parts[0]
        self.part = Part.place(spec.name, values, dtype, spec.num_items, self.counts.next)

    @property
    def _edges(self) -> list[int]:
        # Not `cached_property`, which takes a lock at every first use.
        found = self._listed
        if found is None:
            found = self._listed = self.starts.tolist()
        return found

    def pairs(self, rows: Sequence[int]) -> list[Range]:
        """Return the stored rows of these samples, in their order. Adjacent ones are joined, to be read and copied as
        one.
        """
        edges = self._edges
        out: list[Range] = []
        last = -1
        for i in rows:
            for a, b in ((edges[i], edges[i + 1]),) if self.prefixes is None else self._with_ancestors(i):
                if a == last:
                    out[-1] = (out[-1][0], b)
                elif b > a:
                    out.append((a, b))
                else:
                    continue
                last = b
        return out

    @property
    def _tree(self) -> tuple[list[int], list[int], list[int]]:
        found = self._listed_tree
        if found is None:
            assert self.prefixes is not None
            parents, shared = self.prefixes.parents.tolist(), self.prefixes.shared.tolist()
            found = self._listed_tree = parents, shared, self.lengths.tolist()
        return found

    def _with_ancestors(self, i: int) -> list[Range]:
        """Return what a sample's ancestors store of it, then its own part.

        For example lengths [5, 5, 3], shared [0, 3, 2], parents [-1, 0, 0] and edges [0, 5, 7, 8]. Sample 1 owns rows 5
        to 7 and has its first 3 tokens from sample 0: [(0, 3), (5, 7)]. The prefixes are shortened, so every step up
        leaves tokens behind and the walk ends.
        """
        parents, shared, lengths = self._tree
        count, parent = shared[i], parents[i]
        if count and not shared[parent]:  # the usual tree: all samples branch off one of them
            begin, own_part = self._edges[parent], (self._edges[i], self._edges[i + 1])
            return [(begin, begin + count), own_part] if lengths[i] > count else [(begin, begin + count)]
        own, end = [], lengths[i]
        while True:
            # `first` is where token 0 of sample i would lie if its own rows began with it: 5 - 3 = 2 above, so token 3
            # is at 2 + 3 = 5.
            first = self._edges[i] - shared[i]
            if end > shared[i]:
                own.append((first + shared[i], first + end))
            if not shared[i]:
                return own[::-1]
            i, end = parents[i], min(end, shared[i])

    @property
    def is_raw(self) -> bool:
        """Whether every sample has it per token, as plain bytes that need no decoding."""
        plain = self.part.block.coding == RAW and self.part.dtype != np.bool_
        return plain and self.counts is None and not self.is_sparse and self.spec.rows is None

    def row_pieces(self, rows: Sequence[int], fetch: Fetch) -> list[list[Array]]:
        """Return the pieces of each of these samples, as views of the fetched bytes. Only for a column that
        `is_raw`.
        """
        edges, out = self._edges, []
        for i in rows:
            pairs = [(edges[i], edges[i + 1])] if self.prefixes is None else self._with_ancestors(i)
            out.append(self.part.read(fetch, [(a, b) for a, b in pairs if b > a]))
        return out

    def ranges(self, rows: Sequence[int]) -> list[Range]:
        """Return the bytes of the frame that these samples need."""
        pairs = self.pairs(rows)
        if self.counts is None:
            return [found for a, b in pairs for found in self.part.ranges(a, b)]
        if not pairs:
            return []
        if self.items is None:  # the position of a sample's items depends on the counts of all samples before it
            return [(self.counts.at, self.counts.end), (self.part.at, self.part.end)]
        found = [one for a, b in pairs for one in self.counts.ranges(a, b)]
        return found + [one for a, b in self._item_pairs(self.items, rows) for one in self.part.ranges(a, b)]

    def read_into(self, out: Array, rows: Sequence[int], fetch: Fetch, trained: MaskRuns | None) -> None:
        """Write the values of these samples to `out`. `trained` is their loss mask, for a sparse column."""
        pieces = self.part.read(fetch, self.pairs(rows))
        if trained is not None:
            trained.put(_joined(pieces, self.part), out)
        elif pieces:
            np.concatenate(pieces, out=out)

    def read_lists(self, rows: Sequence[int], fetch: Fetch, trained: MaskRuns | None) -> Ragged:
        """Read the lists of these samples, one per token that the column has."""
        assert self.counts is not None
        pairs = self.pairs(rows)
        if not pairs and self.items is None:
            return Ragged.empty(int(self.lengths[rows].sum()), self.part.dtype)
        counts = _joined(self.counts.read(fetch, pairs), self.counts)
        if trained is not None:
            counts = trained.put(counts)
        offsets = offsets_of(counts)
        items = self._items_of_all(fetch) if self.items is None else self.items
        edges = offsets[offsets_of(self.lengths[rows])]
        # Check before allocating: the counts come from the body and were not verified yet.
        if not np.array_equal(np.diff(edges), np.diff(items)[rows]):
            raise CorruptFrame(f"{self.spec.name}: the items per sample are not those of the lists")
        values = _joined(self.part.read(fetch, self._item_pairs(items, rows)), self.part)
        return lists_of(values, offsets) if self.spec.values.coding == DELTAS else Ragged(values, offsets)

    def _item_pairs(self, items: Offsets, rows: Sequence[int]) -> list[Range]:
        index = np.asarray(rows, np.intp)
        starts, ends = items[index].tolist(), items[index + 1].tolist()
        return [(a, b) for a, b in zip(starts, ends, strict=True) if b > a]

    def _items_of_all(self, fetch: Fetch) -> Offsets:
        """Compute where each sample's items begin from the counts of all samples, for a frame that does not say."""
        assert self.counts is not None
        everything: list[Range] = [(0, self.counts.count)] if self.counts.count else []
        counts = _joined(self.counts.read(fetch, everything), self.counts)
        if int(counts.sum(dtype=np.int64)) != self.spec.num_items:
            raise CorruptFrame(f"{self.spec.name}: the counts are not those of {self.spec.num_items} list items")
        return offsets_of(counts)[self.starts]


class RangedFrame:
    """A frame known by its front.

    >>> import penstock as ps
    >>> frame = ps.encode([ps.Sample(id=name, token_ids=range(1000)) for name in "abc"])
    >>> ranged = RangedFrame(frame)
    >>> ranged.size == len(frame), all(ranged.front_size <= a < b <= ranged.size for a, b in ranged.ranges([1]))
    (True, True)
    """

    def __init__(self, front: Buffer, *, limits: Limits = DEFAULT_LIMITS) -> None:
        self.front_size, self.size = front_and_frame_size(front)
        """Bytes of the front, and of the frame: front and body."""
        self.head, _ = parse_head(split(front, whole=False), limits)
        self.columns: dict[str, RangedColumn] = {}
        """The columns of the body."""
        at = end = self.front_size
        if at % ALIGN:
            raise CorruptFrame(f"frame: its body begins at {at}, which is no multiple of {ALIGN}")
        for spec in self.head.header.body_columns:
            column = RangedColumn(spec, self.head, at, after_mask="loss_mask" in self.columns)
            self.columns[spec.name] = column
            at, end = column.part.next, column.part.end
        if not end <= self.size < at + ALIGN:
            raise CorruptFrame(f"frame: its columns end at {end} of {self.size} bytes")
        for name in ("token_ids", "loss_mask"):
            if name not in self.columns:
                raise CorruptFrame(f"frame: column {name} is missing")

    def __len__(self) -> int:
        return len(self.head)

    def rows(self, rows: Sequence[int] | NDArray[np.integer]) -> list[int]:
        """Return the rows as a list. Raises CorruptFrame for a row that the frame does not have."""
        found: list[int]
        if isinstance(rows, tuple) and all(type(row) is int for row in rows):  # those of picks
            found = list(rows)
        else:
            found = np.asarray(rows, np.intp).tolist()
        if found and not 0 <= min(found) <= max(found) < len(self):
            raise CorruptFrame(f"frame: asked for sample {max(found)} of {len(self)}; the front is of another frame")
        return found

    def ranges(self, rows: Sequence[int] | NDArray[np.integer], *, gap: int = GAP) -> list[Range]:
        """Return the bytes after the front that these samples need. Ranges at most `gap` apart are joined."""
        chosen = self.rows(rows)
        return merged((one for column in self.columns.values() for one in column.ranges(chosen)), gap)

    def plan(self, rows: Sequence[int] | NDArray[np.integer]) -> list[Range]:
        """Return the ranges to read: the complete body as one range where the frame is small or most of it is
        needed.
        """
        whole = [(self.front_size, self.size)]
        if self.size < SMALL_FRAME:  # the usual frame of text: no range has to be computed
            return whole if self.rows(rows) else []
        found = self.ranges(rows)
        return whole if sum(b - a for a, b in found) >= self.size * WHOLE_FROM else found


def _rows_held(spec: ColumnBlock, head: Head) -> tuple[NDArray[np.int64], Offsets, Prefixes | None]:
    """Return per sample the tokens that have the column, where each sample's own rows begin, and the prefixes if
    shared.
    """
    if spec.rows is not None:
        kinds = head.row_kinds[spec.name]
        lengths = np.where(kinds == 2, head.lengths, kinds.astype(np.int64))
        starts = offsets_of(lengths)
        if int(starts[-1]) != spec.num_values:
            raise CorruptFrame(f"{spec.name}: rows add up to {int(starts[-1])} of {spec.num_values} values")
        return lengths, starts, None
    if not spec.shares_prefixes:
        return head.lengths, head.offsets, None
    if head.prefixes is None:
        raise CorruptFrame(f"{spec.name}: shares prefixes where there are none")
    return head.lengths, offsets_of(head.lengths - head.prefixes.shared), head.prefixes.shortened()


def _trained_only(spec: ColumnBlock, block: Block, trained: int, *, after_mask: bool) -> Block:
    """Return the block of a column that stores only the `trained` tokens. Checks that it has one value for each."""
    if spec.rows is not None or spec.shares_prefixes or not after_mask:
        raise CorruptFrame(f"{spec.name}: values on trained tokens only, in a column that cannot have them")
    if block.arg != trained or len(block.parts) != 1:
        raise CorruptFrame(f"{spec.name}: {block.arg} values for {trained} trained tokens")
    return block.parts[0]


def _joined(pieces: Sequence[Array], part: Part) -> Array:
    if len(pieces) == 1:
        return pieces[0]
    return np.concatenate(pieces) if pieces else np.zeros((0, *part.shape), part.dtype)
