"""The layout of a frame: which part lies where, so that sizes can be checked before anything is allocated.

    prefix   48 bytes: magic, version, section sizes, checksums
    header   msgpack: counts, and for every block its coding and sizes, but no values per token
    head     values per sample: lengths, ids, groups, versions, rewards given per sample, ...
    body     values per token, each buffer at a multiple of 8 bytes

Everything a planner needs comes before the body. The first checksum covers prefix, header and head, the second covers
the body, so the front can be verified without reading the rest. docs/internals/wire-format.md is byte-exact.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import msgspec
import numpy as np
import xxhash

from penstock.arrays import ImageSpan
from penstock.errors import CorruptFrame, InvalidInput

MAGIC = b"PENSTOCK"
VERSION = 1
ALIGN = 8
TEXTS = ("id", "group", "env", "run", "mode")
"""Text columns that every frame has. Others are written only if a sample has them, and read as empty otherwise."""
_PREFIX = struct.Struct("<8sHHIIIQQQ")
PREFIX_SIZE = _PREFIX.size
_CHECKED = PREFIX_SIZE - 8  # the head checksum covers the prefix up to itself

Buffer: TypeAlias = bytes | bytearray | memoryview
Form: TypeAlias = tuple[str, bool | int | float, bool | int | float]
"""How a column is given (token, either, sample), its fill and its padding."""


FIRST_COLUMNS = (
    *("token_ids", "loss_mask", "logprobs", "temperatures", "advantages", "rewards", "teacher_logprobs"),
    *("rl_weights", "ce_weights", "ref_kl_weights", "routed_experts", "mm_token_type_ids", "weight_versions"),
)
"""Columns that every reader of the format knows. All others are described in the header."""
_FIRST_FIELDS = 7
"""Fields of a ColumnBlock in the first version of the format. Blocks of `FIRST_COLUMNS` still have only these."""


class Block(msgspec.Struct, frozen=True, array_like=True):
    """How one array is written: its coding, an argument, sizes of compressed buffers, and the blocks it consists of."""

    coding: int
    arg: int = 0
    sizes: tuple[int, ...] = ()
    parts: tuple[Block, ...] = ()


class TextBlock(msgspec.Struct, frozen=True, array_like=True):
    """One text column: distinct strings in order of appearance, and the index of each sample's string."""

    name: str
    num_distinct: int
    lengths: Block
    """Bytes of each distinct string."""
    num_bytes: int
    """Size of the joined UTF-8 text."""
    codes: Block
    """Per sample, the index of its string."""


class ColumnBlock(msgspec.Struct, frozen=True, array_like=True):
    """One column along the tokens."""

    name: str
    dtype: str
    values: Block
    trailing: tuple[int, ...] = ()
    rows: Block | None = None
    """Per sample: 0 absent, 1 one number, 2 per token. None: per token for all samples."""
    num_values: int = 0
    """Number of values; only used with `rows`."""
    shares_prefixes: bool = False
    """Whether tokens shared with an earlier sample are left out."""
    counts: Block | None = None
    """For a column of lists: the length of each token's list."""
    num_items: int = 0
    """Number of values in all lists; only used with `counts`."""
    form: Form | None = None
    """What a reader needs to store a column it does not know; None for columns that every reader knows."""
    items: tuple[int, ...] | None = None
    """For a column of lists: per sample, the number of values in its lists. None in frames of earlier writers."""

    def to_wire(self) -> tuple[Any, ...]:
        """Return the fields to write: those after `shares_prefixes`, and `items`, only where they are set."""
        fields = msgspec.structs.astuple(self)
        if self.form is None:
            return fields[:_FIRST_FIELDS]
        return fields[:-1] if self.items is None else fields


class Header(msgspec.Struct, frozen=True, array_like=True):
    """Counts and block descriptions. New fields are appended; readers ignore fields they do not know."""

    num_samples: int
    num_tokens: int
    num_shared: int
    """Tokens not stored because an earlier sample of the frame has them."""
    lengths: Block
    loss_tokens: Block
    policy_versions: Block
    """-1 = not known."""
    text: tuple[TextBlock, ...]
    head_columns: tuple[ColumnBlock, ...]
    """Columns with at most one number per sample: their values are in the head."""
    body_columns: tuple[ColumnBlock, ...]
    parents: Block | None = None
    """Per sample, how many samples back its prefix is stored; 0 = not shared."""
    shared: Block | None = None
    """Per sample, how many of its first tokens are stored there."""
    images: tuple[tuple[ImageSpan, ...], ...] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Sections:
    """The three parts after a frame's prefix, as views of the frame."""

    header: memoryview
    head: memoryview
    body: memoryview
    body_hash: int


def assemble(header: bytes, head: list[Buffer], body: list[Buffer]) -> list[Buffer]:
    """Build a frame, in pieces to be joined. Sections are lists of pieces; those of the body are already padded."""
    head_size = sum(len(piece) for piece in head)
    # Python's % is never negative: -(48 + 100 + 30) % 8 = 6 bytes bring 178 to 184, the next multiple of 8.
    padding = -(PREFIX_SIZE + len(header) + head_size) % ALIGN
    front = b"".join([header, *head, bytes(padding)])
    body_hash, body_size = xxhash.xxh3_64(), 0
    for piece in body:
        body_hash.update(piece)
        body_size += len(piece)
    checked = _PREFIX.pack(MAGIC, VERSION, 0, len(header), head_size + padding, 0, body_size, body_hash.intdigest(), 0)[
        :_CHECKED
    ]
    front_hash = struct.pack("<Q", _front_hash(checked, front))
    return [checked + front_hash + front, *body]


