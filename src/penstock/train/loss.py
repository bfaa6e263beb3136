"""Losses over the tokens of a micro-batch. Each returns per-token values and masks as `Terms` and sums nothing.

With trainer log-probability t and sampler log-probability s of the same token, at the same temperature:

    log_ratio    t - s                      prob_delta   exp(t) - exp(s)
    ratio        exp(t - s)                 mismatch_kl  ratio - 1 - log_ratio      (k3, >= 0)

A loss is a small frozen object that holds its thresholds. Call it with the tensors of `to_torch`:

    terms = Dppo()(tensors, trainer_logprobs, entropy)
    (terms.mean(step.denominators)).backward()

`ByMode` trains reinforcement learning, distillation and supervised tokens in one micro-batch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Protocol, TypeAlias

try:
    import torch
    from torch import Tensor
except ImportError as error:
    from penstock.extras import missing

    raise missing("penstock.train.loss", error) from None

from penstock.errors import InvalidInput
from penstock.train.terms import Rule, Terms

OPD_THRESHOLD = 0.2
Columns: TypeAlias = Mapping[str, Tensor]
"""The tensors of a micro-batch, by column."""


class Loss(Protocol):
    """The interface of a loss: tensors by column name and the model's outputs in, `Terms` out."""

    def __call__(self, columns: Columns, trainer_logprobs: Tensor, entropy: Tensor | None = None) -> Terms: ...


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Gap:
    """The difference between trainer and sampler on each token. Carries no gradient."""

    log_ratio: Tensor
    ratio: Tensor
    mismatch_kl: Tensor
    prob_delta: Tensor


@torch.no_grad()  # type: ignore[untyped-decorator]
def measure_gap(trainer_logprobs: Tensor, logprobs: Tensor) -> Gap:
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

    masked: Tensor
    masked_high: Tensor
    masked_low: Tensor

    @staticmethod
    def of(high: Tensor, low: Tensor) -> Masks:
        return Masks(masked=high | low, masked_high=high, masked_low=low)


def trust_region(loss_mask: Tensor, signal: Tensor, prob_delta: Tensor, *, high: float, low: float) -> Masks:
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

    def __call__(self, columns: Columns, trainer_logprobs: Tensor, entropy: Tensor | None = None) -> Terms:
        inputs = _Inputs.of(self, columns, trainer_logprobs, entropy)
        signal = inputs.need("advantages")
        masks = trust_region(inputs.mask, signal, inputs.gap.prob_delta, high=self.high, low=self.low)
        loss = inputs.push(self.adv_tau * signal, masks.masked, self.kl_tau)
        return inputs.terms(loss, masks, {"kind": "dppo", "high": self.high, "low": self.low})


@dataclass(frozen=True, slots=True, kw_only=True)
class Ipo:
    """Policy gradient without tokens whose probability moved by more than a threshold in either direction."""

    threshold: float = 0.1
    adv_tau: float = 1.0
    kl_tau: float = 1e-3

    def __call__(self, columns: Columns, trainer_logprobs: Tensor, entropy: Tensor | None = None) -> Terms:
        inputs = _Inputs.of(self, columns, trainer_logprobs, entropy)
        delta = inputs.gap.prob_delta
        masks = Masks.of(inputs.mask & (delta > self.threshold), inputs.mask & (delta < -self.threshold))
        loss = inputs.push(self.adv_tau * inputs.need("advantages"), masks.masked, self.kl_tau)
        return inputs.terms(loss, masks, {"kind": "ipo", "threshold": self.threshold})


@dataclass(frozen=True, slots=True, kw_only=True)
class Opd:
    """On-policy distillation: the signal points to the teacher, `teacher - t`, in a trust region fixed at 0.2."""

    kl_tau: float = 1e-3

    def __call__(self, columns: Columns, trainer_logprobs: Tensor, entropy: Tensor | None = None) -> Terms:
        inputs = _Inputs.of(self, columns, trainer_logprobs, entropy)
        signal = inputs.need("teacher_logprobs") - trainer_logprobs.detach()
        masks = trust_region(inputs.mask, signal, inputs.gap.prob_delta, high=OPD_THRESHOLD, low=OPD_THRESHOLD)
        loss = inputs.push(signal, masks.masked, self.kl_tau)
        return inputs.terms(loss, masks, {"kind": "opd", "high": OPD_THRESHOLD, "low": OPD_THRESHOLD})


