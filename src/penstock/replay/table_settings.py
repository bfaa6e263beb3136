"""The settings of a table, declared and checked once, and the parts it may be composed of."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any

from msgspec import Meta

from penstock.config import Kinds, check
from penstock.errors import ConfigError
from penstock.replay.fixed_order import Fifo, Lifo, MaxPriority, MinPriority
from penstock.replay.limiters import Limiter, MinSize, Paced, Queue, SamplesPerInsert
from penstock.replay.prioritized import Prioritized
from penstock.replay.selector import Selector
from penstock.replay.uniform import Freshest, Uniform
from penstock.replay.windowed_fifo import WindowedFifo

SELECTORS = Kinds(
    fifo=Fifo,
    lifo=Lifo,
    uniform=Uniform,
    freshest=Freshest,
    prioritized=Prioritized,
    min_priority=MinPriority,
    max_priority=MaxPriority,
    windowed_fifo=WindowedFifo,
)
"""Samplers and removers by the names that files, flags and checkpoints use."""
LIMITERS = Kinds(min_size=MinSize, queue=Queue, samples_per_insert=SamplesPerInsert, paced=Paced)
"""Limiters by name."""

MAX_CAPACITY = 1 << 27
"""Memory for every item's slot is allocated at once. More than this is a mistake that no machine could hold."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Replay:
    """How items wait for training. The default is a queue: each item once, in order, nothing dropped.

    Impossible combinations cannot be constructed.
    """

    capacity: Annotated[
        int, Meta(ge=1, le=MAX_CAPACITY, description="items held at most; in a plane an item is a group")
    ] = 1 << 16
    sampler: Annotated[Selector, SELECTORS, Meta(description="chooses what is trained on next")] = field(
        default_factory=Fifo
    )
    remover: Annotated[
        Selector | None,
        SELECTORS,
        Meta(description="chooses what makes room when it is full; none: nothing is dropped, puts wait"),
    ] = None
    limiter: Annotated[Limiter, LIMITERS, Meta(description="decides who waits for whom")] = field(
        default_factory=MinSize
    )
    max_times_sampled: Annotated[
        int | None, Meta(ge=1, description="uses after which an item leaves; none: it stays")
    ] = 1
    max_staleness: Annotated[
        int | None,
        Meta(ge=0, description="policy versions behind the published one beyond which an item is dropped; none: any"),
    ] = None
    seed: Annotated[int, Meta(ge=0, description="of the random draws")] = 0

    def __post_init__(self) -> None:
        check(self)
        if self.remover is None and self.max_times_sampled is None and self.max_staleness is None:
            raise ConfigError(
                "remover, max_times_sampled, max_staleness: all none, so nothing ever leaves and a full "
                "table stops; give one of them (remover=Fifo() drops the oldest)"
            )
        if isinstance(self.sampler, WindowedFifo) and self.max_times_sampled is None:
            raise ConfigError(
                "sampler: WindowedFifo with max_times_sampled none; the oldest groups would be trained for ever; give "
                "the number of uses"
            )
        pace = self.limiter.max_staleness if isinstance(self.limiter, Paced) else 0
        if self.max_staleness is not None and self.max_staleness < pace:
            raise ConfigError(
                f"limiter: {self.limiter} with max_staleness {self.max_staleness}; groups that it lets begin would be "
                "dropped as stale; give max_staleness at least as much, or none"
            )
        self.limiter.check(
            capacity=self.capacity,
            max_times_sampled=self.max_times_sampled,
            evicts=self.remover is not None,
        )

    @property
    def parts(self) -> dict[str, Any]:
        """The parts that the table is composed of."""
        return {"sampler": self.sampler, "remover": self.remover, "limiter": self.limiter}


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings(Replay):
    """A table's settings: those of replay, and limits by size."""

    capacity_bytes: Annotated[
        int | None, Meta(ge=1, description="sum of the items' `num_bytes` at most; none: any")
    ] = None
    capacity_tokens: Annotated[
        int | None, Meta(ge=1, description="sum of the items' `num_tokens` at most; none: any")
    ] = None
