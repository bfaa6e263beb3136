"""Decode frames. Nothing is trusted: every size is checked before it is used, every value after it is read.

The samples' arrays are views of the frame where the coding allows.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.arrays import (
    TOPK,
    Cells,
    MaskRuns,
    Offsets,
    Pieced,
    Ragged,
    Samples,
    allows_all,
    check_spans,
    first_bad,
    first_bad_set,
    offsets_of,
)
from penstock.errors import CorruptFrame, InvalidInput
from penstock.frames.codings import SPARSE, Reader, is_wide
from penstock.frames.head import DEFAULT_LIMITS, Head, Limits, check_floats, parse_head, ragged
from penstock.frames.layout import PREFIX_SIZE, Buffer, ColumnBlock, check_body, split
from penstock.frames.prefixes import Stored, restore


def decode(data: Buffer, *, limits: Limits = DEFAULT_LIMITS) -> Samples:
    """Return the samples of a frame, bit for bit as they were encoded. Raises `CorruptFrame` for anything else."""
    return describe(data, limits=limits)[1]


def describe(data: Buffer, *, limits: Limits = DEFAULT_LIMITS) -> tuple[Head, Samples, Counter[str]]:
    """Return a frame's head, its samples, and how many bytes each part of it takes."""
    sections = split(data)
    head, of_head = parse_head(sections, limits)
    check_body(sections)
    reader, offsets = Reader(sections.body, align=True), head.offsets
    stored, trained = _read_body(head, offsets, reader)
    columns = {name: _unfold(column, offsets) for name, column in stored.items()}
    samples = _samples(head, columns | head.columns)
    if trained is not None:
        samples.trained = trained
    check_values(samples, head.loss_tokens)
    used = Counter(of_head)
    used["header"] = len(sections.header) + PREFIX_SIZE
    return head, samples, used + Counter(reader.used)


def open_stored(
    data: Buffer, *, limits: Limits = DEFAULT_LIMITS
) -> tuple[Head, Samples, dict[str, Stored], dict[str, Stored]]:
    """Open a frame that was checked when it arrived. Returns its head, its small columns, and the other columns as
    stored: first those with a value per token, then those with a value per trained token.

    Checksums are verified again, because the frame was on a disk since. Values are not.
    """
    sections = split(data)
    head, _ = parse_head(sections, limits)
    check_body(sections)
    offsets = head.offsets
    stored, _ = _read_body(head, offsets, Reader(sections.body, align=True), unfold=False)
    sparse = {name: stored.pop(name) for name in [name for name, column in stored.items() if column.is_sparse]}
    large = {
        name: column for name, column in stored.items() if name == "token_ids" or _stays_stored(head, column, name)
    }
    light = {name: _unfold(column, offsets) for name, column in stored.items() if name not in large}
    if head.prefixes is not None:
        short = head.prefixes.shortened()
        large = {
            name: replace(column, prefixes=short if column.shares_prefixes else None) for name, column in large.items()
        }
    return head, _samples(head, light | head.columns), large, sparse


def _stays_stored(head: Head, column: Stored, name: str) -> bool:
    """Return whether rows are copied without decoding. Wider ones are coded, so they are decoded and coded again."""
    return head.table[name].trailing > 0 and not is_wide(column.values.dtype)


def _samples(head: Head, columns: dict[str, Ragged]) -> Samples:
    return Samples(
        columns={name: columns[name] for name in head.table if name in columns},
        text=head.text,
        policy_versions=head.policy_versions,
        images=head.images,
        own=head.own,
    )


def _read_body(
    head: Head, offsets: Offsets, reader: Reader, *, unfold: bool = True
) -> tuple[dict[str, Stored], MaskRuns | None]:
    """Read the columns, and the runs of the mask where a column needs them. Without `unfold`, columns with values on
    trained tokens only are not expanded.
    """
    columns: dict[str, Stored] = {}
    # The mask comes before the columns that are sparse by it, in the order of the file.
    trained: MaskRuns | None = None
    uses_mask = unfold or any(spec.counts is not None for spec in head.header.body_columns)
    for spec in head.header.body_columns:
        if not unfold and spec.values.coding == SPARSE and spec.rows is None:
            columns[spec.name] = _read_sparse(spec, head, reader)
            continue
        columns[spec.name] = _read_column(spec, head, offsets, reader, trained)
        if spec.name == "loss_mask" and uses_mask:
            trained = MaskRuns.of(columns[spec.name].values)
    reader.finish("frame body")
    return columns, trained


def _read_sparse(spec: ColumnBlock, head: Head, reader: Reader) -> Stored:
    """Read a column that is stored with values on trained tokens only, without expanding it."""
    starts, parts = offsets_of(head.loss_tokens), spec.values.parts
    if spec.values.arg != starts[-1] or len(parts) != 1:
        raise CorruptFrame(f"{spec.name}: {spec.values.arg} values for {starts[-1]} trained tokens")
    count, dtype = int(starts[-1]), np.dtype(spec.dtype)
    if spec.trailing:
        return Stored(reader.read_rows(parts[0], dtype, count, spec.trailing, spec.name), starts, None, is_sparse=True)
    return Stored(reader.read(parts[0], dtype, count, spec.name), starts, None, is_sparse=True)


