"""The decisions that are neither a group accepted nor a step planned: small tagged records, as the log keeps them.

New kinds are appended, and new fields at the end of a kind; a plane that meets a kind it does not know refuses the
folder in words instead of guessing.
"""

from __future__ import annotations

from typing import TypeAlias

import msgspec

from penstock.errors import CorruptFile


class _Record(msgspec.Struct, frozen=True, array_like=True, kw_only=True, tag=True):
    pass


class Advance(_Record, frozen=True, tag="advance"):
    """The trainer published a policy version."""

    policy_version: int


class Prioritize(_Record, frozen=True, tag="priorities"):
    """New priorities, by group."""

    priorities: dict[str, float]
    step: int = 0
    """The step whose reports they combine; 0: none."""


class Quarantine(_Record, frozen=True, tag="quarantine"):
    """Groups that no step can be made with are set aside."""

    groups: dict[int, str]
    """Group, by op -> why."""


class Discard(_Record, frozen=True, tag="discard"):
    """Samples were filtered out before they became a group."""

    reason: str
    samples: int
    key: str = ""
    """Counted once under this name, however often it is said."""


class Weigh(_Record, frozen=True, tag="weigh"):
    """A run is given a share of the trainer, or another one."""

    run: str
    weight: float


class EvictRun(_Record, frozen=True, tag="evict"):
    """A run loses what it has waiting, and is refused from now on."""

    run: str
    reason: str


class ReleaseGroup(_Record, frozen=True, tag="release"):
    """A group in quarantine waits for training again."""

    op: int


class DropGroup(_Record, frozen=True, tag="drop"):
    """A group in quarantine is given up."""

    op: int


class Lose(_Record, frozen=True, tag="lose"):
    """Groups whose frames cannot be read any more."""

    groups: dict[int, str]
    """Group, by op -> why."""


class Shorten(_Record, frozen=True, tag="shorten"):
    """Samples longer than `seq_len` were truncated or dropped."""

    truncated_samples: int = 0
    truncated_tokens: int = 0
    dropped_samples: int = 0
    dropped_tokens: int = 0
    key: str = ""
    """The group, where all of its samples were dropped and there is no row of it."""


class Report(_Record, frozen=True, tag="report"):
    """A rank reported priorities, by group; they take effect when the step is committed."""

    step: int
    priorities: dict[str, float]


class GivePriorities(_Record, frozen=True, tag="give priorities"):
    """Groups that are accepted next are put with these priorities."""

    priorities: dict[str, float]


class ForgetReports(_Record, frozen=True, tag="forget reports"):
    """Steps from this one on are trained again: what was reported of them does not count."""

    first: int


Record: TypeAlias = (
    Advance
    | Prioritize
    | Quarantine
    | Discard
    | Weigh
    | EvictRun
    | ReleaseGroup
    | DropGroup
    | Lose
    | Shorten
    | Report
    | ForgetReports
    | GivePriorities
)

_PACK = msgspec.msgpack.Encoder()
_READ: msgspec.msgpack.Decoder[Record] = msgspec.msgpack.Decoder(Record)


def pack_record(record: Record) -> bytes:
    return _PACK.encode(record)


def read_record(data: bytes) -> Record:
    try:
        return _READ.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise CorruptFile(f"log: a decision cannot be read: {error}; restore the folder from a copy") from None
