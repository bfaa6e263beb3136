"""A reader of frames in plain Python, written from docs/internals/wire-format.md alone: slow, and without any checks.

It shows that the page suffices to write a reader in another language, and tests the real decoder against code that
shares nothing with it. For each sample it returns plain data, with floats as their bits.
"""

from __future__ import annotations

import struct
from typing import Any

import msgspec
import zstandard

SIZES = {"|b1": 1, "|u1": 1, "|i1": 1, "<u2": 2, "<i2": 2, "<f2": 2, "<u4": 4, "<f4": 4, "<i4": 4}
SIZES |= {"<u8": 8, "<i8": 8, "<f8": 8}
WIDTHS = {1: (0, 1), 2: (0, 2), 4: (0, 4), 8: (8, 0), 9: (8, 1), 10: (8, 2), 12: (8, 4), 16: (16, 0)}
WIDTHS |= {17: (16, 1), 18: (16, 2), 20: (16, 4), 24: (16, 8), 32: (32, 0)}
PER_TOKEN = {"token_ids", "loss_mask", "logprobs", "teacher_logprobs", "rl_weights", "ce_weights", "ref_kl_weights"}
PER_TOKEN |= {"routed_experts", "mm_token_type_ids", "weight_versions", "sampling_mask"}
PER_TOKEN |= {"teacher_topk_ids", "teacher_topk_logprobs"}
ORDER = ["token_ids", "loss_mask", "logprobs", "temperatures", "advantages", "rewards", "teacher_logprobs"]
ORDER += ["rl_weights", "ce_weights", "ref_kl_weights", "routed_experts", "mm_token_type_ids", "weight_versions"]
ORDER += ["sampling_mask", "teacher_topk_ids", "teacher_topk_logprobs"]


