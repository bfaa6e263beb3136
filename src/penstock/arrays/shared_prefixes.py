"""Prefixes that samples share, as planning needs them: an order, and a length per sample.

Each sample names an earlier one (its parent) and how many first tokens it shares with it. In depth-first order (a
sample, then its children, those that diverge latest first, each with its own), every sample shares with the one before
it what it shares with its parent, and with any earlier sample the minimum of the lengths between them:

    sample      a b c d e    a b c x y    a b z
    shared      0            3            2           the third shares min(3, 2) with the first
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from penstock.arrays.columns import Array


def earliest_parents(parents: NDArray[np.int64], shared: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return [n], for each sample its earliest ancestor that has all the tokens it shares, or -1 where it shares none.

    >>> earliest_parents(np.array([-1, 0, 1, 2]), np.array([0, 3, 2, 0])).tolist()
    [-1, 0, 0, -1]
    """
    found, lengths = parents.tolist(), shared.tolist()
    for i, length in enumerate(lengths):
        # Sample 2 above shares 2 tokens with sample 1, which has its own first 3 from sample 0: so sample 0 has those 2
        # as well. Earlier entries of `found` are already final, which keeps each walk short.
        parent = found[i]
        while parent >= 0 and lengths[parent] >= length:
            parent = found[parent]
        found[i] = parent
    return np.array(found, np.int64)


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedPrefixes:
    """One entry per sample."""

    parents: NDArray[np.int64]
    """[n] an earlier sample, -1 for none."""
    lengths: NDArray[np.int64]
    """[n] how many first tokens equal the parent's, in every input of the model."""
    patches: NDArray[np.int64]
    """[n] image patches among these."""
    parted: NDArray[np.int64]
    """[n] tokens after these whose ids agree but another input of the model differs: they are computed twice."""

    @staticmethod
    def none(count: int) -> SharedPrefixes:
        """Build an instance where nothing is shared."""
        lengths, patches, parted = np.zeros((3, count), np.int64)
        return SharedPrefixes(parents=np.full(count, -1, np.int64), lengths=lengths, patches=patches, parted=parted)

    @staticmethod
    def of(parents: Sequence[int], lengths: Sequence[int]) -> SharedPrefixes:
        """Build from text samples, which agree in everything where their ids agree."""
        none = SharedPrefixes.none(len(parents))
        return replace(none, parents=np.array(parents, np.int64), lengths=np.array(lengths, np.int64))

    @staticmethod
    def joined(parts: Sequence[SharedPrefixes]) -> SharedPrefixes:
        """Concatenate groups. Samples of different groups share nothing."""
        starts = np.cumsum([0, *(len(part.parents) for part in parts)])[:-1].tolist()
        parents = [np.where(p.parents < 0, -1, p.parents + at) for p, at in zip(parts, starts, strict=True)]
        numbers = {
            name: np.concatenate([np.zeros(0, np.int64), *(getattr(part, name) for part in parts)])
            for name in ("lengths", "patches", "parted")
        }
        return SharedPrefixes(parents=np.concatenate([np.zeros(0, np.int64), *parents]), **numbers)

    def shortened(self) -> SharedPrefixes:
        """Move each parent as early as possible. Then every child shares more with its parent than the parent shares
        with its own, so shared lengths fall on every path to the root."""
        return replace(self, parents=earliest_parents(self.parents, self.lengths))

    def depth_first(self) -> NDArray[np.intp]:
        """Return [n], the samples in depth-first order; unchanged order if nothing is shared.

        >>> found = SharedPrefixes.of([-1, 0, 0, -1, 1], [0, 3, 2, 0, 4])
        >>> found.depth_first().tolist()
        [0, 1, 4, 2, 3]
        """
        short = self.shortened()
        count = len(self.lengths)
        if not self.lengths.any():
            return np.arange(count)
        # Sort by parent, and within a parent by shared length, so that the stack below pops those first that diverge
        # latest. edges[p + 1] to edges[p + 2] are the children of p; edges[0] to edges[1] are the roots (parent -1).
        order = np.lexsort((-np.arange(count), self.lengths, short.parents))
        edges = np.searchsorted(short.parents[order], np.arange(-1, count + 1)).tolist()
        listed, out = order.tolist(), []
        stack = listed[edges[0] : edges[1]]
        while stack:
            i = stack.pop()
            out.append(i)
            stack += listed[edges[i + 1] : edges[i + 2]]
        return np.array(out, np.intp)


def common_prefix(a: Array, b: Array) -> int:
    """Return the length of the longest common prefix of two one-dimensional arrays.

    The search uses growing strides, so that an early difference costs little.

    >>> import numpy as np
    >>> common_prefix(np.array([1, 2, 3]), np.array([1, 2, 4, 5]))
    2
    """
    limit = min(len(a), len(b))
    at, stride = 0, 512
    while at < limit:
        end = min(limit, at + stride)
        differs = a[at:end] != b[at:end]
        if differs.any():
            return at + int(differs.argmax())
        at, stride = end, stride * 4
    return limit
