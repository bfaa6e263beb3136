"""The frame's skeleton: what lies where, so that sizes can be checked before anything is allocated.

    prefix   48 bytes: magic, version, section sizes, checksums
    header   msgpack: counts, and for every block its coding and sizes, but no values per token
    head     values per sample: lengths, ids, groups, versions, rewards given per sample, ...
    body     values per token, each buffer at a multiple of 8 bytes

Everything a planner needs is in front of the body. The first checksum covers prefix, header and head, the
second the body, so the front can be trusted without reading the rest. docs/wire-format.md is byte-exact.
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
from penstock.errors import CorruptFrame

MAGIC = b"PENSTOCK"
VERSION = 1
ALIGN = 8
TEXTS = ("id", "group", "env", "run", "mode")
"""Text columns that every frame has; others are written where a sample has them, and empty where they are not."""
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
"""Columns that every reader of the format knows; all others are described in the header."""
_FIRST_FIELDS = 7
"""Of a ColumnBlock, in frames of the first writers; those of the columns they knew still have no more."""


class Block(msgspec.Struct, frozen=True, array_like=True):
    """How one array is written: a coding, its argument, sizes of compressed buffers, the blocks it is made of."""

    coding: int
    arg: int = 0
    sizes: tuple[int, ...] = ()
    parts: tuple[Block, ...] = ()


class TextBlock(msgspec.Struct, frozen=True, array_like=True):
    """One text column: distinct strings in order of appearance, and which sample has which."""

    name: str
    num_distinct: int
    lengths: Block
    """Bytes of each distinct string."""
    num_bytes: int
    """Size of the joined UTF-8 text."""
    codes: Block
    """Per sample the index of its string."""


class ColumnBlock(msgspec.Struct, frozen=True, array_like=True):
    """One column along the tokens."""

    name: str
    dtype: str
    values: Block
    trailing: tuple[int, ...] = ()
    rows: Block | None = None
    """Per sample 0 absent, 1 one number, 2 per token; None: per token for all."""
    num_values: int = 0
    """Values held; only used with `rows`."""
    shares_prefixes: bool = False
    """Whether tokens shared with an earlier sample are left out."""
    counts: Block | None = None
    """Of a column of lists: per token held, how many values its list has."""
    num_items: int = 0
    """Values of all lists together; only used with `counts`."""
    form: Form | None = None
    """What it takes to keep the column without knowing it; None for those that every reader knows."""
    items: tuple[int, ...] | None = None
    """Of a column of lists: per sample the number of values in its lists. None in frames of earlier writers."""

    def to_wire(self) -> tuple[Any, ...]:
        """The fields that are written: those behind `shares_prefixes`, and `items`, only where they say something."""
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
    """Columns that hold at most one number per sample: their values are in the head."""
    body_columns: tuple[ColumnBlock, ...]
    parents: Block | None = None
    """Per sample how many samples back its prefix is found; 0 = nowhere."""
    shared: Block | None = None
    """Per sample how many of its first tokens are found there."""
    images: tuple[tuple[ImageSpan, ...], ...] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Sections:
    """The three parts behind a frame's prefix, as views of the frame."""

    header: memoryview
    head: memoryview
    body: memoryview
    body_hash: int


def assemble(header: bytes, head: list[Buffer], body: list[Buffer]) -> list[Buffer]:
    """A frame, in pieces to be joined. Sections are lists of pieces; the body's are already padded."""
    head_size = sum(len(piece) for piece in head)
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


def join(pieces: Sequence[Buffer]) -> memoryview:
    """The pieces end to end, in numpy's memory. It takes large blocks in huge pages, where `bytes.join` spends
    more time on new pages than on copying."""
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
    """The length of the frame that begins with these bytes, at least 48 of them."""
    header_size, head_size, body_size, _, _ = _read_prefix(memoryview(prefix))
    return PREFIX_SIZE + header_size + head_size + body_size


def read_sizes(prefix: Buffer) -> tuple[int, int, int]:
    """(header, head, body): bytes of each part of the frame that begins with these bytes, at least 48 of them."""
    return _read_prefix(memoryview(prefix))[:3]


def _read_prefix(view: memoryview) -> tuple[int, int, int, int, int]:
    """(header_size, head_size, body_size, body_hash, front_hash) of a frame of a version that is known."""
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
    """The sections of a frame, with sizes and the front's checksum verified; `whole=False` allows a missing body."""
    view = memoryview(data)
    view = view.cast("B") if view.nbytes else memoryview(b"")  # an empty view cannot be cast
    header_size, head_size, body_size, body_hash, front_hash = _read_prefix(view)
    body_start = PREFIX_SIZE + header_size + head_size
    expected = body_start + body_size
    if len(view) != expected and (whole or len(view) < body_start):
        raise CorruptFrame(f"frame: {len(view)} bytes where its prefix says {expected}; it was cut or joined")
    if _front_hash(view[:_CHECKED], view[PREFIX_SIZE:body_start]) != front_hash:
        raise CorruptFrame("frame: header checksum does not match; the bytes were altered on the way")
    start = PREFIX_SIZE + header_size
    return Sections(
        header=view[PREFIX_SIZE:start], head=view[start:body_start], body=view[body_start:], body_hash=body_hash
    )


def check_body(sections: Sections) -> None:
    if xxhash.xxh3_64_intdigest(sections.body) != sections.body_hash:
        raise CorruptFrame("frame: body checksum does not match; the bytes were altered on the way")


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
