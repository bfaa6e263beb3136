"""Arrange the rollouts of a group as a tree: shared tokens appear once, branches open where rollouts differ."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

MAX_NODES = 4096


@dataclass(frozen=True, slots=True)
class Branch:
    """Tokens that a set of rollouts shares, after those of the parent."""

    parent: int
    """Index of the branch it follows; -1 for the first."""
    start: int
    """Position of its first token in each of its members."""
    end: int
    members: tuple[int, ...]
    """Indexes of the rollouts that contain it."""


def branches(sequences: Sequence[NDArray[np.int64]]) -> list[Branch]:
    """Build the tree of token sequences, parents before children, members in the given order.

    >>> a, b, c = (np.array(ids) for ids in ([1, 2, 3], [1, 2, 4, 5], [1, 2, 4, 6]))
    >>> [(one.parent, one.start, one.end, one.members) for one in branches([a, b, c])]
    [(-1, 0, 2, (0, 1, 2)), (0, 2, 3, (0,)), (0, 2, 3, (1, 2)), (2, 3, 4, (1,)), (2, 3, 4, (2,))]
    """
    found: list[Branch] = []
    waiting = [(-1, 0, tuple(range(len(sequences))))]
    while waiting and len(found) < MAX_NODES:
        parent, start, members = waiting.pop(0)
        end = start + _common([sequences[m][start:] for m in members])
        if end > start or len(members) == 1:
            found.append(Branch(parent, start, end, members))
            parent = len(found) - 1
        if len(members) > 1:
            waiting = [(parent, end, own) for own in _split(sequences, members, end)] + waiting
    return found


def _common(rests: list[NDArray[np.int64]]) -> int:
    """Return the length of the common prefix."""
    length = min(len(rest) for rest in rests)
    differs = np.zeros(length, np.bool_)
    for rest in rests[1:]:
        differs |= rest[:length] != rests[0][:length]
    at = np.flatnonzero(differs)
    return int(at[0]) if len(at) else length


def _split(sequences: Sequence[NDArray[np.int64]], members: tuple[int, ...], at: int) -> list[tuple[int, ...]]:
    """Group members by their next token. Each that has ended is a part of its own, so that the loop makes progress."""
    parts: dict[tuple[str, int], list[int]] = {}
    for member in members:
        rest = sequences[member]
        key = ("next", int(rest[at])) if at < len(rest) else ("ended", member)
        parts.setdefault(key, []).append(member)
    return [tuple(own) for own in parts.values()]
