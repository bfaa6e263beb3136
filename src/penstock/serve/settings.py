"""The settings of a plane, checked once."""

from __future__ import annotations

from dataclasses import dataclass, field

from penstock.errors import ConfigError
from penstock.hold import Fifo, Limiter, Selector, Table
from penstock.hold.store import OnEvict
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

    def __str__(self) -> str:
        return next(f"{v} {n}" for n in ("groups", "samples", "tokens") if (v := getattr(self, n)) is not None)


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

    def table(self, on_evict: OnEvict) -> Table:
        return Table(
            capacity=self.capacity,
            sampler=self.sampler,
            remover=self.remover,
            limiter=self.limiter,
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
    retain_steps: int = 64
    """Committed steps that can still be served again, for a trainer that resumes from an older checkpoint."""
    timeouts: Timeouts = field(default_factory=Timeouts)

    def __post_init__(self) -> None:
        for name in ("replicas", "max_held_bytes"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name}: {getattr(self, name)}; must be from 1 up")
        if self.retain_steps < 0:
            raise ConfigError(f"retain_steps: {self.retain_steps}; must be from 0 up")
        if self.target.groups is not None and self.target.groups > self.replay.capacity:
            raise ConfigError(
                f"groups_per_step: {self.target.groups} with capacity {self.replay.capacity}; "
                "a step could never be filled; raise the capacity"
            )
