"""Finds how far samples agree in every input of the model: token ids, columns per node, and images.

The frame knows how far ids agree. But two images may have the same placeholder ids, and two samples may have been
routed to different experts over the same tokens: the computation diverges there, and so does the tree.
"""

from __future__ import annotations

from itertools import zip_longest

import numpy as np

from penstock.arrays import PER_NODE, TOKEN_COLUMNS, Ragged, Samples, SharedPrefixes, bit_view, common_prefix
from penstock.frames.prefixes import Prefixes, find_prefixes

_FEW_BYTES = 1 << 16


def node_prefixes(samples: Samples, prefixes: Prefixes | None) -> SharedPrefixes:
    """Return what these samples share in all inputs of the model, given what their ids share."""
    count = len(samples)
    if prefixes is None:
        return SharedPrefixes.none(count)
    shared, patches = prefixes.shared.copy(), np.zeros(count, np.int64)
    columns = [(samples.columns[name], name) for name in PER_NODE if name in samples.columns and name != "token_ids"]
    # Samples of text alone agree in everything where their ids agree.
    narrowed = np.flatnonzero(shared).tolist() if columns or samples.images is not None else []
    for i in narrowed:
        parent = int(prefixes.parents[i])
        for column, name in columns:
            shared[i] = min(int(shared[i]), _agreement(column, name, i, parent, int(shared[i])))
        if samples.images is not None:
            shared[i] = _until_images_differ(samples, i, parent, int(shared[i]))
            patches[i] = sum(span.num_patches for span in samples.images[i] if span.end <= shared[i])
    parents = np.where(shared > 0, prefixes.parents, -1)
    return SharedPrefixes(parents=parents, lengths=shared, patches=patches, parted=prefixes.shared - shared)


def find_node_prefixes(samples: Samples) -> SharedPrefixes:
    """Find what samples of one group share, from their tokens."""
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
    """Count how many of the first `limit` tokens agree in a column. A missing row counts as the column's fill value."""
    a, b = column[i], column[j]
    if len(a) == len(b) == 0:
        return limit
    if len(a) == 0 or len(b) == 0:
        differs = (a if len(a) else b)[:limit] != TOKEN_COLUMNS[name].fill
        # One sample has no value: routed experts have no neutral fill, so nothing agrees.
        return 0 if TOKEN_COLUMNS[name].trailing else int(differs.argmax()) if differs.any() else limit
    a, b = a[:limit], b[:limit]
    if a.nbytes <= _FEW_BYTES and a.tobytes() == b.tobytes():  # ten times faster than numpy's comparison
        return limit
    a, b = bit_view(a.reshape(-1)), bit_view(b.reshape(-1))
    if np.array_equal(a, b):
        return limit
    # From flat values to tokens: with 16 values per token, 35 equal values are 2 equal tokens.
    return common_prefix(a, b) // max(len(a) // limit, 1)


def _until_images_differ(samples: Samples, i: int, j: int, limit: int) -> int:
    assert samples.images is not None
    for a, b in zip_longest(samples.images[i], samples.images[j]):
        if a is None or b is None or (a.hash, a.grid, a.offset, a.length) != (b.hash, b.grid, b.offset, b.length):
            return min(limit, *(span.offset for span in (a, b) if span is not None))
        if a.offset < limit < a.end:  # the model encodes an image as one unit
            return a.offset
    return limit
