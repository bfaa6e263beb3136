"""A frame's head: lengths, ids, groups, versions and all else that is given once per sample.

Nothing in it is trusted: counts are compared with the reader's limits before anything is allocated, sizes before they
are used, values after they are read. Everything a planner needs is here, before the body.

The *front* is prefix, header and head: all that is needed to read samples of the frame by range. For a group of sixteen
samples it takes about half a kilobyte. It travels with the group's metadata, so a reader needs only one round trip to
the storage.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, pairwise

import numpy as np
import xxhash
from numpy.typing import NDArray

from penstock.arrays import (
    MAX_EXTENT,
    MAX_TEXT,
    MAX_VERSION,
    MODE_WEIGHTS,
    NO_VERSION,
    TEXT_COLUMNS,
    TOKEN_COLUMNS,
    Array,
    Cells,
    Column,
    ImageSpan,
    Offsets,
    Own,
    Ragged,
    check_name,
    check_text,
    first_bad,
    offsets_of,
    table_with,
)
from penstock.errors import ConfigError, CorruptFrame, InvalidInput
from penstock.frames.codings import CONSTANT, FEW, Reader, counted
from penstock.frames.layout import (
    TEXTS,
    Block,
    Buffer,
    ColumnBlock,
    Header,
    Sections,
    TextBlock,
    front_size,
    parse_header,
    split,
)
from penstock.frames.prefixes import Prefixes


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What a decoder accepts. A frame that claims more is rejected before anything is allocated."""

    max_samples: int = 1 << 20
    max_tokens: int = 1 << 28
    max_bytes: int = 4 << 30
    """Bytes of all decoded columns together."""


DEFAULT_LIMITS = Limits()
ANY_SIZE = Limits(
    max_samples=1 << 31, max_tokens=1 << 40, max_bytes=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
)
"""For a step: the plane built it, and each of its groups was checked before. What this machine's memory cannot hold is
an error all the same."""
_U4, _I8 = np.dtype("<u4"), np.dtype("<i8")
_NEEDED = frozenset(TEXTS)


@dataclass(frozen=True, slots=True, kw_only=True)
class Head:
    """What a frame says before its body: enough to plan, account and look up."""

    header: Header
    lengths: NDArray[np.int64]
    """[n] tokens of each sample."""
    offsets: Offsets
    """[n + 1] where each sample's tokens start."""
    loss_tokens: NDArray[np.int64]
    """[n] trained tokens of each sample."""
    policy_versions: NDArray[np.int64]
    """[n] -1 = not known."""
    text: dict[str, tuple[str, ...]]
    columns: dict[str, Ragged]
    """Columns given once per sample."""
    images: tuple[tuple[ImageSpan, ...], ...] | None
    row_kinds: dict[str, NDArray[np.uint32]]
    """For body columns that not all samples have per token: 0 absent, 1 one number, 2 per token."""
    prefixes: Prefixes | None
    own: Own
    """Declarations in the header of columns that are not in the table."""
    table: Mapping[str, Column]
    """The possible columns along tokens, in order."""

    @property
    def ids(self) -> tuple[str, ...]:
        return self.text["id"]

    def __len__(self) -> int:
        return len(self.lengths)


def read_head(data: Buffer, *, limits: Limits = DEFAULT_LIMITS) -> Head:
    """Read lengths, ids and accounting of a frame, without its body.

    >>> import penstock as ps
    >>> head = read_head(ps.encode([ps.Sample(id="a", token_ids=[1, 2, 3], loss_mask=[0, 1, 1])]))
    >>> head.ids, head.lengths.tolist(), head.loss_tokens.tolist()
    (('a',), [3], [2])
    """
    sections = split(data, whole=False)
    return parse_head(sections, limits)[0]


