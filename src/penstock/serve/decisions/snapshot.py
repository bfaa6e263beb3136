"""What a plane's memory holds, in a form that can be kept: so that a restart need not do again all a long run ever did.

It is never the truth, only a shorter way to it. One that cannot be read, or was made with other replay settings, is
left aside, and everything is done again from the log.
"""

from __future__ import annotations

from typing import Any

import msgspec
import xxhash

from penstock.serve.decisions.priorities import Reports

FORMAT = 3


class SavedTables(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """Of `RunTables`."""

    tables: dict[str, bytes]
    policy_version: int
    members: set[str]
    weights: dict[str, float]
    owed: dict[str, float]
    evicted: dict[str, str]
    taken: dict[str, int]
    lines: dict[str, list[tuple[str, int, int, int, int, float]]] = {}
    """Table -> key, op, bytes, tokens, policy version and priority of the groups that wait before it."""


class Saved(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """Of `PlaneState`; rows and manifests are not repeated, the log has them."""

    format: int = FORMAT
    replay: str
    """The settings of the tables, in words; others would have drawn something else."""
    op: int
    ledger: dict[str, Any]
    policy_version: int
    next_step: int
    last_step: int
    oldest_step: int
    held_tokens: int
    bytes_of: dict[str, int]
    unpackable: dict[str, int]
    rows: list[int]
    """The groups that memory knows, by op."""
    quarantined: list[int]
    last_step_of: dict[int, int]
    steps: dict[int, tuple[int, list[int]]]
    """Step -> (state, the groups whose last use it is)."""
    run_tables: SavedTables
    reports: Reports = msgspec.field(default_factory=Reports)
    """Priorities that ranks reported."""

    def to_bytes(self) -> bytes:
        """A checksum and the content."""
        data = msgspec.msgpack.encode(self)
        return xxhash.xxh3_64_digest(data) + data

    @staticmethod
    def from_bytes(data: bytes, replay: str) -> Saved | None:
        """What was saved; None if it is of no use here."""
        if xxhash.xxh3_64_digest(data[8:]) != data[:8]:
            return None
        try:
            saved = _READ.decode(data[8:])
        except msgspec.DecodeError:
            return None
        return saved if saved.format == FORMAT and saved.replay == replay else None


# Made at import: msgspec crashes when two threads are the first to decode a type.
_READ = msgspec.msgpack.Decoder(Saved)
