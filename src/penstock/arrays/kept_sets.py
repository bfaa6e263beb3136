"""Sampling masks: for each sampled token the set of ids that the sampler kept, ascending, the token's own among them.

A sampler with top-p, top-k or min-p draws from a part of the vocabulary, and its log-probabilities are normalized over
that part. A trainer that normalizes over the whole vocabulary compares with other numbers; with the set it can do as
the sampler did. An empty list says that nothing was left out, or that nobody recorded it.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from penstock.arrays.ragged import Ragged
from penstock.errors import InvalidInput


def ascending(lists: Ragged) -> Ragged:
    """The same sets with the ids of each in order.

    >>> ascending(Ragged.of_lists([[9, 7], [], [8]])).tolist()
    [[7, 9], [], [8]]
    """
    if not _falls(lists).any():
        return lists
    token = np.repeat(np.arange(len(lists), dtype=np.uint64), lists.lengths)
    keys = np.sort(token << np.uint64(32) | lists.values.astype(np.uint64))
    return Ragged(keys.astype(np.uint32), lists.offsets)


def check_kept(kept: Ragged, token_ids: NDArray[np.uint32], where: str) -> None:
    """Raise unless every set ascends, without repeats, and holds the token that was drawn from it."""
    found = first_bad_set(kept, token_ids)
    if found is not None:
        raise InvalidInput(f"{where}.sampling_mask[{found[0]}]: {found[1]}")


def first_bad_set(kept: Ragged, token_ids: NDArray[np.uint32]) -> tuple[int, str] | None:
    """The first token whose set cannot be, and why; None when all are sound."""
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
    """[N] where a value is smaller than the one before it in its list; or, not strictly, equal to it."""
    values = lists.values
    falls = np.zeros(len(values), np.bool_)
    (np.less if strictly else np.less_equal)(values[1:], values[:-1], out=falls[1:])
    starts = lists.offsets[:-1]
    falls[starts[starts < len(values)]] = False
    return falls
