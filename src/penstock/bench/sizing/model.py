"""What is simulated, and what is counted: a cluster's size and links, and the facts of groups that nobody generated."""

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec
import numpy as np
from numpy.typing import NDArray

from penstock.bench.sizing.calibrate import SIZE
from penstock.bench.sizing.constants import KINDS
from penstock.errors import ConfigError
from penstock.keep import GroupFacts


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """What is simulated."""

    workers: int
    ranks: int
    nodes: int
    """Each with a keeper; workers and ranks are spread over them."""
    tokens: int = 4096
    """Of a sample, on average."""
    columns: str = "text"
    copies: int = 2
    groups_per_step: int
    generate_tokens_s: float = 2000.0
    """Of one worker."""
    train_s: float | None = None
    """Of one step; None: four fifths of the time in which workers generate one, so that the trainer keeps up."""
    link_bytes_s: float = 25e9 / 8
    """Of each node, in either direction."""
    delay_s: float = 100e-6
    steps: int = 5
    """That are measured, after `warm_up` others."""
    warm_up: int = 2
    seed: int = 0

    def __post_init__(self) -> None:
        counts = ("workers", "ranks", "nodes", "tokens", "copies", "groups_per_step", "steps")
        for name in (*counts, "generate_tokens_s", "link_bytes_s"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"{name}: {getattr(self, name)}; must be positive")
        if self.columns not in KINDS:
            raise ConfigError(f"columns: {self.columns!r}; must be one of {', '.join(KINDS)}")
        if self.copies > self.nodes:
            raise ConfigError(f"copies: {self.copies} on {self.nodes} nodes; copies of a group are on different nodes")

    @property
    def offered_tokens_s(self) -> float:
        return self.workers * self.generate_tokens_s

    @property
    def step_s(self) -> float:
        """In which workers generate a step."""
        return self.groups_per_step * SIZE * self.tokens / self.offered_tokens_s


@dataclass(slots=True)
class Measured:
    """What was seen since counting began."""

    since: float = 0.0
    puts: list[float] = field(default_factory=list)
    steps: list[float] = field(default_factory=list)
    rank_steps: list[float] = field(default_factory=list)
    tokens: int = 0
    """Of steps that every rank has."""
    trained_s: float = 0.0
    """In which ranks trained."""
    network_bytes: float = 0.0
    """That left a node."""
    plane_bytes: float = 0.0
    """To and from the plane."""
    no_room_s: float = 0.0
    """In which workers waited for room, all of them together."""


def facts_of(template: GroupFacts, name: str, lengths: NDArray[np.int64]) -> GroupFacts:
    """Facts of a group of samples of these lengths, three quarters of which are trained."""
    trained = lengths * 3 // 4
    terms = np.zeros((len(lengths), 3), np.int64)
    terms[:, 0] = trained
    arrays = {"lengths": lengths, "kept": lengths, "loss_tokens": trained, "kept_loss_tokens": trained}
    return msgspec.structs.replace(
        template,
        group=name,
        prompt=name,
        num_tokens=int(lengths.sum()),
        ids=tuple(f"{name}/{i}" for i in range(len(lengths))),
        term_tokens=terms.astype("<i8").tobytes(),
        parents=(),
        shared=(),
        shared_patches=(),
        parted=(),
        **{key: values.astype("<i8").tobytes() for key, values in arrays.items()},
    )