def parse_head(sections: Sections, limits: Limits) -> tuple[Head, dict[str, int]]:
    """Return the head of a frame that was split, and the number of bytes of each part of it."""
    header = parse_header(sections.header)
    _check_limits(header, limits)
    _check_names(header)
    own = _own_columns(header)
    table = table_with(own)
    reader = Reader(sections.head, align=False)
    lengths, loss_tokens, versions = _read_counts(reader, header)
    text = {spec.name: _read_text(reader, spec, len(lengths)) for spec in header.text}
    if not text.keys() >= _NEEDED:
        raise CorruptFrame(f"frame: text column {sorted(_NEEDED - text.keys())[0]!r} is missing")
    for name in TEXT_COLUMNS:
        if name not in text:
            text[name] = ("",) * len(lengths)
    # Keyword arguments are evaluated in this order, which must be the order of the file: each read moves the reader.
    head = Head(
        header=header,
        lengths=lengths,
        offsets=offsets_of(lengths),
        loss_tokens=loss_tokens,
        policy_versions=versions,
        text=text,
        prefixes=_read_prefixes(reader, header, lengths),
        columns={spec.name: _read_per_sample(reader, spec, table, len(lengths)) for spec in header.head_columns},
        row_kinds=_read_row_kinds(reader, header, table),
        images=_check_images(header),
        own=own,
        table=table,
    )
    reader.finish("frame head")
    return head, reader.used


def _check_limits(header: Header, limits: Limits) -> None:
    """Check counts and the total size of all columns against the limits, before anything is allocated."""
    if not 0 <= header.num_samples <= limits.max_samples or not 0 <= header.num_tokens <= limits.max_tokens:
        raise CorruptFrame(
            f"frame: says {header.num_samples} samples, {header.num_tokens} tokens; "
            f"this reader takes {limits.max_samples} and {limits.max_tokens}"
        )
    if header.num_samples > header.num_tokens:
        raise CorruptFrame(f"frame: {header.num_samples} samples in {header.num_tokens} tokens; none may be empty")
    total = header.num_samples * 32
    for spec in (*header.head_columns, *header.body_columns):
        if len(spec.trailing) > 2 or any(not 0 < size < MAX_EXTENT for size in spec.trailing):
            raise CorruptFrame(f"{spec.name}: trailing shape {spec.trailing[:4]}")
        # The widest dtype has 8 bytes per value. This is an upper bound; exact sizes are checked when a column is read.
        size = 8
        for extent in spec.trailing:
            size *= extent
        total += size * (header.num_tokens if spec.rows is None else spec.num_values) + 8 * max(spec.num_items, 0)
        if spec.num_values < 0 or spec.num_values > header.num_tokens:
            raise CorruptFrame(f"{spec.name}: {spec.num_values} values for {header.num_tokens} tokens")
        if spec.num_items < 0 or (spec.num_items and spec.counts is None):
            raise CorruptFrame(f"{spec.name}: {spec.num_items} values in lists of no length")
        _check_items(spec, header.num_samples)
    for text in header.text:
        total += max(text.num_distinct, 0) * 4 + max(text.num_bytes, 0)
    if total > limits.max_bytes:
        raise CorruptFrame(f"frame: would unfold to {total} bytes; this reader takes {limits.max_bytes}")


def _check_items(spec: ColumnBlock, num_samples: int) -> None:
    """Check that the items per sample, where given, add up to the items of the column."""
    if spec.items is None:
        return
    if spec.counts is None or len(spec.items) != num_samples or min(spec.items, default=0) < 0:
        raise CorruptFrame(f"{spec.name}: items of {len(spec.items)} samples in a frame of {num_samples}")
    if sum(spec.items) != spec.num_items:
        raise CorruptFrame(f"{spec.name}: samples have {sum(spec.items)} of {spec.num_items} values in lists")


def _check_names(header: Header) -> None:
    """Check that every name occurs once. A repeated column would be read twice and stored once."""
    columns = (*header.head_columns, *header.body_columns)
    for specs in (columns, header.text):
        names = [spec.name for spec in specs]
        if len(set(names)) < len(names):
            ((name, times),) = Counter(names).most_common(1)
            raise CorruptFrame(f"frame: column {name[:40]!r} is given {times} times")


