"""Filters drop rollouts that are not worth training on. Each drop is counted under a reason.

A filter marks rollouts to drop. It sees the numbers of all rollouts, and the tokens of each through
`rollouts.tokens(i)`. It decides what is trained, not what a rollout was worth: advantages are computed over all
rollouts of the group first. Filters apply in order, and a rollout counts under the first reason that drops it. A filter
that judges the group (`ZeroVariance`, `AnyErrored`) marks all of its rollouts or none.

Filters with a name (`FILTERS`) can also be applied by the plane, when late rewards arrive.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from penstock.config import unknown
from penstock.convert.rollouts import Rollouts, RolloutTokens
from penstock.errors import InvalidInput


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Gibberish:
    """Drops rollouts with a rare token that the model sampled by accident: its id is above a threshold, and it is less
    likely than a blind guess.

    Ids of a byte-pair vocabulary are in the order of merges, so high ids are rare tokens. A token counts if its id is
    above `rare_above` and its log-probability below `-log(vocabulary) - offset`.
    """

    vocabulary: int
    rare_above: int = 100_000
    offset: float = 2.0
    reason: str = "gibberish"

    def __call__(self, rollouts: Rollouts) -> NDArray[np.bool_]:
        return _any_hit(self, rollouts)

    def first_hit(self, tokens: RolloutTokens) -> int | None:
        """Return the number of the first such token among the sampled tokens, or None."""
        unlikely = _logprobs(tokens, self.reason) < -math.log(self.vocabulary) - self.offset
        return _first(unlikely & (tokens.sampled_ids > self.rare_above))


@dataclass(frozen=True, slots=True, kw_only=True)
class Repetition:
    """Drops rollouts that loop: `window` sampled tokens in a row, each with a probability above `certain`.

    A model in a loop is certain of every token, however long the loop is. Repeated text is harder to find by comparing.
    Tokens of the environment in between do not end a run.
    """

    window: int = 3_000
    certain: float = 0.99
    reason: str = "repetition"

    def __post_init__(self) -> None:
        if self.window < 1 or not 0 < self.certain < 1:
            raise InvalidInput(
                f"repetition: window {self.window}, certain {self.certain}; must be from 1 up, and between 0 and 1"
            )

    def __call__(self, rollouts: Rollouts) -> NDArray[np.bool_]:
        return _any_hit(self, rollouts)

    def first_hit(self, tokens: RolloutTokens) -> int | None:
        """Return the number, among sampled tokens, of the token that completed a run of `window`, or None."""
        sure = _logprobs(tokens, self.reason) > math.log(self.certain)
        places = np.arange(len(sure))
        # For each place, the last place that was not certain: sure 1 0 1 1 gives -1 1 1 1. The run up to a place is the
        # difference: 1 0 1 2.
        ended = np.maximum.accumulate(np.where(sure, -1, places))
        return _first(places - ended >= self.window)


class _OfTokens(Protocol):
    def first_hit(self, tokens: RolloutTokens) -> int | None: ...


def _any_hit(one: _OfTokens, rollouts: Rollouts) -> NDArray[np.bool_]:
    return np.array([one.first_hit(rollouts.tokens(i)) is not None for i in range(len(rollouts))], np.bool_)


def _logprobs(tokens: RolloutTokens, who: str) -> NDArray[np.float64]:
    if tokens.logprobs is None:
        raise InvalidInput(f"filter {who!r}: a rollout without log-probabilities; record them, or leave the filter out")
    return tokens.logprobs.astype(np.float64)


def _first(hits: NDArray[np.bool_]) -> int | None:
    return int(hits.argmax()) if hits.any() else None


def apply_filters(rollouts: Rollouts, filters: Iterable[Filter]) -> tuple[NDArray[np.bool_], Counter[str]]:
    """Return ([n] True for rollouts that stay, the number of rollouts dropped by each reason).

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


FILTERS: dict[str, Filter] = {
    "zero_variance": ZeroVariance(),
    "errored": Errored(),
    "any_errored": AnyErrored(),
    "truncated": Truncated(),
}
_OF_ERRORS = ("errored", "any_errored")


def filter_named(name: str) -> Filter:
    """Return a filter by name. Raises InvalidInput."""
    if name not in FILTERS:
        raise InvalidInput(f"filter {name!r:.60}: {unknown(name, FILTERS, 'filter')}")
    return FILTERS[name]


def _filter_of(given: Filter | str) -> Filter:
    if isinstance(given, str):
        return filter_named(given)
    if isinstance(given, type) or not callable(given) or not hasattr(given, "reason"):
        raise InvalidInput(f"filter {given!r:.60}: give a name, such as 'zero_variance', or an object with a `reason`")
    return given


def split_filters(filters: Iterable[Filter | str], *, is_late: bool) -> tuple[list[Filter], tuple[str, ...]]:
    """Return the filters to apply now, and the names of those that wait for late rewards.

    `ZeroVariance()` has a name as well: applied before the rewards are known, it would drop every group."""
    given = [_filter_of(one) for one in filters]
    if not is_late:
        return given, ()
    names = [next((name for name, known in FILTERS.items() if known == one), "") for one in given]
    # Only the producer knows which rollouts failed, only the plane which could not be scored: both look for errors.
    now = [one for one, name in zip(given, names, strict=True) if not name or name in _OF_ERRORS]
    return now, tuple(filter(None, names))
