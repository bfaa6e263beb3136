"""Losses over the tokens of a micro-batch. Each returns per-token values and masks as `Terms` and sums nothing.

With trainer log-probability t and sampler log-probability s of the same token, at the same temperature:

    log_ratio    t - s                      prob_delta   exp(t) - exp(s)
    ratio        exp(t - s)                 mismatch_kl  ratio - 1 - log_ratio      (k3, >= 0)

A loss is a small frozen object that holds its thresholds. Call it with the tensors of `to_torch`:

    terms = Dppo()(tensors, trainer_logprobs, entropy)
    (terms.mean(step.denominators)).backward()

`penstock.train.modes` trains reinforcement learning, distillation and supervised tokens in one micro-batch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

try:
    import torch
except ImportError as error:
    from penstock.extras import missing

    raise missing("penstock.train.loss", error) from None

from penstock.errors import InvalidInput
from penstock.train.terms import Rule, Terms

OPD_THRESHOLD = 0.2


class Loss(Protocol):
    """The interface of a loss: tensors by column name and the model's outputs in, `Terms` out."""

    def __call__(
        self, columns: Mapping[str, torch.Tensor], trainer_logprobs: torch.Tensor, entropy: torch.Tensor | None = None
    ) -> Terms: ...


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Gap:
    """The difference between trainer and sampler on each token. Carries no gradient."""

    log_ratio: torch.Tensor
    ratio: torch.Tensor
    mismatch_kl: torch.Tensor
    prob_delta: torch.Tensor


@torch.no_grad()  # type: ignore[untyped-decorator]
def measure_gap(trainer_logprobs: torch.Tensor, logprobs: torch.Tensor) -> Gap:
    """Measure the gap on every token, context included.

    >>> gap = measure_gap(torch.tensor([0.6]).log(), torch.tensor([0.3]).log())
    >>> [round(float(value), 4) for value in (gap.ratio, gap.prob_delta, gap.mismatch_kl)]
    [2.0, 0.3, 0.3069]
    """
    log_ratio = trainer_logprobs.detach() - logprobs
    return Gap(
        log_ratio=log_ratio,
        ratio=log_ratio.exp(),
        # expm1 keeps the digits that ratio - 1 loses near 1, where almost every token is.
        mismatch_kl=(log_ratio.expm1() - log_ratio).clamp_min(0.0),
        prob_delta=trainer_logprobs.detach().exp() - logprobs.exp(),
    )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Masks:
    """The trained tokens a rule removes, and by which threshold."""

    masked: torch.Tensor
    masked_high: torch.Tensor
    masked_low: torch.Tensor


