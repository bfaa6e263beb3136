"""Rows of the log: groups, segments, and the states they are in."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import msgspec


class State(IntEnum):
    """Where a group is. Steps use SCHEDULED, DELIVERED and COMMITTED."""

    HELD = 0
    SCHEDULED = 1
    DELIVERED = 2
    COMMITTED = 3
    DROPPED = 4
    QUARANTINED = 5
    EVALUATION = 6
    """For good: it was put to be looked at, and no step may use it."""


STATES = tuple(State)
"""By number; ten times faster than `State(number)`, which counts when a long run is read again."""


@dataclass(frozen=True, slots=True)
class SegmentRow:
    """A segment that may hold frames."""

    name: str
    writer: str
    """Who writes it."""
    epoch: int
    """In which it was registered."""
    sealed_at: float = 0.0
    """Unix time; 0 while frames may still be accepted from it."""
    clean: bool = False
    """Whether all of it was accepted when it was sealed, so that it holds nothing the log does not know."""


@dataclass(frozen=True, slots=True)
class GroupRow:
    """What is decided with of a group; its metadata is beside it, its frame in storage."""

    op: int
    id: str
    digest: bytes
    policy_version: int | None
    """Of its oldest sample; None where no sample says."""
    samples: int
    tokens: int
    size: int
    """Bytes of its frame."""
    state: State = State.HELD
    reason: str = ""
    run: str = ""
    """The run it waits with; empty where runs are not kept apart."""
    prompt: str = ""
    kinds: tuple[tuple[str, str], ...] = ()
    """What all groups of a step must have in common, by column."""
    location: str = ""
    """Where its frame is; empty once it is freed."""


GROUP_COLUMNS = "op, id, digest, policy_version, samples, tokens, size, state, reason, run, prompt, kinds, location"
SELECT_GROUPS = f"SELECT {GROUP_COLUMNS} FROM groups"  # noqa: S608 - our own names
_KINDS: msgspec.msgpack.Decoder[tuple[tuple[str, str], ...]] = msgspec.msgpack.Decoder(tuple[tuple[str, str], ...])


def group_row(found: tuple[Any, ...]) -> GroupRow:
    values = list(found)
    values[7], values[11] = STATES[found[7]], _KINDS.decode(found[11])
    return GroupRow(*values)
