"""The durable log: every group that was accepted, every decision that was made, in one SQLite file.

SQLite in WAL mode with full sync does what a log must: a transaction is on disk, or it never happened. What is
written here is the truth; tables and ledgers in memory are rebuilt from it by doing the same things again, in the
same order, which `op` numbers. One process owns a run's folder (a lock that dies with it), and every transaction
checks the epoch, so that a plane which was thought dead and comes back writes nothing.
"""

from __future__ import annotations

import fcntl
import os
import secrets
import sqlite3
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import Any

from penstock.errors import Conflict, CorruptFile, DiskFull, Fenced, StorageError
from penstock.serve.decisions import fork
from penstock.serve.decisions.wal_checkpointer import TIDY_BYTES, WalCheckpointer

FORMAT = 2
READABLE = (1, FORMAT)
_PAGE = 16384
_MUST_TIDY_BYTES = 4 * TIDY_BYTES
"""Of write-ahead log, from which on a commit carries it over itself: its thread could not keep up."""
_SCHEMA = """
CREATE TABLE IF NOT EXISTS meta (name TEXT PRIMARY KEY, value) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS groups (
    op INTEGER PRIMARY KEY, id TEXT NOT NULL UNIQUE, digest BLOB NOT NULL, policy_version INTEGER NOT NULL,
    samples INTEGER NOT NULL, tokens INTEGER NOT NULL, size INTEGER NOT NULL,
    state INTEGER NOT NULL, reason TEXT NOT NULL DEFAULT '', uses INTEGER NOT NULL DEFAULT 0,
    run TEXT NOT NULL DEFAULT '');
CREATE TABLE IF NOT EXISTS frames (op INTEGER PRIMARY KEY, frame BLOB NOT NULL);
CREATE TABLE IF NOT EXISTS events (op INTEGER PRIMARY KEY, kind TEXT NOT NULL, data BLOB NOT NULL);
CREATE TABLE IF NOT EXISTS snapshots (op INTEGER PRIMARY KEY, data BLOB NOT NULL);
CREATE TABLE IF NOT EXISTS steps (
    step INTEGER PRIMARY KEY, op INTEGER NOT NULL, manifest BLOB NOT NULL, state INTEGER NOT NULL);
"""


class State(IntEnum):
    """Where a group is. Steps use SCHEDULED, DELIVERED and COMMITTED."""

    HELD = 0
    SCHEDULED = 1
    DELIVERED = 2
    COMMITTED = 3
    DROPPED = 4
    QUARANTINED = 5


_STATES = tuple(State)
"""By number; ten times faster than `State(number)`, which counts when a long run is read again."""


@dataclass(frozen=True, slots=True)
class GroupRow:
    op: int
    id: str
    digest: bytes
    policy_version: int
    samples: int
    tokens: int
    size: int
    frame: bytes | memoryview
    state: State = State.HELD
    reason: str = ""
    run: str = ""
    """The run it waits with; empty where runs are not kept apart."""


_GROUPS = "SELECT op, id, digest, policy_version, samples, tokens, size, state, reason, run FROM groups"


def _row(found: tuple[Any, ...]) -> GroupRow:
    op, name, digest, version, samples, tokens, size, state, reason, run = found
    return GroupRow(op, name, digest, version, samples, tokens, size, b"", _STATES[state], reason, run)


@dataclass(frozen=True, slots=True)
class EventRow:
    op: int
    kind: str
    data: bytes


