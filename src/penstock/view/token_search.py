"""Find samples by what their tokens say: a piece of text, or token ids that follow one another."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

_IDS = re.compile(r"\d{1,10}(?:[\s,]+\d{1,10})*")


def find(query: str, ids: Sequence[NDArray[np.int64]], texts: Mapping[int, str]) -> list[tuple[int, int]]:
    """(sample, token) of the first place in each sample where the query stands, as ids or as text.

    >>> find("6 2", [np.array([1, 6, 2]), np.array([6, 6])], {})
    [(0, 1)]
    """
    wanted = query.strip()
    found: dict[int, int] = {}
    if _IDS.fullmatch(wanted):
        numbers = np.array([int(part) for part in re.split(r"[\s,]+", wanted)])
        found |= {i: at for i, own in enumerate(ids) if (at := _find_ids(own, numbers)) >= 0}
    if wanted and texts:
        needle = query.casefold() if wanted != query else wanted.casefold()
        for i, own in enumerate(ids):
            if i not in found and (at := _find_text(own, needle, texts)) >= 0:
                found[i] = at
    return sorted(found.items())


def _find_ids(own: NDArray[np.int64], wanted: NDArray[np.int64]) -> int:
    last = len(own) - len(wanted) + 1
    if last < 1:
        return -1
    same = np.ones(last, np.bool_)
    for offset, number in enumerate(wanted):
        same &= own[offset : offset + last] == number
    at = np.flatnonzero(same)
    return int(at[0]) if len(at) else -1


def _find_text(own: NDArray[np.int64], needle: str, texts: Mapping[int, str]) -> int:
    """The token in which the text begins."""
    pieces = [texts.get(i, "").casefold() for i in own.tolist()]
    at = "".join(pieces).find(needle)
    if at < 0:
        return -1
    ends = np.cumsum([len(piece) for piece in pieces])
    return int(np.searchsorted(ends, at, side="right"))
