"""Shared prefixes: tokens that an earlier sample of the batch already has are stored once.

Sixteen answers to one prompt share the prompt. A multi-turn rollout that became one sample per turn shares everything
but the last turn. Both are one mechanism: a sample names an earlier one (its parent) and how many of its first tokens
are stored there.

    samples   a b c d e    a b c x y        parents  -1  0
    stored    a b c d e    x y              shared    0  3
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from penstock.arrays import Array, Cells, Offsets, bit_view, common_prefix, earliest_parents

MIN_SHARED = 32
"""Shorter prefixes cost more to describe and to copy than they save."""
_RECENT = 4
"""Candidates per sample: the latest ones and the first one with the same beginning."""


@dataclass(frozen=True, slots=True)
class Prefixes:
    parents: NDArray[np.int64]
    """[n] index of the earlier sample, -1 for none."""
    shared: NDArray[np.int64]
    """[n] number of first tokens stored there."""

    @property
    def any(self) -> bool:
        return bool(np.count_nonzero(self.shared))  # a fifth of the time of `any()`

    def shortened(self) -> Prefixes:
        """Move each parent as early as possible: what a parent has from its own parent is stored there.

        Every step from a sample to its first ancestor then leaves tokens behind, so no walk is longer than the sample,
        whatever chain a frame describes.
        """
        return Prefixes(earliest_parents(self.parents, self.shared), self.shared)


def find_prefixes(token_ids: NDArray[np.uint32], offsets: Offsets) -> Prefixes:
    """Find for every sample the earlier one with the longest common prefix, among those with the same beginning."""
    count = len(offsets) - 1
    parents, shared = [-1] * count, [0] * count
    edges: list[int] = offsets.tolist()
    alike: dict[bytes, _Siblings] = {}
    items = token_ids.data  # one item of a memoryview costs a fifth of numpy's
    for i in range(count):
        start, end = edges[i], edges[i + 1]
        if end - start < MIN_SHARED:
            continue
        key = token_ids[start : start + MIN_SHARED].tobytes()
        found = alike.get(key)
        if found is None:
            alike[key] = _Siblings(i)
            continue
        guess = found.guess
        # One comparison of memory instead of the search below, which would find the same.
        if (
            0 < guess < end - start
            and found.is_usual(token := items[start + guess])
            and token_ids[start : start + guess].tobytes() == found.prefix
        ):
            parents[i], shared[i] = found.known[-1], guess
            found.known.append(i)
            found.recent.append(token)
            continue
        parents[i], shared[i] = _longest(token_ids, items, edges, i, found.known, shared[found.known[-1]])
        found.add(i, shared[i], token_ids, items, edges)
    return Prefixes(np.array(parents, np.int64), np.array(shared, np.int64))


class _Siblings:
    """Samples with the same beginning. All answers to a prompt diverge at the same position, so the last sample's
    shared length is tried first."""

    __slots__ = ("first", "guess", "known", "prefix", "recent")

    def __init__(self, i: int) -> None:
        self.known = [i]
        self.guess = 0
        """What the last sample shares with its parent."""
        self.prefix = b""
        """These tokens."""
        self.first: int | None = None
        """The first sample's token after as many; None where it is shorter."""
        self.recent: deque[int | None] = deque(maxlen=_RECENT)
        """The same of the latest samples."""

    def is_usual(self, token: int) -> bool:
        """Return whether a sample that continues with this token after `prefix` has the last sample as its parent:
        no candidate of `_longest` continues with the same token."""
        return self.recent[-1] is not None and token != self.first and token not in self.recent

    def add(self, i: int, shared: int, token_ids: NDArray[np.uint32], items: memoryview, edges: list[int]) -> None:
        """Add a sample that `_longest` looked at."""
        self.known.append(i)
        self.guess = shared
        if shared:
            start = edges[i]
            self.prefix = token_ids[start : start + shared].tobytes()
            self.first = _item(items, edges, self.known[0], shared)
            self.recent.clear()
            self.recent.extend([_item(items, edges, k, shared) for k in self.known[-_RECENT:]])


def _item(items: memoryview, edges: list[int], i: int, at: int) -> int | None:
    """Return a token of a sample, or None where it is shorter."""
    found: int | None = items[edges[i] + at] if edges[i] + at < edges[i + 1] else None
    return found