class Log:
    """A run's SQLite file, owned by this process until `close`."""

    def __init__(self, folder: str | Path | None, *, max_disk_bytes: int | None = None) -> None:
        """`None` keeps the log in memory: the same code, nothing durable."""
        self.folder = None if folder is None else Path(folder).resolve()
        self._max_bytes = max_disk_bytes
        self._lock = None if self.folder is None else _own(self.folder)
        path = ":memory:" if self.folder is None else str(self.folder / "log.sqlite")
        self._db = sqlite3.connect(path, isolation_level=None, check_same_thread=False, cached_statements=64)
        with _typed_errors(path):
            self._db.execute(f"PRAGMA page_size={_PAGE}")
            self._db.execute("PRAGMA journal_mode=WAL")
            self._db.execute("PRAGMA synchronous=FULL")
            self._db.execute(f"PRAGMA journal_size_limit={_MUST_TIDY_BYTES}")
            self._db.execute(f"PRAGMA wal_autocheckpoint={_MUST_TIDY_BYTES // _PAGE}")
            self._db.executescript(_SCHEMA)
            self._upgrade(path)
            self.take_over()
        self._frame_bytes = 0
        """In the transaction under way."""
        self._checkpointer = None if self.folder is None else WalCheckpointer(path)

    def _upgrade(self, path: str) -> None:
        found = self.meta("format", FORMAT)
        if found not in READABLE:
            raise CorruptFile(f"{path}: format {found}; this version reads format {FORMAT}; use a matching one")
        if found == 1:  # no runs were kept apart then
            self._db.execute("BEGIN IMMEDIATE")
            self._db.execute("ALTER TABLE groups ADD COLUMN run TEXT NOT NULL DEFAULT ''")
            self.set_meta("format", FORMAT)
            self._db.execute("COMMIT")

    def take_over(self) -> None:
        """Begin a new epoch: whoever wrote before may write no more."""
        self.epoch = self.meta("epoch", 0) + 1
        found = self._db.execute("SELECT value FROM meta WHERE name = 'run_id'").fetchone()
        self.run_id = secrets.token_hex(16) if found is None else str(found[0])
        """Tells this run from any other, also from one that lay in the same folder before."""
        self._db.execute("BEGIN IMMEDIATE")
        self.set_meta("format", FORMAT)
        self.set_meta("run_id", self.run_id)
        self.set_meta("epoch", self.epoch)
        self._db.execute("COMMIT")

    def check_room(self, size: int) -> None:
        """Raise DiskFull if so many bytes of groups would exceed the quota.

        The quota holds for what is put, not for the few bytes of a step or a commit: those free space in the end.
        """
        if self._max_bytes is None:
            return
        pages, free = (
            int(self._db.execute(f"PRAGMA {name}").fetchone()[0]) for name in ("page_count", "freelist_count")
        )
        used = (pages - free) * _PAGE
        if used + size > self._max_bytes:
            raise DiskFull(
                f"{self.folder or 'memory'}: {used:,} bytes are used and {size:,} more do not fit max_disk_bytes "
                f"{self._max_bytes:,}; raise it, lower retain_steps, or wait until steps are committed"
            )

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """All of it on disk when this ends, or none of it. Refuses once another plane has taken the run over."""
        with _typed_errors(str(self.folder or "memory")):
            self._db.execute("BEGIN IMMEDIATE")
            self._frame_bytes = 0
            try:
                self._check_epoch()
                yield
                self._db.execute("COMMIT")
                if self._checkpointer is not None:
                    self._checkpointer.note(self._frame_bytes)
            except BaseException:
                if self._db.in_transaction:
                    self._db.execute("ROLLBACK")
                raise

    def _check_epoch(self) -> None:
        current = self.meta("epoch", 0)
        if current != self.epoch:
            raise Fenced(f"epoch {self.epoch}: the run was taken over by epoch {current}; this plane must end")

    # -------------------------------------------------------------- writing, inside a transaction

    def set_meta(self, name: str, value: int | str) -> None:
        self._db.execute("INSERT OR REPLACE INTO meta VALUES (?, ?)", (name, value))

    def add_groups(self, rows: Sequence[GroupRow]) -> None:
        self._db.executemany(
            "INSERT INTO groups (op, id, digest, policy_version, samples, tokens, size, state, reason, run)"
            " VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
            [
                (r.op, r.id, r.digest, r.policy_version, r.samples, r.tokens, r.size, int(r.state), r.reason, r.run)
                for r in rows
            ],
        )
        self._db.executemany("INSERT INTO frames VALUES (?, ?)", [(r.op, r.frame) for r in rows])
        self._frame_bytes += sum(r.size for r in rows)

    def add_event(self, event: EventRow) -> None:
        self._db.execute("INSERT INTO events VALUES (?, ?, ?)", (event.op, event.kind, event.data))

    def add_step(self, step: int, op: int, manifest: bytes) -> None:
        self._db.execute("INSERT INTO steps VALUES (?, ?, ?, ?)", (step, op, manifest, int(State.SCHEDULED)))

    def set_snapshot(self, op: int, data: bytes) -> None:
        """Keep what memory held after a decision, in place of the one before."""
        self._db.execute("DELETE FROM snapshots")
        self._db.execute("INSERT INTO snapshots VALUES (?, ?)", (op, data))

    def set_groups(self, ops: Sequence[int], state: State, reason: str = "") -> None:
        self._db.executemany(
            "UPDATE groups SET state = ?, reason = ? WHERE op = ?", [(int(state), reason, op) for op in ops]
        )

    def count_uses(self, ops: Sequence[int]) -> None:
        self._db.executemany("UPDATE groups SET uses = uses + 1 WHERE op = ?", [(op,) for op in ops])

    def set_steps(self, first: int, last: int, state: State) -> None:
        self._db.execute("UPDATE steps SET state = ? WHERE step BETWEEN ? AND ?", (int(state), first, last))

    def forget_frames(self, ops: Sequence[int]) -> None:
        """Give the space of frames back; the rows stay, so that a group is known for as long as the run lives."""
        self._db.executemany("DELETE FROM frames WHERE op = ?", [(op,) for op in ops])

    # -------------------------------------------------------------- reading

    def meta(self, name: str, default: int) -> int:
        row = self._db.execute("SELECT value FROM meta WHERE name = ?", (name,)).fetchone()
        return default if row is None else int(row[0])

    def digest_of(self, group: str) -> bytes | None:
        row = self._db.execute("SELECT digest FROM groups WHERE id = ?", (group,)).fetchone()
        return None if row is None else row[0]

    def frame(self, op: int) -> bytes | None:
        row = self._db.execute("SELECT frame FROM frames WHERE op = ?", (op,)).fetchone()
        return None if row is None else row[0]

    def groups(self, *, after: int = 0) -> Iterator[GroupRow]:
        """All groups behind a decision, in order, without their frames."""
        yield from map(_row, self._db.execute(f"{_GROUPS} WHERE op > ? ORDER BY op", (after,)))

    def groups_of(self, ops: Iterable[int]) -> Iterator[GroupRow]:
        """These groups, without their frames."""
        for op in ops:
            yield from map(_row, self._db.execute(f"{_GROUPS} WHERE op = ?", (op,)))

    def snapshot(self) -> tuple[int, bytes] | None:
        """(decision, what memory held after it), if it was ever kept."""
        found: tuple[int, bytes] | None = self._db.execute("SELECT op, data FROM snapshots").fetchone()
        return found

    def with_frames(self) -> set[int]:
        """The groups whose frames were not given back."""
        return {op for (op,) in self._db.execute("SELECT op FROM frames")}

    def totals(self) -> dict[tuple[State, str], int]:
        """Samples by recorded state and reason."""
        query = "SELECT state, reason, SUM(samples) FROM groups GROUP BY state, reason"
        return {(State(state), reason): samples for state, reason, samples in self._db.execute(query)}

    def events(self, *, after: int = 0) -> Iterator[EventRow]:
        """All events behind a decision, in order."""
        query = "SELECT op, kind, data FROM events WHERE op > ? ORDER BY op"
        for op, kind, data in self._db.execute(query, (after,)):
            yield EventRow(op, kind, data)

    def steps(self, *, first: int = 1) -> Iterator[tuple[int, int, bytes, State]]:
        """(step, op, manifest, state) from the first one on, in order."""
        for step, op, manifest, state in self._db.execute(
            "SELECT * FROM steps WHERE step >= ? ORDER BY step", (first,)
        ):
            yield step, op, manifest, _STATES[state]

    def close(self) -> None:
        if self._checkpointer is not None:
            self._checkpointer.close()
        self._db.close()
        if self._lock is not None:
            fork.close(self._lock)


def _own(folder: Path) -> int:
    """Lock the folder for this process; the lock goes with the process, however it ends."""
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    descriptor = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        holder = os.pread(descriptor, 32, 0).decode(errors="replace").strip() or "unknown"
        os.close(descriptor)
        raise Conflict(
            f"{folder}: another plane has it open (process {holder}); stop it or use another folder"
        ) from None
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
    fork.close_in_children(descriptor)
    return descriptor


@contextmanager
def _typed_errors(where: str) -> Iterator[None]:
    try:
        yield
    except sqlite3.DatabaseError as error:
        code = getattr(error, "sqlite_errorname", "")
        if code.startswith(("SQLITE_FULL", "SQLITE_IOERR_WRITE", "SQLITE_IOERR_SHMSIZE")):
            raise DiskFull(f"{where}: {error}; nothing was written; make room, or raise max_disk_bytes") from None
        if code.startswith(("SQLITE_CORRUPT", "SQLITE_NOTADB")):
            raise CorruptFile(f"{where}: {error}; restore the folder from a copy") from None
        raise StorageError(f"{where}: {error}") from None
