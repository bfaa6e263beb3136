"""Decisions other than "group accepted" and "step planned": small tagged records, as the log stores them.

Append new kinds at the end, and new fields at the end of a kind. A plane that reads a kind it does not know refuses the
folder with an error instead of guessing.
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
    """Groups get new priorities."""

    priorities: dict[str, float]
    """Group id -> priority."""
    step: int = 0
    """The step whose reports they combine; 0: none."""


class Quarantine(_Record, frozen=True, tag="quarantine"):
    """Groups that no step can be made with are set aside."""

    groups: dict[int, str]
    """Op of the group -> reason."""


class Discard(_Record, frozen=True, tag="discard"):
    """Samples were filtered out before they became a group."""

    reason: str
    samples: int
    key: str = ""
    """Counted once under this name, however often the request is repeated."""


class Weigh(_Record, frozen=True, tag="weigh"):
    """A tenant's share of the trainer is set."""

    tenant: str
    weight: float


class EvictTenant(_Record, frozen=True, tag="evict"):
    """A tenant's waiting groups are dropped, and its puts are rejected from now on."""

    tenant: str
    reason: str


class ReleaseGroup(_Record, frozen=True, tag="release"):
    """A group leaves quarantine and waits for training again."""

    op: int


class DropGroup(_Record, frozen=True, tag="drop"):
    """A group in quarantine is dropped."""

    op: int


class Lose(_Record, frozen=True, tag="lose"):
    """Groups that wait for training are dropped: their frames cannot be read, or no sample fits `seq_len`."""

    groups: dict[int, str]
    """Op of the group -> what happened."""
    reason: str = "lost"
    """The reason that the ledger counts them under."""


class Shorten(_Record, frozen=True, tag="shorten"):
    """Samples longer than `seq_len` were truncated or dropped."""

    truncated_samples: int = 0
    truncated_tokens: int = 0
    dropped_samples: int = 0
    dropped_tokens: int = 0
    key: str = ""
    """The group's id, if all of its samples were dropped and it has no row of its own."""


class Report(_Record, frozen=True, tag="report"):
    """A rank reported priorities, by group. They take effect when the step is committed."""

    step: int
    priorities: dict[str, float]


class GivePriorities(_Record, frozen=True, tag="give priorities"):
    """The groups accepted next enter their table with these priorities."""

    priorities: dict[str, float]


class ForgetReports(_Record, frozen=True, tag="forget reports"):
    """Steps from `first` on are trained again, so earlier reports about them do not count."""

    first: int


class Awaited(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """The columns that a group waits for, and what to compute when it has them."""

    columns: dict[str, tuple[int, ...]]
    """Column -> the samples that lack it, by position."""
    advantage: str = ""
    """The advantage to compute when the rewards are there, by name; empty: none."""
    filters: tuple[str, ...] = ()
    """Filters to apply then, by name."""
    at: float = 0.0
    """Unix time of the put."""
    epoch: int = 0
    """The epoch in which it was put; 0 in logs of earlier versions."""


class AwaitColumns(_Record, frozen=True, tag="await columns"):
    """The groups accepted next lack columns that are attached later."""

    groups: dict[str, Awaited]
    """By id."""


class AttachColumn(_Record, frozen=True, tag="attach column"):
    """Samples of a group that waits get values."""

    group: int
    """Its op."""
    column: str
    values: dict[int, float]
    """By position of the sample."""
    errors: dict[int, str] = {}
    """Position of a sample that could not be scored -> why."""
    digests: dict[int, bytes] = {}
    """Of a column that is stored in the frame: position of a sample -> digest of its values."""
    location: str = ""
    """The frame that has these values, in place of the one before; empty if the frame stays."""


class AdmitGroup(_Record, frozen=True, tag="admit group"):
    """A group no longer waits for columns: it enters its table, or is dropped."""

    group: int
    """Its op."""
    kinds: tuple[tuple[str, str], ...] = ()
    """What all groups of its step must have in common with it, now that it has its columns."""
    reason: str = ""
    """Why it is dropped; empty: it enters its table."""
    overdue: bool = False
    """Whether its columns did not come in time."""


class HandOut(_Record, frozen=True, tag="hand out"):
    """Work is leased to a process. The leases are numbered from this decision on, and take as many numbers."""

    kind: str
    """"prompt" or "column"."""
    keys: tuple[str, ...]
    """What is leased: tasks, or columns of groups."""
    worker: str
    """The process that works on it."""
    lease_s: float
    """Seconds without a renewal after which a lease returns. Only the plane's clock decides when that is."""
    seen: int = 0
    """The last event from which the curriculum that chose these prompts had learned; 0: there is no curriculum."""


class ReturnLeases(_Record, frozen=True, tag="return leases"):
    """Leases end without a result."""

    leases: tuple[int, ...]
    reason: str = ""
    """Why the work failed. Empty if the process ended or stopped, which says nothing about the work."""
    expired: bool = False
    """Whether they ran out. Then their process is probably dead."""


class OpenList(_Record, frozen=True, tag="open list"):
    """A list of prompts is opened, changed or given other settings. Its prompts are in the table `prompts`."""

    list: str
    """Its name."""
    digest: bytes
    """XXH3-128 of its prompts."""
    base: int
    """Row of its first prompt."""
    count: int
    epochs: int
    seed: int
    shuffle: bool
    attempts: int
    """How often a prompt of an epoch is tried at most."""
    again: tuple[str, ...]
    """Reasons for which a dropped group is made again."""
    tenant: str = ""
    places: bytes = b""
    """Number of each prompt, as little-endian uint32. Empty: 0, 1, 2, ... A prompt keeps its number in later lists."""
    max_expiries: int | None = None
    """Leases in a row that may run out before a prompt is given up for this epoch. None: any number."""
    order: str = ""
    """The curriculum that draws prompts, by the name of its class; empty: every prompt once per epoch."""
    parameters: bytes = b""
    """Of the curriculum, as JSON."""
    arms: tuple[str, ...] = ()
    arm_of: bytes = b""
    """The arm of each prompt of the list, as little-endian uint16."""
    since: int = 0
    """The last event before the list was opened first: its curriculum learns from those after it."""


Record: TypeAlias = (
    Advance
    | Prioritize
    | Quarantine
    | Discard
    | Weigh
    | EvictTenant
    | ReleaseGroup
    | DropGroup
    | Lose
    | Shorten
    | Report
    | ForgetReports
    | GivePriorities
    | AwaitColumns
    | AttachColumn
    | AdmitGroup
    | HandOut
    | ReturnLeases
    | OpenList
)

_PACK = msgspec.msgpack.Encoder()
_READ: msgspec.msgpack.Decoder[Record] = msgspec.msgpack.Decoder(Record)


def numbers_taken(record: Record) -> int:
    """Return how many decision numbers a record takes: one, or one for each lease that it hands out."""
    return len(record.keys) if isinstance(record, HandOut) else 1


def pack_record(record: Record) -> bytes:
    return _PACK.encode(record)


def read_record(data: bytes) -> Record:
    try:
        return _READ.decode(data)
    except (msgspec.DecodeError, TypeError, UnicodeDecodeError) as error:
        raise CorruptFile(f"log: a decision cannot be read: {error}; restore the folder from a copy") from None
