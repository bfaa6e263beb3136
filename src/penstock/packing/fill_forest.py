"""The forest of a micro-batch, from its filled columns: of each sample what the one before it does not have."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.arrays import PER_NODE, TOKEN_COLUMNS, Array, Cells, ImageSpan, Samples, offsets_of
from penstock.errors import InvalidInput
from penstock.packing.forest import Forest, grow, positions_of


def fill_forest(
    samples: Samples,
    rows: NDArray[np.intp],
    lengths: NDArray[np.int64],
    shared: NDArray[Any],
    columns: Mapping[str, Cells],
    *,
    padded: int,
    pad_id: int,
) -> Forest:
    """The forest of the samples `rows`, cut to `lengths`, whose columns stand end to end in `columns`."""
    padding = padded - int((lengths - shared).sum())
    offsets, found = offsets_of(lengths), {}
    _check_shared(columns["token_ids"], offsets, shared)
    begins, ends = (offsets[:-1] + shared).tolist(), offsets[1:].tolist()
    for name in PER_NODE:
        column = TOKEN_COLUMNS[name]
        if column.trailing:
            pieces = _from_samples(samples, name, rows, lengths, shared)
        else:
            pieces = [columns[name][a:b] for a, b in zip(begins, ends, strict=True)] if name in columns else []
        if pieces:
            pad = pad_id if name == "token_ids" else column.pad
            tail = np.full((padding, *pieces[0].shape[1:]), pad, pieces[0].dtype)
            found[name] = np.concatenate([*pieces, tail])
    found["position_ids"] = positions_of(lengths, shared, padding)
    images = _images(samples, rows, lengths, shared)
    return grow(lengths, shared, columns=found, images=images, padding=padding)


def _check_shared(token_ids: Array, offsets: NDArray[np.int64], shared: NDArray[Any]) -> None:
    """Samples begin with the tokens that the plan says they share; one comparison of memory each."""
    starts = offsets.tolist()
    for k in np.flatnonzero(shared).tolist():
        n, here, before = int(shared[k]), starts[k], starts[k - 1]
        if not np.array_equal(token_ids[here : here + n], token_ids[before : before + n]):
            raise InvalidInput(
                f"samples: number {k} of a micro-batch does not begin with the {n} tokens of the one before it, which "
                "the rank plan has them share; pass the samples it was planned for"
            )


def _from_samples(
    samples: Samples, name: str, rows: NDArray[np.intp], lengths: NDArray[np.int64], shared: NDArray[Any]
) -> Sequence[Array]:
    """A column that the micro-batch itself does not have: straight from the samples, which all have it or none."""
    column = samples.columns.get(name)
    if column is None or not column.lengths[rows].any():
        return []
    return [column[i][a:b] for i, a, b in zip(rows.tolist(), shared.tolist(), lengths.tolist(), strict=True)]


def _images(
    samples: Samples, rows: NDArray[np.intp], lengths: NDArray[np.int64], shared: NDArray[Any]
) -> tuple[ImageSpan, ...]:
    """The images of what the samples do not share, in node space."""
    if samples.images is None:
        return ()
    shifts = offsets_of(lengths - shared)[:-1] - shared
    return tuple(
        span.shifted(shift)
        for row, n, s, shift in zip(rows.tolist(), lengths.tolist(), shared.tolist(), shifts.tolist(), strict=True)
        for span in samples.images[row]
        if s <= span.offset and span.end <= n
    )
