"""Gather the arrays of a rank's micro-batches: one pass per column, every token copied once.

All micro-batches of the share are laid end to end; a column is one `np.concatenate` of views into the samples'
columns, with constant views where a sample lacks it and where padding stands, and each micro-batch is a slice of the
result. A gather index would cost more to build than all of the copying. One number per sample is repeated over the
sample's tokens: an advantage stands on every token, and `loss_mask` alone decides what is trained.
"""

from __future__ import annotations

from itertools import pairwise

import msgspec
import numpy as np
from numpy.typing import NDArray

from penstock.arrays import ImageSpan, Samples, offsets_of
from penstock.arrays.columns import TOKEN_COLUMNS, Array, Column
from penstock.errors import InvalidInput
from penstock.pack.micro_batch import MicroBatch, Segments
from penstock.pack.share import Share
from penstock.pack.traits import MODALITIES, MODE_WEIGHTS, TERMS

PADDING = -1
# What a dummy borrows from a sample; everything else in it is padding.
BORROWED = ("token_ids", "mm_token_type_ids")


def fill(samples: Samples, share: Share) -> list[MicroBatch]:
    """The micro-batches of one rank, from all samples of the step or (`share.relative()`) from the rank's own."""
    if len(share.order) and int(share.order.max()) >= len(samples):
        raise InvalidInput(
            f"samples: {len(samples)} given, the share uses number {int(share.order.max())}; "
            "pass those it was planned for, or share.relative() with samples.take(share.needs)"
        )
    layout = _Layout(samples, share)
    columns = {name: _gather(layout, TOKEN_COLUMNS[name]) for name in share.columns if name != "routed_experts"}
    columns["position_ids"] = _positions(layout)
    return [_micro_batch(layout, columns, m) for m in range(len(share))]


class _Layout:
    """Where everything lies when the share's micro-batches stand end to end."""

    def __init__(self, samples: Samples, share: Share) -> None:
        self.samples, self.share = samples, share
        self.tokens = offsets_of(share.padded).tolist()
        """[micro_batches + 1] first token of each micro-batch."""
        self.segments = [0]
        """[micro_batches + 1] first segment of each micro-batch."""
        self.rows: list[int] = []
        """[segments] the sample of each segment, or PADDING."""
        self.lengths: list[int] = []
        """[segments] its tokens."""
        self.borrowed: set[int] = set()
        """Segments that a dummy borrows."""
        order, cuts, dummy = share.order.tolist(), share.cuts.tolist(), share.dummy.tolist()
        for m, (a, b) in enumerate(pairwise(share.starts.tolist())):
            if dummy[m]:
                self.borrowed |= set(range(len(self.rows), len(self.rows) + b - a))
            self.rows += order[a:b]
            self.lengths += cuts[a:b]
            padding = self.tokens[m + 1] - self.tokens[m] - sum(cuts[a:b])
            if padding:
                self.rows.append(PADDING)
                self.lengths.append(padding)
            self.segments.append(len(self.rows))


def _gather(layout: _Layout, column: Column) -> Array:
    """One column of all micro-batches."""
    ragged = layout.samples.columns.get(column.name)
    constants = _constants(layout, column)
    given = np.zeros(len(layout.samples), np.int64) if ragged is None else ragged.lengths
    rows = np.array(layout.rows, np.intp)
    takes = (rows != PADDING) & (given[rows] > 0) if len(given) else rows != PADDING
    if column.name not in BORROWED and layout.borrowed:
        takes[list(layout.borrowed)] = False
    if ragged is not None and column.per == "either":
        single = takes & (given[rows] == 1)
        constants[single] = ragged.values[ragged.offsets[rows[single]]]
        takes &= ~single
    if ragged is None or not takes.any():
        return np.repeat(constants, layout.lengths)
    values, starts = ragged.values, ragged.offsets[rows].tolist()
    if takes.all():
        return np.concatenate([values[a : a + n] for a, n in zip(starts, layout.lengths, strict=True)])
    return np.concatenate(
        [
            values[a : a + n] if take else np.full(n, constant)
            for a, n, take, constant in zip(starts, layout.lengths, takes.tolist(), constants, strict=True)
        ]
    )


