"""Rows and tables of the log, declared once for SQLite and PostgreSQL.

`TABLES` lists every table. A field of a group's row is declared in `GroupRow`: its Python type, its column, and how its
value is stored. Tables, queries and inserts of both databases are made from these declarations. To add a field, append
one line there, raise `FORMAT` and say what logs that already exist get in its place.
"""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import IntEnum
from functools import lru_cache
from operator import attrgetter
from typing import Annotated, Any, TypeVar

import msgspec

from penstock.errors import CorruptFile

_T = TypeVar("_T")


class State(IntEnum):
    """The state of a group. Steps use SCHEDULED, DELIVERED and COMMITTED."""

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


def state_of(number: object) -> State:
    """Return the state that a log has as a number. Raises CorruptFile if there is none."""
    if isinstance(number, int) and 0 <= number < len(STATES):
        return STATES[number]
    raise CorruptFile(f"log: a group or step has state {number!r:.40}; states 0 to {len(STATES) - 1} are known")


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
    """Whether every frame in it had been accepted when it was sealed. Then it holds nothing that the log does not know.
    """


# ------------------------------------------------------------------ groups


@dataclass(frozen=True, slots=True)
class Column:
    """How a field of `GroupRow` is stored."""

    kind: str
    """Its type: a key of the databases' `TYPES`."""
    rule: str = "NOT NULL"
    """Its constraint."""
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
    """One accepted group, as the plane decides with it. Its metadata is in another table, its frame in storage."""

    op: Annotated[int, Column("int")]
    """Number of the decision that accepted it: groups sort by arrival."""
    id: Annotated[str, Column("text", rule="NOT NULL UNIQUE")]
    digest: Annotated[bytes, Column("blob")]
    """XXH3-128 of its frame."""
    policy_version: Annotated[int | None, Column("int", rule="")]
    """Policy version of its oldest sample; None if no sample has one."""
    samples: Annotated[int, Column("int")]
    tokens: Annotated[int, Column("int")]
    size: Annotated[int, Column("int")]
    """Bytes of its frame."""
    state: Annotated[State, Column("small", write=int, read=state_of)] = State.HELD
    reason: Annotated[str, Column("text")] = ""
    """Why it was dropped or quarantined."""
    # Memory keeps its own counts and never compares times, so two rows are equal whatever these two say.
    uses: Annotated[int, Column("int")] = dataclasses.field(default=0, compare=False)
    """How often a step has drawn it, as the log had it when the row was read."""
    run: Annotated[str, Column("text")] = ""
    """The tenant whose table it waits in; empty where tenants share one table."""
    prompt: Annotated[str, Column("text")] = ""
    kinds: Annotated[tuple[tuple[str, str], ...], Column("blob", write=msgspec.msgpack.encode, read=_kinds)] = ()
    """What all groups of a step must have in common, by column. Forgotten with the frame."""
    location: Annotated[str, Column("text")] = ""
    """Where its frame is; empty once the frame is freed."""
    at: Annotated[float, Column("real")] = dataclasses.field(default=0.0, compare=False)
    """Unix time at which it was accepted. No decision depends on it; a replay at the original speed does."""

    @property
    def is_evaluation(self) -> bool:
        return self.state is State.EVALUATION


def _declared() -> dict[str, Column]:
    """Return each field of `GroupRow` with its column, in order."""
    hints = typing.get_type_hints(GroupRow, include_extras=True)
    return {field.name: hints[field.name].__metadata__[0] for field in dataclasses.fields(GroupRow)}


COLUMNS_OF_GROUPS = _declared()
GROUP_COLUMNS = ", ".join(COLUMNS_OF_GROUPS)
SELECT_GROUPS = f"SELECT {GROUP_COLUMNS} FROM groups"  # noqa: S608 - our own names
FIELDS_OF_GROUPS = attrgetter(*COLUMNS_OF_GROUPS)
WRITES_OF_GROUPS = [(place, column.write) for place, column in enumerate(COLUMNS_OF_GROUPS.values()) if column.write]
_READS = [(place, column.read) for place, column in enumerate(COLUMNS_OF_GROUPS.values()) if column.read]


def group_row(found: tuple[Any, ...]) -> GroupRow:
    """Make a row from what `SELECT_GROUPS` returned."""
    values = list(found)
    try:
        for place, read in _READS:
            values[place] = read(values[place])
    except (TypeError, msgspec.DecodeError, UnicodeDecodeError) as error:
        column = list(COLUMNS_OF_GROUPS)[place]
        raise CorruptFile(
            f"log: group {found[1]!r:.60}: {column} cannot be read: {error}; restore it from a copy"
        ) from None
    return GroupRow(*values)


# ------------------------------------------------------------------ tables

TABLES: dict[str, dict[str, str]] = {
    "meta": {"name": "text", "value": "any"},
    "groups": {name: column.kind for name, column in COLUMNS_OF_GROUPS.items()},
    "facts": {"op": "int", "facts": "blob"},
    "records": {"op": "int", "data": "blob"},
    "discards": {"name": "text"},
    "snapshots": {"op": "int", "data": "blob"},
    "steps": {"step": "int", "op": "int", "manifest": "blob", "state": "small"},
    "segments": {"name": "text", "writer": "text", "epoch": "int", "sealed_at": "real", "clean": "small"},
    "frees": {"name": "text"},
    "prompts": {"number": "int", "name": "text", "payload": "blob"},
    "summaries": {"op": "int", "data": "blob"},
    "outcomes": {"number": "int", "data": "blob"},
}
"""Table -> column -> kind. The first column of a table is its key."""


def definitions(table: str, types: Mapping[str, str]) -> str:
    """Return the columns of a table as CREATE TABLE takes them. `types` maps kinds to types of the database."""
    key, *_ = columns = TABLES[table]
    rules = {name: COLUMNS_OF_GROUPS[name].rule if table == "groups" else "NOT NULL" for name in columns}
    rules[key] = "PRIMARY KEY"
    return ", ".join(f"{name} {types[kind]} {rules[name]}" for name, kind in columns.items())


# ------------------------------------------------------------------ what became of groups
#
# Rows that are appended, never changed, and read by `plane.feedback`. Events are numbered from 1 without a gap. A row
# holds up to `MAX_EVENTS` of them, and its key is the number of the last. Most events name a group only by its op: id,
# prompt and policy version are in the group's own row, and env, rewards and lengths in its summary, which is written
# when the group is accepted and stays when its metadata is freed.

MAX_EVENTS = 1024
"""Events in one row, at most."""
MAX_SHOWN = 256
"""Samples of a group whose rewards and lengths are kept, at most."""


class Summary(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """The part of an event that is not in its group's row. Arrays are little-endian bytes, one number per sample."""

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
pack_outcome = msgspec.msgpack.Encoder().encode
"""Packs a `GroupOutcome` or a `Summary`."""
_READ_OUTCOME = msgspec.msgpack.Decoder(GroupOutcome)
_READ_SUMMARY = msgspec.msgpack.Decoder(Summary)


def read_outcome(data: bytes) -> GroupOutcome:
    return _decoded(_READ_OUTCOME, data, "an outcome")


def read_summary(data: bytes) -> Summary:
    return _decoded(_READ_SUMMARY, data, "a group's summary")


def _decoded(decoder: msgspec.msgpack.Decoder[_T], data: bytes, what: str) -> _T:
    try:
        return decoder.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise CorruptFile(f"log: {what} cannot be read: {error}; restore the folder from a copy") from None
