"""Filters: which rollouts of a group are not worth training on, each with a reason that is counted.

A filter marks rollouts to drop. It decides what is trained, not what a rollout was worth: advantages are computed
over the whole group first. Filters apply in order, and a rollout counts under the first reason that drops it. A filter
that judges the group as a whole (`ZeroVariance`, `AnyErrored`) marks all of it or nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from penstock.convert.rollouts import Rollouts


class Filter(Protocol):
    @property
    def reason(self) -> str:
        """The name its drops are counted under."""

    def __call__(self, rollouts: Rollouts) -> NDArray[np.bool_]:
        """[n] True for rollouts to drop."""


@dataclass(frozen=True, slots=True)
class Errored:
    """Drops rollouts that failed."""

    reason: str = "errored"

    def __call__(self, rollouts: Rollouts) -> NDArray[np.bool_]:
        return rollouts.errored


@dataclass(frozen=True, slots=True)
class AnyErrored:
    """Drops the group if any of its rollouts failed: for environments that score a group together."""

    reason: str = "group errored"

    def __call__(self, rollouts: Rollouts) -> NDArray[np.bool_]:
        return np.full(len(rollouts), bool(rollouts.errored.any()))


@dataclass(frozen=True, slots=True)
class Truncated:
    """Drops rollouts that a limit ended."""

    reason: str = "truncated"

    def __call__(self, rollouts: Rollouts) -> NDArray[np.bool_]:
        return rollouts.truncated


@dataclass(frozen=True, slots=True)
class TooLong:
    """Drops rollouts with a sample of more than `max_tokens`."""

    max_tokens: int
    reason: str = "too long"

    def __call__(self, rollouts: Rollouts) -> NDArray[np.bool_]:
        return rollouts.longest > self.max_tokens


@dataclass(frozen=True, slots=True)
class ZeroVariance:
    """Drops the group if all its scored rollouts have the same reward: nothing can be learned from the difference."""

    reason: str = "zero variance"

    def __call__(self, rollouts: Rollouts) -> NDArray[np.bool_]:
        rewards = rollouts.rewards[rollouts.scored]
        flat = len(rewards) == 0 or rewards.max() == rewards.min()
        return np.full(len(rollouts), bool(flat))


def apply_filters(rollouts: Rollouts, filters: Iterable[Filter]) -> tuple[NDArray[np.bool_], Counter[str]]:
    """([n] True for rollouts that stay, how many each reason dropped).

    >>> kept, reasons = apply_filters(Rollouts.of([1.0, 1.0]), [ZeroVariance()])
    >>> kept.tolist(), dict(reasons)
    ([False, False], {'zero variance': 2})
    """
    kept = np.ones(len(rollouts), np.bool_)
    reasons: Counter[str] = Counter()
    for one in filters:
        drops = kept & one(rollouts)
        if drops.any():
            reasons[one.reason] += int(np.count_nonzero(drops))
        kept &= ~drops
    return kept, reasons
