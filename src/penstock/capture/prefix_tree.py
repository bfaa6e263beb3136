"""Find the longest stored prefix of a token sequence without walking the history.

Stored turns form a radix tree whose edges ("segments") are spans of turns; a segment ends wherever two sequences
diverge. Every segment end has the hash of its full path from the root. So one vectorized comparison of all ends against
the prefix hashes of a new sequence finds the deepest end on its path. What remains lies inside one child:

    stored     a b c d, a b x y        segments  (a b) (c d) (x y), ends 2 4 4
    new        a b c z                 hashes of a, ab, abc, abcz: only end 2 matches; then 1 key inside (c d)

The Python work per lookup does not grow with the number of turns. A hash never decides alone: the winner is compared
key by key.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from penstock.arrays import common_prefix

Keys = NDArray[np.uint64]

# Odd constants of the splitmix64 finalizer. Any fixed mixing would do, because comparison catches collisions.
_BY_KEY, _BY_POSITION, _FINAL = (np.uint64(c) for c in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))
_WRAP = (1 << 64) - 1
ROOT = 0


class PrefixIndex:
    """Sequences by their prefixes. Segment 0 is the root: the empty prefix."""

    def __init__(self) -> None:
        self._turn = [-1]
        self._start = [0]
        self._stop = [0]
        self._parent = [-1]
        self._children: list[dict[int, int]] = [{}]
        self._keys: dict[int, Keys] = {}
        self._ends = np.zeros(16, np.int64)
        self._hashes = np.zeros(16, np.uint64)

    def end(self, segment: int) -> int:
        """Return the length of the sequence from the root to the end of a segment."""
        return int(self._ends[segment])

    def place(self, segment: int) -> tuple[int, int]:
        """Return (turn, how many of its tokens) that a segment ends at; (-1, 0) for the root."""
        return self._turn[segment], self._stop[segment]

    def ends_of(self, segments: NDArray[np.intp]) -> NDArray[np.int64]:
        return self._ends[segments]

    def insert(self, segment: int, turn: int, keys: Keys) -> int:
        """Store a turn's keys after a segment. Returns the segment that ends where the turn does."""
        self._keys[turn] = keys
        at = 0
        while at < len(keys):
            child = self._children[segment].get(int(keys[at]))
            if child is None:
                return self._add(segment, turn, at, len(keys))
            stored = self._segment_keys(child)
            shared = common_prefix(keys[at:], stored)
            segment = child if shared == len(stored) else self._split(child, shared)
            at += shared
        return segment

    def longest(self, keys: Keys) -> int:
        """Return the segment that ends exactly where `keys` leaves everything stored; splits one if necessary."""
        everything = np.arange(len(self._turn))
        segment = self.deepest(keys, prefix_hashes(keys), everything)
        assert segment is not None, "the root is a prefix of everything"
        end = self.end(segment)
        child = self._children[segment].get(int(keys[end])) if end < len(keys) else None
        if child is None:
            return segment
        shared = common_prefix(keys[end:], self._segment_keys(child))
        return self._split(child, shared)

    def deepest(self, keys: Keys, hashes: Keys, among: NDArray[np.intp]) -> int | None:
        """Return the first of the longest segments in `among` whose path is a prefix of `keys`."""
        ends = self._ends[among]
        fits = np.flatnonzero(ends <= len(keys))
        found = fits[hashes[ends[fits]] == self._hashes[among[fits]]]
        for i in found[np.argsort(-ends[found], kind="stable")]:
            segment = int(among[i])
            if np.array_equal(self._path_keys(segment), keys[: ends[i]]):
                return segment
        return None

    def _segment_keys(self, segment: int) -> Keys:
        return self._keys[self._turn[segment]][self._start[segment] : self._stop[segment]]

    def _path_keys(self, segment: int) -> Keys:
        parts = []
        while segment != ROOT:
            parts.append(self._segment_keys(segment))
            segment = self._parent[segment]
        return np.concatenate(parts[::-1]) if parts else np.zeros(0, np.uint64)

    def _add(self, parent: int, turn: int, start: int, stop: int) -> int:
        segment = len(self._turn)
        self._turn.append(turn)
        self._start.append(start)
        self._stop.append(stop)
        self._parent.append(parent)
        self._children.append({})
        if segment == len(self._ends):
            self._ends = np.concatenate([self._ends, np.zeros_like(self._ends)])
            self._hashes = np.concatenate([self._hashes, np.zeros_like(self._hashes)])
        keys = self._segment_keys(segment)
        self._children[parent][int(keys[0])] = segment
        position = self.end(parent)
        self._ends[segment] = position + len(keys)
        # The hash of a path is a sum over its keys, each mixed with its position, modulo 2**64. So a segment's hash is
        # its parent's plus its own keys', and `prefix_hashes` is one cumulative sum.
        self._hashes[segment] = (int(self._hashes[parent]) + int(_mix(keys, position).sum())) & _WRAP
        return segment

    def _split(self, segment: int, at: int) -> int:
        """Insert a new segment for the first `at` keys. The old one keeps the rest, and its end."""
        start = self._start[segment]
        upper = self._add(self._parent[segment], self._turn[segment], start, start + at)
        self._start[segment] = start + at
        self._parent[segment] = upper
        self._children[upper][int(self._segment_keys(segment)[0])] = segment
        return upper


def prefix_hashes(keys: Keys) -> Keys:
    """Return [n + 1], the hash of every prefix, the empty one first."""
    hashes = np.zeros(len(keys) + 1, np.uint64)
    np.cumsum(_mix(keys, 0), out=hashes[1:])
    return hashes


def _mix(keys: Keys, position: int) -> Keys:
    mixed = keys * _BY_KEY + np.arange(position, position + len(keys), dtype=np.uint64) * _BY_POSITION
    mixed ^= mixed >> np.uint64(29)
    mixed *= _FINAL
    mixed ^= mixed >> np.uint64(32)
    return mixed
