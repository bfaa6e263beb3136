"""The result of a loss per token: the one record that training sums and the exporter writes.

A loss returns the masks it applied together with the loss values, so a report cannot disagree with what was trained.
This module holds tensors but does not import torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeAlias

from penstock.errors import InvalidInput
from penstock.packing import Denominators

if TYPE_CHECKING:
    import torch

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
