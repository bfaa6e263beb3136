"""How far samples agree in everything a model computes from: token ids, columns per node, and images.

The frame knows how far ids agree. Two images may stand behind the same placeholder ids, and two samples may have been
routed to other experts over the same tokens: what is computed parts there, and so does the tree.
"""

from __future__ import annotations

from itertools import zip_longest

import numpy as np

from penstock.arrays import PER_NODE, TOKEN_COLUMNS, Ragged, Samples, SharedPrefixes, bit_view, common_prefix
from penstock.frames.prefixes import Prefixes, find_prefixes

_FEW_BYTES = 1 << 16


def node_prefixes(samples: Samples, prefixes: Prefixes | None) -> SharedPrefixes:
    """What these samples share, from what they share of their ids."""
    count = len(samples)
    if prefixes is None:
        return SharedPrefixes.none(count)
    shared, patches = prefixes.shared.copy(), np.zeros(count, np.int64)
    columns = [(samples.columns[name], name) for name in PER_NODE if name in samples.columns and name != "token_ids"]
    for i in np.flatnonzero(shared).tolist():
        parent = int(prefixes.parents[i])
        for column, name in columns:
            shared[i] = min(int(shared[i]), _agreement(column, name, i, parent, int(shared[i])))
        if samples.images is not None:
            shared[i] = _until_images_differ(samples, i, parent, int(shared[i]))
            patches[i] = sum(span.num_patches for span in samples.images[i] if span.end <= shared[i])
    parents = np.where(shared > 0, prefixes.parents, -1)
    return SharedPrefixes(parents=parents, lengths=shared, patches=patches, parted=prefixes.shared - shared)


def find_node_prefixes(samples: Samples) -> SharedPrefixes:
    """What samples of one group share, found in their tokens."""
    groups: dict[str, list[int]] = {}
    for i, name in enumerate(samples.text["group"]):
        groups.setdefault(name, []).append(i)
    parents, shared = np.full(len(samples), -1, np.int64), np.zeros(len(samples), np.int64)
    for rows in (np.array(rows) for rows in groups.values() if len(rows) > 1):
        ids = samples.columns["token_ids"].take(rows)
        found = find_prefixes(ids.values, ids.offsets)
        parents[rows], shared[rows] = np.where(found.parents < 0, -1, rows[found.parents]), found.shared
    return node_prefixes(samples, Prefixes(parents, shared))


def _agreement(column: Ragged, name: str, i: int, j: int, limit: int) -> int:
    """Over how many of the first `limit` tokens two rows agree; where one has none, with what stands for it."""
    a, b = column[i], column[j]
    if len(a) == len(b) == 0:
        return limit
    if len(a) == 0 or len(b) == 0:
        differs = (a if len(a) else b)[:limit] != TOKEN_COLUMNS[name].fill
        return 0 if TOKEN_COLUMNS[name].trailing else int(differs.argmax()) if differs.any() else limit
    a, b = a[:limit], b[:limit]
    if a.nbytes <= _FEW_BYTES and a.tobytes() == b.tobytes():  # a tenth of what a comparison by numpy costs
        return limit
    a, b = bit_view(a.reshape(-1)), bit_view(b.reshape(-1))
    if np.array_equal(a, b):
        return limit
    return common_prefix(a, b) // max(len(a) // limit, 1)


def _until_images_differ(samples: Samples, i: int, j: int, limit: int) -> int:
    assert samples.images is not None
    for a, b in zip_longest(samples.images[i], samples.images[j]):
        if a is None or b is None or (a.hash, a.grid, a.offset, a.length) != (b.hash, b.grid, b.offset, b.length):
            return min(limit, *(span.offset for span in (a, b) if span is not None))
        if a.offset < limit < a.end:  # an image is computed in one piece
            return a.offset
    return limit
