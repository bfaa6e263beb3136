"""Writes a log: the same statements for every database, inside its transactions.

What is written here is the truth; tables and ledgers in memory are rebuilt from it by doing the same things again, in
the same order, which `op` numbers. Every transaction checks the epoch, so that a plane which was thought dead and comes
back writes nothing.
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
from penstock.log.log_rows import GROUP_COLUMNS, GroupRow, SegmentRow, State
from penstock.log.volume import Disk

FORMAT = 5


class Guard(Protocol):
    """Asked before a log is taken over; raises when it must not be."""

    def __call__(self, *, run_id: str, epoch: int, commits: int, held: int, is_new: bool) -> None: ...


class Log(LogReader):
    """A run's log, owned by this process until `close`."""

    folder: Path | None
    """The run's folder; None for a plane in memory."""
    run_id: str
    """Tells this run from any other, also from one that lay in the same folder before."""
    epoch: int
    """Of this plane."""
    disk: Disk
    """The volume that the log shares with frames."""
    while_waiting: Callable[[], None] = staticmethod(lambda: None)
    """Called a few times a second while a database does not answer; must not use the log."""
    on_commit: Callable[[float], None] = staticmethod(lambda _seconds: None)
    """Called after each commit with how long it took."""

    @abstractmethod
    def transaction(self) -> AbstractContextManager[None]:
        """All of it is durable when this ends, or none of it. Raises Fenced once another plane has the run.

        What is read inside is what was committed before."""

    @abstractmethod
    def current_epoch(self) -> int:
        """The epoch of the plane that took the log over last."""

    @property
    @abstractmethod
    def commits(self) -> int:
        """Transactions that were committed: how far the log is, also where a transaction has no decision's number."""

    @property
    @abstractmethod
    def used_bytes(self) -> int:
        """What the log itself takes of the run's disk."""

    @abstractmethod
    def shrink(self) -> None:
        """Free what disk space the log can do without."""

    @abstractmethod
    def close(self) -> None: ...

    def check_epoch(self) -> None:
        """Raise Fenced if another plane has taken the run over."""
        current = self.current_epoch()
        if current != self.epoch:
            raise Fenced(f"epoch {self.epoch}: the run was taken over by epoch {current}; this plane must end")

    def look_up(self, groups: Sequence[str], discards: Sequence[str]) -> None:
        """Read ahead what `digest_of` and others will be asked of groups, and `is_discarded` of names, where every
        question costs a round trip."""

    # -------------------------------------------------------------- statements, as each database runs them

    @abstractmethod
    def _write(self, query: str, values: Sequence[Any] = ()) -> None:
        """Run a statement."""

    @abstractmethod
    def _write_keyed(self, query: str, values: Sequence[Any], keys: Sequence[Any]) -> None:
        """Run a statement for every key; it ends with the name of the key's column."""

    @abstractmethod
    def _insert(self, table: str, columns: str, rows: Sequence[tuple[Any, ...]], *, known: str = "") -> None:
        """Insert rows. `known`: what is done with a row that is there already."""

    # -------------------------------------------------------------- writing, inside a transaction

    def set_meta(self, name: str, value: int | str) -> None:
        self._write(
            "INSERT INTO meta (name, value) VALUES (?, ?) ON CONFLICT (name) DO UPDATE SET value = excluded.value",
            (name, self._meta_value(value)),
        )

    def _meta_value(self, value: int | str) -> int | str:
        return value

    def add_groups(self, rows: Sequence[tuple[GroupRow, bytes]]) -> None:
        """Groups, each with its metadata. Nothing is decided by the time; a replay waits by it."""
        at = time.time()
        self._insert("groups", f"{GROUP_COLUMNS}, at", [(*_values(row), at) for row, _ in rows])
        self._insert("facts", "op, facts", [(row.op, metadata) for row, metadata in rows])

    def add_record(self, op: int, record: Record) -> None:
        self._insert("records", "op, data", [(op, pack_record(record))])

    def mark_settled(self, op: int) -> None:
        """A group in quarantine is decided upon; what became of it follows when the decision is done."""
        self.set_groups([op], State.HELD)

    def add_discard(self, name: str) -> None:
        """Samples are counted as discarded under this name, once and for all."""
        self._insert("discards", "name", [(name,)])

    def add_step(self, step: int, op: int, manifest: bytes) -> None:
        self._insert("steps", "step, op, manifest, state", [(step, op, manifest, int(State.SCHEDULED))])

    def set_manifest(self, step: int, manifest: bytes) -> None:
        self._write("UPDATE steps SET manifest = ? WHERE step = ?", (manifest, step))

    def remove_steps(self, first: int) -> None:
        """Steps from this one on were never planned; nor did what was remembered after them happen."""
        self._write("DELETE FROM snapshots WHERE op >= (SELECT MIN(op) FROM steps WHERE step >= ?)", (first,))
        self._write("DELETE FROM steps WHERE step >= ?", (first,))

    def set_snapshot(self, op: int, data: bytes) -> None:
        """Keep what memory held after a decision, in place of the one before."""
        self._write("DELETE FROM snapshots")
        self._insert("snapshots", "op, data", [(op, data)])

    def set_groups(self, ops: Sequence[int], state: State, reason: str = "") -> None:
        self._write_keyed("UPDATE groups SET state = ?, reason = ? WHERE op", (int(state), reason), ops)

    def count_uses(self, ops: Sequence[int]) -> None:
        counts = Counter(ops)  # a sampler may draw a group twice for one step
        for uses in sorted(set(counts.values())):
            found = [op for op, count in counts.items() if count == uses]
            self._write_keyed("UPDATE groups SET uses = uses + ? WHERE op", (uses,), found)

    def set_steps(self, first: int, last: int, state: State) -> None:
        self._write("UPDATE steps SET state = ? WHERE step BETWEEN ? AND ?", (int(state), first, last))

    def forget_frames(self, ops: Sequence[int]) -> None:
        """Free frames and metadata of groups. Their rows stay, so that a repeated put is recognised."""
        self._write_keyed("UPDATE groups SET location = '' WHERE op", (), ops)
        self._write_keyed("DELETE FROM facts WHERE op", (), ops)

    def add_segment(self, row: SegmentRow) -> None:
        """A segment that frames may be accepted from, before its first byte is written."""
        values = (row.name, row.writer, row.epoch, row.sealed_at, int(row.clean))
        self._insert("segments", "name, writer, epoch, sealed_at, clean", [values])

    def seal_segment(self, name: str, *, at: float, clean: bool) -> None:
        self._write("UPDATE segments SET sealed_at = ?, clean = ? WHERE name = ?", (at, int(clean), name))

    def add_frees(self, names: Iterable[str]) -> None:
        """Frames and segments to delete; they stay listed until that is done."""
        self._insert("frees", "name", [(name,) for name in names], known="ON CONFLICT (name) DO NOTHING")

    def remove_frees(self, names: Sequence[str]) -> None:
        """These are deleted."""
        self._write_keyed("DELETE FROM frees WHERE name", (), names)
        self._write_keyed("DELETE FROM segments WHERE name", (), names)


def _values(row: GroupRow) -> tuple[Any, ...]:
    """As `GROUP_COLUMNS` has them."""
    return (
        row.op,
        row.id,
        row.digest,
        row.policy_version,
        row.samples,
        row.tokens,
        row.size,
        int(row.state),
        row.reason,
        row.run,
        row.prompt,
        msgspec.msgpack.encode(row.kinds),
        row.location,
    )
