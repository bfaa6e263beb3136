"""What became of groups, as the log stores it: rows that are appended, never changed, and read by `plane.feedback`.

Events are numbered from 1 without a gap. A row holds up to `MAX_EVENTS` of them, and its key is the number of the last.
Most events name a group by its op and nothing else: id, prompt and policy version are in the group's own row, and env,
rewards and lengths in its summary, which is written when the group is accepted and stays when its metadata is freed.
"""

from __future__ import annotations

import msgspec

from penstock.errors import CorruptFile

MAX_EVENTS = 1024
"""Events in one row, at most."""
MAX_SHOWN = 256
"""Samples of a group whose rewards and lengths are kept, at most."""


class Summary(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """What an event shows of a group beside its row. Arrays are little-endian bytes, one number per sample."""

    env: str = ""
    tenant: str = ""
    rewards: bytes = b""
    """float32; NaN: not scored. Empty if no sample has a reward."""
    lengths: bytes = b""
    """uint32: tokens."""


class Unlisted(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """A group that has no row in the log, because it was filtered out before it was put, or no sample fitted."""

    group: str = ""
    prompt: str = ""
    samples: int = 0
    summary: Summary = Summary()


class GroupOutcome(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """A row: one thing that happened to some groups."""

    outcome: str
    """trained, dropped, quarantined, filtered, evaluation or rewound."""
    reason: str = ""
    step: int = 0
    """The step that was trained, or the first one to be trained again."""
    policy_version: int = 0
    """The version that staleness counts from."""
    groups: tuple[int, ...] = ()
    """Ops of the groups."""
    unlisted: tuple[Unlisted, ...] = ()

    @property
    def num_events(self) -> int:
        return len(self.groups) + len(self.unlisted)


# Made at import: msgspec crashes when two threads are the first to decode a type.
_PACK = msgspec.msgpack.Encoder()
_READ_OUTCOME = msgspec.msgpack.Decoder(GroupOutcome)
_READ_SUMMARY = msgspec.msgpack.Decoder(Summary)


def pack_outcome(found: GroupOutcome | Summary) -> bytes:
    return _PACK.encode(found)


def read_outcome(data: bytes) -> GroupOutcome:
    try:
        return _READ_OUTCOME.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise CorruptFile(f"log: an outcome cannot be read: {error}; restore the folder from a copy") from None


def read_summary(data: bytes) -> Summary:
    try:
        return _READ_SUMMARY.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise CorruptFile(f"log: a group's summary cannot be read: {error}; restore the folder from a copy") from None
