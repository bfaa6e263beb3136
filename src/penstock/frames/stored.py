"""A column as a frame stores it: shared prefixes left out, samples as pieces, nothing unfolded."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from penstock.arrays import Array, Cells
from penstock.frames.prefixes import Prefixes


@dataclass(frozen=True, slots=True)
class Stored:
    """One column of one frame."""

    values: Cells
    """[stored, *trailing] the samples' own parts, end to end."""
    starts: NDArray[np.int64]
    """[n + 1] where each sample's own part begins."""
    prefixes: Prefixes | None
    """Where the rest is found; None when every sample has all of its tokens here."""
    is_sparse: bool = False
    """Whether only trained tokens have a value here; all others are zero."""

    @property
    def shares_prefixes(self) -> bool:
        return self.prefixes is not None

    def has(self, i: int) -> bool:
        """Whether a sample has the column."""
        shared = 0 if self.prefixes is None else int(self.prefixes.shared[i])
        return shared > 0 or bool(self.starts[i + 1] > self.starts[i])

    def collect(self, i: int, begin: int, end: int, pieces: list[Array]) -> None:
        """Append tokens `begin` to `end` of sample i, as views: first what its ancestors have, then its own."""
        own: list[Array] = []
        while True:  # from the sample up to its first ancestor; a loop, for a chain may be thousands long
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
