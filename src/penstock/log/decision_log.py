"""Reads and writes a log: the same statements for every database, in SQL that SQLite and PostgreSQL both understand.

The log is the truth. Tables and ledgers in memory are rebuilt from it by applying the same decisions in the same order.
`op` is the number of a decision. Every transaction checks the epoch, so a plane that counted as dead and comes back can
write nothing:

    op 1  groups    a is accepted                  memory: a waits in its table
    op 2  groups    b is accepted                  memory: a, b
    op 3  steps     step 1 is planned from a, b    memory: both leave the table, the sampler's state moves on
    op 4  records   policy version 1 is published  memory: versions, staleness

A `?` stands for a value. Sums are cast, because the sum of bigints is a decimal in PostgreSQL.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, ClassVar, Protocol

import msgspec

from penstock.errors import CorruptFile, Fenced
from penstock.log.decision_records import Record, pack_record, read_record
from penstock.log.log_rows import (
    FIELDS_OF_GROUPS,
    GROUP_COLUMNS,
    NO_KINDS,
    SELECT_GROUPS,
    WRITES_OF_GROUPS,
    GroupOutcome,
    GroupRow,
    SegmentRow,
    State,
    Summary,
    group_row,
    pack_outcome,
    read_outcome,
    read_summary,
    state_of,
)
from penstock.log.run_folder import Disk

FORMAT = 5

# -------------------------------------------------------------------------------------------------------------- reading

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
        """Ask the database to check itself. Returns what is damaged, or "" if nothing is found or it cannot check."""
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
        try:
            return default if row is None else int(row[0])
        except (TypeError, ValueError):
            found = f"{row[0]!r:.40}" if row else ""
            raise CorruptFile(f"{self.where}: {name} is {found}, not a number; restore it from a copy") from None

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
        return {group: (op, state_of(state), reason) for group, op, state, reason in found}

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
        return {(state_of(state), reason): samples for state, reason, samples in self.rows(query)}

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
            yield step, op, manifest, state_of(state)

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

    def _keyed(self, query: str, keys: Sequence[int] | Sequence[str]) -> list[tuple[Any, ...]]:
        """Return the rows with these keys, in this order. The query begins and ends with the name of its key."""
        return [row for key in keys for row in self.rows(f"{query} = ?", (key,))]


# -------------------------------------------------------------------------------------------------------------- writing


class Guard(Protocol):
    """Called before a log is taken over. Raises if it must not be."""

    def __call__(self, *, run_id: str, epoch: int, commits: int, held: int, is_new: bool) -> None: ...


class Log(LogReader):
    """A run's log, owned by this process until `close`."""

    folder: Path | None
    """The run's folder; None for a plane in memory."""
    run_id: str
    """Random and made with the log: tells this run from any other, even from an earlier one in the same folder."""
    epoch: int
    """The epoch this plane began by opening the log."""
    commits: int
    """Number of committed transactions. It counts all of them, also those without a decision (`op`)."""
    disk: Disk
    """The volume that the log shares with frames."""
    least_looked_up: ClassVar[int] = 2
    """The number of groups from which on `look_up` takes less time than queries one by one."""
    while_waiting: Callable[[], None] = staticmethod(lambda: None)
    """Called a few times a second while a database does not answer. Must not use the log."""
    on_commit: Callable[[float, Callable[[], str]], None] = staticmethod(lambda _seconds, _doing: None)
    """Called after each commit with its duration and a function that says what it did."""

    @abstractmethod
    def transaction(self) -> AbstractContextManager[None]:
        """Make everything written in the block durable when it ends, or nothing. Raises Fenced once another plane has
        the run. Reads inside the block see what was committed before it."""

    @abstractmethod
    def current_epoch(self) -> int:
        """Return the epoch of the plane that took the log over last."""

    @property
    def used_bytes(self) -> int:
        """Bytes of the run's disk that the log itself takes: none if it is in a database elsewhere."""
        return 0

    def shrink(self) -> None:
        """Free what disk space the log can do without. A database elsewhere does that itself."""

    @abstractmethod
    def close(self) -> None: ...

    def check_epoch(self) -> None:
        """Raise Fenced if another plane has taken the run over."""
        current = self.current_epoch()
        if current != self.epoch:
            raise Fenced(f"epoch {self.epoch}: the run was taken over by epoch {current}; this plane must end")

    def look_up(self, groups: Sequence[str], discards: Sequence[str]) -> None:
        """Read ahead, with few queries, what `digest_of` and others will need of these groups and `is_discarded` of
        these names."""

    # -------------------------------------------------------------- statements; each database has its own

    @abstractmethod
    def _write(self, query: str, values: Sequence[Any] = ()) -> None:
        """Run a statement."""

    @abstractmethod
    def _write_keyed(self, query: str, values: Sequence[Any], keys: Sequence[Any]) -> None:
        """Run a statement for every key. The statement ends with the name of the key's column: "... WHERE op"."""

    @abstractmethod
    def _insert(self, table: str, columns: str, rows: Sequence[tuple[Any, ...]], *, known: str = "") -> None:
        """Insert rows. `known` is the ON CONFLICT clause for rows that exist."""

    # -------------------------------------------------------------- writing, inside a transaction

    def set_meta(self, name: str, value: int | str) -> None:
        self._write(
            "INSERT INTO meta (name, value) VALUES (?, ?) ON CONFLICT (name) DO UPDATE SET value = excluded.value",
            (name, self._meta_value(value)),
        )

    def _meta_value(self, value: int | str) -> int | str:
        return value

    def add_groups(self, rows: Sequence[tuple[GroupRow, bytes]]) -> None:
        """Add groups, each with its metadata, with the current time as their time of acceptance."""
        at = time.time()
        self._insert("groups", GROUP_COLUMNS, [_values(row, at) for row, _ in rows])
        # The table and its column are called `facts` in every log that exists: the name is part of the format.
        self._insert("facts", "op, facts", [(row.op, metadata) for row, metadata in rows])

    def set_metadata(self, op: int, metadata: bytes, kinds: tuple[tuple[str, str], ...]) -> None:
        """Replace the metadata of a group that got its late columns."""
        self._write("UPDATE facts SET facts = ? WHERE op = ?", (metadata, op))
        self._write("UPDATE groups SET kinds = ? WHERE op = ?", (msgspec.msgpack.encode(kinds), op))

    def set_frame(self, op: int, location: str, digest: bytes) -> None:
        """Replace the frame of a group by one that also has late columns."""
        self._write("UPDATE groups SET location = ?, digest = ? WHERE op = ?", (location, digest, op))

    def add_summaries(self, summaries: Sequence[tuple[int, Summary]]) -> None:
        """Keep what events show of groups, by op. A recovery may write a group again."""
        rows = [(op, pack_outcome(summary)) for op, summary in summaries]
        self._insert("summaries", "op, data", rows, known="ON CONFLICT (op) DO UPDATE SET data = excluded.data")

    def add_outcomes(self, rows: Sequence[tuple[int, GroupOutcome]]) -> None:
        """Append outcomes, each with the number of its last event."""
        self._insert("outcomes", "number, data", [(number, pack_outcome(row)) for number, row in rows])

    def add_record(self, op: int, record: Record) -> None:
        self._insert("records", "op, data", [(op, pack_record(record))])

    def mark_settled(self, op: int) -> None:
        """Note that a group left quarantine. Its next state follows when the decision is carried out."""
        self.set_groups([op], State.HELD)

    def add_discard(self, name: str) -> None:
        """Note a name by which a repeated request is recognised: its samples were counted as discarded, or its group is
        stored in another frame by now."""
        self._insert("discards", "name", [(name,)])

    def add_step(self, step: int, op: int, manifest: bytes) -> None:
        self._insert("steps", "step, op, manifest, state", [(step, op, manifest, int(State.SCHEDULED))])

    def set_manifest(self, step: int, manifest: bytes) -> None:
        self._write("UPDATE steps SET manifest = ? WHERE step = ?", (manifest, step))

    def remove_steps(self, first: int) -> None:
        """Remove steps from `first` on, as if they were never planned, with every snapshot taken after them."""
        self._write("DELETE FROM snapshots WHERE op >= (SELECT MIN(op) FROM steps WHERE step >= ?)", (first,))
        self._write("DELETE FROM steps WHERE step >= ?", (first,))

    def set_snapshot(self, op: int, data: bytes) -> None:
        """Store what memory held after decision `op`. Replaces the snapshot before."""
        self._write("DELETE FROM snapshots")
        self._insert("snapshots", "op, data", [(op, data)])

    def set_groups(self, ops: Sequence[int], state: State, reason: str = "") -> None:
        self._write_keyed("UPDATE groups SET state = ?, reason = ? WHERE op", (int(state), reason), ops)

    def count_uses(self, ops: Sequence[int]) -> None:
        """Count one use of each group, or more where a sampler drew it twice for one step."""
        # One statement per count: [7, 9, 7] adds 1 to group 9, then 2 to group 7.
        counts = Counter(ops)
        for uses in sorted(set(counts.values())):
            found = [op for op, count in counts.items() if count == uses]
            self._write_keyed("UPDATE groups SET uses = uses + ? WHERE op", (uses,), found)

    def set_steps(self, first: int, last: int, state: State) -> None:
        self._write("UPDATE steps SET state = ? WHERE step BETWEEN ? AND ?", (int(state), first, last))

    def forget_frames(self, ops: Sequence[int]) -> None:
        """Forget locations and metadata of groups. The rest of their rows stays: repeated puts are recognised by it,
        and the run can be decided again."""
        self._write_keyed("UPDATE groups SET location = '', kinds = ? WHERE op", (NO_KINDS,), ops)
        self._write_keyed("DELETE FROM facts WHERE op", (), ops)

    def add_segment(self, row: SegmentRow) -> None:
        """Register a segment, before its first byte is written. Frames are accepted from registered segments only."""
        values = (row.name, row.writer, row.epoch, row.sealed_at, int(row.clean))
        self._insert("segments", "name, writer, epoch, sealed_at, clean", [values])

    def seal_segment(self, name: str, *, at: float, clean: bool) -> None:
        self._write("UPDATE segments SET sealed_at = ?, clean = ? WHERE name = ?", (at, int(clean), name))

    def add_frees(self, names: Iterable[str]) -> None:
        """List frames and segments to delete. They stay listed until `remove_frees`."""
        self._insert("frees", "name", [(name,) for name in names], known="ON CONFLICT (name) DO NOTHING")

    def remove_frees(self, names: Sequence[str]) -> None:
        """Take frames and segments off the list once they are deleted."""
        self._write_keyed("DELETE FROM frees WHERE name", (), names)
        self._write_keyed("DELETE FROM segments WHERE name", (), names)

    def add_prompts(self, first: int, prompts: Sequence[tuple[str, bytes]]) -> None:
        """Add names and payloads of prompts from row `first` on. Rows that exist stay: they were sent twice."""
        rows = [(row, name, payload) for row, (name, payload) in enumerate(prompts, start=first)]
        self._insert("prompts", "number, name, payload", rows, known="ON CONFLICT (number) DO NOTHING")

    def remove_prompts(self, first: int) -> None:
        """Remove prompts from row `first` on: they were sent for a list that was never opened."""
        self._write("DELETE FROM prompts WHERE number >= ?", (first,))


def _values(row: GroupRow, at: float) -> tuple[Any, ...]:
    """Return the values to store for a group that was accepted at this time, in the order of `GROUP_COLUMNS`."""
    values = list(FIELDS_OF_GROUPS(row))
    for place, write in WRITES_OF_GROUPS:
        values[place] = write(values[place])
    values[-1] = at
    return tuple(values)
