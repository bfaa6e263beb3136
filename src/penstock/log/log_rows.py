"""Rows of the log: groups, segments, and the states they are in.

A field of a group's row is declared once, in `GroupRow`: its Python type, its column in SQLite and in PostgreSQL, and
how its value is stored. Tables, queries and inserts of both databases are made from that declaration. To add a field,
append one line there, raise `FORMAT` and say what logs that already exist get in its place.
"""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum
from functools import lru_cache
from operator import attrgetter
from typing import Annotated, Any

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
    """Final: the group was put for evaluation, and no step may train on it."""
    WAITING = 7
    """Accepted, and lacks columns that are attached later. It enters its table when it has them."""


STATES = tuple(State)
"""States by number. Ten times faster than `State(number)`, which matters when a long run is read again."""


@dataclass(frozen=True, slots=True)
class SegmentRow:
    """A segment that may hold frames."""

    name: str
    writer: str
    """The process that writes it."""
    epoch: int
    """The epoch in which it was registered."""
    sealed_at: float = 0.0
    """Unix time; 0 while frames may still be accepted from it."""
    clean: bool = False
    """Whether every frame in it was accepted when it was sealed, so that it holds nothing the log does not know."""


# ------------------------------------------------------------------ groups


@dataclass(frozen=True, slots=True)
class Column:
    """How a field of `GroupRow` is stored."""

    sqlite: str
    """Type and constraints in SQLite. Defaults stay as they were: other versions wrote logs with these tables."""
    postgres: str
    """Type in PostgreSQL."""
    rule: str = "NOT NULL"
    """Constraint in PostgreSQL."""
    write: Callable[[Any], Any] | None = None
    """Convert the field's value to what the database stores; None: stored as it is."""
    read: Callable[[Any], Any] | None = None


NO_KINDS = msgspec.msgpack.encode(())
_DECODER: msgspec.msgpack.Decoder[tuple[tuple[str, str], ...]] = msgspec.msgpack.Decoder(tuple[tuple[str, str], ...])


@lru_cache(maxsize=256)
def _kinds(data: bytes) -> tuple[tuple[str, str], ...]:
    """Decode the kinds of a group. Cached: a run has a few, and a restart reads every row."""
    return _DECODER.decode(data)


@dataclass(frozen=True, slots=True)
class GroupRow:
    """What the plane decides with: one accepted group. Its metadata is in a table beside it, its frame in storage."""

    op: Annotated[int, Column("INTEGER PRIMARY KEY", "bigint")]
    """Number of the decision that accepted it: groups sort by arrival."""
    id: Annotated[str, Column("TEXT NOT NULL UNIQUE", "text")]
    digest: Annotated[bytes, Column("BLOB NOT NULL", "bytea")]
    """XXH3-128 of its frame."""
    policy_version: Annotated[int | None, Column("INTEGER", "bigint", rule="")]
    """Policy version of its oldest sample; None if no sample has one."""
    samples: Annotated[int, Column("INTEGER NOT NULL", "bigint")]
    tokens: Annotated[int, Column("INTEGER NOT NULL", "bigint")]
    size: Annotated[int, Column("INTEGER NOT NULL", "bigint")]
    """Bytes of its frame."""
    state: Annotated[State, Column("INTEGER NOT NULL", "smallint", write=int, read=STATES.__getitem__)] = State.HELD
    reason: Annotated[str, Column("TEXT NOT NULL DEFAULT ''", "text")] = ""
    """Why it was dropped or quarantined."""
    # Memory keeps its own counts and never compares times, so two rows are equal whatever these two say.
    uses: Annotated[int, Column("INTEGER NOT NULL DEFAULT 0", "bigint", rule="NOT NULL DEFAULT 0")] = dataclasses.field(
        default=0, compare=False
    )
    """How often a step has drawn it, as the log had it when the row was read."""
    run: Annotated[str, Column("TEXT NOT NULL DEFAULT ''", "text")] = ""
    """The tenant whose table it waits in; empty where tenants share one table."""
    prompt: Annotated[str, Column("TEXT NOT NULL DEFAULT ''", "text")] = ""
    kinds: Annotated[
        tuple[tuple[str, str], ...],
        Column("BLOB NOT NULL DEFAULT x'80'", "bytea", write=msgspec.msgpack.encode, read=_kinds),
    ] = ()
    """What all groups of a step must have in common, by column. Forgotten with the frame."""
    location: Annotated[str, Column("TEXT NOT NULL DEFAULT ''", "text")] = ""
    """Where its frame is; empty once the frame is freed."""
    at: Annotated[float, Column("REAL NOT NULL DEFAULT 0", "double precision")] = dataclasses.field(
        default=0.0, compare=False
    )
    """Unix time at which it was accepted. No decision depends on it; a replay at the original speed does."""

    @property
    def is_evaluation(self) -> bool:
        return self.state is State.EVALUATION


def _declared() -> dict[str, Column]:
    """Each field of `GroupRow` with its column, in order."""
    hints = typing.get_type_hints(GroupRow, include_extras=True)
    return {field.name: hints[field.name].__metadata__[0] for field in dataclasses.fields(GroupRow)}


COLUMNS_OF_GROUPS = _declared()
GROUP_COLUMNS = ", ".join(COLUMNS_OF_GROUPS)
SELECT_GROUPS = f"SELECT {GROUP_COLUMNS} FROM groups"  # noqa: S608 - our own names
_FIELDS = attrgetter(*COLUMNS_OF_GROUPS)
_WRITES = [(place, column.write) for place, column in enumerate(COLUMNS_OF_GROUPS.values()) if column.write]
_READS = [(place, column.read) for place, column in enumerate(COLUMNS_OF_GROUPS.values()) if column.read]


def group_row(found: tuple[Any, ...]) -> GroupRow:
    """Make a row from what `SELECT_GROUPS` returned."""
    values = list(found)
    for place, read in _READS:
        values[place] = read(values[place])
    return GroupRow(*values)


def group_values(row: GroupRow) -> tuple[Any, ...]:
    """Return the values to store for a row, in the order of `GROUP_COLUMNS`."""
    values = list(_FIELDS(row))
    for place, write in _WRITES:
        values[place] = write(values[place])
    return tuple(values)
