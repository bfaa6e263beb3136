"""The keyword arguments of `Table`. Made by scripts/make_settings.py."""

from typing import TypedDict

from penstock.replay.limiters import Limiter
from penstock.replay.selector import Selector

class TableKeywords(TypedDict, total=False):
    """The keyword arguments of `Table`. Made by scripts/make_settings.py."""

    capacity: int
    """Items held at most; in a plane an item is a group."""
    sampler: Selector
    """Chooses what is trained on next."""
    remover: Selector | None
    """Chooses what makes room when it is full; none: nothing is dropped, puts wait."""
    limiter: Limiter
    """Decides who waits for whom."""
    max_times_sampled: int | None
    """Uses after which an item leaves; none: it stays."""
    max_staleness: int | None
    """Policy versions behind the published one beyond which an item is dropped; none: any."""
    seed: int
    """Of the random draws."""
    capacity_bytes: int | None
    """Sum of the items' `num_bytes` at most; none: any."""
    capacity_tokens: int | None
    """Sum of the items' `num_tokens` at most; none: any."""
