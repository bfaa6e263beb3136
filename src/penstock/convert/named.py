"""Advantages and filters by name: what the plane can compute when late rewards arrive, also after a restart.

A function cannot be written to the log, a name can.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import partial
from typing import TypeVar

from penstock.config import unknown
from penstock.convert.advantages import Advantage, Std, grpo, leave_one_out, max_rl, raw_rewards
from penstock.convert.filters import AnyErrored, Errored, Filter, Truncated, ZeroVariance
from penstock.errors import InvalidInput

T = TypeVar("T")
ADVANTAGES: dict[str, Advantage] = {
    "grpo": grpo,
    "grpo_std": partial(grpo, scale=Std()),
    "leave_one_out": leave_one_out,
    "max_rl": max_rl,
    "raw_rewards": raw_rewards,
}
FILTERS: dict[str, Filter] = {
    "zero_variance": ZeroVariance(),
    "errored": Errored(),
    "any_errored": AnyErrored(),
    "truncated": Truncated(),
}


_OF_ERRORS = ("errored", "any_errored")


def advantage_named(name: str) -> Advantage:
    """Return an advantage by name. Raises InvalidInput.

    >>> advantage_named("grpo")([1.0, 0.0]).tolist()
    [0.5, -0.5]
    """
    return _named(name, ADVANTAGES, "advantage")


def filter_named(name: str) -> Filter:
    """Return a filter by name. Raises InvalidInput."""
    return _named(name, FILTERS, "filter")


def split_filters(filters: Iterable[Filter | str], *, is_late: bool) -> tuple[list[Filter], tuple[str, ...]]:
    """Return the filters to apply now, and the names of those that wait for late rewards.

    `ZeroVariance()` has a name as well: applied before the rewards are known, it would drop every group."""
    given = [filter_named(one) if isinstance(one, str) else one for one in filters]
    if not is_late:
        return given, ()
    names = [next((name for name, known in FILTERS.items() if known == one), "") for one in given]
    # Only the producer knows which rollouts failed, only the plane which could not be scored: both look for errors.
    now = [one for one, name in zip(given, names, strict=True) if not name or name in _OF_ERRORS]
    return now, tuple(filter(None, names))


def _named(name: str, table: Mapping[str, T], what: str) -> T:
    found = table.get(name)
    if found is None:
        raise InvalidInput(f"{what} {name!r:.60}: {unknown(name, table, what)}")
    return found