def _longest(
    token_ids: NDArray[np.uint32], items: memoryview, edges: list[int], i: int, known: list[int], guess: int
) -> tuple[int, int]:
    """Return (sample, length) of the longest prefix of sample i among the latest and the first of the known ones."""
    start, count = edges[i], edges[i + 1] - edges[i]
    row = token_ids[start : start + count]
    parent, best = -1, MIN_SHARED - 1
    first = row[:guess].tobytes()
    for j in (*known[: -_RECENT - 1 : -1], known[0]):
        begin, end = edges[j], edges[j + 1]
        if end - begin <= best or items[begin + best] != items[start + best]:
            continue  # cannot be longer: siblings diverge right where their shared prompt ends
        # All answers to a prompt diverge at the same position, so this one is tried first, with one memcmp.
        splits = guess < min(count, end - begin) and items[begin + guess] != items[start + guess]
        is_guessed = splits and guess > 0 and token_ids[begin : begin + guess].tobytes() == first
        length = guess if is_guessed else common_prefix(row, token_ids[begin:end])
        if length > best:
            parent, best = j, length
        if best == count:
            break
    return (parent, best) if parent >= 0 else (-1, 0)


def shares_values(values: Array, offsets: Offsets, prefixes: Prefixes) -> bool:
    """Return whether another column repeats, bit for bit, wherever the tokens do."""
    rows = np.flatnonzero(prefixes.shared)
    starts, origins = offsets[rows].tolist(), offsets[prefixes.parents[rows]].tolist()
    bits = bit_view(values)
    return all(
        np.array_equal(bits[a : a + n], bits[b : b + n])
        for a, b, n in zip(starts, origins, prefixes.shared[rows].tolist(), strict=True)
    )


def cut(values: Array, offsets: Offsets, prefixes: Prefixes) -> Array:
    """Return the values without the shared tokens."""
    starts, ends = (offsets[:-1] + prefixes.shared).tolist(), offsets[1:].tolist()
    return np.concatenate([values[a:b] for a, b in zip(starts, ends, strict=True)])


def restore(stored: Array, offsets: Offsets, prefixes: Prefixes) -> Array:
    """Invert `cut`. Parents come earlier, so one pass in order suffices."""
    out = np.empty((int(offsets[-1]), *stored.shape[1:]), stored.dtype)
    edges, shared = offsets.tolist(), prefixes.shared.tolist()
    origins = offsets[np.maximum(prefixes.parents, 0)].tolist()
    at = 0
    for i, n in enumerate(shared):
        begin, end = edges[i], edges[i + 1]
        own = end - begin - n
        out[begin + n : end] = stored[at : at + own]
        at += own
        # For the example above: stored is a b c d e x y. Sample 1 takes its own x y to places 8 and 9, then copies
        # a b c from place 0, where its parent is already complete.
        if n:
            out[begin : begin + n] = out[origins[i] : origins[i] + n]
    return out


@dataclass(frozen=True, slots=True)
class Stored:
    """One column as a frame stores it: shared prefixes left out, nothing decoded per sample."""

    values: Cells
    """[stored, *trailing] the samples' own parts, end to end."""
    starts: NDArray[np.int64]
    """[n + 1] where each sample's own part begins."""
    prefixes: Prefixes | None
    """Where the rest is stored; None when every sample has all of its tokens here."""
    is_sparse: bool = False
    """Whether only trained tokens have a value here; all others are zero."""

    @property
    def shares_prefixes(self) -> bool:
        return self.prefixes is not None

    def has(self, i: int) -> bool:
        """Return whether a sample has the column."""
        shared = 0 if self.prefixes is None else int(self.prefixes.shared[i])
        return shared > 0 or bool(self.starts[i + 1] > self.starts[i])

    def collect(self, i: int, begin: int, end: int, pieces: list[Array]) -> None:
        """Append tokens `begin` to `end` of sample i, as views: first what its ancestors store, then its own."""
        own: list[Array] = []
        while True:  # from the sample up to its first ancestor; not recursive, because a chain may be thousands long
            shared = 0 if self.prefixes is None else int(self.prefixes.shared[i])
            first = int(self.starts[i]) - shared
            if end > max(begin, shared):
                own.append(self.values[first + max(begin, shared) : first + end])
            if self.prefixes is None or begin >= shared:
                break
            i, end = int(self.prefixes.parents[i]), min(end, shared)
        pieces.extend(reversed(own))


@dataclass(frozen=True, slots=True)
class Gathered:
    """One column of an output frame, in pieces that lie in its sources."""

    pieces: list[Array]
    lengths: NDArray[np.int64]
    """[n] tokens of each sample; 0 where it lacks the column."""
    example: Array
    """Any array of the same dtype and trailing shape."""
    shares_prefixes: bool
    """Whether tokens shared with an earlier sample are left out of the pieces."""
    is_sparse: bool = False
    """Whether the pieces hold trained tokens only."""
