"""What the state machines of a keeper want done: messages to say, frames to check and keep, numbers to forget."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from penstock.send.carrier import Peer
from penstock.send.messages import Buffer, Frames, FromClient, FromPlane

WorkId: TypeAlias = int | tuple[Peer, int]
"""Whose work it is: a put, or a copy that a peer asked for with a ticket."""


@dataclass(frozen=True, slots=True)
class ToPlane:
    message: FromClient
    frames: Frames = ()


@dataclass(frozen=True, slots=True)
class ToClient:
    """To a producer, a rank or a peer that connected here."""

    peer: Peer
    message: FromPlane
    frames: Frames = ()


@dataclass(frozen=True, slots=True)
class ToPeer:
    """To another keeper, over the line that leads there."""

    name: str
    message: FromClient
    frames: Frames = ()


@dataclass(frozen=True, slots=True)
class CheckFrame:
    """Check a group and make its facts; then call `PutDesk.checked`."""

    work: int
    group: str
    digest: bytes
    frame: Buffer
    is_evaluation: bool


@dataclass(frozen=True, slots=True)
class KeepFrame:
    """Keep and sync a frame; then call `kept`. One that came from a peer has not been looked at here."""

    work: WorkId
    group: str
    digest: bytes
    frame: Buffer


@dataclass(frozen=True, slots=True)
class TakeFrame:
    """Gather samples; then call `TakeDesk.taken`."""

    peer: Peer
    ticket: int
    picks: tuple[tuple[int, str, tuple[int, ...]], ...]


@dataclass(frozen=True, slots=True)
class ForgetNumbers:
    numbers: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Joined:
    """The plane has taken this keeper in: let these keys in."""

    clients: tuple[bytes, ...]
    keepers: tuple[bytes, ...]


Event: TypeAlias = ToPlane | ToClient | ToPeer | CheckFrame | KeepFrame | TakeFrame | ForgetNumbers | Joined
