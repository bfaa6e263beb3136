"""zstd with a bound: a plane is compressed if that helps, and decompressed only to the size it must have."""

from __future__ import annotations

import threading
from functools import cache

import numpy as np
import zstandard
from numpy.typing import NDArray

from penstock.errors import CorruptFrame
from penstock.frames.layout import Buffer


class _Local(threading.local):
    """zstd contexts are expensive to make and not safe to share between threads."""

    def __init__(self) -> None:
        self.compressor = cache(lambda level: zstandard.ZstdCompressor(level=level))
        self.decompressor = zstandard.ZstdDecompressor()


_LOCAL = _Local()


def compress(plane: NDArray[np.uint8], *, level: int) -> bytes:
    """The plane compressed, or as it is when that is not shorter: the length tells which."""
    raw = plane.tobytes()
    packed: bytes = _LOCAL.compressor(level).compress(raw)
    return packed if len(packed) < len(raw) else raw


def decompress(data: memoryview, size: int, what: str) -> Buffer:
    """The `size` bytes that were given to `compress`.

    The library allocates what the compressed data *says* it holds, whatever limit it is given, so that number
    is compared first: a bomb costs nothing.
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
