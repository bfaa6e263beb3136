"""The result of a loss per token, and the metrics of a step that are summed from it.

A loss returns the masks it applied together with the loss values, so a report cannot disagree with what was trained.
Sums over micro-batches and ranks are divided once, so that a mean is the mean of the step.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from penstock.errors import InvalidInput
from penstock.packing import Denominators, MicroBatch

try:
    import torch
    from torch import distributed
except ImportError as error:
    from penstock.extras import missing

    raise missing("penstock.train.terms", error) from None

Rule: TypeAlias = Mapping[str, float | str]
"""`{"kind": "dppo", "high": 0.2, "low": 0.2}`: how tokens were masked, with the thresholds used."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Terms:
    """Per-token terms of one micro-batch, all in the shape of `trainer_logprobs`; None where a term does not apply.

    Your own loss returns this too. Only the first two fields are required.

    >>> import torch
    >>> logprobs = torch.tensor([0.0, -0.5, -1.0], requires_grad=True)
    >>> terms = Terms(loss=-logprobs, trainer_logprobs=logprobs)
    >>> terms.mean(Denominators(loss_tokens=3)).item()
    0.5
    """

    loss: torch.Tensor
    """Loss per token, 0 where nothing is trained; carries the gradient. Sum it, never average it."""
    trainer_logprobs: torch.Tensor
    """Of the model being trained."""
    entropy: torch.Tensor | None = None
    """Of the predicted distribution, in nats."""
    log_ratio: torch.Tensor | None = None
    """Trainer minus sampler log-probability; NaN on tokens without a ratio."""
    ratio: torch.Tensor | None = None
    """exp(log_ratio), the importance ratio."""
    mismatch_kl: torch.Tensor | None = None
    """ratio - 1 - log_ratio, the k3 estimate of KL(sampler || trainer); never negative."""
    prob_delta: torch.Tensor | None = None
    """Trainer minus sampler probability."""
    masked: torch.Tensor | None = None
    """True where the loss removed the token."""
    masked_high: torch.Tensor | None = None
    """Masked by the upper threshold."""
    masked_low: torch.Tensor | None = None
    """Masked by the lower threshold."""
    parts: Mapping[str, torch.Tensor] = field(default_factory=dict)
    """The summands of `loss` by term (rl, ce, ref_kl), where each is divided by its own count of tokens."""
    trained: torch.Tensor | None = None
    """The loss mask given to the loss, None for the micro-batch's own. They differ if a sample was removed, such as one
    whose image could not be read (`mask_segments`)."""
    rules: Mapping[str, Rule] = field(default_factory=dict)
    """The masking rule by training mode, or under "" if one rule applies to all."""

    def mean(self, denominators: Denominators) -> torch.Tensor:
        """Return this micro-batch's share of the step's loss. The sum over all does not depend on the packing.

        A step without trained tokens has counts of 0 and a loss of 0, not NaN. Two mistakes would silently train
        nothing and raise instead: a loss without tokens in a step that has some, and a loss other than 0 in a step that
        counts no token.
        """
        if not isinstance(denominators, Denominators):
            raise InvalidInput(f"mean of {type(denominators).__name__} {denominators!r}; pass step.denominators")
        if denominators.loss_tokens and self.loss.numel() == 0:
            raise InvalidInput(
                f"terms.loss: shape {list(self.loss.shape)}, no tokens, in a step that trains "
                f"{denominators.loss_tokens}; columns are [T]: index tokens, not rows"
            )
        self._check_counted(denominators)
        if not self.parts:
            return self.loss.sum() * denominators.per_loss_token
        counts = {name: getattr(denominators, f"{name}_tokens") for name in self.parts}
        scaled = [part.sum() / max(counts[name], 1) for name, part in self.parts.items()]
        return sum(scaled[1:], start=scaled[0])

    def _check_counted(self, denominators: Denominators) -> None:
        """Raise if there is a loss but the step counts no tokens to divide it by."""
        parts = self.parts or {"loss": self.loss}
        for name, part in parts.items():
            # Only checked if the count is 0: reading the value makes the host wait for the device.
            if not getattr(denominators, f"{name}_tokens") and bool(part.detach().ne(0).any()):
                raise InvalidInput(
                    f"terms.{name}: not 0, but the step's denominators count no {name} token; pass step.denominators "
                    "of the step this micro-batch belongs to"
                )

    def rule(self, mode: str) -> Rule | None:
        """Return the masking rule for samples in this training mode, None if nothing is masked."""
        return self.rules.get(mode, self.rules.get(""))


# ------------------------------------------------------------------ metrics of a step


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
    """Priority by sample id for prioritized replay: the largest |advantage| of a trained token + 0.05. Only this
    rank's samples."""

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
        if "rewards" in batch:
            scored = [row for one in segments if len(row := _finite(batch["rewards"][one.tokens]))]
            # The same number on every token is one reward for the sample. Different rewards per token add up.
            self.reward_sum += sum(float(row[0] if (row == row[0]).all() else row.sum()) for row in scored)
            self.rewarded += len(scored)
        if "advantages" in batch:
            sizes = np.where(mask.cpu().numpy(), np.abs(batch["advantages"]), 0.0)
            self.priorities |= {one.id: float(sizes[one.tokens].max()) + 0.05 for one in segments}

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


def _finite(values: NDArray[np.float32]) -> NDArray[np.float32]:
    return values[np.isfinite(values)]


_SUMMED = tuple(one.name for one in fields(Sums) if one.name not in (*_LARGEST, *_PER_RANK))
