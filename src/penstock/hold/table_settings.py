"""Everything that defines a table, checked once, when it is built."""

from __future__ import annotations

from dataclasses import dataclass, field

from penstock.errors import ConfigError
from penstock.hold.fifo_lifo import Fifo
from penstock.hold.limiters import Limiter, MinSize
from penstock.hold.selector import Selector


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """A valid combination; impossible ones cannot be constructed."""

    capacity: int
    """Items at most."""
    capacity_bytes: int | None = None
    """Sum of the items' `num_bytes` at most; None: unlimited."""
    capacity_tokens: int | None = None
    """Sum of the items' `num_tokens` at most; None: unlimited."""
    sampler: Selector = field(default_factory=Fifo)
    """Chooses what is sampled."""
    remover: Selector | None = None
    """Chooses what makes room in a full table; None: nothing is dropped, inserts wait instead."""
    limiter: Limiter = field(default_factory=MinSize)
    """Decides who waits."""
    max_times_sampled: int | None = 1
    """Uses after which an item leaves; None: it stays."""
    max_staleness: int | None = None
    """Policy versions an item may be behind; older ones leave. None: any number."""
    seed: int = 0
    """Of the table's random generator."""

    def __post_init__(self) -> None:
        self._check_numbers()
        if self.remover is None and self.max_times_sampled is None and self.max_staleness is None:
            raise ConfigError(
                "Table: no remover, max_times_sampled or max_staleness, so nothing ever leaves and a full "
                "table stops; give one of them (remover=Fifo() drops the oldest)"
            )
        for name, part in (("sampler", self.sampler), ("remover", self.remover)):
            if part is not None and (isinstance(part, type) or not isinstance(part, Selector)):
                raise ConfigError(f"Table: {name} {part!r} is no selector; give for example Fifo() or Uniform()")
        if isinstance(self.limiter, type) or not isinstance(self.limiter, Limiter):
            raise ConfigError(f"Table: limiter {self.limiter!r} is no limiter; give for example MinSize(1)")
        self.limiter.check(
            capacity=self.capacity,
            max_times_sampled=self.max_times_sampled,
            evicts=self.remover is not None,
        )

    def _check_numbers(self) -> None:
        for name, least in (
            ("capacity", 1),
            ("capacity_bytes", 1),
            ("capacity_tokens", 1),
            ("max_times_sampled", 1),
            ("max_staleness", 0),
            ("seed", 0),
        ):
            value = getattr(self, name)
            if value is None and name not in ("capacity", "seed"):
                continue
            if not isinstance(value, int) or value < least:
                raise ConfigError(f"Table: {name} {value!r}; give a whole number, {least} or more")
