"""Read plain arrays: one flat sequence and a mask of what the model sampled."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from penstock.arrays import ImageSpan, Ragged, Values
from penstock.capture.trajectory import Trajectory
from penstock.capture.turn import Turn
from penstock.errors import InvalidInput


def from_arrays(
    token_ids: Values,
    mask: Values,
    *,
    logprobs: Values | None = None,
    columns: Mapping[str, Values] | None = None,
    images: Sequence[ImageSpan] = (),
    **fields: Any,
) -> Trajectory:
    """Return the trajectory of one flat sequence: a turn per run of sampled tokens. `fields` are `Trajectory`'s.

    `logprobs` has one value per token or one per sampled token. `columns` holds other per-token columns, or one number
    for all tokens. `sampling_mask` among them is a list of ids per token, or per sampled token.

    >>> t = from_arrays([1, 2, 3, 4], [0, 1, 1, 0], logprobs=[0, -0.5, -0.25, 0], reward=1.0)
    >>> [(turn.token_ids.tolist(), turn.sampled) for turn in t.turns]
    [([1], False), ([2, 3], True), ([4], False)]
    """
    where = f"trajectory {fields['id']!r}" if fields.get("id") else "trajectory"
    # Build one turn over all tokens first: it checks all lengths and values before anything is cut.
    others: dict[str, Any] = dict(columns or {})
    full = Turn(token_ids, sampled=True, mask=mask, logprobs=logprobs, images=images, where=where, **others)
    marks = full.sampled_mask
    if full.num_tokens == 0:
        raise InvalidInput(f"{where}.token_ids: empty; a trajectory has at least one token")
    # A turn ends where the mask changes: marks 0 1 1 0 have edges 0 1 3 4.
    edges = [0, *(np.flatnonzero(np.diff(marks)) + 1).tolist(), full.num_tokens]
    sampled_before = np.concatenate([[0], np.cumsum(marks)])
    turns = [
        _cut(full, start, stop, bool(marks[start]), int(sampled_before[start]), where)
        for start, stop in pairwise(edges)
    ]
    return Trajectory(turns=turns, **fields)


def _cut(full: Turn, start: int, stop: int, sampled: bool, before: int, where: str) -> Turn:
    logprobs = full.logprobs[before : before + stop - start] if sampled and full.logprobs is not None else None
    columns: dict[str, Any] = {
        name: cells[start:stop] if isinstance(cells, Ragged) or cells.ndim else cells
        for name, cells in full.columns.items()
    }
    return Turn(
        full.token_ids[start:stop],
        sampled=sampled,
        logprobs=logprobs,
        images=[span.shifted(-start) for span in full.images if start <= span.offset < stop],
        where=f"{where} tokens {start}..{stop}",
        **columns,
    )