def _own_columns(header: Header) -> Own:
    """Return the columns that this reader does not know, as the header describes them."""
    own: dict[str, Column] = {}
    for spec in (*header.head_columns, *header.body_columns):
        if spec.name in TOKEN_COLUMNS:
            continue
        if spec.form is None:
            raise CorruptFrame(f"frame: column {spec.name[:40]!r} is not one this reader knows; upgrade it")
        per, fill, pad = spec.form
        ragged = spec.counts is not None
        try:
            found = Column.of(check_name(spec.name), (spec.dtype, per, len(spec.trailing), ragged, fill, pad))
        except ConfigError as error:
            raise CorruptFrame(f"frame: {error}") from None
        own[spec.name] = found
    return {name: own[name] for name in sorted(own)}


def _check_spec(spec: ColumnBlock, table: Mapping[str, Column]) -> Column:
    column = table[spec.name]
    if spec.dtype not in column.dtypes or len(spec.trailing) != column.trailing:
        raise CorruptFrame(f"{spec.name}: {spec.dtype[:8]} with {len(spec.trailing)} trailing dimensions")
    if (spec.counts is not None) != column.ragged or (column.ragged and spec.shares_prefixes):
        raise CorruptFrame(f"{spec.name}: {'lists that share prefixes' if column.ragged else 'lists'}")
    return column


def _read_counts(reader: Reader, header: Header) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """Read (tokens, trained tokens, policy version) of each sample."""
    n, num_tokens = header.num_samples, header.num_tokens
    lengths, low, high = _counts(reader, header.lengths, n, "lengths")
    # Bound each length before summing: an int64 sum can wrap around to any value.
    if n and not 1 <= low <= high <= num_tokens:
        raise CorruptFrame(f"frame: samples of {low} to {high} tokens in {num_tokens}")
    total = sum(lengths.tolist()) if n <= FEW else int(np.add.reduce(lengths))
    if total != num_tokens:
        raise CorruptFrame(f"frame: lengths add up to {int(lengths.sum())} of {num_tokens} tokens")
    loss_tokens, _, _ = _counts(reader, header.loss_tokens, n, "loss_tokens")
    if np.count_nonzero(loss_tokens >= lengths):
        raise CorruptFrame("frame: a sample says all its tokens are trained; the first never is")
    return lengths, loss_tokens, _read_versions(reader, header.policy_versions, n)


def _counts(reader: Reader, block: Block, n: int, what: str) -> tuple[NDArray[np.int64], int, int]:
    """Read n numbers, none below 0. Returns them with the least and the largest."""
    counts, low, high = _integers(reader, block, n, what)
    if low < 0:
        raise CorruptFrame(f"{what}: {low}")
    return counts, low, high


def _integers(reader: Reader, block: Block, n: int, what: str) -> tuple[NDArray[np.int64], int, int]:
    """Read n numbers. Returns them with the least and the largest, both 0 if n is 0."""
    if n <= FEW:  # builtins take a tenth of the time of numpy's reductions here
        few = reader.integers(block, _I8, n, what)
        return np.array(few, _I8), min(few, default=0), max(few, default=0)
    found = reader.read(block, _I8, n, what)
    return found, int(found.min()), int(found.max())


def _read_versions(reader: Reader, block: Block, n: int) -> NDArray[np.int64]:
    versions, low, high = _integers(reader, block, n, "policy_version")
    if low < NO_VERSION or high > MAX_VERSION:
        bad = low if low < NO_VERSION else high
        raise CorruptFrame(f"policy_version: {bad}; must be from 0 to 2**53, or {NO_VERSION} where it is not known")
    return versions


