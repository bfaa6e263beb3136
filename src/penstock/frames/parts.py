"""One coded array in a frame's body: which bytes some of its rows need, and how to read those rows.

The coding decides which bytes rows a to b need:

    raw, flat over raw    a * width to b * width
    narrow                two planes: a range of each, starting at a byte boundary
    constant              one value
    runs, compressed      only the complete block can be read
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

from penstock.arrays import WIDTHS, Array, plane_bytes, planes_of, unpack_uints
from penstock.errors import CorruptFrame
from penstock.frames.codings import CONSTANT, FLAT, NARROW, PACKED, PLANES, RAW, RUNS, Reader, from_uints
from penstock.frames.layout import ALIGN, Block, Buffer

Range: TypeAlias = tuple[int, int]
"""(begin, end): bytes of a frame, or rows of a part."""
Fetch: TypeAlias = Callable[[int, int], Buffer]
"""Returns bytes `begin` to `end` of a frame."""
NEAR = 1 << 13
"""Gaps of up to this many numbers between two spans are unpacked along with them."""
_OCTET, _U4 = np.dtype("|u1"), np.dtype("<u4")


def merged(ranges: Iterable[Range], gap: int = 0) -> list[Range]:
    """Return the same bytes in ascending order, with ranges joined that touch or are at most `gap` bytes apart.

    >>> merged([(8, 9), (0, 4), (2, 6), (5, 5)], gap=1), merged([(8, 9), (0, 4), (2, 6)], gap=2)
    ([(0, 6), (8, 9)], [(0, 9)])
    """
    out: list[Range] = []
    for a, b in sorted(one for one in ranges if one[1] > one[0]):
        if out and a <= out[-1][1] + gap:
            out[-1] = (out[-1][0], max(out[-1][1], b))
        else:
            out.append((a, b))
    return out


def fetched(fetch: Fetch, a: int, b: int, what: str) -> memoryview:
    """Fetch bytes a to b of a frame. Checks the length, because a store may return fewer bytes without an error."""
    view = memoryview(fetch(a, b))
    if view.nbytes != b - a:
        raise CorruptFrame(f"{what}: {view.nbytes} bytes where bytes {a} to {b} of the frame were asked for")
    return view.cast("B") if b > a else memoryview(b"")


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """`count` rows of `shape`."""

    name: str
    block: Block
    dtype: np.dtype[Any]
    count: int
    shape: tuple[int, ...]
    at: int
    """Where it begins in the frame."""
    end: int
    """Where its last buffer ends. The next part begins at the following multiple of 8."""
    is_turned: bool
    """Whether rows were transposed before they were compressed."""

    @staticmethod
    def place(name: str, block: Block, dtype: np.dtype[Any], count: int, at: int, shape: tuple[int, ...] = ()) -> Part:
        """Build the part of this coding that begins at `at`, a multiple of 8."""
        is_turned = False
        if shape and block.coding == FLAT and len(block.parts) == 1:
            block = block.parts[0]
        elif shape:
            is_turned = block.coding == PLANES and len(block.sizes) == 1
            if not is_turned and block.coding not in (RAW, CONSTANT):
                raise CorruptFrame(f"{name}: rows in coding {block.coding} of {len(block.parts)} parts")
        end = at
        for size in _buffers(name, block, dtype, count * math.prod(shape)):
            end = -(-end // ALIGN) * ALIGN + size
        return Part(name=name, block=block, dtype=dtype, count=count, shape=shape, at=at, end=end, is_turned=is_turned)

    @property
    def next(self) -> int:
        """Where the next part begins."""
        return -(-self.end // ALIGN) * ALIGN

    def ranges(self, a: int, b: int) -> list[Range]:
        """Return the bytes of the frame that rows a to b need."""
        if a >= b:
            return []
        items = math.prod(self.shape)
        if self.block.coding == RAW:
            width = items * self.dtype.itemsize
            return [(self.at + a * width, self.at + b * width)]
        if self.block.coding == NARROW:
            return [found for found in self._planes(a * items, b * items) if found[1] > found[0]]
        if self.block.coding == CONSTANT:
            return [(self.at, self.at + self.dtype.itemsize)]
        return [(self.at, self.end)]

    def read(self, fetch: Fetch, pairs: Sequence[Range]) -> list[Array]:
        """Return rows a to b for each pair (a, b), as views of the bytes where the coding allows.

        Rows that several pairs need, such as a shared prefix, are unpacked once.
        """
        if not pairs:
            return []
        if self.block.coding == RAW and self.shape:
            return [self._raw(fetch, a, b) for a, b in pairs]
        if self.block.coding == CONSTANT:
            value = self._plain(fetched(fetch, self.at, self.at + self.dtype.itemsize, self.name))[0]
            return [np.broadcast_to(value, (b - a, *self.shape)) for a, b in pairs]
        if self.block.coding in (RAW, NARROW):
            spans, found = self._spans(fetch, pairs)
        else:
            spans, found = [(0, self.count)], [self._whole(fetch)]
        if len(spans) == 1:
            begin = spans[0][0]
            return [found[0][a - begin : b - begin] for a, b in pairs]
        starts = [a for a, _ in spans]
        places = [bisect_right(starts, a) - 1 for a, _ in pairs]
        return [found[k][a - starts[k] : b - starts[k]] for k, (a, b) in zip(places, pairs, strict=True)]

    def _spans(self, fetch: Fetch, pairs: Sequence[Range]) -> tuple[list[Range], list[Array]]:
        """Return spans of rows that cover the pairs, and their values."""
        read = self._raw if self.block.coding == RAW else self._narrow
        if len(pairs) > 1 and not self.shape:
            # Reading many samples and the gaps between them in one call costs less than one call each. The bytes of
            # the gaps are only there if the complete frame was read, or ranges were joined; otherwise fetch raises.
            with suppress(CorruptFrame):
                begin, end = min(pairs)[0], max([b for _, b in pairs])
                # Of a small frame all rows are near one another, without looking at each gap.
                near = [(begin, end)] if end - begin <= NEAR else merged(pairs, NEAR)
                return near, [read(fetch, a, b) for a, b in near]
        spans = merged(pairs)
        return spans, [read(fetch, a, b) for a, b in spans]

    def _raw(self, fetch: Fetch, a: int, b: int) -> Array:
        ((begin, end),) = self.ranges(a, b)
        return self._plain(fetched(fetch, begin, end, self.name)).reshape(b - a, *self.shape)

    def _plain(self, data: memoryview) -> Array:
        if self.dtype == np.bool_:  # a numpy bool from any other byte than 0 and 1 is undefined behaviour
            return np.frombuffer(data, _OCTET).astype(np.bool_)
        return np.frombuffer(data, self.dtype)

    def _planes(self, a: int, b: int) -> tuple[Range, Range]:
        """Return where items a to b lie in the low and the high plane, both starting at a byte boundary of the high
        plane.
        """
        # Eight items fill whole bytes of both planes at every width. With 2 high bits, item 21 starts in the middle of
        # a byte, so reading starts at item 16, and `_narrow` skips 5.
        a -= a % 8
        low, high = planes_of(self.block.arg)
        low_size, _ = plane_bytes(self.block.arg, self.count * math.prod(self.shape))
        behind = self.at + -(-low_size // ALIGN) * ALIGN
        return (
            (self.at + a * low // 8, self.at + b * low // 8),
            (behind + a * high // 8, behind + -(-b * high // 8)),
        )

    def _narrow(self, fetch: Fetch, a: int, b: int) -> Array:
        items = math.prod(self.shape)
        begin, count = a * items, (b - a) * items
        skip = begin % 8
        low, high = (
            np.frombuffer(fetched(fetch, x, y, self.name), np.uint8) if y > x else np.zeros(0, np.uint8)
            for x, y in self._planes(begin, b * items)
        )
        values = unpack_uints(low, high, self.block.arg, count + skip)[skip:]
        return from_uints(values, self.dtype, self.name).reshape(b - a, *self.shape)

    def _whole(self, fetch: Fetch) -> Array:
        reader = Reader(fetched(fetch, self.at, self.end, self.name), align=True)
        if self.is_turned:
            return reader.read_rows(self.block, self.dtype, self.count, self.shape, self.name)
        flat = reader.read(self.block, self.dtype, self.count * math.prod(self.shape), self.name)
        return flat.reshape(self.count, *self.shape)


def _buffers(name: str, block: Block, dtype: np.dtype[Any], count: int) -> tuple[int, ...]:
    """Return the sizes of the buffers of an array of `count` items, checked as far as the header allows."""
    if block.coding == RAW:
        return (count * dtype.itemsize,)
    if block.coding == CONSTANT:
        return (dtype.itemsize,)
    if block.coding == NARROW and block.arg in WIDTHS and dtype.kind != "f":
        return plane_bytes(block.arg, count)
    if block.coding == RUNS and 0 < block.arg <= count and len(block.parts) == 1:
        lengths = block.parts[0]
        if lengths.coding in (NARROW, PACKED):
            values = (1 if dtype == np.bool_ else block.arg) * dtype.itemsize
            return (values, *_buffers(name, lengths, _U4, block.arg))
    if block.coding in (PACKED, PLANES) and min(block.sizes, default=0) >= 0:
        return block.sizes
    raise CorruptFrame(f"{name}: {count} items in coding {block.coding} with argument {block.arg}")
