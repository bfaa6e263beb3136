"""Train several modes (rl, ce, ref_kl) in one micro-batch. Weight columns select the loss of each token."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import torch

from penstock.train.loss import Dppo, Loss, Opd, Sft
from penstock.train.terms import Terms

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

    def __call__(
        self, columns: Mapping[str, torch.Tensor], trainer_logprobs: torch.Tensor, entropy: torch.Tensor | None = None
    ) -> Terms:
        found = {}
        for name, loss in (("rl", self.rl), ("ce", self.ce), ("ref_kl", self.ref_kl)):
            weights = _weights(columns, name)
            if weights is None:
                continue
            own = {**columns, "loss_mask": columns["loss_mask"] & (weights != 0)}
            terms = loss(own, trainer_logprobs, entropy)
            found[name] = replace(terms, loss=torch.where(own["loss_mask"], weights * terms.loss, 0.0))
        return _joined(found, columns)


def _weights(columns: Mapping[str, torch.Tensor], name: str) -> torch.Tensor | None:
    """Return the weights of a term, None if the term does not occur in this micro-batch.

    Which terms are computed depends on the columns, which are the same on every rank, and not on their values: with a
    branch on values, ranks would run different collectives.
    """
    weights = columns.get(f"{name}_weights")
    if weights is None:
        return torch.ones_like(columns["logprobs"]) if name == "rl" else None
    if name == "ref_kl" and not {"teacher_logprobs", "teacher_kl"} & columns.keys() and not bool(weights.any()):
        return None
    return weights


def _joined(found: Mapping[str, Terms], columns: Mapping[str, torch.Tensor]) -> Terms:
    parts = {name: terms.loss for name, terms in found.items()}
    first = next(iter(found.values()))
    loss = sum(list(parts.values())[1:], start=first.loss)
    joined = replace(first, loss=loss, parts=parts, trained=columns["loss_mask"], rules={})
    rules = {_MODES[name]: rule for name, terms in found.items() for rule in terms.rules.values()}
    compared = [(name, terms) for name, terms in found.items() if terms.log_ratio is not None]
    if not compared:
        return joined
    applies = torch.stack([_weights_of(columns, name) != 0 for name, _ in compared]).any(dim=0)
    values = {name: torch.where(applies, getattr(compared[0][1], name), torch.nan) for name in _RATIOS}
    masks = {
        name: torch.stack([getattr(terms, name) for _, terms in compared]).any(dim=0)
        for name in _MASKS
        if all(getattr(terms, name) is not None for _, terms in compared)
    }
    return replace(joined, **values, **masks, rules=rules)


def _weights_of(columns: Mapping[str, torch.Tensor], name: str) -> torch.Tensor:
    weights = _weights(columns, name)
    assert weights is not None
    return weights