def _constants(layout: _Layout, column: Column) -> Array:
    """[segments] what stands in each segment that has nothing of its own in this column."""
    pad = layout.share.pad_id if column.name == "token_ids" else column.pad
    out = np.full(len(layout.rows), column.fill, column.dtype)
    if column.name in TERMS:
        term, modes = TERMS.index(column.name), layout.samples.text["mode"]
        out[:] = [MODE_WEIGHTS[modes[row]][term] if row != PADDING else 0.0 for row in layout.rows]
    out[[row == PADDING or s in layout.borrowed for s, row in enumerate(layout.rows)]] = pad
    return out


def _positions(layout: _Layout) -> NDArray[np.int64]:
    """Positions from 0 in every segment. int64, because that is what models index with: no copy on the way there."""
    longest = np.arange(max(layout.lengths, default=0), dtype=np.int64)
    return np.concatenate([longest[:n] for n in layout.lengths]) if layout.lengths else longest


def _micro_batch(layout: _Layout, columns: dict[str, Array], m: int) -> MicroBatch:
    share, samples = layout.share, layout.samples
    tokens = slice(layout.tokens[m], layout.tokens[m + 1])
    own = slice(layout.segments[m], layout.segments[m + 1])
    rows, lengths = layout.rows[own], layout.lengths[own]
    offsets = offsets_of(lengths).tolist()
    real = [row for row in rows if row != PADDING]
    is_dummy = bool(share.dummy[m])
    parts = {name: values[tokens] for name, values in columns.items()}
    if "routed_experts" in share.columns and not is_dummy:
        parts = _with_routed(parts, layout, rows, lengths)
    return MicroBatch(
        columns=parts,
        sequence_lengths=np.array(lengths, np.int32),
        segments=_segments(samples, [] if is_dummy else real, lengths, offsets),
        images=_images(samples, real, lengths, offsets),
        modality=MODALITIES[share.modality[m]],
        run=samples.text["run"][real[0]] if real else "",
        is_dummy=is_dummy,
    )


def _with_routed(parts: dict[str, Array], layout: _Layout, rows: list[int], lengths: list[int]) -> dict[str, Array]:
    """The columns with routed experts, if the samples of this micro-batch have them: then all of them do."""
    ragged = layout.samples.columns.get("routed_experts")
    if ragged is None or len(ragged[rows[0]]) == 0:
        return parts
    blank = np.zeros((lengths[-1] if rows[-1] == PADDING else 0, *ragged.values.shape[1:]), ragged.values.dtype)
    views = [blank if row == PADDING else ragged[row][:n] for row, n in zip(rows, lengths, strict=True)]
    routed = np.concatenate(views)
    return {
        name: routed if name == "routed_experts" else parts[name]
        for name in (*TOKEN_COLUMNS, "position_ids")
        if name in parts or name == "routed_experts"
    }


def _segments(samples: Samples, rows: list[int], lengths: list[int], offsets: list[int]) -> Segments:
    text, count = samples.text, len(rows)
    return Segments(
        ids=tuple(text["id"][row] for row in rows),
        groups=tuple(text["group"][row] for row in rows),
        envs=tuple(text["env"][row] for row in rows),
        modes=tuple(text["mode"][row] for row in rows),
        policy_versions=samples.policy_versions[rows],
        source_offsets=np.zeros(count, np.int64),
        offsets=np.array(offsets[:count], np.int64),
        lengths=np.array(lengths[:count], np.int64),
    )


def _images(samples: Samples, rows: list[int], lengths: list[int], offsets: list[int]) -> tuple[ImageSpan, ...]:
    """The images of these samples that were not cut off, in the micro-batch's token space."""
    if samples.images is None:
        return ()
    return tuple(
        msgspec.structs.replace(span, offset=offset + span.offset)
        for row, length, offset in zip(rows, lengths, offsets, strict=False)
        for span in samples.images[row]
        if span.end <= length
    )