def wrap(header: bytes, body: list[Buffer]) -> list[Buffer]:
    """Build a frame whose content is not samples, in pieces to be joined. `split` and a scan of a storage read it;
    `decode` rejects it.
    """
    return assemble(header, [], body)


def join(pieces: Sequence[Buffer]) -> memoryview:
    """Join pieces in memory from numpy, which uses huge pages for large blocks. `bytes.join` spends more time on new
    pages than on copying.
    """
    total = sum(len(piece) for piece in pieces)
    out = np.empty(total, np.uint8).data
    at = 0
    for piece in pieces:
        out[at : at + len(piece)] = piece
        at += len(piece)
    return out


def _front_hash(checked: Buffer, front: Buffer) -> int:
    digest = xxhash.xxh3_64(checked)
    digest.update(front)
    return digest.intdigest()


def frame_size(prefix: Buffer) -> int:
    """Return the length of the frame that begins with these bytes (at least 48)."""
    header_size, head_size, body_size, _, _ = _read_prefix(memoryview(prefix))
    return PREFIX_SIZE + header_size + head_size + body_size


def front_size(prefix: Buffer) -> int:
    """Return the size of the front of the frame that begins with these bytes (at least 48)."""
    header_size, head_size, _ = read_sizes(prefix)
    return PREFIX_SIZE + header_size + head_size


def front_and_frame_size(prefix: Buffer) -> tuple[int, int]:
    """Return `front_size` and `frame_size`."""
    header_size, head_size, body_size = read_sizes(prefix)
    front = PREFIX_SIZE + header_size + head_size
    return front, front + body_size


def read_sizes(prefix: Buffer) -> tuple[int, int, int]:
    """Return the bytes of (header, head, body) of the frame that begins with these bytes (at least 48)."""
    return _read_prefix(memoryview(prefix))[:3]


def _read_prefix(view: memoryview) -> tuple[int, int, int, int, int]:
    """Return (header_size, head_size, body_size, body_hash, front_hash). Raises CorruptFrame for an unknown version."""
    if len(view) < PREFIX_SIZE:
        raise CorruptFrame(f"frame: {len(view)} bytes; a frame has at least {PREFIX_SIZE}")
    magic, version, flags, header_size, head_size, reserved, body_size, body_hash, front_hash = _PREFIX.unpack_from(
        view
    )
    if magic != MAGIC:
        raise CorruptFrame(f"frame: begins with {bytes(magic)!r}, not {MAGIC!r}; this is not a Penstock frame")
    if version != VERSION or flags or reserved:
        raise CorruptFrame(
            f"frame: format version {version}, flags {flags}; this reader knows version {VERSION}; upgrade it"
        )
    return header_size, head_size, body_size, body_hash, front_hash


def split(data: Buffer, *, whole: bool = True) -> Sections:
    """Return the sections of a frame after verifying sizes and the front's checksum. `whole=False` allows a missing
    body.
    """
    try:
        view = memoryview(data)
    except TypeError:
        raise InvalidInput(f"frame: a {type(data).__name__}; give its bytes, as ps.encode returns them") from None
    view = view.cast("B") if view.nbytes else memoryview(b"")  # an empty view cannot be cast
    header_size, head_size, body_size, body_hash, front_hash = _read_prefix(view)
    body_start = PREFIX_SIZE + header_size + head_size
    expected = body_start + body_size
    if len(view) != expected and (whole or len(view) < body_start):
        raise CorruptFrame(f"frame: {len(view)} bytes where its prefix says {expected}; it was cut or joined")
    if _front_hash(view[:_CHECKED], view[PREFIX_SIZE:body_start]) != front_hash:
        raise CorruptFrame("frame: header checksum does not match; the bytes were altered in transit or on disk")
    start = PREFIX_SIZE + header_size
    return Sections(
        header=view[PREFIX_SIZE:start], head=view[start:body_start], body=view[body_start:], body_hash=body_hash
    )


def check_body(sections: Sections) -> None:
    if xxhash.xxh3_64_intdigest(sections.body) != sections.body_hash:
        raise CorruptFrame("frame: body checksum does not match; the bytes were altered in transit or on disk")


_HEADER = msgspec.msgpack.Decoder(Header)
_PACK = msgspec.msgpack.Encoder()


def pack_header(header: Header) -> bytes:
    fields = {name: getattr(header, name) for name in header.__struct_fields__}
    for name in ("head_columns", "body_columns"):
        fields[name] = [block.to_wire() for block in fields[name]]
    return _PACK.encode(tuple(fields.values()))


def parse_header(section: memoryview) -> Header:
    try:
        return _HEADER.decode(section)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        # The last two are not DecodeErrors: a hostile header can provoke either.
        raise CorruptFrame(f"frame header: {error}") from None
