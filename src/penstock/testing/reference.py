"""Plain-Python references for what `arrays` and `frames` do with numpy: slow, and short enough to check by eye.

Every fast path has a property test against the function of its name here. They are shipped so that a reader or writer
in another language can be checked against them as well.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import Any, TypeVar

from penstock.arrays import Cells, Ragged, Sample

Item = TypeVar("Item")


def runs(values: Iterable[Item]) -> list[tuple[Item, int]]:
    """Return (value, length) of each run of equal values.

    >>> runs([7, 7, 7, 2])
    [(7, 3), (2, 1)]
    """
    return [(value, len(list(group))) for value, group in groupby(values)]


def pack_uints(values: Sequence[int], low_bits: int, high_bits: int) -> tuple[bytes, bytes]:
    """Return (low plane, high plane): low bits byte by byte, high bits packed from the lowest bit of each byte up.

    >>> pack_uints([0x10203, 0x20405], 16, 2)
    (b'\\x03\\x02\\x05\\x04', b'\\t')
    """
    low = b"".join((value & ((1 << low_bits) - 1)).to_bytes(low_bits // 8, "little") for value in values)
    packed = 0
    for i, value in enumerate(values):
        packed |= (value >> low_bits) << (i * high_bits)
    return low, packed.to_bytes(-(-len(values) * high_bits // 8), "little")


def byte_planes(values: Sequence[int], size: int) -> list[bytes]:
    """Return all lowest bytes, then all second bytes, and so on, of unsigned integers of `size` bytes.

    >>> byte_planes([0x0102, 0x0304], 2)
    [b'\\x02\\x04', b'\\x01\\x03']
    """
    return [bytes((value >> (8 * i)) & 0xFF for value in values) for i in range(size)]


def rotate_sign_down(bits: int) -> int:
    """Rotate 32 bits left by one: the sign goes to the bottom and the exponent fills the top byte.

    >>> hex(rotate_sign_down(0xC0000001))
    '0x80000003'
    """
    return ((bits << 1) | (bits >> 31)) & 0xFFFF_FFFF


def common_prefix(a: Sequence[Any], b: Sequence[Any]) -> int:
    """Return the number of first items that two sequences share.

    >>> common_prefix([1, 2, 3], [1, 2, 4, 5])
    2
    """
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def unfold(stored: Sequence[Sequence[Item]], parents: Sequence[int], shared: Sequence[int]) -> list[list[Item]]:
    """Restore rows that were stored without the prefix they share with an earlier row.

    >>> unfold([[1, 2, 3], [9]], parents=[-1, 0], shared=[0, 2])
    [[1, 2, 3], [1, 2, 9]]
    """
    rows: list[list[Item]] = []
    for own, parent, count in zip(stored, parents, shared, strict=True):
        rows.append([*(rows[parent][:count] if count else []), *own])
    return rows


def record(sample: Sample) -> dict[str, Any]:
    """Return a sample as plain data, with floats as their bits, so that `==` compares bit by bit.

    >>> record(Sample(id="a", token_ids=[5, 6], rewards=1.0))["columns"]["rewards"]
    1065353216
    """
    return {
        "text": [sample.id, sample.group, sample.env, sample.run, sample.mode],
        # As in frames: left out where empty.
        **{name: getattr(sample, name) for name in ("prompt", "rollout") if getattr(sample, name)},
        "policy_version": sample.policy_version,
        "images": [
            [i.hash, list(i.grid), i.offset, i.length, i.merge, i.media_type, i.width, i.height, i.num_bytes]
            for i in sample.images
        ],
        "columns": {name: _plain(values) for name, values in sample.columns.items()},
    }


def _plain(values: Cells) -> Any:
    if isinstance(values, Ragged):
        return [_plain(values[t]) for t in range(len(values))]
    if values.dtype.kind != "f":
        return values.tolist()
    return values.view(f"<u{values.dtype.itemsize}").tolist()
