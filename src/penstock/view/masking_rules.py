"""Apply masking rules to exported values: what would another rule or threshold have masked?

Each rule returns two masks: tokens beyond its upper threshold and beyond its lower one. The page applies rules to one
sample in JavaScript while thresholds are typed. This module has the same arithmetic for steps, lists, sorting and
tests.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from penstock.errors import InvalidInput
from penstock.view.record import Record

Mask: TypeAlias = NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Rule:
    needs: tuple[str, ...]
    """Columns it uses."""
    thresholds: Mapping[str, float]
    """Defaults by name."""
    sides: Callable[..., tuple[Mask, Mask]]
    """Record and thresholds -> [T] beyond the upper, [T] beyond the lower one; trained tokens only."""


def _dppo(record: Record, *, high: float, low: float) -> tuple[Mask, Mask]:
    """Mask by the difference of probabilities. An advantage of 0 or NaN uses the lower threshold."""
    columns, mask = record.columns, record.loss_mask
    delta, up = columns["prob_delta"], columns["advantages"] > 0
    return mask & up & (delta > high), mask & ~up & (delta < -low)


def _icepop(record: Record, *, low: float, high: float) -> tuple[Mask, Mask]:
    """Mask by the ratio, whatever the advantage."""
    ratio, mask = record.columns["importance_ratio"], record.loss_mask
    return mask & (ratio > high), mask & (ratio < low)


def _ppo(record: Record, *, low: float, high: float) -> tuple[Mask, Mask]:
    """Mask the tokens whose gradient PPO's clip stops."""
    columns, mask = record.columns, record.loss_mask
    ratio, advantages = columns["importance_ratio"], columns["advantages"]
    return mask & (advantages > 0) & (ratio > 1 + high), mask & (advantages < 0) & (ratio < 1 - low)


def _ipo(record: Record, *, threshold: float) -> tuple[Mask, Mask]:
    """Mask by the difference of probabilities in either direction."""
    delta, mask = record.columns["prob_delta"], record.loss_mask
    return mask & (delta > threshold), mask & (delta < -threshold)


RULES = {
    "dppo": Rule(("prob_delta", "advantages"), {"high": 0.2, "low": 0.2}, _dppo),
    "icepop": Rule(("importance_ratio",), {"low": 0.2, "high": 5.0}, _icepop),
    "ppo": Rule(("importance_ratio", "advantages"), {"low": 0.2, "high": 0.2}, _ppo),
    "ipo": Rule(("prob_delta",), {"threshold": 0.1}, _ipo),
}


def judge(record: Record, name: str, thresholds: Mapping[str, float]) -> tuple[Mask, Mask] | None:
    """Return what a rule masks, above and below. None if the record lacks a column it uses."""
    if name not in RULES:
        raise InvalidInput(f"rule {name[:40]!r}: unknown; there are {', '.join(RULES)}")
    rule = RULES[name]
    if not set(rule.needs) <= set(record.columns):
        return None
    bad = {key: value for key, value in thresholds.items() if key not in rule.thresholds or not value >= 0}
    if bad:
        raise InvalidInput(f"thresholds of {name}: {', '.join(bad)}; give {', '.join(rule.thresholds)}, each 0 or more")
    with np.errstate(invalid="ignore"):
        return rule.sides(record, **{**rule.thresholds, **thresholds})


def disagreement(record: Record) -> int | None:
    """Count trained tokens masked by exactly one of DPPO and IcePop at their defaults. None without ratios."""
    dppo, icepop = judge(record, "dppo", {}), judge(record, "icepop", {})
    if dppo is None or icepop is None:
        return None
    return int(np.count_nonzero((dppo[0] | dppo[1]) ^ (icepop[0] | icepop[1])))
