"""Effects: what the coordinator asks its caller to do, as data. Messages to send, decisions to log."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from penstock.protocol.messages import Frames, FromPlane, Peer


@dataclass(frozen=True, slots=True)
class Send:
    """Send this message."""

    peer: Peer
    message: FromPlane
    frames: Frames = ()


@dataclass(frozen=True, slots=True)
class Detach:
    """This process gets no further steps: the transport may free what it holds for it."""

    peer: Peer


@dataclass(frozen=True, slots=True)
class MemberLeft:
    """A process left while others stay. Logged, so that a restarted plane does not wait for it."""

    session: int
    rank: int
    replica: int
    step: int
    """The last step it committed."""


@dataclass(frozen=True, slots=True)
class Resume:
    """A new session begins at `step`: earlier steps count as trained."""

    session: int
    step: int
    after: str = ""
    """Why the session before failed; empty if its processes left it, or there was none."""


@dataclass(frozen=True, slots=True)
class StepReceived:
    """Every process has the step and verified it."""

    step: int


@dataclass(frozen=True, slots=True)
class StepCommitted:
    """Every process has trained the step: log it, then call `Coordinator.committed`."""

    session: int
    step: int
    policy_version: int | None


@dataclass(frozen=True, slots=True)
class Reported:
    """A process reported priorities of groups and metrics of samples."""

    step: int
    priorities: dict[str, float]
    metrics: dict[str, float]


@dataclass(frozen=True, slots=True)
class Suspect:
    """A process could not read a group from storage. Check the group first: if it is readable, the process is at
    fault."""

    session: int
    place: tuple[int, int]
    step: int
    group: str
    reason: str


@dataclass(frozen=True, slots=True)
class Note:
    """A line for the log file."""

    text: str


Effect: TypeAlias = Note | Send | Detach | MemberLeft | Resume | StepReceived | StepCommitted | Reported | Suspect
