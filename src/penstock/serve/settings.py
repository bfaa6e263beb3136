"""The settings of a plane, checked once."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from penstock.errors import ConfigError
from penstock.hold import Fifo, Limiter, Selector, Table
from penstock.hold.core import OnEvict
from penstock.pack import Packing
from penstock.send.timeouts import Timeouts


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """When a step is full: exactly one of the three is given."""

    groups: int | None = None
    samples: int | None = None
    tokens: int | None = None

    def __post_init__(self) -> None:
        given = {n: v for n in ("groups", "samples", "tokens") if (v := getattr(self, n)) is not None}
        if len(given) != 1 or next(iter(given.values())) < 1:
            raise ConfigError(
                f"step target: {given or 'none'}; give exactly one of groups_per_step, samples_per_step, "
                "tokens_per_step, from 1 up"
            )

    @property
    def unit(self) -> Literal["groups", "samples", "tokens"]:
        """What is counted."""
        if self.groups is not None:
            return "groups"
        return "tokens" if self.samples is None else "samples"

    @property
    def amount(self) -> int:
        """How many of them fill a step."""
        amount: int = getattr(self, self.unit)
        return amount

    def measure(self, samples: int, tokens: int) -> int:
        """What a group of so many samples and tokens counts."""
        return {"groups": 1, "samples": samples, "tokens": tokens}[self.unit]

    def __str__(self) -> str:
        return f"{self.amount} {self.unit}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Replay:
    """How groups wait for training. The default is a queue: each group once, in order, nothing dropped."""

    capacity: int = 1 << 16
    """Groups."""
    sampler: Selector = field(default_factory=Fifo)
    remover: Selector | None = None
    limiter: Limiter | None = None
    max_times_sampled: int | None = 1
    max_staleness: int | None = None
    """Policy versions behind the trainer's published one beyond which a group is dropped."""
    seed: int = 0

    @property
    def parts(self) -> dict[str, Any]:
        """What a table is composed of."""
        return {"sampler": self.sampler, "remover": self.remover, "limiter": self.limiter}

    def table(self, on_evict: OnEvict) -> Table:
        return Table(
            capacity=self.capacity,
            **self.parts,
            max_times_sampled=self.max_times_sampled,
            max_staleness=self.max_staleness,
            seed=self.seed,
            on_evict=on_evict,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class PlaneSettings:
    """Everything a plane is told when it starts."""

    packing: Packing
    target: Target
    run: str = "run"
    replay: Replay = field(default_factory=Replay)
    replicas: int = 1
    """Processes per data rank (tensor or context parallel); each gets the rank's data."""
    max_held_bytes: int = 4 << 30
    """Encoded bytes that may wait for training; beyond, puts are refused with `Overloaded`."""
    max_disk_bytes: int | None = None
    shares: dict[str, float] = field(default_factory=dict)
    """Runs that share the trainer, by the name in `Sample.run`, each with its weight; none: runs are not kept apart."""
    evict_after: int | None = 3
    """Groups of one run set aside, because no step could be made with them, after which the run is evicted."""
    retain_steps: int = 64
    """Committed steps that can still be served again, for a trainer that resumes from an older checkpoint."""
    snapshot_every: int = 20_000
    """Decisions (groups, steps, reports) after which memory is written down, so that a restart need not redo them."""
    timeouts: Timeouts = field(default_factory=Timeouts)

    def __post_init__(self) -> None:
        for name in ("replicas", "max_held_bytes", "snapshot_every"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name}: {getattr(self, name)}; must be from 1 up")
        for run, weight in self.shares.items():
            if not run or not 0 < weight < float("inf"):
                raise ConfigError(f"shares: {run!r} has {weight}; give each run a name and a positive number")
        if self.evict_after is not None and self.evict_after < 1:
            raise ConfigError(f"evict_after: {self.evict_after}; must be from 1 up, or none")
        if self.retain_steps < 0:
            raise ConfigError(f"retain_steps: {self.retain_steps}; must be from 0 up")
        if self.target.groups is not None and self.target.groups > self.replay.capacity:
            raise ConfigError(
                f"groups_per_step: {self.target.groups} with capacity {self.replay.capacity}; "
                "a step could never be filled; raise the capacity"
            )