def _read_column(spec: ColumnBlock, head: Head, offsets: Offsets, reader: Reader, trained: MaskRuns | None) -> Stored:
    dtype: np.dtype[Any] = np.dtype(spec.dtype)
    if spec.rows is not None:
        kinds = head.row_kinds[spec.name]
        lengths = np.where(kinds == 2, head.lengths, kinds.astype(np.int64))
        rows = ragged(spec, _read_values(spec, dtype, spec.num_values, reader, None), lengths)
        _check_items(spec, rows)
        return Stored(rows.values, rows.offsets, None)
    count = head.header.num_tokens
    if not spec.shares_prefixes:
        full = Ragged(_read_values(spec, dtype, count, reader, trained), offsets)
        _check_items(spec, full)
        return Stored(full.values, offsets, None)
    if head.prefixes is None:
        raise CorruptFrame(f"{spec.name}: shares prefixes where there are none")
    values = _read_values(spec, dtype, count - head.header.num_shared, reader, None)
    return Stored(values, offsets_of(head.lengths - head.prefixes.shared), head.prefixes)


def _check_items(spec: ColumnBlock, rows: Ragged) -> None:
    """Check the header's items per sample against the lists: a range reader relies on them."""
    if spec.items is not None and not np.array_equal(np.diff(rows.values.offsets[rows.offsets]), spec.items):
        raise CorruptFrame(f"{spec.name}: the items per sample in the header are not those of the lists")


def _unfold(stored: Stored, offsets: Offsets) -> Ragged:
    """Expand a column to every token of every sample. `offsets` are those of the samples."""
    if stored.prefixes is None:
        return Ragged(stored.values, stored.starts)
    return Ragged(restore(stored.values, offsets, stored.prefixes), offsets)


def _read_values(
    spec: ColumnBlock, dtype: np.dtype[Any], count: int, reader: Reader, trained: MaskRuns | None
) -> Cells:
    if spec.counts is not None:
        counts = reader.read(spec.counts, np.dtype("<u4"), count, spec.name, trained)
        if int(counts.sum(dtype=np.int64)) != spec.num_items:
            raise CorruptFrame(f"{spec.name}: lists of {int(counts.sum(dtype=np.int64))} of {spec.num_items} values")
        return reader.read_lists(spec.values, dtype, counts, spec.name)
    if spec.trailing:
        return reader.read_rows(spec.values, dtype, count, spec.trailing, spec.name, trained)
    return reader.read(spec.values, dtype, count, spec.name, trained)


def check_values(samples: Samples, loss_tokens: NDArray[np.int64]) -> None:
    """Raise CorruptFrame unless decoded samples are as valid as a `Sample`. `loss_tokens` come from the head."""
    for name in ("token_ids", "loss_mask"):
        if name not in samples.columns or samples.columns[name].offsets[-1] != samples.num_tokens:
            raise CorruptFrame(f"frame: column {name} is missing or short")
    mask = samples["loss_mask"].values
    if len(samples) and np.count_nonzero(mask[samples.offsets[:-1]]):
        raise CorruptFrame("frame: a sample's first token is marked as trained")
    if np.count_nonzero(samples.loss_tokens != loss_tokens):
        raise CorruptFrame("frame: the loss tokens in the header are not those of the mask")
    try:
        for name, column in samples.columns.items():
            _check_column(name, column, samples)
        _check_topk(samples)
        types = samples.columns.get("mm_token_type_ids")
        if samples.images is None and types is not None:
            check_spans((), len(types.values), types.values, "frame without images")
        for i, spans in enumerate(samples.images or ()):
            where, row = f"sample {samples.ids[i]!r}", None if types is None or not len(types[i]) else types[i]
            if spans and row is None:
                raise CorruptFrame(f"{where}: {len(spans)} images without mm_token_type_ids")
            check_spans(spans, int(samples.lengths[i]), row, where)
    except InvalidInput as error:
        raise CorruptFrame(str(error)) from None


def _check_topk(samples: Samples) -> None:
    found = [samples.columns[name] for name in TOPK if name in samples.columns]
    if found and (
        len(found) == 1
        or found[0].values.shape != found[1].values.shape
        or not np.array_equal(found[0].offsets, found[1].offsets)
    ):
        raise CorruptFrame(f"frame: {' and '.join(TOPK)} are not of one shape")


def _check_column(name: str, column: Ragged, samples: Samples) -> None:
    if isinstance(column, Pieced) and allows_all(samples.table[name], column.dtype):
        return
    values = column.values
    if isinstance(values, Ragged):
        if name == "sampling_mask":
            _check_kept(column, samples)
        values = values.values
    if first_bad(samples.table[name], values) is None:
        return
    if samples.table[name].nan == "untrained":
        if column.offsets is samples.offsets:
            values = samples.trained.take(values) if samples.trained.has_off else values
        else:
            have = np.repeat(column.lengths > 0, samples.lengths)
            values = values[samples.trained.mask[have]]
    check_floats(samples.table[name], values)


def _check_kept(column: Ragged, samples: Samples) -> None:
    """Check that every set of a sampling mask contains the token that was drawn from it."""
    ids = samples["token_ids"].values
    if column.offsets[-1] != samples.num_tokens:
        ids = ids[np.repeat(column.lengths > 0, samples.lengths)]
    bad = first_bad_set(column.values, ids)
    if bad is not None:
        row = int(np.searchsorted(column.offsets, bad[0], side="right")) - 1
        token = bad[0] - int(column.offsets[row])
        raise CorruptFrame(f"sample {samples.ids[row]!r}.sampling_mask[{token}]: {bad[1]}")
