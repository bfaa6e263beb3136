"""What the coordinator wants done: messages for the transport, decisions for the engine."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from penstock.protocol.messages import Frames, FromPlane, Peer


@dataclass(frozen=True, slots=True)
class Send:
    """Give this to the transport."""

    peer: Peer
    message: FromPlane
    frames: Frames = ()


@dataclass(frozen=True, slots=True)
class Detach:
    """No more steps go to this process: the transport may give back what it keeps for it."""

    peer: Peer


@dataclass(frozen=True, slots=True)
class MemberLeft:
    """A process wants nothing more, and others are still there: a plane that restarts must not wait for it."""

    session: int
    rank: int
    replica: int
    step: int
    """The last one it committed."""


@dataclass(frozen=True, slots=True)
class Resume:
    """A new session begins and its trainer is at `step`: what came before counts as trained."""

    session: int
    step: int
    named: bool
    """Whether the trainer named the step; else it goes on at the first one that is not committed."""


@dataclass(frozen=True, slots=True)
class StepReceived:
    """Every process has the step, and found it whole."""

    step: int


@dataclass(frozen=True, slots=True)
class StepCommitted:
    """Every process has trained the step: write it down, then call `Coordinator.committed`."""

    session: int
    step: int
    policy_version: int | None


@dataclass(frozen=True, slots=True)
class Reported:
    """A process knows something about samples."""

    step: int
    priorities: dict[str, float]
    metrics: dict[str, float]


@dataclass(frozen=True, slots=True)
class Suspect:
    """A process could not read a group from storage: look at the group, then at the process."""

    session: int
    place: tuple[int, int]
    step: int
    group: str
    reason: str


@dataclass(frozen=True, slots=True)
class Note:
    """A line of the run's story, for the log."""

    text: str


Effect: TypeAlias = Note | Send | Detach | MemberLeft | Resume | StepReceived | StepCommitted | Reported | Suspect