def _read_text(reader: Reader, spec: TextBlock, n: int) -> tuple[str, ...]:
    if spec.name not in TEXT_COLUMNS or not 0 <= spec.num_distinct <= n:
        raise CorruptFrame(f"text {spec.name[:40]!r}: {spec.num_distinct} strings for {n} samples")
    if spec.num_distinct == 1 and spec.codes.coding == CONSTANT:
        return _read_same_text(reader, spec, n)
    lengths = reader.integers(spec.lengths, _U4, spec.num_distinct, spec.name)
    blob = bytes(reader.bytes(spec.num_bytes, spec.name))
    codes = _read_codes(reader, spec, n)
    ends = list(accumulate(lengths, initial=0))
    if ends[-1] != len(blob) or (codes is not None and max(codes, default=-1) >= spec.num_distinct):
        raise CorruptFrame(f"{spec.name}: {ends[-1]} of {len(blob)} bytes, {spec.num_distinct} strings")
    if blob.isascii():  # cut as text: a string per byte is a place per byte
        text = blob.decode()
        distinct = [text[a:b] for a, b in pairwise(ends)]
    else:
        try:
            distinct = [blob[a:b].decode() for a, b in pairwise(ends)]
        except UnicodeDecodeError as error:
            raise CorruptFrame(f"{spec.name}: {error}") from None
    _check_text(spec.name, distinct)
    return tuple(distinct) if codes is None else tuple([distinct[code] for code in codes])


def _read_codes(reader: Reader, spec: TextBlock, n: int) -> list[int] | None:
    """Return the index of each sample's string, or None where they all differ, as ids do."""
    if spec.num_distinct == n <= FEW:
        block, planes = counted(n)
        if spec.codes == block and reader.skip(planes, spec.name):
            return None
    return reader.integers(spec.codes, _U4, n, spec.name)


def _read_same_text(reader: Reader, spec: TextBlock, n: int) -> tuple[str, ...]:
    """`_read_text` for the usual case that all samples have the same text."""
    length = reader.read_number(spec.lengths, spec.name)
    blob = bytes(reader.bytes(spec.num_bytes, spec.name))
    if length != len(blob) or reader.bytes(4, spec.name) != bytes(4):
        raise CorruptFrame(f"{spec.name}: {length} of {len(blob)} bytes, 1 string")
    return (_one_text(spec.name, blob),) * n


@lru_cache(maxsize=64)
def _one_text(name: str, blob: bytes) -> str:
    """Decode and check one string. Most (env, run, mode) are those of the frame before."""
    try:
        value = blob.decode()
    except UnicodeDecodeError as error:
        raise CorruptFrame(f"{name}: {error}") from None
    _check_text(name, (value,))
    return value


def _check_text(name: str, distinct: Sequence[str]) -> None:
    """Raise CorruptFrame for a string that the text column does not allow."""
    # The usual cases: one check of the joined text instead of one per string.
    if name == "mode" and all(value in MODE_WEIGHTS for value in distinct):
        return
    if name not in ("mode", "rollout") and (name != "id" or all(distinct)):
        joined = "".join(distinct)
        if joined.isascii() and joined.isprintable() and max(map(len, distinct), default=0) <= MAX_TEXT:
            return
    try:
        for value in distinct:
            check_text({"mode": "rl", name: value}, "frame")
    except InvalidInput as error:
        raise CorruptFrame(str(error)) from None


def _read_prefixes(reader: Reader, header: Header, lengths: NDArray[np.int64]) -> Prefixes | None:
    if header.parents is None or header.shared is None:
        if header.num_shared or header.parents is not header.shared:
            raise CorruptFrame(f"frame: {header.num_shared} shared tokens without saying where")
        return None
    n, sizes = header.num_samples, lengths.tolist()
    back = reader.integers(header.parents, _I8, n, "parents")
    shared = reader.integers(header.shared, _I8, n, "shared")
    parents = [-1] * n
    # Lists, not arrays: a frame has few samples. Invalid: a parent before the first sample, shared tokens without a
    # parent, or more than either sample has.
    for i, (distance, count) in enumerate(zip(back, shared, strict=True)):
        if not 0 <= distance <= i or not 0 <= count <= min(sizes[i], sizes[i - distance]) or (count and not distance):
            raise CorruptFrame("frame: a shared prefix points outside the samples before it")
        if count:
            parents[i] = i - distance
    if sum(shared) != header.num_shared:
        raise CorruptFrame("frame: a shared prefix points outside the samples before it")
    return Prefixes(np.array(parents, np.int64), np.array(shared, np.int64))


