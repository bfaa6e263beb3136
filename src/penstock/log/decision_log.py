"""Writes a log: the same statements for every database, inside transactions.

The log is the truth. Tables and ledgers in memory are rebuilt from it, by doing the same decisions again in the same
order; `op` is the number of a decision. Every transaction checks the epoch, so a plane that was taken for dead and
comes back can write nothing:

    op 1  groups    a is accepted                  memory: a waits in its table
    op 2  groups    b is accepted                  memory: a, b
    op 3  steps     step 1 is planned from a, b    memory: both leave the table, the sampler's state moves on
    op 4  records   policy version 1 is published  memory: versions, staleness
"""

from __future__ import annotations

import time
from abc import abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Protocol

import msgspec

from penstock.errors import Fenced
from penstock.log.decision_records import Record, pack_record
from penstock.log.log_reader import LogReader
from penstock.log.log_rows import (
    GROUP_COLUMNS,
    NO_KINDS,
    GroupOutcome,
    GroupRow,
    SegmentRow,
    State,
    Summary,
    group_values,
    pack_outcome,
)
from penstock.log.run_folder import Disk

FORMAT = 5


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
        """Read ahead what `digest_of` and others need of these groups, and `is_discarded` of these names. For
        databases where every query costs a round trip; does nothing in others."""

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
        at = (time.time(),)
        # The time is the last column.
        self._insert("groups", GROUP_COLUMNS, [group_values(row)[:-1] + at for row, _ in rows])
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
        """Forget locations and metadata of groups. What is left of their rows stays, so that a repeated put is
        recognised and the run can be decided again."""
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
