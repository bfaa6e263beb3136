"""Lossless codings of one array, and the choice of the cheapest one for its content.

    0 raw       the bytes unchanged
    1 constant  one value
    2 runs      lengths and values of runs of equal bits (a mask needs no values: they alternate)
    3 narrow    unsigned integers in as many bits as the largest needs (arrays/bits.py)
    4 sparse    only the values on trained tokens; all others are zero bits
    5 planes    byte planes, each compressed with zstd if that is shorter (arrays/bits.py)
    6 packed    `narrow`, each plane compressed if that is shorter
    7 deltas    ascending lists: the first value of each list, then the difference to the value before
    8 flat      rows of a column with trailing dimensions, end to end as one array in a coding of its own

The `fast` profile uses 0-4 and 8, which run at memory speed; `small` adds 5 to 7. Each writer has its reader in this
module. Readers check sizes against counts before they allocate.
"""

from __future__ import annotations

import math
import struct
import threading
from bisect import bisect_left
from collections.abc import Sequence
from functools import cache
from itertools import pairwise
from typing import Any, Literal, TypeAlias

import numpy as np
import zstandard
from numpy.typing import NDArray

from penstock.arrays import (
    RUNS_HEAD,
    WIDTHS,
    Array,
    MaskRuns,
    Ragged,
    bit_view,
    decode_runs,
    encode_runs,
    has_few_runs,
    join_bytes,
    lists_of,
    offsets_of,
    pack_uints,
    plane_bytes,
    planes_of,
    run_starts,
    split_bytes,
    steps_of,
    unpack_uints,
    width_of,
)
from penstock.errors import CorruptFrame
from penstock.frames.layout import ALIGN, Block, Buffer

Profile: TypeAlias = Literal["fast", "small"]
RAW, CONSTANT, RUNS, NARROW, SPARSE, PLANES, PACKED, DELTAS, FLAT = range(9)
FEW = 64
"""Arrays of up to this many numbers are coded without numpy."""
NAMES = ("raw", "constant", "runs", "narrow", "sparse", "planes", "packed", "deltas", "flat")
_LETTERS = {8: "B", 16: "H", 32: "I"}
"""Bits of a low plane -> letter of `struct`."""
_SHORT = 1 << 14
_U4, _I8 = np.dtype("<u4"), np.dtype("<i8")
_OCTETS = (RAW, CONSTANT, PLANES)
"""Codings whose bytes become values directly. Bools in them are read as bytes first."""


_ALTERNATING = [np.arange(start, start + FEW) % 2 == 1 for start in (0, 1)]
"""Values of a mask's runs, by its first one."""


