"""The packer on its own: lengths in, indices out. For trainers that keep their own samples and tensors."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from penstock.arrays import SampleMetadata
from penstock.errors import InvalidInput
from penstock.packing.cost import Cost
from penstock.packing.planning import plan
from penstock.packing.settings import Packing


def assign(
    lengths: Sequence[int] | NDArray[np.integer], *, ranks: int, cap: int, cost: Cost | None = None
) -> list[list[list[int]]]:
    """Assign sequences to micro-batches of at most `cap` tokens. Returns indices: `result[rank][micro_batch]`.

    Every rank gets the same number of micro-batches, and each index appears once. Ranks that meet at every micro-batch
    wait as little as the lengths allow. A micro-batch may be empty where there is not enough to share. `cost` is the
    time model (default: linear in tokens plus attention). A length above `cap` raises `InvalidInput`.

    >>> assign([5, 3, 2, 6], ranks=2, cap=8)
    [[[2, 3]], [[0, 1]]]
    """
    tokens = _checked(lengths, cap)
    made = plan(SampleMetadata.of_lengths(tokens), Packing(ranks=ranks, seq_len=cap, cost=cost or Cost()))
    return [
        [part.order[part.starts[m] : part.starts[m + 1]].tolist() for m in range(len(part))] for part in made.rank_plans
    ]


def _checked(lengths: Sequence[int] | NDArray[np.integer], cap: int) -> NDArray[np.int64]:
    found = np.asarray(lengths)
    if found.ndim != 1 or (found.size and not np.issubdtype(found.dtype, np.integer)):
        raise InvalidInput(f"lengths: {found.dtype} of shape {list(found.shape)}; give one whole number per sequence")
    tokens = found.astype(np.int64)
    for at in np.flatnonzero((tokens < 1) | (tokens > cap))[:1]:
        raise InvalidInput(f"lengths[{at}]: {tokens[at]}; must be from 1 to cap = {cap}; cut the sequence or raise cap")
    return tokens
