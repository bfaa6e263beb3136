"""The denominators of a step: what a loss is divided by, counted over all ranks and all micro-batches.

A loss averaged per micro-batch or per rank changes with the packing. Summed and divided by these numbers it does not:
any cap, any number of ranks and any order gives the same loss and the same gradient. In a step without trained tokens
these are zero and `per_loss_token` is 0, so that a loss of 0 stays 0 instead of becoming NaN.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from penstock.arrays import SampleMetadata


@dataclass(frozen=True, slots=True, kw_only=True)
class Denominators:
    loss_tokens: int = 0
    """Trained tokens."""
    samples: int = 0
    groups: int = 0
    """Distinct groups; a sample without one counts as its own group."""
    rl_tokens: int = 0
    """Trained tokens with a weight in the policy-gradient term."""
    ce_tokens: int = 0
    """Trained tokens with a weight in the cross-entropy term."""
    ref_kl_tokens: int = 0
    """Trained tokens with a weight in the KL term against the reference."""

    @property
    def per_loss_token(self) -> float:
        """1 / loss_tokens, or 0 when nothing is trained."""
        return 1.0 / self.loss_tokens if self.loss_tokens else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Totals:
    step: Denominators
    """Of everything packed."""
    modes: dict[str, Denominators]
    """Of each training mode (rl, opd, sft) present."""
    tenants: dict[str, Denominators]
    """Of each tenant present, by the samples' `run`."""


def count_totals(metadata: SampleMetadata, packed: NDArray[np.intp]) -> Totals:
    """Count the denominators of the packed samples."""
    step = _count(metadata, packed)

    def split(values: Sequence[str]) -> dict[str, Denominators]:
        own = [values[i] for i in packed.tolist()]
        names = sorted(set(own))
        if len(names) == 1:
            return {names[0]: step}
        return {name: _count(metadata, packed[[value == name for value in own]]) for name in names}

    return Totals(step=step, modes=split(metadata.mode), tenants=split(metadata.run))


def _count(metadata: SampleMetadata, rows: NDArray[np.intp]) -> Denominators:
    picked = rows.tolist()
    groups = list(map(metadata.group.__getitem__, picked))
    named = set(zip(map(metadata.run.__getitem__, picked), groups, strict=True))
    alone = groups.count("")
    terms = metadata.term_tokens[rows].sum(axis=0).tolist()
    return Denominators(
        loss_tokens=int(metadata.kept_loss_tokens[rows].sum()),
        samples=len(rows),
        groups=sum(bool(group) for _, group in named) + alone,
        rl_tokens=terms[0],
        ce_tokens=terms[1],
        ref_kl_tokens=terms[2],
    )