@dataclass(frozen=True, slots=True, kw_only=True)
class RefKl:
    """KL towards a reference, one-sided: masks only tokens that already fell by more than `low`."""

    low: float = 0.2
    kl_tau: float = 1e-3

    def __call__(self, columns: Columns, trainer_logprobs: Tensor, entropy: Tensor | None = None) -> Terms:
        inputs = _Inputs.of(self, columns, trainer_logprobs, entropy)
        below = inputs.mask & (inputs.gap.prob_delta < -self.low)
        masks = Masks.of(torch.zeros_like(below), below)
        signal = inputs.need("teacher_logprobs") - trainer_logprobs.detach()
        loss = inputs.push(signal, below, self.kl_tau)
        return inputs.terms(loss, masks, {"kind": "ref_kl", "low": self.low})


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

    def __call__(self, columns: Columns, trainer_logprobs: Tensor, entropy: Tensor | None = None) -> Terms:
        inputs = _Inputs.of(self, columns, trainer_logprobs, entropy)
        mask, ratio, advantages = inputs.mask, inputs.gap.ratio, inputs.need("advantages")
        high = mask & (advantages > 0) & (ratio > 1 + self.high)
        masks = Masks.of(high, mask & (advantages < 0) & (ratio < 1 - self.low))
        # A clipped token contributes a constant, so that the loss equals PPO's in value, not only in gradient.
        bound = torch.where(high, advantages * (1 + self.high), advantages * (1 - self.low))
        loss = inputs.push(advantages, masks.masked, 0.0) - torch.where(masks.masked, bound, 0.0)
        if self.beta:
            away = need(columns, "teacher_logprobs", "Grpo with beta") - trainer_logprobs
            away = torch.where(mask, away, 0.0)
            loss = loss + self.beta * (away.expm1() - away)
        return inputs.terms(loss, masks, {"kind": "ppo", "high": self.high, "low": self.low})


@dataclass(frozen=True, slots=True, kw_only=True)
class Sft:
    """Cross-entropy: the negative log-probability of each trained token. No ratio, and nothing is masked."""

    def __call__(self, columns: Columns, trainer_logprobs: Tensor, entropy: Tensor | None = None) -> Terms:
        _check_shape(columns, trainer_logprobs, "Sft")
        loss = -torch.where(columns["loss_mask"], trainer_logprobs, 0.0)
        return plain_terms(columns, loss, trainer_logprobs, entropy)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Inputs:
    """What a loss was called with, checked, and the gap between trainer and sampler."""

    who: str
    """The loss, in errors."""
    columns: Columns
    trainer_logprobs: Tensor
    entropy: Tensor | None
    gap: Gap

    @staticmethod
    def of(loss: object, columns: Columns, trainer_logprobs: Tensor, entropy: Tensor | None) -> _Inputs:
        who = type(loss).__name__
        _check_shape(columns, trainer_logprobs, who)
        gap = measure_gap(trainer_logprobs, need(columns, "logprobs", who))
        return _Inputs(who=who, columns=columns, trainer_logprobs=trainer_logprobs, entropy=entropy, gap=gap)

    @property
    def mask(self) -> Tensor:
        return self.columns["loss_mask"]

    def need(self, name: str) -> Tensor:
        return need(self.columns, name, self.who)

    def push(self, signal: Tensor, masked: Tensor, kl_tau: float) -> Tensor:
        """Return -signal * ratio on unmasked tokens plus kl_tau * log_ratio**2 on all trained tokens.

        Values are masked before `exp`, not after: 0 times an overflowed ratio is NaN, in the gradient too.
        """
        log_ratio = torch.where(self.mask, self.trainer_logprobs - self.columns["logprobs"], 0.0)
        kept = self.mask & ~masked
        ratio = torch.where(kept, log_ratio, 0.0).exp()
        loss = -torch.where(kept, signal, 0.0) * ratio
        return loss + kl_tau * log_ratio.square() if kl_tau else loss

    def terms(self, loss: Tensor, masks: Masks, rule: Rule) -> Terms:
        return replace(
            plain_terms(self.columns, loss, self.trainer_logprobs, self.entropy),
            log_ratio=self.gap.log_ratio,
            ratio=self.gap.ratio,
            mismatch_kl=self.gap.mismatch_kl,
            prob_delta=self.gap.prob_delta,
            masked=masks.masked,
            masked_high=masks.masked_high,
            masked_low=masks.masked_low,
            rules={"": rule},
        )


def plain_terms(columns: Columns, loss: Tensor, trainer_logprobs: Tensor, entropy: Tensor | None) -> Terms:
    """Return the terms of a loss without a ratio and without masks."""
    return Terms(
        loss=loss,
        trainer_logprobs=trainer_logprobs.detach(),
        entropy=None if entropy is None else entropy.detach(),
        trained=columns["loss_mask"],
    )


