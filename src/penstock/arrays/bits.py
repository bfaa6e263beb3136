"""Narrow unsigned integers: as many bits per value as the largest one needs.

A value of `width` bits is split in two planes that numpy can write without shifting full-width data:

    low    the lowest 0, 8 or 16 bits, byte-aligned
    high   the remaining 1, 2, 4 or 8 bits, packed into bytes, first value in the lowest bits

Token ids below 2**18 (every vocabulary in use below 262,144) thus take 16 + 2 bits = 2.25 bytes instead of
4. Widths: 1 2 4 8 | 9 10 12 16 | 17 18 20 24 | 32. Planes are little-endian, as is everything on the wire.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

WIDTHS = (1, 2, 4, 8, 9, 10, 12, 16, 17, 18, 20, 24, 32)


def width_of(largest: int) -> int:
    """The smallest width that holds `largest`.

    >>> [width_of(n) for n in (0, 1, 3, 255, 256, 151_935, 2**32 - 1)]
    [1, 1, 2, 8, 9, 18, 32]
    """
    need = max(int(largest).bit_length(), 1)
    return next(width for width in WIDTHS if width >= need)


def planes_of(width: int) -> tuple[int, int]:
    """(bits in the low plane, bits in the high plane) of a width; 32 is one low plane."""
    if width in (8, 16, 32):
        return width, 0
    low = 0 if width < 8 else 8 if width < 16 else 16
    return low, width - low


def plane_bytes(width: int, count: int) -> tuple[int, int]:
    """Byte sizes of the two planes for `count` values."""
    low, high = planes_of(width)
    return count * low // 8, -(-count * high // 8)


def pack_uints(values: NDArray[np.uint32], width: int) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    """(low plane, high plane) of values that all fit in `width` bits."""
    low_bits, high_bits = planes_of(width)
    values = np.ascontiguousarray(values)
    octets = values.view(np.uint8).reshape(-1, 4)
    if low_bits == 16:  # a strided copy of uint16 is ten times faster than one of byte pairs
        low = values.view(np.uint16)[::2].copy().view(np.uint8)
    else:
        low = np.ascontiguousarray(octets[:, : low_bits // 8]).reshape(-1)
    if high_bits == 0:
        return low, np.zeros(0, np.uint8)
    return low, _pack_high(np.ascontiguousarray(octets[:, low_bits // 8]), high_bits)


def _pack_high(high: NDArray[np.uint8], bits: int) -> NDArray[np.uint8]:
    if bits == 8:
        return high
    if bits == 1:
        return np.packbits(high, bitorder="little")
    per_byte = 8 // bits
    short = -len(high) % per_byte
    if short:
        high = np.concatenate([high, np.zeros(short, np.uint8)])
    # Two or four values lie in one machine word; shifting the word brings them together in its lowest byte.
    if bits == 4:
        pairs = high.view(np.uint16)
        return (pairs | (pairs >> 4)).astype(np.uint8)
    quads = high.view(np.uint32)
    return (quads | (quads >> 6) | (quads >> 12) | (quads >> 18)).astype(np.uint8)


def _expansion(bits: int, shift: int) -> NDArray[Any]:
    """Byte -> the values packed in it, each shifted into place, as one opaque item per byte."""
    index = np.arange(256, dtype=np.uint32)[:, None]
    places = np.arange(0, 8, bits, dtype=np.uint32)
    table = np.ascontiguousarray(((index >> places) & ((1 << bits) - 1)) << shift, np.uint32)
    return table.view(np.dtype((np.void, table.shape[1] * 4))).reshape(-1)


_EXPANSIONS = {(bits, shift): _expansion(bits, shift) for bits in (1, 2, 4) for shift in (0, 8, 16)}


def unpack_uints(low: NDArray[np.uint8], high: NDArray[np.uint8], width: int, count: int) -> NDArray[np.uint32]:
    """The `count` values that `pack_uints` was given."""
    low_bits, high_bits = planes_of(width)
    if high_bits in (0, 8):
        out = np.zeros(count, np.uint32)
        octets = out.view(np.uint8).reshape(-1, 4)
        octets[:, : low_bits // 8] = low.reshape(count, low_bits // 8)
        if high_bits:
            octets[:, low_bits // 8] = high
        return out
    out = np.take(_EXPANSIONS[high_bits, low_bits], high).view(np.uint32)[:count]
    if low_bits == 16:
        out.view(np.uint16)[::2] = low.view(np.uint16)
    elif low_bits == 8:
        out.view(np.uint8)[::4] = low
    return out