class Section:
    """A sequence of buffers. Those of the body begin at multiples of 8 bytes."""

    def __init__(self, data: bytes, align: int) -> None:
        self.data, self.align, self.at = data, align, 0

    def take(self, size: int) -> bytes:
        found = self.data[self.at : self.at + size]
        self.at += -(-size // self.align) * self.align
        return found

    def plane(self, stored: int, size: int) -> bytes:
        data = self.take(stored)
        return data if stored == size else zstandard.decompress(data)


def integers(data: bytes, dtype: str) -> list[int]:
    """Read numbers of a dtype; floats as their bits."""
    size, signed = SIZES[dtype], dtype[1] == "i"
    return [int.from_bytes(data[i : i + size], "little", signed=signed) for i in range(0, len(data), size)]


def read(section: Section, block: list[Any], dtype: str, count: int, mask: list[int] | None = None) -> list[int]:
    """Read the `count` values of a block. Numbers of codings are those of docs/internals/wire-format.md."""
    coding, arg, sizes, parts = (*block, 0, (), ())[:4] if len(block) < 4 else block[:4]
    if coding == 0:
        return integers(section.take(count * SIZES[dtype]), dtype)
    if coding == 1:
        return integers(section.take(SIZES[dtype]), dtype) * count
    if coding == 2:
        return read_runs(section, arg, parts[0], dtype)
    if coding == 3 or coding == 6:
        low_bits, high_bits = WIDTHS[arg]
        expected = (count * low_bits // 8, -(-count * high_bits // 8))
        stored = expected if coding == 3 else sizes
        low, high = (int.from_bytes(section.plane(s, e), "little") for s, e in zip(stored, expected, strict=True))
        return [_bits(low, i, low_bits) | _bits(high, i, high_bits) << low_bits for i in range(count)]
    if coding == 4:
        assert mask is not None
        kept = iter(read(section, parts[0], dtype, arg))
        return [next(kept) if on else 0 for on in mask]
    planes = [section.plane(stored, count) for stored in sizes]
    values = [sum(plane[i] << (8 * k) for k, plane in enumerate(planes)) for i in range(count)]
    if dtype == "<f4":  # the sign was rotated to the lowest bit
        return [(v >> 1) | ((v & 1) << 31) for v in values]
    return integers(b"".join(v.to_bytes(SIZES[dtype], "little") for v in values), dtype)


def _bits(plane: int, i: int, bits: int) -> int:
    return (plane >> (i * bits)) & ((1 << bits) - 1)


def read_runs(section: Section, runs: int, lengths_block: list[Any], dtype: str) -> list[int]:
    if dtype == "|b1":
        first = section.take(1)[0]
        values = [(first + i) % 2 for i in range(runs)]
    else:
        values = integers(section.take(runs * SIZES[dtype]), dtype)
    lengths = read(section, lengths_block, "<u4", runs)
    return [value for value, length in zip(values, lengths, strict=True) for _ in range(length)]


def read_rows(
    section: Section, block: list[Any], dtype: str, count: int, shape: list[int], mask: list[int] | None = None
) -> list[Any]:
    """Read the `count` rows of a column with trailing dimensions."""
    if block[0] == 4:
        assert mask is not None
        kept = iter(read_rows(section, block[3][0], dtype, block[1], shape))
        return [next(kept) if on else zeros(shape) for on in mask]
    layers, top_k = (1, *shape)[-2:]
    total = count * layers * top_k
    if block[0] == 8:
        flat = read(section, block[3][0], dtype, total)
    elif block[0] == 0:
        flat = integers(section.take(total * SIZES[dtype]), dtype)
    elif block[0] == 1:
        flat = integers(section.take(SIZES[dtype]), dtype) * total
    else:
        turned = integers(section.plane(block[2][0], total * SIZES[dtype]), dtype)
        flat = [turned[place * count + row] for row in range(count) for place in range(layers * top_k)]
    rows = [flat[i : i + top_k] for i in range(0, total, top_k)]
    return rows if len(shape) == 1 else [rows[i : i + layers] for i in range(0, len(rows), layers)]


def zeros(shape: list[int]) -> Any:
    return [zeros(shape[1:]) for _ in range(shape[0])] if shape else 0


def read_lists(
    section: Section, block: list[Any], counts_block: list[Any], dtype: str, count: int, mask: list[int] | None
) -> list[Any]:
    """Read the lists of `count` tokens: first the lengths, then all values."""
    counts = read(section, counts_block, "<u4", count, mask)
    if block[0] != 7:
        return split(read(section, block, dtype, sum(counts)), counts)
    lists = split(read(section, block[3][0], dtype, sum(counts)), counts)
    return [[sum(steps[: i + 1]) for i in range(len(steps))] for steps in lists]


def read_frame(frame: bytes) -> list[dict[str, Any]]:
    """Return every sample of a frame as plain data."""
    header_size, head_size = struct.unpack_from("<II", frame, 12)
    behind_header = 48 + header_size
    header = msgspec.msgpack.decode(frame[48:behind_header])
    head = Section(frame[behind_header : behind_header + head_size], align=1)
    body = Section(frame[behind_header + head_size :], align=8)
    n, _, _, lengths_block, loss_block, version_block, texts, head_columns, body_columns, back_b, shared_b, images = (
        header[:12]
    )
    lengths = read(head, lengths_block, "<i8", n)
    read(head, loss_block, "<i8", n)
    versions = read(head, version_block, "<i8", n)
    text = {spec[0]: read_text(head, spec, n) for spec in texts}
    back = read(head, back_b, "<i8", n) if back_b else [0] * n
    shared = read(head, shared_b, "<i8", n) if shared_b else [0] * n
    rows: dict[str, list[Any]] = {}
    per_token = PER_TOKEN | {spec[0] for spec in body_columns if len(spec) > 9 and spec[9] and spec[9][0] == "token"}
    types = {spec[0]: spec[1] for spec in (*head_columns, *body_columns)}
    for name, dtype, block, _, kinds_block, num_values, *_ in head_columns:
        kinds = read(head, kinds_block, "<u4", n)
        rows[name] = split(read(head, block, dtype, num_values), kinds)
    kinds_of = {spec[0]: read(head, spec[4], "<u4", n) for spec in body_columns if spec[4]}
    mask: list[int] | None = None
    for name, dtype, block, trailing, kinds_block, _, shares, *described in body_columns:
        sizes = [m if kind == 2 else kind for m, kind in zip(lengths, kinds_of.get(name, [2] * n), strict=True)]
        if shares:
            sizes = [m - s for m, s in zip(lengths, shared, strict=True)]
        # A mask covers all tokens of all samples, so a column that lacks some of them cannot be coded by it.
        mask_of_all = None if kinds_block or shares else mask
        count = sum(sizes)
        if described and described[0]:
            values = read_lists(body, block, described[0], dtype, count, mask_of_all)
        elif trailing:
            values = read_rows(body, block, dtype, count, trailing, mask_of_all)
        else:
            values = read(body, block, dtype, count, mask_of_all)
        rows[name] = split(values, sizes)
        if shares:
            for i in range(n):
                rows[name][i] = rows[name][i - back[i]][: shared[i]] + rows[name][i]
        if name == "loss_mask":
            mask = [on for row in rows[name] for on in row]
    order = [*ORDER, *sorted(rows.keys() - set(ORDER))]
    plain = {name: [plain_row(row, types[name]) for row in rows[name]] for name in order if name in rows}
    return [_record(i, text, versions, images, plain, per_token) for i in range(n)]


def split(values: list[Any], sizes: list[int]) -> list[list[Any]]:
    """Split values into rows of these sizes."""
    rest = iter(values)
    return [[next(rest) for _ in range(size)] for size in sizes]


def plain_row(row: Any, dtype: str) -> Any:
    """Return bools as bools, others as they were read."""
    if isinstance(row, list):
        return [plain_row(one, dtype) for one in row]
    return bool(row) if dtype == "|b1" else row


def read_text(head: Section, spec: list[Any], n: int) -> list[str]:
    _, distinct, lengths_block, num_bytes, codes_block = spec
    sizes = read(head, lengths_block, "<u4", distinct)
    joined = head.take(num_bytes)
    strings = [bytes(part).decode() for part in split(list(joined), sizes)]
    return [strings[code] for code in read(head, codes_block, "<u4", n)]


def _record(
    i: int,
    text: dict[str, list[str]],
    versions: list[int],
    images: Any,
    rows: dict[str, list[Any]],
    per_token: set[str],
) -> dict[str, Any]:
    columns: dict[str, Any] = {}
    for name in rows:
        row = rows[name][i]
        if row:
            columns[name] = row if name in per_token or len(row) > 1 else row[0]
    return {
        "text": [text[name][i] for name in ("id", "group", "env", "run", "mode")],
        **{name: text[name][i] for name in ("prompt", "rollout") if name in text and text[name][i]},
        "policy_version": None if versions[i] < 0 else versions[i],
        "images": images[i] if images else [],
        "columns": columns,
    }
