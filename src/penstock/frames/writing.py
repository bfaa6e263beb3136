"""Encode samples as a frame: find shared prefixes, write every column in its cheapest coding, prepend a header."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import get_args

import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray

from penstock.arrays import TEXT_COLUMNS, Array, Column, MaskRuns, Pieced, Ragged, Sample, Samples, bit_view
from penstock.errors import ConfigError
from penstock.frames.codings import CONSTANT, FEW, SPARSE, Profile, Writer, counted, is_wide
from penstock.frames.head import digest_of
from penstock.frames.layout import (
    FIRST_COLUMNS,
    TEXTS,
    Block,
    Buffer,
    ColumnBlock,
    Form,
    Header,
    TextBlock,
    assemble,
    pack_header,
)
from penstock.frames.prefixes import Gathered, Prefixes, cut, find_prefixes, shares_values


def encode(samples: Iterable[Sample], profile: Profile = "fast") -> bytes:
    """Return one frame that holds the samples, bit for bit.

    `fast` runs at memory speed and is meant for networks; `small` also compresses and is meant for disks.

    >>> import penstock as ps
    >>> frame = ps.encode([ps.Sample(id="a", token_ids=[1, 2, 3], loss_mask=[0, 1, 1], logprobs=[0, -1, -2])])
    >>> ps.decode(frame)[0].token_ids.tolist()
    [1, 2, 3]
    """
    return b"".join(_pieces_of(samples, profile))


@dataclass(frozen=True, slots=True, kw_only=True)
class FramePieces:
    """An encoded frame that is not joined yet. Large pieces are views of the samples' arrays."""

    samples: Samples
    prefixes: Prefixes
    """The prefixes that the samples share, as the frame stores them."""
    pieces: list[Buffer]
    """The buffers that form the frame, for `os.writev`. The first one is the front."""

    @property
    def front(self) -> bytes:
        return bytes(self.pieces[0])

    @property
    def size(self) -> int:
        """Bytes of the frame."""
        return sum(len(piece) for piece in self.pieces)

    def digest(self) -> bytes:
        """xxh3-128 of the frame."""
        return digest_of(self.pieces)


def encode_group(samples: Iterable[Sample]) -> FramePieces:
    """Encode like `encode`, but return the pieces with the samples and prefixes they came from.

    >>> import penstock as ps
    >>> samples = [ps.Sample(id="a", token_ids=[1, 2, 3])]
    >>> made = encode_group(samples)
    >>> b"".join(made.pieces) == ps.encode(samples), made.size == len(ps.encode(samples))
    (True, True)
    """
    batch = Samples.of(samples, pieced=True)
    prefixes = find_prefixes(batch["token_ids"].values, batch.offsets)
    return FramePieces(samples=batch, prefixes=prefixes, pieces=frame_pieces(batch, prefixes, {}))


def _pieces_of(samples: Iterable[Sample], profile: Profile) -> list[Buffer]:
    if profile not in get_args(Profile):
        raise ConfigError(f"profile: {profile!r}; must be one of {', '.join(get_args(Profile))}")
    batch = Samples.of(samples)
    prefixes = find_prefixes(batch["token_ids"].values, batch.offsets)
    return frame_pieces(batch, prefixes, {}, profile)