def trust_region(
    loss_mask: torch.Tensor, signal: torch.Tensor, prob_delta: torch.Tensor, *, high: float, low: float
) -> Masks:
    """Compute DPPO's masks: raising a token stops above `high`, lowering it stops below `-low`. Comparisons are strict.

    A signal of 0 or NaN is tested against the lower threshold and counted in `masked` only: it has no direction.
    """
    up, above, below = signal > 0, prob_delta > high, prob_delta < -low
    return Masks(
        masked=loss_mask & torch.where(up, above, below),
        masked_high=loss_mask & up & above,
        masked_low=loss_mask & (signal < 0) & below,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Dppo:
    """The default: policy gradient without tokens whose probability already moved too far in its direction."""

    high: float = 0.2
    """Masks tokens of positive advantage whose probability rose by more."""
    low: float = 0.2
    """Masks tokens of other advantage whose probability fell by more."""
    adv_tau: float = 1.0
    """Weight of the advantage."""
    kl_tau: float = 1e-3
    """Weight of log_ratio squared, which also restrains masked tokens."""

    def __call__(
        self, columns: Mapping[str, torch.Tensor], trainer_logprobs: torch.Tensor, entropy: torch.Tensor | None = None
    ) -> Terms:
        gap = _gap(columns, trainer_logprobs, type(self).__name__)
        signal = need(columns, "advantages", "Dppo")
        masks = trust_region(columns["loss_mask"], signal, gap.prob_delta, high=self.high, low=self.low)
        loss = _push(columns, trainer_logprobs, self.adv_tau * signal, masks.masked, self.kl_tau)
        return _terms(
            columns, loss, trainer_logprobs, entropy, gap, masks, {"kind": "dppo", "high": self.high, "low": self.low}
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Ipo:
    """Policy gradient without tokens whose probability moved by more than a threshold in either direction."""

    threshold: float = 0.1
    adv_tau: float = 1.0
    kl_tau: float = 1e-3

    def __call__(
        self, columns: Mapping[str, torch.Tensor], trainer_logprobs: torch.Tensor, entropy: torch.Tensor | None = None
    ) -> Terms:
        gap, mask = _gap(columns, trainer_logprobs, type(self).__name__), columns["loss_mask"]
        high, low = mask & (gap.prob_delta > self.threshold), mask & (gap.prob_delta < -self.threshold)
        masks = Masks(masked=high | low, masked_high=high, masked_low=low)
        signal = self.adv_tau * need(columns, "advantages", "Ipo")
        loss = _push(columns, trainer_logprobs, signal, masks.masked, self.kl_tau)
        return _terms(
            columns, loss, trainer_logprobs, entropy, gap, masks, {"kind": "ipo", "threshold": self.threshold}
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Opd:
    """On-policy distillation: the signal points to the teacher, `teacher - t`, in a trust region fixed at 0.2."""

    kl_tau: float = 1e-3

    def __call__(
        self, columns: Mapping[str, torch.Tensor], trainer_logprobs: torch.Tensor, entropy: torch.Tensor | None = None
    ) -> Terms:
        gap = _gap(columns, trainer_logprobs, type(self).__name__)
        signal = need(columns, "teacher_logprobs", "Opd") - trainer_logprobs.detach()
        masks = trust_region(columns["loss_mask"], signal, gap.prob_delta, high=OPD_THRESHOLD, low=OPD_THRESHOLD)
        loss = _push(columns, trainer_logprobs, signal, masks.masked, self.kl_tau)
        rule: Rule = {"kind": "opd", "high": OPD_THRESHOLD, "low": OPD_THRESHOLD}
        return _terms(columns, loss, trainer_logprobs, entropy, gap, masks, rule)


@dataclass(frozen=True, slots=True, kw_only=True)
class RefKl:
    """KL towards a reference, one-sided: masks only tokens that already fell by more than `low`."""

    low: float = 0.2
    kl_tau: float = 1e-3

    def __call__(
        self, columns: Mapping[str, torch.Tensor], trainer_logprobs: torch.Tensor, entropy: torch.Tensor | None = None
    ) -> Terms:
        gap, mask = _gap(columns, trainer_logprobs, type(self).__name__), columns["loss_mask"]
        below = mask & (gap.prob_delta < -self.low)
        masks = Masks(masked=below, masked_high=torch.zeros_like(below), masked_low=below)
        signal = need(columns, "teacher_logprobs", "RefKl") - trainer_logprobs.detach()
        loss = _push(columns, trainer_logprobs, signal, below, self.kl_tau)
        return _terms(columns, loss, trainer_logprobs, entropy, gap, masks, {"kind": "ref_kl", "low": self.low})


@dataclass(frozen=True, slots=True, kw_only=True)
class Grpo:
    """PPO's clipped objective; with `beta`, GRPO's, which adds the k3 KL towards `teacher_logprobs`.

    A clipped token has a constant loss and no gradient. These tokens are reported as masked.
    """

    low: float = 0.2
    """Ratios below 1 - low are clipped where the advantage is negative."""
    high: float = 0.2
    """Ratios above 1 + high are clipped where the advantage is positive."""
    beta: float = 0.0

    def __call__(
        self, columns: Mapping[str, torch.Tensor], trainer_logprobs: torch.Tensor, entropy: torch.Tensor | None = None
    ) -> Terms:
        gap, mask = _gap(columns, trainer_logprobs, type(self).__name__), columns["loss_mask"]
        advantages = need(columns, "advantages", "Grpo")
        high = mask & (advantages > 0) & (gap.ratio > 1 + self.high)
        low = mask & (advantages < 0) & (gap.ratio < 1 - self.low)
        masks = Masks(masked=high | low, masked_high=high, masked_low=low)
        # A clipped token contributes a constant, so that the loss equals PPO's in value, not only in gradient.
        bound = torch.where(high, advantages * (1 + self.high), advantages * (1 - self.low))
        loss = _push(columns, trainer_logprobs, advantages, masks.masked, 0.0)
        loss = loss - torch.where(masks.masked, bound, 0.0)
        if self.beta:
            away = need(columns, "teacher_logprobs", "Grpo with beta") - trainer_logprobs
            away = torch.where(mask, away, 0.0)
            loss = loss + self.beta * (away.expm1() - away)
        rule: Rule = {"kind": "ppo", "high": self.high, "low": self.low}
        return _terms(columns, loss, trainer_logprobs, entropy, gap, masks, rule)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sft:
    """Cross-entropy: the negative log-probability of each trained token. No ratio, and nothing is masked."""

    def __call__(
        self, columns: Mapping[str, torch.Tensor], trainer_logprobs: torch.Tensor, entropy: torch.Tensor | None = None
    ) -> Terms:
        _check_shape(columns, trainer_logprobs, "Sft")
        loss = -torch.where(columns["loss_mask"], trainer_logprobs, 0.0)
        return Terms(
            loss=loss,
            trainer_logprobs=trainer_logprobs.detach(),
            entropy=_detached(entropy),
            trained=columns["loss_mask"],
        )


def _gap(columns: Mapping[str, torch.Tensor], trainer_logprobs: torch.Tensor, who: str) -> Gap:
    _check_shape(columns, trainer_logprobs, who)
    gap: Gap = measure_gap(trainer_logprobs, need(columns, "logprobs", who))
    return gap


def _check_shape(columns: Mapping[str, torch.Tensor], trainer_logprobs: torch.Tensor, who: str) -> None:
    """Raise if shapes differ. Shapes that broadcast would silently train the wrong tokens, or none."""
    mask = columns["loss_mask"]
    if trainer_logprobs.shape != mask.shape:
        raise InvalidInput(
            f"{who}: trainer_logprobs {list(trainer_logprobs.shape)} for a loss_mask {list(mask.shape)}; pass one "
            "value per token in the shape of the columns, as token_logprobs returns them"
        )


def need(columns: Mapping[str, torch.Tensor], name: str, who: str) -> torch.Tensor:
    """Return a required column, or raise with the columns there are."""
    try:
        return columns[name]
    except KeyError:
        raise InvalidInput(
            f"{who}: the micro-batch has no column {name!r}, only {', '.join(columns)}; attach it to the samples"
        ) from None


def _push(
    columns: Mapping[str, torch.Tensor],
    trainer_logprobs: torch.Tensor,
    signal: torch.Tensor,
    masked: torch.Tensor,
    kl_tau: float,
) -> torch.Tensor:
    """Return -signal * ratio on unmasked tokens plus kl_tau * log_ratio**2 on all trained tokens.

    Values are masked before `exp`, not after: 0 times an overflowed ratio is NaN, in the gradient too.
    """
    mask = columns["loss_mask"]
    log_ratio = torch.where(mask, trainer_logprobs - columns["logprobs"], 0.0)
    kept = mask & ~masked
    ratio = torch.where(kept, log_ratio, 0.0).exp()
    loss = -torch.where(kept, signal, 0.0) * ratio
    return loss + kl_tau * log_ratio.square() if kl_tau else loss


def _terms(
    columns: Mapping[str, torch.Tensor],
    loss: torch.Tensor,
    trainer_logprobs: torch.Tensor,
    entropy: torch.Tensor | None,
    gap: Gap,
    masks: Masks,
    rule: Rule,
) -> Terms:
    return Terms(
        loss=loss,
        trainer_logprobs=trainer_logprobs.detach(),
        entropy=_detached(entropy),
        log_ratio=gap.log_ratio,
        ratio=gap.ratio,
        mismatch_kl=gap.mismatch_kl,
        prob_delta=gap.prob_delta,
        masked=masks.masked,
        masked_high=masks.masked_high,
        masked_low=masks.masked_low,
        trained=columns["loss_mask"],
        rules={"": rule},
    )


def _detached(entropy: torch.Tensor | None) -> torch.Tensor | None:
    return None if entropy is None else entropy.detach()
