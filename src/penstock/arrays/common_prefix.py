"""How far two arrays agree from their beginning."""

from __future__ import annotations

from penstock.arrays.columns import Array


def common_prefix(a: Array, b: Array, guess: int = 0) -> int:
    """Length of the longest common prefix of two one-dimensional arrays.

    `guess` is tried first, with one memcmp: all answers to a prompt part at the same place. Otherwise in growing
    strides, so that an early difference costs little.

    >>> import numpy as np
    >>> common_prefix(np.array([1, 2, 3]), np.array([1, 2, 4, 5]))
    2
    """
    limit = min(len(a), len(b))
    if 0 < guess < limit and a[guess] != b[guess] and a[:guess].tobytes() == b[:guess].tobytes():
        return guess
    at, stride = 0, 512
    while at < limit:
        end = min(limit, at + stride)
        differs = a[at:end] != b[at:end]
        if differs.any():
            return at + int(differs.argmax())
        at, stride = end, stride * 4
    return limit