def _check_shape(columns: Columns, trainer_logprobs: Tensor, who: str) -> None:
    """Raise if shapes differ. Shapes that broadcast would silently train the wrong tokens, or none."""
    mask = columns["loss_mask"]
    if trainer_logprobs.shape != mask.shape:
        raise InvalidInput(
            f"{who}: trainer_logprobs {list(trainer_logprobs.shape)} for a loss_mask {list(mask.shape)}; pass one "
            "value per token in the shape of the columns, as token_logprobs returns them"
        )


def need(columns: Columns, name: str, who: str) -> Tensor:
    """Return a required column, or raise with the columns there are."""
    try:
        return columns[name]
    except KeyError:
        raise InvalidInput(
            f"{who}: the micro-batch has no column {name!r}, only {', '.join(columns)}; attach it to the samples"
        ) from None


# ------------------------------------------------------------------ several modes in one micro-batch

_MODES = {"rl": "rl", "ce": "sft", "ref_kl": "opd"}
"""The training mode of each term."""
_RATIOS = ("log_ratio", "ratio", "mismatch_kl", "prob_delta")
_MASKS = ("masked", "masked_high", "masked_low")


@dataclass(frozen=True, slots=True, kw_only=True)
class ByMode:
    """Applies to each token the losses for which it has a weight. Modes may share a micro-batch.

    A token with several weights is trained by several losses and counts as masked if any of them masks it. Each part
    is divided by its own number of tokens, see `Terms.mean`.

    >>> columns = {
    ...     "loss_mask": torch.tensor([False, True, True]), "logprobs": torch.tensor([0.0, -1.0, 0.0]),
    ...     "rl_weights": torch.tensor([1.0, 1, 0]), "ce_weights": torch.tensor([0.0, 0, 1]),
    ...     "advantages": torch.ones(3),
    ... }
    >>> terms = ByMode()(columns, torch.tensor([0.0, -1.0, -3.0]))
    >>> terms.loss.tolist(), terms.ratio.tolist()
    ([0.0, -1.0, 3.0], [1.0, 1.0, nan])
    """

    rl: Loss = field(default_factory=Dppo)
    ce: Loss = field(default_factory=Sft)
    ref_kl: Loss = field(default_factory=Opd)

    def __call__(self, columns: Columns, trainer_logprobs: Tensor, entropy: Tensor | None = None) -> Terms:
        used = {name: given for name in _MODES if (given := _weights(columns, name)) is not None}
        found = {}
        for name, weights in used.items():
            own = {**columns, "loss_mask": columns["loss_mask"] & (weights != 0)}
            terms = getattr(self, name)(own, trainer_logprobs, entropy)
            found[name] = replace(terms, loss=torch.where(own["loss_mask"], weights * terms.loss, 0.0))
        return _joined(found, used, columns)


def _weights(columns: Columns, name: str) -> Tensor | None:
    """Return the weights of a term, None if the term does not occur in this micro-batch.

    Which terms are computed depends on the columns, which are the same on every rank, and not on their values: with a
    branch on values, ranks would run different collectives.
    """
    weights = columns.get(f"{name}_weights")
    if weights is None:
        return torch.ones_like(columns["loss_mask"], dtype=torch.float32) if name == "rl" else None
    # A step of other modes alone lacks what the term needs. If a token has a weight all the same, the loss says so.
    lacks_rl = name == "rl" and not {"logprobs", "advantages"} <= columns.keys()
    lacks_ref_kl = name == "ref_kl" and not {"teacher_logprobs", "teacher_kl"} & columns.keys()
    return None if (lacks_rl or lacks_ref_kl) and not bool(weights.any()) else weights


def _joined(found: Mapping[str, Terms], used: Mapping[str, Tensor], columns: Columns) -> Terms:
    parts = {name: terms.loss for name, terms in found.items()}
    first = next(iter(found.values()))
    loss = sum(list(parts.values())[1:], start=first.loss)
    joined = replace(first, loss=loss, parts=parts, trained=columns["loss_mask"], rules={})
    rules = {_MODES[name]: rule for name, terms in found.items() for rule in terms.rules.values()}
    compared = [(name, terms) for name, terms in found.items() if terms.log_ratio is not None]
    if not compared:
        return joined
    applies = torch.stack([used[name] != 0 for name, _ in compared]).any(dim=0)
    values = {name: torch.where(applies, getattr(compared[0][1], name), torch.nan) for name in _RATIOS}
    masks = {
        name: torch.stack([getattr(terms, name) for _, terms in compared]).any(dim=0)
        for name in _MASKS
        if all(getattr(terms, name) is not None for _, terms in compared)
    }
    return replace(joined, **values, **masks, rules=rules)
