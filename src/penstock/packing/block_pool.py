"""Memory for micro-batches that is used again once nobody holds a view of it."""

from __future__ import annotations

import sys

import numpy as np
from numpy.typing import NDArray

LARGE_BYTES = 32 << 20
"""Blocks from this size on are kept. Smaller ones the C library gives out again by itself, and only as long as they are
freed: it learns from them not to ask the kernel."""
_MOST = 8
"""Blocks that are kept; a step takes one, and one more for each column with trailing dimensions."""
_ALONE = 3
"""References to a block that nobody uses: of the list, of the loop over it, and of the call that counts them."""


class BlockPool:
    """Used by one thread.

    New memory must be cleared by the kernel: for 400 MB of routed experts that takes longer than reading and copying
    them. A view of a block (a column of a micro-batch, a tensor made of it) holds a reference to it, so a block without
    references is free, whoever had it.

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
        """`size` bytes that nobody else has."""
        if size < LARGE_BYTES:
            return np.empty(size, np.uint8)
        small = []
        for block in self._blocks:
            if sys.getrefcount(block) == _ALONE:
                if len(block) >= size:
                    return block[:size]
                small.append(id(block))
        self._blocks = [block for block in self._blocks if id(block) not in small]  # too small for today's steps
        # A quarter more, so that steps that grow little by little do not each need new memory.
        block = np.empty(size + size // 4, np.uint8)
        if len(self._blocks) < _MOST:
            self._blocks.append(block)
        return block[:size]