def frame_pieces(
    batch: Samples, prefixes: Prefixes, gathered: Mapping[str, Gathered], profile: Profile = "fast"
) -> list[Buffer]:
    """Build a frame in pieces. Columns in `gathered` are taken from there, the others from the batch."""
    head, body = Writer(profile, align=False), Writer(profile, align=True)
    batch.find_loss_tokens()
    lengths, loss_tokens = head.write(batch.lengths), head.write(batch.loss_tokens)
    policy_versions = head.write(batch.policy_versions)
    text = tuple(_text(name, batch.text[name], head) for name in _texts(batch))
    parents = shared = None
    shared_by: list[int] = prefixes.shared.tolist()
    if any(shared_by):
        # Parents are written as a distance, a small number: sample 7 with parent 5 writes 2, and 0 means none.
        back = [0 if parent < 0 else i - parent for i, parent in enumerate(prefixes.parents.tolist())]
        parents, shared = head.counts(back), head.counts(shared_by)
    names = [name for name in batch.table if name in batch.columns or name in gathered]
    per_sample = [name for name in names if name not in gathered and _is_per_sample(name, batch)]
    head_columns = tuple(_sparse_rows(n, batch, head, head) for n in per_sample)
    body_columns = tuple(
        _gathered(batch.table[n], gathered[n], head, body) if n in gathered else _column(n, batch, prefixes, head, body)
        for n in names
        if n not in per_sample
    )
    header = Header(
        num_samples=len(batch),
        num_tokens=batch.num_tokens,
        num_shared=sum(shared_by),
        lengths=lengths,
        loss_tokens=loss_tokens,
        policy_versions=policy_versions,
        text=text,
        head_columns=head_columns,
        body_columns=body_columns,
        parents=parents,
        shared=shared,
        images=batch.images,
    )
    return assemble(pack_header(header), head.pieces, body.pieces)


def _texts(batch: Samples) -> list[str]:
    """Return the text columns to write: those of every frame, and optional ones that some sample has."""
    return [name for name in TEXT_COLUMNS if name in TEXTS or any(batch.text[name])]


def _gathered(column: Column, found: Gathered, head: Writer, body: Writer) -> ColumnBlock:
    """Write a column from pieces. Sparse ones and those with trailing dimensions go in without a copy."""
    trailing, full = tuple(found.example.shape[1:]), bool(found.lengths.all())
    rows = None if full else head.write(_row_kinds(found.lengths, column))
    if found.is_sparse:
        count = sum(len(piece) for piece in found.pieces)
        wide = bool(trailing) and is_wide(found.example.dtype)
        inner = body.write_rows(np.concatenate(found.pieces)) if wide else body.write_pieces(found.pieces)
        block = Block(SPARSE, count, (), (inner,))
    else:
        block = body.write_pieces(found.pieces) if trailing else body.write(np.concatenate(found.pieces))
    count = 0 if full else int(found.lengths.sum())
    return ColumnBlock(
        column.name,
        found.example.dtype.str,
        block,
        trailing,
        rows,
        count,
        found.shares_prefixes,
        form=form_of(column),
    )


def _is_per_sample(name: str, batch: Samples) -> bool:
    """Return whether a column that allows it has at most one number per sample."""
    return batch.table[name].per != "token" and int(batch.columns[name].lengths.max(initial=0)) <= 1


def _text(name: str, values: tuple[str, ...], head: Writer) -> TextBlock:
    distinct = {value: code for code, value in enumerate(dict.fromkeys(values))}
    if len(distinct) == 1:
        return _same_text(name, values, head)
    encoded = [value.encode() for value in distinct]
    lengths = head.integers(list(map(len, encoded)))
    num_bytes = head.add(b"".join(encoded))[0]
    if len(distinct) == len(values) <= FEW:  # ids
        codes, planes = counted(len(values))
        head.add(planes)
    else:
        codes = head.integers([distinct[value] for value in values])
    return TextBlock(name, len(distinct), lengths, num_bytes, codes)


def _same_text(name: str, values: tuple[str, ...], head: Writer) -> TextBlock:
    """`_text` for the usual case that all samples have the same text: the same bytes, without an array per number."""
    block, data = _one_text(name, values[0], len(values) > 1)
    head.add(data)
    return block


@lru_cache(maxsize=64)
def _one_text(name: str, value: str, is_shared: bool) -> tuple[TextBlock, bytes]:
    """Return the block and the bytes of one string. Most names (env, run, mode) are those of the group before."""
    head, encoded = Writer("fast", align=False), value.encode()
    lengths = head.write_number(len(encoded))
    head.add(encoded)
    codes = head.plain(CONSTANT, 0, bytes(4)) if is_shared else head.write_number(0)
    return TextBlock(name, 1, lengths, len(encoded), codes), b"".join(head.pieces)


