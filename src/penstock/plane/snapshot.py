"""Snapshots of a plane's memory, so that a restart need not apply every decision of a long run again.

A snapshot is only a shortcut: the log is the truth. A snapshot that cannot be read, or was made with other replay
settings, is ignored: then all decisions are applied again.
"""

from __future__ import annotations

from typing import Any

import msgspec
import xxhash

from penstock.plane.late_groups import WaitingGroup
from penstock.plane.lease_book import Lease
from penstock.plane.priorities import Reports
from penstock.plane.task_book import SavedList

FORMAT = 5


class SavedTables(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """A snapshot of `TenantTables`."""

    tables: dict[str, bytes]
    policy_version: int
    members: set[str]
    weights: dict[str, float]
    owed: dict[str, float]
    evicted: dict[str, str]
    taken: dict[str, int]
    overflow: dict[str, list[tuple[str, int, int, int, int, float, int]]] = {}
    """Table -> key, op, bytes, tokens, policy version, priority and dispatch of the groups that queue before it."""


class Saved(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """A snapshot of `PlaneState`, without rows and manifests, which are in the log."""

    format: int = FORMAT
    replay: str
    """`repr` of the replay settings. Other settings would have drawn other groups."""
    op: int
    ledger: dict[str, Any]
    policy_version: int
    next_step: int
    last_step: int
    oldest_step: int
    held_tokens: int
    bytes_of: dict[str, int]
    rows: list[int]
    """Ops of the groups in memory."""
    quarantined: list[int]
    last_step_of: dict[int, int]
    steps: dict[int, tuple[int, list[int]]]
    """Step -> (state, groups whose last use it is)."""
    tenant_tables: SavedTables
    reports: Reports = msgspec.field(default_factory=Reports)
    """Priorities that ranks reported."""
    waiting: dict[int, WaitingGroup] = {}
    """Groups that wait for columns, by op."""
    leases: list[Lease] = []
    """Open leases."""
    tasks: list[SavedList] = []
    usable_groups: int = 0
    bias: dict[str, tuple[float, float]] = {}
    published: list[int] = []
    """`PlaneState.published`."""

    def to_bytes(self) -> bytes:
        """Encode as a checksum and the content."""
        data = msgspec.msgpack.encode(self)
        return xxhash.xxh3_64_digest(data) + data

    @staticmethod
    def from_bytes(data: bytes, replay: str) -> Saved | None:
        """Decode a snapshot. Returns None if it is damaged, of another version, or of other replay settings."""
        if xxhash.xxh3_64_digest(data[8:]) != data[:8]:
            return None
        try:
            saved = _READ.decode(data[8:])
        except msgspec.DecodeError:
            return None
        return saved if saved.format == FORMAT and saved.replay == replay else None


# Made at import: msgspec crashes when two threads are the first to decode a type.
_READ = msgspec.msgpack.Decoder(Saved)
