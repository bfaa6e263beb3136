"""Reads a log. Every query is written once, in SQL that SQLite and PostgreSQL both understand.

A `?` stands for a value. Sums are cast, because the sum of bigints is a decimal in PostgreSQL.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from penstock.log.decision_records import Record, read_record
from penstock.log.log_rows import (
    SELECT_GROUPS,
    STATES,
    GroupOutcome,
    GroupRow,
    SegmentRow,
    State,
    Summary,
    group_row,
    read_outcome,
    read_summary,
)

_SELECT_PROMPTS = "SELECT number, name, payload FROM prompts WHERE number"


class LogReader(ABC):
    """A log to read. A reader that is no `Log` sees one consistent state, even while a plane writes."""

    where: str
    """The log's name in messages: a path, or an address without secrets."""

    @abstractmethod
    def rows(self, query: str, values: Sequence[Any] = ()) -> Iterable[tuple[Any, ...]]:
        """Run a query."""

    @abstractmethod
    def tables(self) -> set[str]:
        """Return the existing tables. Some are missing if a plane was killed while creating them."""

    def damage(self) -> str:
        """Have the database check itself. Returns what is damaged, or "" if nothing is or it cannot tell."""
        return ""

    def is_open(self) -> bool | None:
        """Return whether a plane has the log open now; None if the database does not know."""
        return None

    def first(self, query: str, values: Sequence[Any] = ()) -> tuple[Any, ...] | None:
        """Return the first row, or None."""
        return next(iter(self.rows(query, values)), None)

    def all_meta(self) -> dict[str, str]:
        """Return all named values, as text."""
        return {str(name): str(value) for name, value in self.rows("SELECT name, value FROM meta")}

    # -------------------------------------------------------------- values by name

    def meta(self, name: str, default: int) -> int:
        row = self.first("SELECT value FROM meta WHERE name = ?", (name,))
        return default if row is None else int(row[0])

    def text(self, name: str) -> str:
        """Return a named value as text, or "" if there is none."""
        row = self.first("SELECT value FROM meta WHERE name = ?", (name,))
        return "" if row is None else str(row[0])

    def texts(self, prefix: str) -> dict[str, str]:
        """Return all values whose names begin with `prefix`."""
        # A range instead of LIKE: the key's index serves it, and % or _ in a name means nothing special.
        query = "SELECT name, value FROM meta WHERE name >= ? AND name < ?"
        return {name: str(value) for name, value in self.rows(query, (prefix, prefix + "\U0010ffff"))}

    # -------------------------------------------------------------- groups

    def digest_of(self, group: str) -> bytes | None:
        row = self.first("SELECT digest FROM groups WHERE id = ?", (group,))
        return None if row is None else row[0]

    def location_of(self, group: str) -> str:
        """Return where a group's frame is, or "" if the group is unknown or its frame was freed."""
        row = self.first("SELECT location FROM groups WHERE id = ?", (group,))
        return "" if row is None else str(row[0])

    def location_at(self, op: int) -> str:
        """Return where a group's frame is, by the group's op."""
        row = self.first("SELECT location FROM groups WHERE op = ?", (op,))
        return "" if row is None else str(row[0])

    def is_evaluation(self, group: str) -> bool:
        row = self.first("SELECT state FROM groups WHERE id = ?", (group,))
        return row is not None and row[0] == State.EVALUATION

    def states_of(self, groups: Sequence[str]) -> dict[str, tuple[int, State, str]]:
        """Return op, recorded state and reason of groups, by id. Unknown ones are left out."""
        found = self._keyed("SELECT id, op, state, reason FROM groups WHERE id", groups)
        return {group: (op, State(state), reason) for group, op, state, reason in found}

    def is_discarded(self, name: str) -> bool:
        return self.first("SELECT 1 FROM discards WHERE name = ?", (name,)) is not None

    def metadata(self, op: int) -> bytes | None:
        return self.metadata_of([op]).get(op)

    def metadata_of(self, ops: Sequence[int]) -> dict[int, bytes]:
        """Return the metadata of groups, by op. Groups that were freed have none."""
        return dict(self._keyed("SELECT op, facts FROM facts WHERE op", ops))

    def locations(self) -> list[str]:
        """Return the locations of all frames that are not freed."""
        return [found for (found,) in self.rows("SELECT location FROM groups WHERE location != ''")]

    @property
    def num_frames(self) -> int:
        """Number of frames the log needs."""
        row = self.first("SELECT COUNT(*) FROM groups WHERE location != ''")
        return 0 if row is None else int(row[0])

    def select_groups(self, rest: str, values: Sequence[Any] = ()) -> list[GroupRow]:
        """Return the groups of a query, given what follows its FROM: WHERE, ORDER BY, LIMIT."""
        return list(map(group_row, self.rows(f"{SELECT_GROUPS} {rest}", values)))

    def groups_in(self, state: State) -> list[GroupRow]:
        """Return the groups recorded in a state, in order of arrival."""
        return self.select_groups("WHERE state = ? ORDER BY op", (int(state),))

    def groups(self, *, after: int = 0) -> Iterator[GroupRow]:
        """Yield all groups accepted after decision `after`, in order."""
        yield from map(group_row, self._ordered(SELECT_GROUPS, "op", after))

    def groups_of(self, ops: Iterable[int]) -> Iterator[GroupRow]:
        """Yield the groups with these ops, in the order given. Unknown ops are left out."""
        yield from map(group_row, self._keyed(f"{SELECT_GROUPS} WHERE op", list(ops)))

    def with_frames(self) -> set[int]:
        """Return the ops of groups whose frames are not freed."""
        return {op for (op,) in self.rows("SELECT op FROM facts")}

    def totals(self) -> dict[tuple[State, str], int]:
        """Return the number of samples by recorded state and reason."""
        query = "SELECT state, reason, CAST(SUM(samples) AS BIGINT) FROM groups GROUP BY state, reason"
        return {(State(state), reason): samples for state, reason, samples in self.rows(query)}

    # -------------------------------------------------------------- decisions and steps

    @property
    def last_op(self) -> int:
        """Number of the last decision in the log."""
        # Snapshots too: the decisions before one may be gone from the other tables.
        tables = ("groups", "records", "steps", "snapshots")
        found = (self.first(f"SELECT MAX(op) FROM {name}") for name in tables)  # noqa: S608 - our own names
        return max((row[0] or 0) if row is not None else 0 for row in found)

    def has_steps(self, first: int = 1) -> bool:
        """Return whether step `first` or a later one is planned."""
        return self.first("SELECT 1 FROM steps WHERE step >= ? LIMIT 1", (first,)) is not None

    def snapshot(self) -> tuple[int, bytes] | None:
        """Return (op, what memory held after that decision), or None if no snapshot was taken yet."""
        row = self.first("SELECT op, data FROM snapshots")
        return None if row is None else (row[0], row[1])

    def records(self, *, after: int = 0) -> Iterator[tuple[int, Record]]:
        """Yield (op, record) after decision `after`, in order."""
        for op, data in self._ordered("SELECT op, data FROM records", "op", after):
            yield op, read_record(data)

    def steps(self, *, first: int = 1) -> Iterator[tuple[int, int, bytes, State]]:
        """Yield (step, op, manifest, state) from step `first` on, in order."""
        for step, op, manifest, state in self._ordered(
            "SELECT step, op, manifest, state FROM steps", "step", first - 1
        ):
            yield step, op, manifest, STATES[state]

    # -------------------------------------------------------------- what became of groups

    @property
    def num_events(self) -> int:
        """Number of events of groups so far."""
        row = self.first("SELECT MAX(number) FROM outcomes")
        return (row[0] or 0) if row is not None else 0

    def outcomes(self, after: int, most: int) -> list[tuple[int, GroupOutcome]]:
        """Return up to `most` rows of outcomes, each with the number of its last event, from the row of event
        `after` + 1 on."""
        found = self.rows("SELECT number, data FROM outcomes WHERE number > ? ORDER BY number LIMIT ?", (after, most))
        return [(number, read_outcome(data)) for number, data in found]

    def summaries(self, ops: Sequence[int]) -> dict[int, Summary]:
        """Return the summaries of groups, by op. Groups of earlier versions have none."""
        found = self._keyed("SELECT op, data FROM summaries WHERE op", ops)
        return {op: read_summary(data) for op, data in found}

    # -------------------------------------------------------------- segments, and what is to be deleted

    def segments(self) -> list[SegmentRow]:
        found = self.rows("SELECT name, writer, epoch, sealed_at, clean FROM segments")
        return [SegmentRow(name, writer, epoch, at, bool(clean)) for name, writer, epoch, at, clean in found]

    def frees(self) -> list[str]:
        return [name for (name,) in self.rows("SELECT name FROM frees")]

    # -------------------------------------------------------------- prompts

    def prompts_of(self, rows: Sequence[int]) -> dict[int, tuple[str, bytes]]:
        """Return name and payload of prompts, by row."""
        return {row: (name, payload) for row, name, payload in self._keyed(_SELECT_PROMPTS, rows)}

    def prompt_names(self, first: int, count: int) -> list[str]:
        """Return the names of `count` prompts from row `first` on."""
        query = "SELECT name FROM prompts WHERE number >= ? AND number < ? ORDER BY number"
        return [name for (name,) in self.rows(query, (first, first + count))]

    def _ordered(self, query: str, key: str, after: int) -> Iterable[tuple[Any, ...]]:
        """Return the rows whose key is greater than `after`, ordered by key. The key is the query's first column."""
        return self.rows(f"{query} WHERE {key} > ? ORDER BY {key}", (after,))

    def _keyed(self, query: str, keys: Sequence[int] | Sequence[str]) -> Iterator[tuple[Any, ...]]:
        """Yield the rows with these keys, in this order. The query begins and ends with the name of its key."""
        for key in keys:
            yield from self.rows(f"{query} = ?", (key,))
