"""Memory for micro-batches that is reused once no view of it is left."""

from __future__ import annotations

import sys

import numpy as np
from numpy.typing import NDArray

LARGE_BYTES = 32 << 20
"""Blocks of at least this size are kept. The C library reuses smaller ones by itself, once they are freed."""
_MOST = 8
"""Blocks that are kept: a step takes one, and one more for each column with trailing dimensions."""
_ALONE = 3
"""Reference count of an unused block: the list, the loop over it, and the call that counts."""


class BlockPool:
    """A pool of blocks for one thread.

    The kernel must clear new memory: for 400 MB of routed experts that takes longer than reading and copying them. A
    view of a block (a column of a micro-batch, a tensor built from it) holds a reference to it, so a block without
    references is free.

    >>> pool = BlockPool()
    >>> one = pool.take(50 << 20)
    >>> address, other = one.ctypes.data, pool.take(50 << 20)
    >>> other.ctypes.data == address  # still in use
    False
    >>> del one
    >>> pool.take(40 << 20).ctypes.data == address
    True
    """

    def __init__(self) -> None:
        self._blocks: list[NDArray[np.uint8]] = []

    def take(self, size: int) -> NDArray[np.uint8]:
        """Return `size` bytes that are not in use."""
        if size < LARGE_BYTES:
            return np.empty(size, np.uint8)
        small = []
        for block in self._blocks:
            if sys.getrefcount(block) == _ALONE:
                if len(block) >= size:
                    return block[:size]
                small.append(id(block))
        self._blocks = [block for block in self._blocks if id(block) not in small]  # too small for today's steps
        # Allocate a quarter more, so that slowly growing steps do not each need new memory.
        block = np.empty(size + size // 4, np.uint8)
        if len(self._blocks) < _MOST:
            self._blocks.append(block)
        return block[:size]