def _read_per_sample(reader: Reader, spec: ColumnBlock, table: Mapping[str, Column], n: int) -> Ragged:
    """Read a column of at most one number per sample."""
    column = _check_spec(spec, table)
    if column.per == "token":
        raise CorruptFrame(f"{spec.name}: in the head, where only columns of one number per sample belong")
    kinds = _read_kinds(reader, spec, column, n, most=1)
    values = reader.read(spec.values, np.dtype(spec.dtype), spec.num_values, spec.name)
    check_floats(column, values)
    return ragged(spec, values, kinds.astype(np.int64))


def _read_row_kinds(reader: Reader, header: Header, table: Mapping[str, Column]) -> dict[str, NDArray[np.uint32]]:
    """Read what each sample has of every body column that not all samples have per token."""
    kinds: dict[str, NDArray[np.uint32]] = {}
    for spec in header.body_columns:
        column = _check_spec(spec, table)
        if column.per == "sample":
            raise CorruptFrame(f"{spec.name}: in the body, and it is given once per sample")
        if spec.rows is None:
            continue
        if spec.name in ("token_ids", "loss_mask"):
            raise CorruptFrame(f"{spec.name}: not given for every token; a sample cannot be without it")
        kinds[spec.name] = _read_kinds(reader, spec, column, header.num_samples, most=2)
    return kinds


def _read_kinds(reader: Reader, spec: ColumnBlock, column: Column, n: int, *, most: int) -> NDArray[np.uint32]:
    if spec.rows is None:
        raise CorruptFrame(f"{spec.name}: a column of the head must say which samples have it")
    kinds = reader.read(spec.rows, _U4, n, spec.name)
    if int(kinds.max(initial=0)) > most or (column.per == "token" and (kinds == 1).any()):
        raise CorruptFrame(f"{spec.name}: row kind {int(kinds.max(initial=0))}")
    return kinds


def ragged(spec: ColumnBlock, values: Cells, lengths: NDArray[np.int64]) -> Ragged:
    if int(lengths.sum()) != len(values):
        raise CorruptFrame(f"{spec.name}: rows add up to {int(lengths.sum())} of {len(values)} values")
    return Ragged(values, offsets_of(lengths))


def check_floats(column: Column, values: Array) -> None:
    """Raise CorruptFrame for a value that the column table does not allow."""
    bad = first_bad(column, values)
    if bad is not None:
        raise CorruptFrame(f"{column.name}: value {bad[0]} {bad[1]}")


def _check_images(header: Header) -> tuple[tuple[ImageSpan, ...], ...] | None:
    if header.images is not None and len(header.images) != header.num_samples:
        raise CorruptFrame(f"frame: images for {len(header.images)} of {header.num_samples} samples")
    return header.images


def front_of(frame: Buffer) -> bytes:
    """Return the front of a frame, or of any leading bytes that contain the front.

    >>> import penstock as ps
    >>> frame = ps.encode([ps.Sample(id="a", token_ids=[1, 2, 3])])
    >>> front = front_of(frame)
    >>> frame.startswith(front), len(front) == front_size(frame)
    (True, True)
    """
    size = front_size(frame)
    view = memoryview(frame).cast("B")
    if len(view) < size:
        raise CorruptFrame(f"frame: {len(view)} bytes where its front takes {size}; it was cut off")
    return bytes(view[:size])


def digest_of(pieces: Sequence[Buffer]) -> bytes:
    """Return the xxh3-128 of the frame that these pieces form, without joining them."""
    state = xxhash.xxh3_128()
    for piece in pieces:
        state.update(piece)
    return state.digest()
