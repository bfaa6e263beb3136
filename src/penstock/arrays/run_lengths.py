"""Run-length coding: a mask of a 30,000-token sample is two runs, not 30,000 values.

Runs are found on the bit patterns, so NaN payloads and negative zeros survive.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from penstock.arrays.columns import Array

RUNS_HEAD = 4096
"""How many values `has_few_runs` looks at."""
_BITS = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}


def bit_view(values: Array) -> Array:
    """View the same memory as unsigned integers, so that equality means equal bits."""
    return values.view(_BITS[values.dtype.itemsize])


def run_starts(values: Array) -> NDArray[np.int64]:
    """Return where each run of equal bits begins; empty for an empty array."""
    if len(values) == 0:
        return np.zeros(0, np.int64)
    return _edges_of(values)[:-1]


def _edges_of(values: Array) -> NDArray[np.int64]:
    """Return where each run of equal bits begins, and where the last one ends; [0] for an empty array."""
    if len(values) == 0:
        return np.zeros(1, np.int64)
    bits = bit_view(values)
    changes = (bits[1:] != bits[:-1]).nonzero()[0]
    edges = np.empty(len(changes) + 2, np.int64)
    edges[0], edges[-1] = 0, len(values)
    np.add(changes, 1, out=edges[1:-1])
    return edges


def encode_runs(values: Array, starts: NDArray[np.int64] | None = None) -> tuple[Array, NDArray[np.uint32]]:
    """Return (value of each run, length of each run). Pass `starts` if they are already known.

    >>> encode_runs(np.array([7, 7, 7, 2], np.uint8))
    (array([7, 2], dtype=uint8), array([3, 1], dtype=uint32))
    """
    if starts is None:
        starts = run_starts(values)
    lengths = np.empty(len(starts), np.uint32)
    if len(starts):
        lengths[:-1] = starts[1:] - starts[:-1]
        lengths[-1] = len(values) - starts[-1]
    return values[starts], lengths


def decode_runs(run_values: Array, run_lengths: NDArray[np.uint32]) -> Array:
    """Invert `encode_runs`. Callers check the total length before allocating."""
    return np.repeat(run_values, run_lengths)


def has_few_runs(values: Array, *, starts: NDArray[np.int64] | None = None) -> bool:
    """Guess from the start of the array whether run-length coding can pay. Pass `starts` if they are known."""
    head = values[:RUNS_HEAD]
    if starts is None:
        bits = bit_view(head)
        runs = 1 + int(np.count_nonzero(bits[1:] != bits[:-1]))
    else:
        runs = int(starts.searchsorted(len(head)))
    # Runs pay from about four values per run. The 64 lets short heads through, where a full pass is cheap anyway.
    return len(head) == 0 or runs * 4 <= len(head) + 64


@dataclass(frozen=True, slots=True)
class MaskRuns:
    """A mask and the edges of its runs, so that masked values can be moved with one memcpy per run.

    Masks have long runs (a prompt, an answer), and copying run by run is several times faster than a boolean index. A
    mask with short runs falls back to the boolean index.
    """

    mask: NDArray[np.bool_]
    edges: NDArray[np.int64]
    """[runs + 1] where each run begins, and where the last one ends."""
    is_choppy: bool
    """Whether runs average fewer than 32 tokens, so the boolean index is used instead."""
    on: list[tuple[int, int]]
    """(start, end) of every run of True. Empty where `is_choppy`: the list could take more memory than the columns."""
    off: list[tuple[int, int]]
    """(start, end) of every run of False; empty where `is_choppy`."""

    @staticmethod
    def of(mask: NDArray[np.bool_]) -> MaskRuns:
        edges = _edges_of(mask)
        first_on = bool(len(mask)) and bool(mask[0])
        # Runs alternate, so half of them (rounded up if the first is True) are True: edges [0 3 5 9] with mask[0] True
        # have 3 runs, 2 of them True.
        if (len(edges) - 1 + first_on) // 2 * 32 > len(mask):
            return MaskRuns(mask, edges, True, [], [])
        runs = list(pairwise(edges.tolist()))
        return MaskRuns(mask, edges, False, runs[not first_on :: 2], runs[first_on::2])

    def part(self, begin: int, end: int) -> MaskRuns:
        """Return `MaskRuns.of(mask[begin:end])`, from the runs that are known."""
        mask = self.mask[begin:end]
        if self.is_choppy:
            return MaskRuns.of(mask)
        edges = [0, *self._inside(begin, end), end - begin]
        first_on = bool(mask[0]) if end > begin else False
        if end == begin or (len(edges) - 1 + first_on) // 2 * 32 > end - begin:
            return MaskRuns.of(mask)
        runs = list(pairwise(edges))
        return MaskRuns(mask, np.array(edges, np.int64), False, runs[not first_on :: 2], runs[first_on::2])

    def _inside(self, begin: int, end: int) -> list[int]:
        a, b = self.edges.searchsorted((begin + 1, end))
        inside: list[int] = (self.edges[a:b] - begin).tolist()
        return inside

    @property
    def has_off(self) -> bool:
        """Whether the mask is False anywhere."""
        return len(self.edges) > 2 or bool(len(self.mask) and not self.mask[0])

    def count(self) -> int:
        return int(np.count_nonzero(self.mask))

    def is_zero_off(self, values: Array) -> bool:
        """Return whether all bits are zero wherever the mask is False."""
        bits = bit_view(values)
        if self.is_choppy:
            return not bits[~self.mask].any()
        # count_nonzero costs a tenth of a microsecond a call where any() costs four
        return not any(np.count_nonzero(bits[a:b]) for a, b in self.off)

    def take(self, values: Array) -> Array:
        """Return `values[mask]`."""
        if self.is_choppy:
            return values[self.mask]
        return np.concatenate([values[a:b] for a, b in self.on]) if self.on else values[:0]

    def put(self, kept: Array, out: Array | None = None) -> Array:
        """Invert `take`, with zeros where the mask is False. Writes into `out` if given."""
        if out is None:
            out = np.zeros((len(self.mask), *kept.shape[1:]), kept.dtype)
        elif self.is_choppy:
            out[:] = 0
        else:
            for a, b in self.off:
                out[a:b] = 0
        if self.is_choppy:
            out[self.mask] = kept
            return out
        at = 0
        for a, b in self.on:
            out[a:b] = kept[at : at + b - a]
            at += b - a
        return out
