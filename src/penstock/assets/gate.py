"""Whether samples with images may share a micro-batch: only where everything that could mix them up is declared safe.

A model that infers sample boundaries from positions, or attends over the whole row, trains one sample on its
neighbour's image without any error. So packing is refused unless the trainer declares each of these, and every
missing declaration is a sentence of its own.
"""

from __future__ import annotations

from dataclasses import dataclass

from penstock.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedImages:
    """What the trainer declares about its model; nothing is assumed.

    >>> PackedImages(explicit_boundaries=True, varlen_attention=True).refusals
    []
    >>> PackedImages(explicit_boundaries=True).refusals
    ['varlen_attention is not declared: attention over the whole row would mix samples']
    """

    explicit_boundaries: bool = False
    """The model takes sequence_lengths and restarts its rotary positions at each of them."""
    varlen_attention: bool = False
    """Attention is computed per segment."""
    context_parallel: int = 1
    """Ranks that share one row; image tokens are not split."""
    runs_per_micro_batch: int = 1

    @property
    def refusals(self) -> list[str]:
        """Why samples with images may not be packed together; empty when they may."""
        reasons = {
            "explicit_boundaries is not declared: positions would run on across samples": not self.explicit_boundaries,
            "varlen_attention is not declared: attention over the whole row would mix samples": (
                not self.varlen_attention
            ),
            f"context_parallel is {self.context_parallel}: an image cannot be split between ranks": (
                self.context_parallel != 1
            ),
            f"runs_per_micro_batch is {self.runs_per_micro_batch}: images belong to one run": (
                self.runs_per_micro_batch != 1
            ),
        }
        return [reason for reason, holds in reasons.items() if holds]

    def require(self) -> None:
        """Raise with every reason unless samples with images may be packed together."""
        if self.refusals:
            raise ConfigError(f"pack_multimodal: {'; '.join(self.refusals)}; turn it off or declare what holds")
