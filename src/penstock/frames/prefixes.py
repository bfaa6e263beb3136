"""Shared prefixes: tokens that an earlier sample of the batch already has are stored once.

Sixteen answers to one prompt share the prompt; a multi-turn rollout that became one sample per turn shares
everything but the last turn. Both are one mechanism: a sample names an earlier one (its parent) and how many
of its first tokens are found there.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from penstock.arrays import Array, Offsets, bit_view, common_prefix, earliest_parents

MIN_SHARED = 32
"""Shorter prefixes cost more to describe and to copy than they save."""
_RECENT = 4
"""Candidates tried per sample: the latest ones and the first one that begin alike."""


@dataclass(frozen=True, slots=True)
class Prefixes:
    parents: NDArray[np.int64]
    """[n] index of the earlier sample, -1 for none."""
    shared: NDArray[np.int64]
    """[n] number of first tokens found there."""

    @property
    def any(self) -> bool:
        return bool(self.shared.any())

    def shortened(self) -> Prefixes:
        """The same, each parent as early as it may be: what a parent itself has from its own parent is found there.

        On the way from a sample to its first ancestor every step then leaves tokens behind, so that no walk is longer
        than the sample, whatever chain a frame describes.
        """
        return Prefixes(earliest_parents(self.parents, self.shared), self.shared)


def find_prefixes(token_ids: NDArray[np.uint32], offsets: Offsets) -> Prefixes:
    """For every sample the earlier one with the longest common prefix among those that begin alike."""
    count = len(offsets) - 1
    parents = np.full(count, -1, np.int64)
    shared = np.zeros(count, np.int64)
    edges = offsets.tolist()
    alike: defaultdict[int, list[int]] = defaultdict(list)
    long_enough = np.flatnonzero(np.diff(offsets) >= MIN_SHARED)
    for i, key in zip(long_enough.tolist(), _beginnings(token_ids, offsets[long_enough]), strict=True):
        known = alike[key]
        if known:
            parents[i], shared[i] = _longest(token_ids, edges, i, known, int(shared[known[-1]]))
        known.append(i)
    return Prefixes(parents, shared)


def _longest(token_ids: NDArray[np.uint32], edges: list[int], i: int, known: list[int], guess: int) -> tuple[int, int]:
    """(sample, length) of the longest prefix of sample i among the latest and the first of the known ones."""
    row = token_ids[edges[i] : edges[i + 1]]
    parent, best = -1, MIN_SHARED - 1
    for j in (*known[: -_RECENT - 1 : -1], known[0]):
        begin, end = edges[j], edges[j + 1]
        if end - begin <= best or token_ids[begin + best] != row[best]:
            continue  # cannot be longer: siblings part right where their shared prompt ends
        length = common_prefix(row, token_ids[begin:end], guess)
        if length > best:
            parent, best = j, length
        if best == len(row):
            break
    return (parent, best) if parent >= 0 else (-1, 0)


# Powers of an odd number, so that order matters. Not drawn at random: numpy.random takes 40 ms to import.
_MIX = np.cumprod(np.full(MIN_SHARED, 0x9E3779B97F4A7C15, np.uint64))


def _beginnings(token_ids: NDArray[np.uint32], starts: NDArray[np.int64]) -> list[int]:
    """A hash of the first tokens from each start; equal beginnings have equal hashes, and only those are compared."""
    first = token_ids[starts[:, None] + np.arange(MIN_SHARED)].astype(np.uint64)
    mixed: list[int] = (first * _MIX).sum(axis=1, dtype=np.uint64).tolist()
    return mixed


def shares_values(values: Array, offsets: Offsets, prefixes: Prefixes) -> bool:
    """Whether another column repeats, bit for bit, wherever the tokens do."""
    rows = np.flatnonzero(prefixes.shared)
    starts, origins = offsets[rows].tolist(), offsets[prefixes.parents[rows]].tolist()
    bits = bit_view(values)
    return all(
        np.array_equal(bits[a : a + n], bits[b : b + n])
        for a, b, n in zip(starts, origins, prefixes.shared[rows].tolist(), strict=True)
    )


def cut(values: Array, offsets: Offsets, prefixes: Prefixes) -> Array:
    """The values without the shared tokens."""
    starts, ends = (offsets[:-1] + prefixes.shared).tolist(), offsets[1:].tolist()
    return np.concatenate([values[a:b] for a, b in zip(starts, ends, strict=True)])


def restore(stored: Array, offsets: Offsets, prefixes: Prefixes) -> Array:
    """The inverse of `cut`. Parents come earlier, so one pass in order suffices."""
    out = np.empty((int(offsets[-1]), *stored.shape[1:]), stored.dtype)
    edges, shared = offsets.tolist(), prefixes.shared.tolist()
    origins = offsets[np.maximum(prefixes.parents, 0)].tolist()
    at = 0
    for i, n in enumerate(shared):
        begin, end = edges[i], edges[i + 1]
        own = end - begin - n
        out[begin + n : end] = stored[at : at + own]
        at += own
        if n:
            out[begin : begin + n] = out[origins[i] : origins[i] + n]
    return out
