"""Segments of about the same length, stacked: one attention call for many, at less than twice the work."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Bucket:
    """Segments that are computed in one call."""

    gather: Tensor
    """[segments, length] positions in the row; beyond a segment's end any position of the row."""
    places: Tensor
    """[tokens] where each of the bucket's tokens stands in the flattened gather."""
    tokens: Tensor
    """[tokens] and in the row."""


def buckets_at(segments: Iterable[tuple[int, int]]) -> list[Bucket]:
    """(start, length) of segments, grouped by length, rounded up to a power of two: stacking wastes less than half."""
    by_size: dict[int, list[tuple[int, int]]] = {}
    for start, length in segments:
        by_size.setdefault(1 << max(length - 1, 0).bit_length(), []).append((start, length))
    out = []
    for members in by_size.values():
        size = max(length for _, length in members)
        starts = torch.tensor([start for start, _ in members])[:, None]
        ends = torch.tensor([start + length for start, length in members])[:, None]
        gather = starts + torch.arange(size)
        inside = gather < ends
        out.append(
            Bucket(
                gather=torch.where(inside, gather, starts),
                places=torch.nonzero(inside.reshape(-1))[:, 0],
                tokens=gather[inside],
            )
        )
    return out
