"""A digest per sample: equal digests mean equal values, however and wherever they were encoded.

A step's digest covers the sample digests and the plan, so it does not depend on which process built the bytes, or in
which coding. A sample's digest covers its names and images first, then each column it has, in table order.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from functools import lru_cache
from itertools import pairwise

import msgspec
import numpy as np
import xxhash

from penstock.arrays.columns import TEXT_COLUMNS
from penstock.arrays.ragged import Pieced, Ragged
from penstock.arrays.samples import Samples

_PACK = msgspec.msgpack.Encoder()


def sample_digests(samples: Samples) -> list[bytes]:
    """Return [n], 16 bytes for each sample.

    >>> from penstock import Sample
    >>> one, two = sample_digests(Samples.of([Sample(id="a", token_ids=[1, 2]), Sample(id="a", token_ids=[1, 3])]))
    >>> one == two, len(one)
    (False, 16)
    """
    parts = [_names(samples), *(_column(name, column) for name, column in samples.columns.items())]
    return [xxhash.xxh3_128_digest(b"".join(row)) for row in zip(*parts, strict=True)]


def column_digests(samples: Samples, name: str) -> list[bytes]:
    """Return [n], 16 bytes for the values that each sample has in one column, empty where it lacks the column."""
    return _column(name, samples.columns[name])


def step_digest(plan: bytes | memoryview, digests: Iterable[bytes]) -> str:
    """Return the digest that plane and rank compare: xxh3-128 of a rank's plan and its samples' digests, in order."""
    state = xxhash.xxh3_128(plan)
    for digest in digests:
        state.update(digest)
    return state.hexdigest()


def _names(samples: Samples) -> list[bytes]:
    images = samples.images or ((),) * len(samples)
    # The rollout text was added later. Leave an empty one out, so old samples keep the digest that old logs hold.
    text = zip(*(samples.text[name] for name in TEXT_COLUMNS if name != "rollout"), strict=True)
    metadata = zip(text, samples.policy_versions.tolist(), images, strict=True)
    rollouts = samples.text["rollout"]
    return [
        xxhash.xxh3_128_digest(_PACK.encode((*fact, rollout) if rollout else fact))
        for fact, rollout in zip(metadata, rollouts, strict=True)
    ]


def _column(name: str, column: Ragged) -> list[bytes]:
    """Return one digest per sample, empty where it lacks the column."""
    if isinstance(column, Pieced):
        return _pieced(name, column)
    if isinstance(column.values, Ragged):
        return _lists(name, column)
    values = np.ascontiguousarray(column.values)
    width = values.itemsize * math.prod(values.shape[1:])
    octets = values.reshape(-1).view(np.uint8).data
    # The seed separates columns: equal bytes under another name, dtype or shape must give another digest.
    seed = _seed(name, column)
    edges, digest = (column.offsets * width).tolist(), xxhash.xxh3_128_digest
    return [digest(octets[a:b], seed) if b > a else b"" for a, b in pairwise(edges)]


def _seed(name: str, column: Ragged) -> int:
    return _seed_of(name, column.dtype.str, column.trailing)


@lru_cache(maxsize=256)
def _seed_of(name: str, dtype: str, trailing: tuple[int, ...]) -> int:
    return xxhash.xxh3_64_intdigest(f"{name}:{dtype}:{trailing}".encode())


def _pieced(name: str, column: Pieced) -> list[bytes]:
    """Like `_column`, without joining the rows."""
    seed, digests = _seed(name, column), []
    for i in range(len(column)):
        state, size = xxhash.xxh3_128(seed=seed), 0
        for piece in column.pieces(i):
            if piece.size:
                state.update(np.ascontiguousarray(piece).data.cast("B"))
                size += piece.nbytes
        digests.append(state.digest() if size else b"")
    return digests


def _lists(name: str, column: Ragged) -> list[bytes]:
    """Like `_column`, where every token has a list: digest the lengths of the lists, then their values."""
    seed = xxhash.xxh3_64_intdigest(f"{name}:{column.values.dtype.str}:lists".encode())
    digests = []
    for i in range(len(column)):
        lists: Ragged = column[i]
        # Without the lengths, [[7, 9], []] and [[7], [9]] would have one digest.
        state = xxhash.xxh3_128(lists.lengths.astype("<u4").data, seed)
        state.update(np.ascontiguousarray(lists.values).data)
        digests.append(state.digest() if len(lists) else b"")
    return digests
