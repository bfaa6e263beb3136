"""Metrics of a step, summed over micro-batches and ranks and divided once, so that a mean is the mean of the step."""

from __future__ import annotations

import math
import os
import sys
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import distributed

from penstock.errors import InvalidInput
from penstock.packing import Accounting, MicroBatch
from penstock.train.terms import Terms

_LARGEST = ("max_log_ratio", "on_policy_gap", "max_staleness")
_PER_RANK = ("grad_norm", "priorities")
"""Not reduced over ranks: the norm is the same on all of them, priorities are reported by each."""


@dataclass
class Sums:
    reward_sum: float = 0.0
    rewarded: float = 0.0
    """Samples with a reward."""
    loss: float = 0.0
    entropy: float = 0.0
    mismatch_kl: float = 0.0
    masked: float = 0.0
    loss_tokens: float = 0.0
    compared_tokens: float = 0.0
    """Trained tokens with sampler log-probabilities: the denominator of mismatch KL and masked."""
    staleness: float = 0.0
    """Versions behind, summed over samples with a known version."""
    samples: float = 0.0
    versioned: float = 0.0
    """Samples with a known version."""
    max_log_ratio: float = 0.0
    on_policy_gap: float = -1.0
    """Largest difference between trainer and sampler on samples of the weights being trained; -1: none."""
    max_staleness: float = 0.0
    grad_norm: float = 0.0
    priorities: dict[str, float] = field(default_factory=dict)
    """Priority by sample id for prioritized replay: |advantage| + 0.05. This rank's samples only."""

    def add(self, batch: MicroBatch, terms: Terms, *, version: int, loss_mask: torch.Tensor | None = None) -> None:
        """Add one micro-batch, trained with weights of `version`.

        `loss_mask` is the mask given to the loss if it is not the batch's own.
        """
        mask = torch.from_numpy(batch["loss_mask"]) if loss_mask is None else loss_mask
        self.loss += float(terms.loss.detach().sum())
        self.loss_tokens += float(mask.sum())
        self._add_tokens(terms, mask, batch, version)
        segments = batch.segments
        behind = version - segments.policy_versions[segments.policy_versions >= 0]
        self.samples += len(segments)
        self.versioned += len(behind)
        self.staleness += float(behind.sum())
        self.max_staleness = max(self.max_staleness, float(behind.max(initial=0)))
        if "rewards" in batch and len(segments):
            rewards = batch["rewards"][segments.offsets]
            scored = rewards[np.isfinite(rewards)]
            self.reward_sum += float(scored.sum())
            self.rewarded += len(scored)
        if "advantages" in batch:
            sizes = np.abs(batch["advantages"][segments.offsets])
            self.priorities |= dict(zip(segments.ids, (sizes + 0.05).tolist(), strict=True))

    def _add_tokens(self, terms: Terms, mask: torch.Tensor, batch: MicroBatch, version: int) -> None:
        if terms.entropy is not None:
            self.entropy += float(terms.entropy.flatten()[mask].sum())
        if terms.masked is not None:
            self.masked += float(terms.masked.sum())
        if terms.log_ratio is None or terms.mismatch_kl is None or not bool(mask.any()):
            return
        ratios = terms.log_ratio.flatten().nan_to_num(0.0).abs() * mask
        self.mismatch_kl += float(terms.mismatch_kl.flatten().nan_to_num(0.0)[mask].sum())
        self.compared_tokens += float((~terms.log_ratio.flatten().isnan())[mask].sum())
        self.max_log_ratio = max(self.max_log_ratio, float(ratios.max()))
        fresh = batch.segments.policy_versions == version
        for start, length in zip(batch.segments.offsets[fresh], batch.segments.lengths[fresh], strict=True):
            self.on_policy_gap = max(self.on_policy_gap, float(ratios[start : start + length].max()))

    def check_trained(self, step: int, loss_tokens: int) -> None:
        """Raise if a step with `loss_tokens` over all ranks trained none of them."""
        if loss_tokens and not self.loss_tokens:
            raise InvalidInput(
                f"step {step}: none of its {loss_tokens} tokens was trained; every loss mask was empty when the loss "
                "was computed"
            )

    def reduced(self, group: Any = None) -> Sums:
        """Return the sums over all ranks. Collective; the group must accept CPU tensors."""
        summed = torch.tensor([getattr(self, name) for name in _SUMMED], dtype=torch.float64)
        largest = torch.tensor([getattr(self, name) for name in _LARGEST], dtype=torch.float64)
        distributed.all_reduce(summed, group=group)
        distributed.all_reduce(largest, op=distributed.ReduceOp.MAX, group=group)
        values = dict(zip(_SUMMED, summed.tolist(), strict=True)) | dict(zip(_LARGEST, largest.tolist(), strict=True))
        return Sums(**values, grad_norm=self.grad_norm, priorities=self.priorities)

    @property
    def reward(self) -> float:
        return self.reward_sum / self.rewarded if self.rewarded else math.nan

    def metrics(self) -> dict[str, float]:
        tokens, compared = max(self.loss_tokens, 1.0), self.compared_tokens
        return {
            "train/reward": self.reward,
            "train/loss": self.loss / tokens,
            "train/entropy": self.entropy / tokens,
            "train/mismatch_kl": self.mismatch_kl / compared if compared else math.nan,
            "train/masked": self.masked / compared if compared else math.nan,
            "train/max_log_ratio": self.max_log_ratio,
            "train/on_policy_gap": math.nan if self.on_policy_gap < 0 else self.on_policy_gap,
            "train/grad_norm": self.grad_norm,
            "train/staleness": self.staleness / self.versioned if self.versioned else math.nan,
            "train/max_staleness": self.max_staleness if self.versioned else math.nan,
        }


_SUMMED = tuple(one.name for one in fields(Sums) if one.name not in (*_LARGEST, *_PER_RANK))


def packed(accounting: Accounting, rank: int) -> dict[str, float]:
    """Return packing counts of one rank (`local`) and of all ranks (`total`)."""
    found: dict[str, float] = {}
    for scope, counts in (("local", accounting.ranks[rank]), ("total", accounting.total)):
        for name in ("tokens", "loss_tokens", "samples", "micro_batches", "max_micro_batch_tokens"):
            found[f"pack/{scope}_{name}"] = getattr(counts, name)
    return found | {
        "pack/micro_batch_max_tokens": accounting.micro_batch_max_tokens,
        "pack/over_cap": accounting.over_cap,
        "pack/truncated_tokens": accounting.truncated_tokens,
    }


def memory() -> dict[str, float]:
    """Return the resident bytes of this process and the peak bytes of its device, without those that are unknown."""
    found = {"perf/memory_bytes": resident_bytes()}
    if torch.cuda.is_available():
        found["perf/device_bytes"] = float(torch.cuda.max_memory_allocated())
    return {name: value for name, value in found.items() if value}


def resident_bytes() -> float:
    """Return the resident bytes now, or the peak on systems without /proc."""
    try:
        with Path("/proc/self/statm").open(encoding="ascii") as file:
            return float(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        import resource

        most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return float(most if sys.platform == "darwin" else most * 1024)
