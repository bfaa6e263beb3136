"""Whether samples with images may share a micro-batch: only where everything that could mix them up is declared safe.

A model that infers sample boundaries from positions, or attends over the whole row, trains one sample on its
neighbour's image without any error. So a sample with images is alone in its micro-batch unless the trainer declares
each of these, and every missing declaration is a sentence of its own.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from msgspec import Meta

from penstock.config import check
from penstock.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedImages:
    """What the trainer declares about its model; nothing is assumed.

    >>> PackedImages(explicit_boundaries=True, varlen_attention=True).refusals
    []
    >>> PackedImages(explicit_boundaries=True).refusals
    ['varlen_attention is not declared: attention over the whole row would mix samples']
    """

    explicit_boundaries: Annotated[
        bool, Meta(description="the model takes sequence_lengths and restarts its rotary positions at each of them")
    ] = False
    varlen_attention: Annotated[bool, Meta(description="attention is computed per segment")] = False
    context_parallel: Annotated[
        int, Meta(ge=1, description="ranks that share one row; above 1 images would be split between them")
    ] = 1

    def __post_init__(self) -> None:
        check(self, "packed_images")

    @property
    def refusals(self) -> list[str]:
        """Why samples with images may not share a micro-batch; empty when they may."""
        reasons = {
            "explicit_boundaries is not declared: positions would run on across samples": not self.explicit_boundaries,
            "varlen_attention is not declared: attention over the whole row would mix samples": (
                not self.varlen_attention
            ),
            f"context_parallel is {self.context_parallel}: an image cannot be split between ranks": (
                self.context_parallel != 1
            ),
        }
        return [reason for reason, holds in reasons.items() if holds]

    def require(self, what: str) -> None:
        """Raise with every reason unless samples with images may share a micro-batch; `what` asks for it."""
        if self.refusals:
            raise ConfigError(
                f"{what}: {'; '.join(self.refusals)}; leave it out, or declare in packed_images what holds"
            )