class Writer:
    """Collects a section's buffers in the order in which a `Reader` reads them."""

    def __init__(self, profile: Profile, *, align: bool) -> None:
        self.pieces: list[Buffer] = []
        self.small = profile == "small"
        self.align = align

    def add(self, *buffers: Array | bytes) -> tuple[int, ...]:
        """Append buffers and return their sizes. Only compressed buffers need to record them."""
        sizes = []
        for buffer in buffers:
            view = buffer if isinstance(buffer, bytes) else _octets(buffer)
            self.pieces.append(view)
            sizes.append(len(view))
            self._pad(len(view))
        return tuple(sizes)

    def _pad(self, size: int) -> None:
        if self.align and size % ALIGN:
            self.pieces.append(bytes(-size % ALIGN))

    def plain(self, coding: int, arg: int, *arrays: Array | bytes) -> Block:
        """Write a block whose buffer sizes follow from its coding and count."""
        self.add(*arrays)
        return Block(coding, arg)

    def write(self, values: Array, trained: MaskRuns | None = None) -> Block:
        """Write a one-dimensional array in its cheapest coding. `trained` is the loss mask aligned with it."""
        if len(values) == 0:
            return self.plain(RAW, 0, values)
        if len(values) <= FEW and values.dtype.kind in "ui" and values.itemsize > 1:
            found = self._few(values.tolist(), values.dtype)
            if found is not None:
                return found
        if values.dtype.kind == "f" and trained is not None and trained.has_off and trained.is_zero_off(values):
            return Block(SPARSE, trained.count(), (), (self._write_trained(values, trained),))
        if len(values) > 1 and has_few_runs(values):
            block = self._runs_if_cheaper(values)
            if block is not None:
                return block
        if values.dtype == np.bool_:
            return self._narrow(values.astype(np.uint32))
        if values.dtype.kind == "f" or values.dtype.itemsize == 1:
            return self._raw(values)
        return self._integers(values)

    def integers(self, values: list[int]) -> Block:
        """Write numbers below 2**32 like `write` of a uint32 array."""
        found = self._few(values, _U4) if 0 < len(values) <= FEW else None
        return self.write(np.array(values, _U4)) if found is None else found

    def counts(self, values: list[int]) -> Block:
        """Write numbers below 2**32 like `write` of an int64 array."""
        found = self._few(values, _I8) if 0 < len(values) <= FEW else None
        return self.write(np.array(values, _I8)) if found is None else found

    def _few(self, values: list[int], dtype: np.dtype[Any]) -> Block | None:
        """`write` for the few integers of a head, one per sample: the same bytes without a dozen numpy calls. Returns
        None for numbers that do not fit 32 bits.
        """
        count, size, signed = len(values), dtype.itemsize, dtype.kind == "i"
        if count > 1 and values.count(values[0]) == count:
            return self.plain(CONSTANT, 0, values[0].to_bytes(size, "little", signed=signed))
        starts = [0, *(i for i, (a, b) in enumerate(pairwise(values), 1) if a != b)]
        # The rule of `_runs_if_cheaper`. Of up to 64 numbers, those that pass it also pass `has_few_runs`.
        if len(starts) * (16 + 8 * size) < count * min(size, 2) * 8:
            self.add(b"".join([values[i].to_bytes(size, "little", signed=signed) for i in starts]))
            lengths = [b - a for a, b in pairwise([*starts, count])]
            return Block(RUNS, len(starts), (), (self._narrow_few(lengths),))
        return None if max(values) >= 2**32 or min(values) < 0 else self._narrow_few(values)

    def _narrow_few(self, values: list[int]) -> Block:
        """`_narrow` for a few numbers."""
        width = width_of(max(values))
        low, high = planes_of(width)
        # The high plane as one big integer, first value in the lowest bits: values 1, 3, 2 of 2 bits are 0b_10_11_01.
        packed = 0
        if high:
            for value in reversed(values):
                packed = packed << high | value >> low
        kept, low_plane = (1 << low) - 1, b""
        if low:
            low_plane = struct.pack(f"<{len(values)}{_LETTERS[low]}", *[value & kept for value in values])
        return self.plain(NARROW, width, low_plane, packed.to_bytes(-(-len(values) * high // 8), "little"))

    def write_number(self, value: int) -> Block:
        """Write one number below 2**32 like `write`, without arrays."""
        return self._narrow_few([value])

    def write_mask(self, trained: MaskRuns) -> Block:
        """Write a mask whose runs are known. The bytes equal those of `write(trained.mask)`."""
        starts, mask = trained.edges[:-1], trained.mask
        if 0 < len(starts) <= FEW and len(mask) >= 2:
            return self._few_runs(mask, trained.edges.tolist())
        if len(mask) < 2 or not has_few_runs(mask, starts=starts):
            return self.write(mask)
        return self._runs_if_cheaper(mask, starts) or self._narrow(mask.astype(np.uint32))

    def _few_runs(self, mask: NDArray[np.bool_], edges: list[int]) -> Block:
        """`write_mask` for a mask of few runs: the same bytes without numpy."""
        runs, head = len(edges) - 1, min(len(mask), RUNS_HEAD)
        if bisect_left(edges, head, 0, runs) * 4 > head + 64:  # as in `has_few_runs`
            return self.write(mask)
        first = mask[:1].tobytes()
        if runs == 1:
            return self.plain(CONSTANT, 0, first)
        if runs * 16 >= len(mask):  # as in `_runs_if_cheaper`
            return self._narrow(mask.astype(np.uint32))
        self.add(first)
        return Block(RUNS, runs, (), (self._narrow_few([b - a for a, b in pairwise(edges)]),))

    def _write_trained(self, values: Array, trained: MaskRuns) -> Block:
        first = values[trained.on[0][0] : trained.on[0][1]] if trained.on else values[:0]
        if self.small or trained.is_choppy or has_few_runs(first):
            return self.write(trained.take(values))
        # The path of log-probabilities: the runs go into the frame as views, without a copy in between.
        octets, size = _octets(values), values.dtype.itemsize
        self.pieces.extend([octets[a * size : b * size] for a, b in trained.on])
        self._pad(trained.count() * size)
        return Block(RAW)

    def _runs_if_cheaper(self, values: Array, starts: NDArray[np.int64] | None = None) -> Block | None:
        starts = run_starts(values) if starts is None else starts
        if len(starts) == 1:
            return self.plain(CONSTANT, 0, values[:1])
        alternating = values.dtype == np.bool_
        # A run costs about 16 bits for its length, plus its value unless values alternate. Without runs, a value costs
        # 1 bit for bools and at most 16 bits narrow. So 30,000 mask tokens in 2 runs cost 32 bits against 30,000.
        bits_per_run = 16 + (0 if alternating else 8 * values.dtype.itemsize)
        if len(starts) * bits_per_run >= len(values) * (1 if alternating else 8 * min(values.dtype.itemsize, 2)):
            return None
        run_values, run_lengths = encode_runs(values, starts)
        kept = run_values[:1] if alternating else run_values
        self.add(kept)
        return Block(RUNS, len(run_lengths), (), (self._narrow(run_lengths),))

    def _integers(self, values: Array) -> Block:
        # `argmax` takes a third of the time of `max` for a short array, and more for a long one.
        largest = values.item(values.argmax()) if len(values) < _SHORT else int(values.max())
        if largest >= 2**32 or (values.dtype.kind == "i" and int(values.min()) < 0):
            return self._raw(values)
        return self._narrow(values.astype(np.uint32, copy=False), largest)

    def _narrow(self, values: NDArray[np.uint32], largest: int | None = None) -> Block:
        if 0 < len(values) <= FEW:
            return self._narrow_few(values.tolist())
        width = width_of(int(values.max()) if largest is None else largest)
        planes = pack_uints(values, width)
        if self.small and len(values) > 64:
            # Below 64 values the zstd header costs more than it saves.
            return Block(PACKED, width, self.add(*(compress(plane, level=3) for plane in planes)))
        return self.plain(NARROW, width, *planes)

    def _raw(self, values: Array) -> Block:
        if self.small and len(values) > 64:
            # Level 1, not 3: mantissa bytes are noise, so the longer match search of level 3 finds nothing.
            return Block(PLANES, 0, self.add(*(compress(plane, level=1) for plane in split_bytes(values))))
        return self.plain(RAW, 0, values)

    def write_pieces(self, pieces: Sequence[Array]) -> Block:
        """Write the rows of several arrays as one raw array, without joining them first."""
        size = 0
        for piece in pieces:
            self.pieces.append(_octets(piece))
            size += piece.nbytes
        self._pad(size)
        return Block(RAW)

    def write_row_pieces(self, pieces: Sequence[Array]) -> Block:
        """`write_rows` for pieces that are not joined. Only for rows that are neither wide nor compressed."""
        bits = [bit_view(piece) for piece in pieces]
        # All zeros is one constant. The first row nearly always decides, before the pass over the rest.
        if not any(one[:1].any() or one.any() for one in bits):
            first = next((piece for piece in pieces if piece.size), None)
            if first is not None:
                return self.plain(CONSTANT, 0, first.reshape(-1)[:1])
        return self.write_pieces(pieces)

    def write_lists(self, lists: Ragged, trained: MaskRuns | None = None) -> tuple[Block, Block]:
        """Write one list per token: the number of values in each, then the values. `trained` as for `write`."""
        counts = lists.lengths.astype(np.uint32)
        if len(counts) and trained is not None and trained.has_off and trained.is_zero_off(counts):
            first = Block(SPARSE, trained.count(), (), (self.write(trained.take(counts)),))
        else:
            first = self.write(counts)
        if self.small and lists.dtype.kind == "u" and len(lists.values) > 64:
            steps = steps_of(lists)
            if steps is not None:
                return first, Block(DELTAS, 0, (), (self.write(steps),))
        return first, self.write(lists.values)

    def write_rows(self, values: Array, trained: MaskRuns | None = None) -> Block:
        """Write an array with trailing dimensions, [N, ...]: constant or raw, transposed for `small`. `trained` as for
        `write`.
        """
        flat = values.reshape(len(values), math.prod(values.shape[1:]))
        if flat.size and not bit_view(flat.reshape(-1)).any():
            return self.plain(CONSTANT, 0, flat[0, :1])
        if is_wide(values.dtype):
            if trained is not None and trained.has_off and trained.is_zero_off(flat):
                return Block(SPARSE, trained.count(), (), (self.write_rows(trained.take(flat)),))
            return Block(FLAT, 0, (), (self.write(flat.reshape(-1)),))
        if self.small and flat.size > 64:
            # Transposed, all values of one layer and choice are adjacent. They repeat along the tokens, which zstd
            # finds.
            return Block(PLANES, 0, self.add(compress(np.ascontiguousarray(flat.T), level=1)))
        return self.plain(RAW, 0, values)


@cache
def counted(count: int) -> tuple[Block, bytes]:
    """Return the block and the bytes of the numbers from 0, of up to `FEW`: the codes of strings that all differ."""
    head = Writer("fast", align=False)
    codes = head.integers(list(range(count)))
    return codes, b"".join(head.pieces)


class Reader:
    """Reads a section's buffers in the order they were written, and checks every size."""

    def __init__(self, section: memoryview, *, align: bool) -> None:
        self.section = section
        self.at = 0
        self.align = align
        self.used: dict[str, int] = {}
        """Bytes read so far, by purpose."""

    def bytes(self, size: int, what: str) -> memoryview:
        end = self.at + size
        if size < 0 or end > len(self.section):
            raise CorruptFrame(f"{what}: {size} bytes at {self.at} of a section of {len(self.section)}")
        view = self.section[self.at : end]
        self.used[what] = self.used.get(what, 0) + size
        self.at = -(-end // ALIGN) * ALIGN if self.align else end
        return view

    def skip(self, expected: Buffer, what: str) -> bool:
        """Move behind these bytes if they come next. Returns whether they do."""
        end = self.at + len(expected)
        if self.align or self.section[self.at : end] != expected:
            return False
        self.used[what] = self.used.get(what, 0) + len(expected)
        self.at = end
        return True

    def finish(self, what: str) -> None:
        """Check that the section is used up, except for the padding that aligns the next one."""
        if len(self.section) - self.at >= ALIGN or any(self.section[self.at :]):
            raise CorruptFrame(f"{what}: {len(self.section) - self.at} bytes left over")

    def read(self, block: Block, dtype: np.dtype[Any], count: int, what: str, trained: MaskRuns | None = None) -> Array:
        """Read the one-dimensional array of `count` values that was written as `block`."""
        if count <= FEW and dtype.kind in "ui":
            few = self._few(block, dtype, count, what)
            if few is not None:
                return np.array(few, dtype)
        if dtype == np.bool_ and block.coding in _OCTETS:
            octets = self.read(block, np.dtype("|u1"), count, what)
            return octets.astype(np.bool_)  # a bool made of any other byte than 0 and 1 is undefined
        if block.coding == RAW:
            return np.frombuffer(self.bytes(count * dtype.itemsize, what), dtype)
        if block.coding == CONSTANT:
            value = np.frombuffer(self.bytes(dtype.itemsize, what), dtype)
            return np.full(count, value[0], dtype)
        if block.coding == RUNS:
            return self._read_runs(block, dtype, count, what)
        if block.coding == SPARSE and trained is not None:
            return self._read_sparse(block, dtype, count, what, trained)
        if block.coding in (NARROW, PACKED):
            return self._read_narrow(block, dtype, count, what)
        if block.coding == PLANES:
            return join_bytes(self._planes(block, [count] * dtype.itemsize, what), dtype)
        raise CorruptFrame(f"{what}: coding {block.coding} is not one this reader knows here")

    def integers(self, block: Block, dtype: np.dtype[Any], count: int, what: str) -> list[int]:
        """`read` for integers, as a list."""
        few = self._few(block, dtype, count, what) if count <= FEW else None
        if few is not None:
            return few
        found: list[int] = self.read(block, dtype, count, what).tolist()
        return found

    def _few(self, block: Block, dtype: np.dtype[Any], count: int, what: str) -> list[int] | None:
        """`read` for the few integers of a head, one per sample: the same values and errors without a dozen numpy
        calls. Returns None for what `_few` of the writer does not write.
        """
        size, signed = dtype.itemsize, dtype.kind == "i"
        if block.coding == CONSTANT:
            return [int.from_bytes(self.bytes(size, what), "little", signed=signed)] * count
        if size != 8 and dtype.str != "<u4":  # a value may be too large for the dtype
            return None
        if block.coding == NARROW and block.arg in WIDTHS:
            return self._few_narrow(block.arg, count, what)
        if block.coding != RUNS or not 0 < block.arg <= count or len(block.parts) != 1:
            return None
        lengths = block.parts[0]
        if lengths.coding != NARROW or lengths.arg not in WIDTHS:
            return None
        values = memoryview(self.bytes(block.arg * size, what))
        runs = self._few_narrow(lengths.arg, block.arg, what)
        if sum(runs) != count:
            raise CorruptFrame(f"{what}: runs add up to {sum(runs)} of {count} values")
        out: list[int] = []
        for i, length in enumerate(runs):
            out += [int.from_bytes(values[i * size : i * size + size], "little", signed=signed)] * length
        return out

    def _few_narrow(self, width: int, count: int, what: str) -> list[int]:
        """Read both planes of a few integers, as `_few` of the writer wrote them."""
        low, high = planes_of(width)
        low_bytes, high_bytes = plane_bytes(width, count)
        out: list[int] = list(struct.unpack(f"<{count}{_LETTERS[low]}", self.bytes(low_bytes, what))) if low else []
        packed = int.from_bytes(self.bytes(high_bytes, what), "little")
        if not high:
            return out
        mask = (1 << high) - 1
        places = range(0, count * high, high)
        if not low:
            return [packed >> at & mask for at in places]
        return [value | (packed >> at & mask) << low for value, at in zip(out, places, strict=True)]

    def read_number(self, block: Block, what: str) -> int:
        """`read` for one number below 2**32."""
        if block.coding == NARROW and block.arg in (1, 2, 4, 8):  # one byte: most lengths of names
            return self.bytes(1, what)[0] & (1 << block.arg) - 1
        return self.integers(block, _U4, 1, what)[0]

    def read_rows(
        self,
        block: Block,
        dtype: np.dtype[Any],
        count: int,
        shape: tuple[int, ...],
        what: str,
        trained: MaskRuns | None = None,
    ) -> Array:
        """Read the [count, *shape] array that `write_rows` wrote."""
        if dtype == np.bool_ and block.coding in _OCTETS:
            return self.read_rows(block, np.dtype("|u1"), count, shape, what).astype(np.bool_)
        size = math.prod(shape)
        if block.coding == SPARSE and trained is not None:
            _check_sparse(block, count, what, trained)
            return trained.put(self.read_rows(block.parts[0], dtype, block.arg, shape, what))
        if block.coding == FLAT and len(block.parts) == 1:
            return self.read(block.parts[0], dtype, count * size, what).reshape(count, *shape)
        total = count * size * dtype.itemsize
        if block.coding == RAW:
            return np.frombuffer(self.bytes(total, what), dtype).reshape(count, *shape)
        if block.coding == CONSTANT:
            value = np.frombuffer(self.bytes(dtype.itemsize, what), dtype)
            return np.full((count, *shape), value[0], dtype)
        if block.coding == PLANES and len(block.sizes) == 1:
            flat = np.frombuffer(decompress(self.bytes(block.sizes[0], what), total, what), dtype)
            return np.ascontiguousarray(flat.reshape(size, count).T).reshape(count, *shape)
        raise CorruptFrame(f"{what}: coding {block.coding} is not one this reader knows here")

    def read_lists(self, block: Block, dtype: np.dtype[Any], counts: NDArray[np.uint32], what: str) -> Ragged:
        """Read lists of these lengths whose values were written as `block`. The caller has bounded their sum."""
        offsets = offsets_of(counts)
        total = int(offsets[-1])
        if block.coding != DELTAS:
            return Ragged(self.read(block, dtype, total, what), offsets)
        if len(block.parts) != 1 or dtype.kind != "u":
            raise CorruptFrame(f"{what}: {len(block.parts)} parts of {dtype} in lists that ascend")
        return lists_of(self.read(block.parts[0], dtype, total, what), offsets)

    def _read_runs(self, block: Block, dtype: np.dtype[Any], count: int, what: str) -> Array:
        runs = block.arg
        if not 0 < runs <= count or len(block.parts) != 1:
            raise CorruptFrame(f"{what}: {runs} runs for {count} values")
        alternating = dtype == np.bool_
        values = np.frombuffer(self.bytes((1 if alternating else runs) * dtype.itemsize, what), dtype)
        if block.parts[0].coding not in (NARROW, PACKED):
            raise CorruptFrame(f"{what}: run lengths in coding {block.parts[0].coding}")
        lengths = self.read(block.parts[0], np.dtype("<u4"), runs, what)
        # Sum in int64: lengths are uint32, and a hostile frame could make their sum wrap around to `count`.
        if int(lengths.sum(dtype=np.int64)) != count:
            raise CorruptFrame(f"{what}: runs add up to {int(lengths.sum(dtype=np.int64))} of {count} values")
        if alternating:
            first = bit_view(values)[0]
            # Only the first value is stored; runs alternate. Runs 0 1 2 with first True are True False True.
            values = _ALTERNATING[int(first != 0)]
            values = values[:runs] if runs <= FEW else np.resize(values, runs)
        return decode_runs(values, lengths)

    def _read_sparse(self, block: Block, dtype: np.dtype[Any], count: int, what: str, trained: MaskRuns) -> Array:
        _check_sparse(block, count, what, trained)
        return trained.put(self.read(block.parts[0], dtype, block.arg, what))

    def _read_narrow(self, block: Block, dtype: np.dtype[Any], count: int, what: str) -> Array:
        if block.arg not in WIDTHS or dtype.kind == "f":
            raise CorruptFrame(f"{what}: {dtype} in {block.arg} bits")
        expected = plane_bytes(block.arg, count)
        if block.coding == NARROW:
            low, high = (np.frombuffer(self.bytes(size, what), np.uint8) for size in expected)
        else:
            low, high = self._planes_of_sizes(block, expected, what)
        return from_uints(unpack_uints(low, high, block.arg, count), dtype, what)

    def _planes_of_sizes(self, block: Block, expected: Sequence[int], what: str) -> list[NDArray[np.uint8]]:
        if len(block.sizes) != len(expected):
            raise CorruptFrame(f"{what}: {len(block.sizes)} planes where {len(expected)} are needed")
        return [
            np.frombuffer(decompress(self.bytes(size, what), need, what), np.uint8)
            for size, need in zip(block.sizes, expected, strict=True)
        ]

    def _planes(self, block: Block, expected: Sequence[int], what: str) -> NDArray[np.uint8]:
        return np.stack(self._planes_of_sizes(block, expected, what))


def from_uints(values: NDArray[np.uint32], dtype: np.dtype[Any], what: str) -> Array:
    """Convert unpacked values to the dtype of their column."""
    if dtype == np.bool_:
        return values.astype(np.bool_)
    if dtype.itemsize < 4 and len(values) and int(values.max()) > np.iinfo(dtype).max:
        raise CorruptFrame(f"{what}: a value does not fit {dtype}")
    return values.view(dtype) if dtype.itemsize == 4 else values.astype(dtype)


def is_wide(dtype: np.dtype[Any]) -> bool:
    """Return whether the numbers of rows are coded. Those of one or two bytes (routed experts) are copied unchanged."""
    return dtype.itemsize >= 4


def _check_sparse(block: Block, count: int, what: str, trained: MaskRuns) -> None:
    if len(trained.mask) != count or block.arg != trained.count() or len(block.parts) != 1:
        raise CorruptFrame(f"{what}: {block.arg} values for {trained.count()} trained tokens")


def _octets(array: Array) -> Buffer:
    return np.ascontiguousarray(array).data.cast("B") if array.size else b""  # an empty view cannot be cast


class _Local(threading.local):
    """zstd contexts per thread: expensive to make, and not safe to share between threads."""

    def __init__(self) -> None:
        self.compressor = cache(lambda level: zstandard.ZstdCompressor(level=level))
        self.decompressor = zstandard.ZstdDecompressor()


_LOCAL = _Local()


def compress(plane: NDArray[np.uint8], *, level: int) -> bytes:
    """Compress a plane with zstd, or return it unchanged if that is not shorter. The length tells which."""
    raw = plane.tobytes()
    packed: bytes = _LOCAL.compressor(level).compress(raw)
    return packed if len(packed) < len(raw) else raw


def decompress(data: memoryview, size: int, what: str) -> Buffer:
    """Return the `size` bytes that were passed to `compress`.

    zstandard allocates what the compressed data *claims* to hold, regardless of the limit it is given. So the claim is
    compared first: a decompression bomb costs nothing.
    """
    if len(data) == size:
        return data
    try:
        says = zstandard.frame_content_size(data)
        if says != size:
            raise CorruptFrame(f"{what}: compressed data says it holds {says} bytes where {size} are needed")
        return _LOCAL.decompressor.decompress(data, max_output_size=size, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise CorruptFrame(f"{what}: {error}") from None
