"""What a loss did, token by token: the one record that training sums and the exporter writes.

A loss returns the masks it applied together with the loss they went into, so a report can never disagree with what
was trained. Nothing here needs torch to be imported; it only holds tensors.
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
"""`{"kind": "dppo", "high": 0.2, "low": 0.2}`: how tokens were masked, with the thresholds in force."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Terms:
    """Per-token terms of one micro-batch, all of the shape of `trainer_logprobs`; None where a term does not apply.

    A loss of your own reports itself the same way; only the first two are required.

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
    """Trainer minus sampler log-probability; NaN on tokens that no ratio was computed for."""
    ratio: torch.Tensor | None = None
    """exp(log_ratio), the importance ratio."""
    mismatch_kl: torch.Tensor | None = None
    """ratio - 1 - log_ratio, the k3 estimate of KL(sampler || trainer); never negative."""
    prob_delta: torch.Tensor | None = None
    """Trainer minus sampler probability."""
    masked: torch.Tensor | None = None
    """True where the loss took the token out."""
    masked_high: torch.Tensor | None = None
    """Those of them that the upper threshold took out."""
    masked_low: torch.Tensor | None = None
    """Those of them that the lower threshold took out."""
    parts: Mapping[str, torch.Tensor] = field(default_factory=dict)
    """The summands of `loss` by term (rl, ce, ref_kl), where each is divided by its own count of tokens."""
    trained: torch.Tensor | None = None
    """The loss mask that the loss was given; None: that of the micro-batch. It differs where a sample was taken out, as
    one without its image is (`mask_segments`)."""
    rules: Mapping[str, Rule] = field(default_factory=dict)
    """The masking rule by training mode, or under "" where one rule holds for all."""

    def mean(self, denominators: Denominators) -> torch.Tensor:
        """This micro-batch's share of the step's loss: add over micro-batches and ranks, and the packing is gone.

        A step without a trained token has counts of 0; its loss is 0, not NaN. A loss over no token at all is an
        error where the step has some, and so is a loss other than 0 where the step counts no token: either would
        train nothing, without a word.
        """
        if not isinstance(denominators, Denominators):
            raise InvalidInput(f"mean of {type(denominators).__name__} {denominators!r}; pass step.denominators")
        if denominators.loss_tokens and self.loss.numel() == 0:
            raise InvalidInput(
                f"terms.loss: shape {list(self.loss.shape)}, no token, of a step that trains "
                f"{denominators.loss_tokens}; columns are [T]: index tokens, not rows"
            )
        self._check_counted(denominators)
        if not self.parts:
            return self.loss.sum() * denominators.per_loss_token
        counts = {name: getattr(denominators, f"{name}_tokens") for name in self.parts}
        scaled = [part.sum() / max(counts[name], 1) for name, part in self.parts.items()]
        return sum(scaled[1:], start=scaled[0])

    def _check_counted(self, denominators: Denominators) -> None:
        """Raise if there is a loss where the step counts no token to divide it by."""
        parts = self.parts or {"loss": self.loss}
        for name, part in parts.items():
            # Looked at only where the count is 0: it makes the host wait for the device.
            if not getattr(denominators, f"{name}_tokens") and bool(part.detach().ne(0).any()):
                raise InvalidInput(
                    f"terms.{name}: not 0, and the step's denominators count no {name} token; pass the denominators of "
                    "the step that this micro-batch belongs to: step.denominators"
                )

    def rule(self, mode: str) -> Rule | None:
        """How tokens of samples in this training mode were masked; None where nothing masks."""
        return self.rules.get(mode, self.rules.get(""))
