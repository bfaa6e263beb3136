"""Sampling masks: for each sampled token the set of ids that the sampler kept, ascending, including the token itself.

A sampler with top-p, top-k or min-p draws from a part of the vocabulary, and its log-probabilities are normalized over
that part. A trainer that normalizes over the full vocabulary compares different numbers. With the set it can do what
the sampler did. An empty list means that all ids were kept, or that the set was not recorded.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from penstock.arrays.ragged import Ragged
from penstock.errors import InvalidInput


def ascending(lists: Ragged) -> Ragged:
    """Sort the ids of each set.

    >>> ascending(Ragged.of_lists([[9, 7], [], [8]])).tolist()
    [[7, 9], [], [8]]
    """
    if not _falls(lists).any():
        return lists
    # Sort all sets at once by the key token << 32 | id: (0, 9) (0, 7) (2, 8) becomes (0, 7) (0, 9) (2, 8). Ids have 32
    # bits, so the low half of the key is the id again.
    token = np.repeat(np.arange(len(lists), dtype=np.uint64), lists.lengths)
    keys = np.sort(token << np.uint64(32) | lists.values.astype(np.uint64))
    return Ragged(keys.astype(np.uint32), lists.offsets)


def check_kept(kept: Ragged, token_ids: NDArray[np.uint32], where: str) -> None:
    """Raise InvalidInput unless every set ascends without repeats and contains the token that was drawn from it."""
    found = first_bad_set(kept, token_ids)
    if found is not None:
        raise InvalidInput(f"{where}.sampling_mask[{found[0]}]: {found[1]}")


def first_bad_set(kept: Ragged, token_ids: NDArray[np.uint32]) -> tuple[int, str] | None:
    """Return the first token with an invalid set and the reason, or None when all are valid."""
    repeats = np.flatnonzero(_falls(kept, strictly=False))
    if len(repeats):
        token = int(np.searchsorted(kept.offsets, repeats[0], side="right")) - 1
        return token, f"id {int(kept.values[repeats[0]])} twice or out of order; a set holds each id once, ascending"
    lengths = kept.lengths
    hits = kept.values == np.repeat(token_ids, lengths)
    if int(np.count_nonzero(hits)) == int(np.count_nonzero(lengths)):
        return None  # no set has more than one hit, so every set that is not empty has one
    hit = np.zeros(len(kept), np.bool_)
    hit[np.searchsorted(kept.offsets, np.flatnonzero(hits), side="right") - 1] = True
    token = int(np.argmax((lengths > 0) & ~hit))
    return token, (
        f"{int(lengths[token])} ids without {int(token_ids[token])}, the token that was sampled there; record the set "
        "that the token was drawn from, or an empty one"
    )


def _falls(lists: Ragged, *, strictly: bool = True) -> NDArray[np.bool_]:
    """Return [N], where a value is smaller than the one before it in its list, or equal with `strictly=False`."""
    values = lists.values
    falls = np.zeros(len(values), np.bool_)
    (np.less if strictly else np.less_equal)(values[1:], values[:-1], out=falls[1:])
    starts = lists.offsets[:-1]
    falls[starts[starts < len(values)]] = False
    return falls
