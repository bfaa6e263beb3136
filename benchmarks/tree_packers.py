"""How others keep samples that share tokens together, written from their descriptions, on the same metadata.

What each chooses is which samples are in which micro-batch. All get our arrangement of these: sorted by cost and cut
into rows, which no other arrangement of the same micro-batches beats.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

from benchmarks.tree_cases import Case
from penstock.packing import Packing
from penstock.packing.bins import Bin, Items
from penstock.packing.rows import rows_of
from penstock.packing.tree_rows import pack_pieces
from penstock.packing.trees import Families, Trees, cut_families

Packer: TypeAlias = Callable[[Case, Items, Packing], list[Bin]]


def today(case: Case, items: Items, packing: Packing) -> list[Bin]:
    """Our own packing without trees."""
    rows = rows_of(items, [np.arange(len(case.metadata))], packing.ranks, packing.cost.overhead)
    return [b for row in rows for b in row]


def trie_rows(case: Case, items: Items, packing: Packing) -> list[Bin]:
    """Rows with a budget of unique tokens, filled in order: a sample goes to the row that holds its group, while that
    has room, else to the first one that has, else to a new one (the idea of TRL's tree rows)."""
    shared = case.metadata.shared
    assert shared is not None
    parents, common = shared.parents.tolist(), shared.lengths.tolist()
    rows: list[_TrieRow] = []
    holds: dict[str, int] = {}
    for i, length in enumerate(items.lengths):
        group, path = case.metadata.group[i], _path(i, length, parents, common)
        row = holds.get(group, -1)
        if row < 0 or rows[row].room < length - rows[row].has(path):
            row = next((k for k, other in enumerate(rows) if other.room >= length - other.has(path)), len(rows))
            if row == len(rows):
                rows.append(_TrieRow(room=packing.caps.tokens, samples=[], depths={}))
            holds[group] = row
        rows[row].put(i, length, path)
    return [row.samples for row in rows]


@dataclass(slots=True, kw_only=True)
class _TrieRow:
    room: int
    samples: Bin
    depths: dict[int, int]
    """By sample how many of its first tokens the row has."""

    def has(self, path: dict[int, int]) -> int:
        """How many first tokens of a sample the row has."""
        return max((min(n, self.depths.get(other, 0)) for other, n in path.items()), default=0)

    def put(self, i: int, length: int, path: dict[int, int]) -> None:
        self.room -= length - self.has(path)
        self.samples.append(i)
        for other, n in path.items():
            self.depths[other] = max(self.depths.get(other, 0), n)


def _path(i: int, length: int, parents: list[int], common: list[int]) -> dict[int, int]:
    """The sample and those it descends from, with what it shares with each."""
    found = {i: length}
    while parents[i] >= 0:
        length = min(length, common[i])
        i = parents[i]
        found[i] = length
    return found


def whole_families(case: Case, items: Items, packing: Packing) -> list[Bin]:
    """Families are never split unless the cap demands it; packed by our planner."""
    trees = Trees.of(case.metadata)
    ids = np.arange(len(case.metadata))
    if trees is None:
        return today(case, items, packing)
    families = Families.of(items, ids, packing, trees)
    return pack_pieces(items, [cut_families(families, np.inf, items.caps)], packing)


RIVALS: dict[str, Packer] = {
    "today's rows": today,
    "trie rows (TRL)": trie_rows,
    "families never split": whole_families,
}
