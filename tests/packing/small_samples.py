"""Samples of any length, with and without images, and the micro-batches of a step."""

from __future__ import annotations

from typing import Any

import numpy as np

from penstock.arrays import ImageSpan, Sample
from penstock.packing import MicroBatch, PackedImages, PackedStep

SAFE = PackedImages(explicit_boundaries=True, varlen_attention=True)
"""Images may share rows with others."""


def sample(length: int, name: str | None = None, **more: Any) -> Sample:
    mask = [False] + [True] * (length - 1)
    return Sample(id=name, token_ids=np.arange(1, length + 1), loss_mask=mask, **more)


def image(offset: int, side: int = 4) -> ImageSpan:
    return ImageSpan(hash=f"{offset:064x}", grid=(1, side, side), offset=offset, length=side * side // 4)


def picture(length: int, *spans: ImageSpan, name: str | None = None, **more: Any) -> Sample:
    types = np.zeros(length, np.uint8)
    for span in spans:
        types[span.offset : span.end] = 1
    return sample(length, name, images=spans, mm_token_type_ids=types, **more)


def batches_of(step: PackedStep) -> list[MicroBatch]:
    return [batch for rank in step.ranks for batch in rank]


def real(step: PackedStep) -> list[MicroBatch]:
    return [batch for batch in batches_of(step) if not batch.is_dummy]
