"""What keepers say to the plane, to producers and ranks, and to each other.

    keeper -> plane     Enlist, KeeperBeat, PutFacts; AskRoom on behalf of producers
    plane -> keeper     Enlisted, KeeperPulse; Accepted, Rejected, Missing, Room as to a producer
    keeper -> keeper    CopyFrame, DropCopies
    rank -> keeper      Take

A producer talks to a keeper as it would to a plane.
"""

from __future__ import annotations

from typing import TypeAlias

import msgspec

from penstock.send.message_record import SCHEMA, Message

Copy: TypeAlias = tuple[str, int]
"""A keeper, by name, and the number under which it keeps a frame."""


class KeeperAt(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """A keeper, and where it can be reached."""

    name: str
    node: str
    url: str
    key: bytes = b""
    """Its public key; empty where there are no keys."""
    up: bool = True


class Enlist(Message, frozen=True, tag="enlist"):
    """A keeper joins, or comes back to a plane that restarted. Its payload: the numbers of the frames it has, int64."""

    name: str
    node: str
    url: str
    key: bytes
    incarnation: str
    """New for every start of the process."""
    last: int
    """The highest number it has given out."""
    life: int
    """How often its folder was opened, and how often it enlisted since: what is older than what came is not read."""
    number: int = 0
    quota_bytes: int | None = None
    schema: int = SCHEMA


class KeeperBeat(Message, frozen=True, tag="keeper-beat"):
    """A keeper lives."""

    incarnation: str
    number: int
    """Counts its beats from 1."""
    num_bytes: int
    num_groups: int
    forgot: int = 0
    """The last batch of numbers it was told to forget, and has forgotten."""
    damaged: tuple[int, ...] = ()
    """Frames it should have and cannot read."""


class PutFacts(Message, frozen=True, tag="put-facts"):
    """A group was checked and is kept: these are its facts. Only a keeper's word counts for this."""

    ticket: int
    group: str
    digest: bytes
    """xxh3-128 of the frame, as its producer sent it."""
    size: int
    """Bytes of the frame."""
    facts: bytes
    copies: tuple[Copy, ...]
    """Where the frame is synced."""
    evaluation: bytes = b""
    """Of an evaluation group, what is shown of it; empty for one that is to be trained."""


class Enlisted(Message, frozen=True, tag="enlisted"):
    """A keeper takes part. Its payload: numbers that it has and nobody wants, int64."""

    epoch: int
    copies: int
    """Keepers that a frame must be synced by."""
    is_shared: bool
    """Whether all keepers write to one shared filesystem."""
    seq_len: int
    max_tokens: int
    max_bytes: int
    max_samples: int
    clients: tuple[bytes, ...] = ()
    """Public keys that a keeper lets in as clients."""
    keepers: tuple[bytes, ...] = ()
    """And as keepers."""


class KeeperPulse(Message, frozen=True, tag="keeper-pulse"):
    """The plane lives."""

    epoch: int
    number: int
    """The beat that it answers."""
    peers: tuple[KeeperAt, ...] = ()
    """Other keepers that are up, those to copy to first; not all of them where there are many."""
    down: tuple[str, ...] = ()
    """Some that are not."""
    batch: int = 0
    """Counts what is to be forgotten."""
    forget: bytes = b""
    """Numbers, int64; said again until a beat confirms the batch."""
    policy_version: int | None = None


class CopyFrame(Message, frozen=True, tag="copy-frame"):
    """Keep this too; its payload is the frame."""

    ticket: int
    group: str
    digest: bytes


class Copied(Message, frozen=True, tag="copied"):
    """The frame is synced under this number, or there is an error."""

    ticket: int
    number: int = 0
    error: str = ""


class DropCopies(Message, frozen=True, tag="drop-copies"):
    """The put these were copied for came to nothing."""

    numbers: tuple[int, ...]


class Take(Message, frozen=True, tag="take"):
    """Give me these samples, in this order, in one frame."""

    ticket: int
    picks: tuple[tuple[int, str, tuple[int, ...]], ...]
    """(number, group, rows); no rows: the frame as it was kept, which must then be the only pick."""
    lost: int = 0
    """So many answers are known to be lost."""


class Taken(Message, frozen=True, tag="taken"):
    """The answer; its payload is one frame of all that could be had, empty if that is nothing."""

    ticket: int
    missing: tuple[tuple[int, str], ...] = ()
    """(which of the picks, why)."""


class Taking(Message, frozen=True, tag="taking"):
    """It is under way. With a payload it follows the answers that were sent: who gets this first has lost them."""

    ticket: int
    sent: int = 0
    """Answers sent before this."""


FromKeeper: TypeAlias = Enlist | KeeperBeat | PutFacts
ToKeeper: TypeAlias = CopyFrame | DropCopies | Take
OfKeeper: TypeAlias = Copied | Taken | Taking
"""What a keeper answers."""
PlaneToKeeper: TypeAlias = Enlisted | KeeperPulse
