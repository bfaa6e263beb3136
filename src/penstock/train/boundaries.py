"""Where samples begin and end in a packed row: `sequence_lengths`, checked before anything is cut by them.

Boundaries of a wrong shape or total do not fail by themselves: a [1, S] tensor broadcasts, and log-probabilities of one
sample are then taken from its neighbour, silently. So everything that takes lengths calls this first.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.errors import InvalidInput


def checked_lengths(sequence_lengths: Any, num_tokens: int | None = None) -> NDArray[np.int64]:
    """[segments] the lengths on the host, from a list, an array or a tensor; they must add up to `num_tokens`.

    >>> checked_lengths([3, 1, 2], 6).tolist()
    [3, 1, 2]
    """
    on_host = sequence_lengths.detach().cpu() if hasattr(sequence_lengths, "detach") else sequence_lengths
    found = np.asarray(on_host)
    if found.ndim != 1:
        raise InvalidInput(
            f"sequence_lengths: shape {list(found.shape)}; must be [segments], the lengths of one row's samples"
        )
    if found.size and found.dtype.kind not in "iu":
        raise InvalidInput(f"sequence_lengths: dtype {found.dtype}; must be whole numbers")
    if found.size and int(found.min()) < 1:
        at = int(found.argmin())
        raise InvalidInput(f"sequence_lengths[{at}]: {int(found[at])}; every segment has at least one token")
    total = int(found.sum())
    if num_tokens is not None and total != num_tokens:
        raise InvalidInput(
            f"sequence_lengths: add up to {total} for {num_tokens} tokens; padding is a segment of its own, the last"
        )
    return found.astype(np.int64)