def _column(name: str, batch: Samples, prefixes: Prefixes, head: Writer, body: Writer) -> ColumnBlock:
    column, found = batch.table[name], batch.columns[name]
    # Compare content, not identity: a batch must encode to the same bytes however its columns were built.
    if found.offsets is not batch.offsets and not np.array_equal(found.offsets, batch.offsets):
        return _sparse_rows(name, batch, head, body)
    if isinstance(found, Pieced):
        return _pieced(column, found, prefixes, body)
    values = found.values
    if column.ragged:
        return _lists(column, found, body, batch.trained)
    if name == "loss_mask":
        return ColumnBlock(name, values.dtype.str, body.write_mask(batch.trained))
    # Only inputs of the model follow from the tokens alone. Masks and log-probabilities differ between branches.
    share = prefixes.any and (name == "token_ids" or _follows_tokens(column, values, batch, prefixes))
    stored = cut(values, batch.offsets, prefixes) if share else values
    trained = None if share else batch.trained
    block = body.write_rows(stored, trained) if column.trailing else body.write(stored, trained)
    return ColumnBlock(
        name, values.dtype.str, block, tuple(values.shape[1:]), shares_prefixes=share, form=form_of(column)
    )


def _pieced(column: Column, found: Pieced, prefixes: Prefixes, body: Writer) -> ColumnBlock:
    """Write rows of one or two bytes per number without joining them. The bytes equal those of `_column`."""
    rows = [found[i] for i in range(len(found))]
    share = prefixes.any and _shares_rows(rows, prefixes)
    skip = prefixes.shared.tolist() if share else [0] * len(rows)
    block = body.write_row_pieces([row[n:] for row, n in zip(rows, skip, strict=True)])
    return ColumnBlock(column.name, found.dtype.str, block, found.trailing, shares_prefixes=share, form=form_of(column))


def _shares_rows(rows: Sequence[Array], prefixes: Prefixes) -> bool:
    """`shares_values` for rows that are not joined."""
    bits = [bit_view(row) for row in rows]
    return all(
        np.array_equal(bits[i][:n], bits[parent][:n])
        for i, (parent, n) in enumerate(zip(prefixes.parents.tolist(), prefixes.shared.tolist(), strict=True))
        if n
    )


def _follows_tokens(column: Column, values: Array, batch: Samples, prefixes: Prefixes) -> bool:
    """Return whether rows repeat wherever tokens do. Rows that are zero on untrained tokens return False: the sparse
    coding saves more.
    """
    if not column.trailing or (is_wide(values.dtype) and batch.trained.has_off and batch.trained.is_zero_off(values)):
        return False
    return shares_values(values, batch.offsets, prefixes)


def _lists(column: Column, found: Ragged, body: Writer, trained: MaskRuns | None = None) -> ColumnBlock:
    """Write a column in which every token has a list."""
    lists: Ragged = found.values
    counts, values = body.write_lists(lists, trained)
    items = tuple(np.diff(lists.offsets[found.offsets]).tolist())
    return ColumnBlock(
        column.name,
        lists.dtype.str,
        values,
        counts=counts,
        num_items=len(lists.values),
        form=form_of(column),
        items=items,
    )


def form_of(column: Column) -> Form | None:
    """Return what the header says of a column that not every reader knows."""
    if column.name in FIRST_COLUMNS:
        return None
    _, per, _, _, fill, pad = column.described()
    return per, fill, pad


def _sparse_rows(name: str, batch: Samples, head: Writer, section: Writer) -> ColumnBlock:
    """Write a column that not every sample has per token: what each sample has, then the values."""
    column, found = batch.table[name], batch.columns[name]
    rows = head.write(_row_kinds(found.lengths, column))
    values = found.values
    if column.ragged:
        return replace(_lists(column, found, section), rows=rows, num_values=len(values))
    trailing = tuple(values.shape[1:])
    block = section.write_rows(values) if trailing else section.write(values)
    return ColumnBlock(name, values.dtype.str, block, trailing, rows, len(values), form=form_of(column))


def _row_kinds(lengths: NDArray[np.int64], column: Column) -> NDArray[np.uint32]:
    """Return per sample: 0 absent, 1 one number, 2 per token."""
    if column.per == "token":
        return np.where(lengths > 0, 2, 0).astype(np.uint32)
    return np.minimum(lengths, 2).astype(np.uint32)
