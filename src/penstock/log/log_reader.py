"""Reads a log. Every query is written once, in SQL that SQLite and PostgreSQL both understand.

A `?` stands for a value. Sums are cast, because PostgreSQL adds integers up to decimals.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from penstock.log.decision_records import Record, read_record
from penstock.log.log_rows import SELECT_GROUPS, STATES, GroupRow, SegmentRow, State, group_row

TABLES = ("meta", "groups", "facts", "records", "discards", "snapshots", "steps", "segments", "frees")


class LogReader(ABC):
    """What a log says. A reader that is no `Log` sees one moment of it, also while a plane writes."""

    where: str
    """Names the log in messages: a path, or an address without secrets."""

    @abstractmethod
    def rows(self, query: str, values: Sequence[Any] = ()) -> Iterable[tuple[Any, ...]]:
        """Return what a query finds."""

    @abstractmethod
    def tables(self) -> set[str]:
        """The tables that there are: fewer than `TABLES` in a log whose plane was killed while it made them."""

    @abstractmethod
    def damage(self) -> str:
        """Have the database look for damage in itself; empty if there is none, or it cannot tell."""

    def first(self, query: str, values: Sequence[Any] = ()) -> tuple[Any, ...] | None:
        """Return the first row, or None."""
        return next(iter(self.rows(query, values)), None)

    def all_meta(self) -> dict[str, str]:
        """Everything that is remembered by name, as text."""
        return {str(name): str(value) for name, value in self.rows("SELECT name, value FROM meta")}

    # -------------------------------------------------------------- values by name

    def meta(self, name: str, default: int) -> int:
        row = self.first("SELECT value FROM meta WHERE name = ?", (name,))
        return default if row is None else int(row[0])

    def text(self, name: str) -> str:
        """What is remembered under a name, as text; empty if nothing is."""
        row = self.first("SELECT value FROM meta WHERE name = ?", (name,))
        return "" if row is None else str(row[0])

    def texts(self, prefix: str) -> dict[str, str]:
        """Everything that is remembered under names that begin with this."""
        query = "SELECT name, value FROM meta WHERE name >= ? AND name < ?"
        return {name: str(value) for name, value in self.rows(query, (prefix, prefix + "\U0010ffff"))}

    # -------------------------------------------------------------- groups

    def digest_of(self, group: str) -> bytes | None:
        row = self.first("SELECT digest FROM groups WHERE id = ?", (group,))
        return None if row is None else row[0]

    def location_of(self, group: str) -> str:
        """Where a group's frame is; empty if it is unknown, or its frame was freed."""
        row = self.first("SELECT location FROM groups WHERE id = ?", (group,))
        return "" if row is None else str(row[0])

    def location_at(self, op: int) -> str:
        """The same, by the decision's number."""
        row = self.first("SELECT location FROM groups WHERE op = ?", (op,))
        return "" if row is None else str(row[0])

    def is_evaluation(self, group: str) -> bool:
        row = self.first("SELECT state FROM groups WHERE id = ?", (group,))
        return row is not None and row[0] == State.EVALUATION

    def is_discarded(self, name: str) -> bool:
        return self.first("SELECT 1 FROM discards WHERE name = ?", (name,)) is not None

    def metadata(self, op: int) -> bytes | None:
        return self.metadata_of([op]).get(op)

    def metadata_of(self, ops: Sequence[int]) -> dict[int, bytes]:
        """The metadata of groups, by op; of groups that were freed there is none."""
        return dict(self._keyed("SELECT op, facts FROM facts WHERE op", ops))

    def locations(self) -> list[str]:
        """Return where the frames are that are not freed."""
        return [found for (found,) in self.rows("SELECT location FROM groups WHERE location != ''")]

    @property
    def num_frames(self) -> int:
        """How many frames the log needs."""
        row = self.first("SELECT COUNT(*) FROM groups WHERE location != ''")
        return 0 if row is None else int(row[0])

    def groups_in(self, state: State) -> list[GroupRow]:
        """The groups that are recorded in a state, in order."""
        return list(map(group_row, self.rows(f"{SELECT_GROUPS} WHERE state = ? ORDER BY op", (int(state),))))

    def groups(self, *, after: int = 0) -> Iterator[GroupRow]:
        """All groups behind a decision, in order, without their frames."""
        yield from map(group_row, self._ordered(SELECT_GROUPS, "op", after))

    def groups_of(self, ops: Iterable[int]) -> Iterator[GroupRow]:
        """These groups, without their frames."""
        yield from map(group_row, self._keyed(f"{SELECT_GROUPS} WHERE op", list(ops)))

    def with_frames(self) -> set[int]:
        """Return the groups whose frames are not freed."""
        return {op for (op,) in self.rows("SELECT op FROM facts")}

    def totals(self) -> dict[tuple[State, str], int]:
        """Samples by recorded state and reason."""
        query = "SELECT state, reason, CAST(SUM(samples) AS BIGINT) FROM groups GROUP BY state, reason"
        return {(State(state), reason): samples for state, reason, samples in self.rows(query)}

    # -------------------------------------------------------------- decisions and steps

    @property
    def last_op(self) -> int:
        """The number of the last decision that is written down."""
        tables = ("groups", "records", "steps", "snapshots")
        found = (self.first(f"SELECT MAX(op) FROM {name}") for name in tables)  # noqa: S608 - our own names
        return max((row[0] or 0) if row is not None else 0 for row in found)

    @property
    def has_steps(self) -> bool:
        return self.first("SELECT 1 FROM steps LIMIT 1") is not None

    def steps_from(self, first: int) -> bool:
        """Whether this step or a later one is planned."""
        return self.first("SELECT 1 FROM steps WHERE step >= ? LIMIT 1", (first,)) is not None

    def snapshot(self) -> tuple[int, bytes] | None:
        """(decision, what memory held after it), if it was ever kept."""
        row = self.first("SELECT op, data FROM snapshots")
        return None if row is None else (row[0], row[1])

    def records(self, *, after: int = 0) -> Iterator[tuple[int, Record]]:
        """(op, decision) behind a decision, in order."""
        for op, data in self._ordered("SELECT op, data FROM records", "op", after):
            yield op, read_record(data)

    def steps(self, *, first: int = 1) -> Iterator[tuple[int, int, bytes, State]]:
        """(step, op, manifest, state) from the first one on, in order."""
        for step, op, manifest, state in self._ordered(
            "SELECT step, op, manifest, state FROM steps", "step", first - 1
        ):
            yield step, op, manifest, STATES[state]

    # -------------------------------------------------------------- segments, and what is to be deleted

    def segments(self) -> list[SegmentRow]:
        found = self.rows("SELECT name, writer, epoch, sealed_at, clean FROM segments")
        return [SegmentRow(name, writer, epoch, at, bool(clean)) for name, writer, epoch, at, clean in found]

    def frees(self) -> list[str]:
        return [name for (name,) in self.rows("SELECT name FROM frees")]

    def _ordered(self, query: str, key: str, after: int) -> Iterable[tuple[Any, ...]]:
        """The rows whose key, the first column, is greater than `after`, in its order."""
        return self.rows(f"{query} WHERE {key} > ? ORDER BY {key}", (after,))

    def _keyed(self, query: str, ops: Sequence[int]) -> Iterator[tuple[Any, ...]]:
        """The rows of these decisions, in this order; a query ends with the name of its key."""
        for op in ops:
            yield from self.rows(f"{query} = ?", (op,))
