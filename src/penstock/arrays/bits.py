"""Codings that use fewer bits: narrow integers, byte planes, and steps of ascending lists.

**Narrow** integers take as many bits as the largest value needs. A value of `width` bits is split into two planes that
numpy can write without shifting full-width data:

    low    the lowest 0, 8 or 16 bits, byte-aligned
    high   the remaining 1, 2, 4 or 8 bits, packed into bytes, first value in the lowest bits

Token ids below 2**18 (every vocabulary in use below 262,144) take 16 + 2 bits = 2.25 bytes instead of 4. Widths: 1 2 4
8 | 9 10 12 16 | 17 18 20 24 | 32. Planes are little-endian, like everything on the wire.

**Byte planes** hold all first bytes, then all second bytes, and so on: an entropy coder compresses similar bytes better
when they are adjacent. A float32 is first rotated left by one bit. Its exponent then fills the top byte alone instead
of straddling two, and the sign, constant for log-probabilities, goes to the bottom. On sampler log-probabilities that
saves 4 % after zstd over plain byte planes (`penstock bench wire`).

**Steps** replace the values of an ascending list by their differences, which are small numbers and need fewer bits:

    lists   [7 9 12] [] [3 4]      steps   7 2 3  3 1
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.arrays.columns import Array
from penstock.arrays.ragged import Offsets, Ragged
from penstock.arrays.run_lengths import bit_view

WIDTHS = (1, 2, 4, 8, 9, 10, 12, 16, 17, 18, 20, 24, 32)


def width_of(largest: int) -> int:
    """Return the smallest width that holds `largest`.

    >>> [width_of(n) for n in (0, 1, 3, 255, 256, 151_935, 2**32 - 1)]
    [1, 1, 2, 8, 9, 18, 32]
    """
    return _WIDTH_OF[int(largest).bit_length()]


_WIDTH_OF = [next(width for width in WIDTHS if width >= need) for need in range(33)]
"""By the bits that a number needs."""


def planes_of(width: int) -> tuple[int, int]:
    """Return (bits in the low plane, bits in the high plane). Width 32 is one low plane."""
    return _PLANES_OF[width]


_PLANES_OF = {w: (w, 0) if w in (8, 16, 32) else (w // 8 * 8, w % 8) for w in WIDTHS}
_PLANES_OF[24] = (16, 8)


def plane_bytes(width: int, count: int) -> tuple[int, int]:
    """Return the byte sizes of the two planes for `count` values."""
    low, high = planes_of(width)
    return count * low // 8, -(-count * high // 8)


def pack_uints(values: NDArray[np.uint32], width: int) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    """Return (low plane, high plane) of values that all fit in `width` bits."""
    low_bits, high_bits = planes_of(width)
    values = np.ascontiguousarray(values)
    # Little-endian: octets[i] is bytes 0 to 3 of value i, lowest first. Width 18 takes bytes 0 and 1 into the low plane
    # and 2 bits of byte 2 into the high plane: 151,935 = 0x2_517F gives low 7F 51 and high 2.
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
    # View two or four values as one machine word, then multiply the word so that they meet in its highest byte. For 4
    # bits: the pair (a, b) is the word a | b << 8. Times 2**8 + 2**4 it is a << 8 | b << 12 | a << 4; b << 16 is gone.
    if bits == 4:
        return (high.view(np.uint16) * _PAIR).view(np.uint8)[1::2].copy()
    return (high.view(np.uint32) * _QUAD).view(np.uint8)[3::4].copy()


_PAIR = np.uint16(1 << 8 | 1 << 4)
_QUAD = np.uint32(1 << 24 | 1 << 18 | 1 << 12 | 1 << 6)
"""For 2 bits, a to d: bits 24 to 31 of the product are a | b << 2 | c << 4 | d << 6; all other terms are below."""


def _expansion(bits: int, shift: int) -> NDArray[Any]:
    """Build a table from a byte to the values packed in it, each shifted into place, as one opaque item per byte."""
    index = np.arange(256, dtype=np.uint32)[:, None]
    places = np.arange(0, 8, bits, dtype=np.uint32)
    # One table lookup per packed byte is several times faster than shifting and masking each value. Byte 0b_11_00_01_10
    # with 2 bits and shift 16 gives the four values 2 << 16, 1 << 16, 0, 3 << 16.
    table = np.ascontiguousarray(((index >> places) & ((1 << bits) - 1)) << shift, np.uint32)
    return table.view(np.dtype((np.void, table.shape[1] * 4))).reshape(-1)


_EXPANSIONS = {(bits, shift): _expansion(bits, shift) for bits in (1, 2, 4) for shift in (0, 8, 16)}


def unpack_uints(low: NDArray[np.uint8], high: NDArray[np.uint8], width: int, count: int) -> NDArray[np.uint32]:
    """Return the `count` values that were passed to `pack_uints`."""
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


def split_bytes(values: Array) -> NDArray[np.uint8]:
    """Return [itemsize, N], the byte planes of a one-dimensional array, lowest byte first."""
    size = values.dtype.itemsize
    if values.dtype == np.float32:
        bits = bit_view(values)
        values = (bits << np.uint32(1)) | (bits >> np.uint32(31))
    octets = np.ascontiguousarray(values).view(np.uint8).reshape(-1, size)
    return np.ascontiguousarray(octets.T)


def join_bytes(planes: NDArray[np.uint8], dtype: np.dtype[Any]) -> Array:
    """Invert `split_bytes`."""
    values = np.ascontiguousarray(planes.T).reshape(-1)
    if dtype != np.float32:
        return values.view(dtype)
    bits = values.view(np.uint32)
    return ((bits >> np.uint32(1)) | (bits << np.uint32(31))).view(dtype)


def steps_of(lists: Ragged) -> Array | None:
    """Return [N], the difference of each value to the one before it in its list, or None if a list does not ascend.

    >>> steps_of(Ragged.of_lists([[7, 9, 12], [], [3, 4]], np.uint32)).tolist()
    [7, 2, 3, 3, 1]
    """
    values: Array = lists.values
    starts = lists.offsets[:-1][np.diff(lists.offsets) > 0]
    falls = values[1:] < values[:-1]
    # falls[i] compares values i and i + 1. Across the start of a list (12, then 3 above) a fall is allowed.
    falls[starts[1:] - 1] = False
    if falls.any():
        return None
    steps = values.copy()
    steps[1:] -= values[:-1]
    steps[starts] = values[starts]
    return steps


def lists_of(steps: Array, offsets: Offsets) -> Ragged:
    """Invert `steps_of`."""
    # One running sum over all lists, then subtract what came before each list. Steps 7 2 3 | 3 1 sum to 7 9 12 | 15 16,
    # minus 0 | 12 gives 7 9 12 | 3 4. Unsigned integers wrap around, so this is exact even if the sum overflows.
    sums = np.cumsum(steps, dtype=steps.dtype)
    lengths = np.diff(offsets)
    starts = offsets[:-1][lengths > 0]
    before = np.zeros(len(starts), steps.dtype)
    before[1:] = sums[starts[1:] - 1]
    return Ragged(sums - np.repeat(before, lengths[lengths > 0]), offsets)
