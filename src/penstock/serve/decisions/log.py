"""The durable log: every group that was accepted, every decision that was made, in one SQLite file.

SQLite in WAL mode with full sync does what a log must: a transaction is on disk, or it never happened. What is
written here is the truth; tables and ledgers in memory are rebuilt from it by doing the same things again, in the
same order, which `op` numbers. One process owns a run's folder (a lock that dies with it), and every transaction
checks the epoch, so that a plane which was thought dead and comes back writes nothing.

A log that lost something is never believed: the witness (`witness.py`) counts commits outside the database.
"""

from __future__ import annotations

import contextlib
import secrets
import sqlite3
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

import msgspec

from penstock.errors import CorruptFile, DiskFull, Fenced
from penstock.serve.decisions import fork
from penstock.serve.decisions.decision_records import Record, pack_record, read_record
from penstock.serve.decisions.disk import Disk, own, typed_errors
from penstock.serve.decisions.log_rows import GROUP_COLUMNS, SELECT_GROUPS, STATES, SegmentRow, group_row
from penstock.serve.decisions.log_rows import GroupRow as GroupRow
from penstock.serve.decisions.log_rows import State as State
from penstock.serve.decisions.wal_checkpointer import TIDY_BYTES, WalCheckpointer
from penstock.serve.decisions.witness import Witness, check_log_is_there, check_witness

FORMAT = 5
_PAGE = 16384
_SCHEMA = """
CREATE TABLE IF NOT EXISTS meta (name TEXT PRIMARY KEY, value) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS groups (
    op INTEGER PRIMARY KEY, id TEXT NOT NULL UNIQUE, digest BLOB NOT NULL, policy_version INTEGER,
    samples INTEGER NOT NULL, tokens INTEGER NOT NULL, size INTEGER NOT NULL,
    state INTEGER NOT NULL, reason TEXT NOT NULL DEFAULT '', uses INTEGER NOT NULL DEFAULT 0,
    run TEXT NOT NULL DEFAULT '', prompt TEXT NOT NULL DEFAULT '', kinds BLOB NOT NULL DEFAULT x'80',
    location TEXT NOT NULL DEFAULT '', at REAL NOT NULL DEFAULT 0);
CREATE TABLE IF NOT EXISTS facts (op INTEGER PRIMARY KEY, facts BLOB NOT NULL);
CREATE TABLE IF NOT EXISTS records (op INTEGER PRIMARY KEY, data BLOB NOT NULL);
CREATE TABLE IF NOT EXISTS discards (name TEXT PRIMARY KEY) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS snapshots (op INTEGER PRIMARY KEY, data BLOB NOT NULL);
CREATE TABLE IF NOT EXISTS steps (
    step INTEGER PRIMARY KEY, op INTEGER NOT NULL, manifest BLOB NOT NULL, state INTEGER NOT NULL);
CREATE TABLE IF NOT EXISTS segments (
    name TEXT PRIMARY KEY, writer TEXT NOT NULL, epoch INTEGER NOT NULL, sealed_at REAL NOT NULL DEFAULT 0,
    clean INTEGER NOT NULL DEFAULT 0) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS frees (name TEXT PRIMARY KEY) WITHOUT ROWID;
"""


class Guard(Protocol):
    """Asked before a log is taken over; raises when it must not be."""

    def __call__(self, *, run_id: str, epoch: int, commits: int, held: int, is_new: bool) -> None: ...


class Log:
    """A run's SQLite file, owned by this process until `close`."""

    def __init__(
        self,
        folder: str | Path | None,
        *,
        max_disk_bytes: int | None = None,
        disk_reserve_bytes: int = 64 << 20,
        exclusive: bool = False,
        guard: Guard | None = None,
    ) -> None:
        """`None` keeps the log in memory: the same code, nothing durable. `exclusive`: no shared memory beside the
        file, so it may lie on a network filesystem, and nobody else can read it while it is open. `guard` is asked
        before anything is changed."""
        self.folder = None if folder is None else Path(folder).resolve()
        self._lock = None if self.folder is None else own(self.folder)
        self.disk = Disk(self.folder, quota=max_disk_bytes, reserve_bytes=disk_reserve_bytes)
        self._wal_bytes = (
            TIDY_BYTES if self.folder is None else max(min(TIDY_BYTES, self.disk.reserve_bytes // 8), _PAGE)
        )
        self._exclusive, self._guard = exclusive, guard
        self._witness: Witness | None = None
        self._commits = 0
        self._path = ":memory:" if self.folder is None else str(self.folder / "log.sqlite")
        try:
            try:
                self._open()
            except DiskFull:
                if not self.disk.release():
                    raise
                self._open()
        except BaseException:
            self._let_go()
            raise
        self._written_bytes = 0
        """In the transaction under way."""
        self._checkpointer: WalCheckpointer | None = None
        if self.folder is not None and not exclusive:
            self._checkpointer = WalCheckpointer(self._path, self._wal_bytes)

    def _open(self) -> None:
        if self.folder is not None:
            check_log_is_there(self.folder)
        with typed_errors(self._path):
            self._db = sqlite3.connect(self._path, isolation_level=None, check_same_thread=False, cached_statements=64)
            self._db.execute(f"PRAGMA page_size={_PAGE}")
            if self._exclusive:  # first: write-ahead logging then keeps its index in this process
                self._db.execute("PRAGMA locking_mode=EXCLUSIVE")
            self._db.execute("PRAGMA journal_mode=WAL")
            self._db.execute("PRAGMA synchronous=FULL")
            self._db.execute(f"PRAGMA journal_size_limit={4 * self._wal_bytes}")
            # Of write-ahead log, from which on a commit carries it over itself: its thread could not keep up.
            self._db.execute(f"PRAGMA wal_autocheckpoint={max(4 * self._wal_bytes // _PAGE, 1)}")
            self._check_format()
            self._db.executescript(_SCHEMA)
            self._commits = self.meta("commits", 0)
            if self.folder is not None:
                check_witness(self.folder, self.text("run_id"), self._commits)
            # What an earlier process could not sync may be readable and still not be on disk: carrying the
            # write-ahead log over writes and syncs all of it again.
            self._db.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()
            self.take_over()

    def _check_format(self) -> None:
        tables = {name for (name,) in self._db.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
        # Tables without a format are of a plane that was killed while it made them: nothing is in them.
        found = self.meta("format", FORMAT) if "meta" in tables else FORMAT
        if found != FORMAT:
            raise CorruptFile(
                f"{self._path}: format {found}; this version reads format {FORMAT}; finish the run with the version of "
                "Penstock that began it, or copy its groups to a new one with `penstock storage recover --into`"
            )

    def take_over(self) -> None:
        """Begin a new epoch: earlier planes can write nothing from now on."""
        epoch = self.meta("epoch", 0) + 1
        found = self.text("run_id")
        self.run_id = found or secrets.token_hex(16)
        """Tells this run from any other, also from one that lay in the same folder before."""
        if self._guard is not None:
            self._guard(run_id=self.run_id, epoch=epoch, commits=self.commits, held=self.num_frames, is_new=not found)
        self.epoch = epoch
        if self.folder is not None and self._witness is None:
            self._witness = Witness(self.folder)
        self._db.execute("BEGIN IMMEDIATE")
        self.set_meta("format", FORMAT)
        self.set_meta("run_id", self.run_id)
        self.set_meta("epoch", self.epoch)
        self.set_meta("commits", self._commits + 1)
        self._db.execute("COMMIT")
        self._committed()

    def _committed(self) -> None:
        """A transaction is on disk: the witness says so. Raises if the file is not the one that others will open."""
        self._commits += 1
        if self._witness is not None:
            self._witness.write(self.run_id, self._commits)

    @property
    def used_bytes(self) -> int:
        """What the log itself takes: pages in use, and the write-ahead log."""
        pages, free = (
            int(self._db.execute(f"PRAGMA {name}").fetchone()[0]) for name in ("page_count", "freelist_count")
        )
        wal = 0
        if self.folder is not None:
            with contextlib.suppress(OSError):
                wal = (self.folder / "log.sqlite-wal").stat().st_size
        return (pages - free) * _PAGE + wal

    def shrink(self) -> None:
        """Carry the write-ahead log over and give its space back."""
        with contextlib.suppress(sqlite3.DatabaseError):
            self._db.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """All of it on disk when this ends, or none of it. Refuses once another plane has taken the run over."""
        try:
            with typed_errors(str(self.folder or "memory")):
                self._db.execute("BEGIN IMMEDIATE")
                self._written_bytes = 0
                try:
                    self._check_epoch()
                    yield
                    self._db.execute("UPDATE meta SET value = ? WHERE name = 'commits'", (self._commits + 1,))
                    self._db.execute("COMMIT")
                    self._committed()
                    if self._checkpointer is not None:
                        self._checkpointer.note(self._written_bytes)
                except BaseException:
                    if self._db.in_transaction:
                        self._db.execute("ROLLBACK")
                    raise
        except DiskFull:
            if self.disk.release():
                self.shrink()
            raise

    def _check_epoch(self) -> None:
        current = self.meta("epoch", 0)
        if current != self.epoch:
            raise Fenced(f"epoch {self.epoch}: the run was taken over by epoch {current}; this plane must end")

    # -------------------------------------------------------------- writing, inside a transaction

    def set_meta(self, name: str, value: int | str) -> None:
        self._db.execute("INSERT OR REPLACE INTO meta VALUES (?, ?)", (name, value))

    def add_groups(self, rows: Sequence[tuple[GroupRow, bytes]]) -> None:
        """Groups, each with its facts. Nothing is decided by the time; a replay waits by it."""
        marks, at = ", ".join("?" * 14), time.time()
        self._db.executemany(
            f"INSERT INTO groups ({GROUP_COLUMNS}, at) VALUES ({marks})",  # noqa: S608 - our own names
            [
                (
                    r.op,
                    r.id,
                    r.digest,
                    r.policy_version,
                    r.samples,
                    r.tokens,
                    r.size,
                    int(r.state),
                    r.reason,
                    r.run,
                    r.prompt,
                    msgspec.msgpack.encode(r.kinds),
                    r.location,
                    at,
                )
                for r, _ in rows
            ],
        )
        self._db.executemany("INSERT INTO facts VALUES (?, ?)", [(r.op, facts) for r, facts in rows])
        self._written_bytes += sum(len(facts) for _, facts in rows)

    def add_record(self, op: int, record: Record) -> None:
        data = pack_record(record)
        self._db.execute("INSERT INTO records VALUES (?, ?)", (op, data))
        self._written_bytes += len(data)

    def mark_settled(self, op: int) -> None:
        """A group in quarantine is decided upon; what became of it follows when the decision is done."""
        self._db.execute("UPDATE groups SET state = ?, reason = '' WHERE op = ?", (int(State.HELD), op))

    def add_discard(self, name: str) -> None:
        """Samples are counted as discarded under this name, once and for all."""
        self._db.execute("INSERT INTO discards VALUES (?)", (name,))

    def add_step(self, step: int, op: int, manifest: bytes) -> None:
        self._db.execute("INSERT INTO steps VALUES (?, ?, ?, ?)", (step, op, manifest, int(State.SCHEDULED)))
        self._written_bytes += len(manifest)

    def set_manifest(self, step: int, manifest: bytes) -> None:
        self._db.execute("UPDATE steps SET manifest = ? WHERE step = ?", (manifest, step))

    def remove_steps(self, first: int) -> None:
        """Steps from this one on were never planned; nor did what was remembered after them happen."""
        row = self._db.execute("SELECT MIN(op) FROM steps WHERE step >= ?", (first,)).fetchone()
        self._db.execute("DELETE FROM steps WHERE step >= ?", (first,))
        if row[0] is not None:
            self._db.execute("DELETE FROM snapshots WHERE op >= ?", (row[0],))

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
        """Their frames are given back, and their facts; the rows stay: groups are known as long as the run lives."""
        self._db.executemany("UPDATE groups SET location = '' WHERE op = ?", [(op,) for op in ops])
        self._db.executemany("DELETE FROM facts WHERE op = ?", [(op,) for op in ops])

    # -------------------------------------------------------------- segments, and what is to be deleted

    def add_segment(self, row: SegmentRow) -> None:
        """A segment that frames may be accepted from, before its first byte is written."""
        self._db.execute(
            "INSERT INTO segments VALUES (?, ?, ?, ?, ?)",
            (row.name, row.writer, row.epoch, row.sealed_at, int(row.clean)),
        )

    def seal_segment(self, name: str, *, at: float, clean: bool) -> None:
        self._db.execute("UPDATE segments SET sealed_at = ?, clean = ? WHERE name = ?", (at, int(clean), name))

    def add_frees(self, names: Iterable[str]) -> None:
        """Frames and segments to delete; they stay listed until that is done."""
        self._db.executemany("INSERT OR IGNORE INTO frees VALUES (?)", [(name,) for name in names])

    def remove_frees(self, names: Sequence[str]) -> None:
        """These are deleted."""
        rows = [(name,) for name in names]
        self._db.executemany("DELETE FROM frees WHERE name = ?", rows)
        self._db.executemany("DELETE FROM segments WHERE name = ?", rows)

    def segments(self) -> list[SegmentRow]:
        found = self._db.execute("SELECT name, writer, epoch, sealed_at, clean FROM segments")
        return [SegmentRow(name, writer, epoch, at, bool(clean)) for name, writer, epoch, at, clean in found]

    def frees(self) -> list[str]:
        return [name for (name,) in self._db.execute("SELECT name FROM frees")]

    # -------------------------------------------------------------- reading

    def meta(self, name: str, default: int) -> int:
        row = self._db.execute("SELECT value FROM meta WHERE name = ?", (name,)).fetchone()
        return default if row is None else int(row[0])

    @property
    def has_steps(self) -> bool:
        return self._db.execute("SELECT 1 FROM steps LIMIT 1").fetchone() is not None

    def steps_from(self, first: int) -> bool:
        """Whether this step or a later one is planned."""
        return self._db.execute("SELECT 1 FROM steps WHERE step >= ? LIMIT 1", (first,)).fetchone() is not None

    def digest_of(self, group: str) -> bytes | None:
        row = self._db.execute("SELECT digest FROM groups WHERE id = ?", (group,)).fetchone()
        return None if row is None else row[0]

    def location_of(self, group: str) -> str:
        """Where a group's frame is; empty if it is unknown, or its frame was freed."""
        row = self._db.execute("SELECT location FROM groups WHERE id = ?", (group,)).fetchone()
        return "" if row is None else str(row[0])

    def is_evaluation(self, group: str) -> bool:
        row = self._db.execute("SELECT state FROM groups WHERE id = ?", (group,)).fetchone()
        return row is not None and row[0] == State.EVALUATION

    def text(self, name: str) -> str:
        """What is remembered under a name, as text; empty if nothing is."""
        row = self._db.execute("SELECT value FROM meta WHERE name = ?", (name,)).fetchone()
        return "" if row is None else str(row[0])

    def texts(self, prefix: str) -> dict[str, str]:
        """Everything that is remembered under names that begin with this."""
        query = "SELECT name, value FROM meta WHERE name >= ? AND name < ?"
        return {name: str(value) for name, value in self._db.execute(query, (prefix, prefix + "\U0010ffff"))}

    def facts(self, op: int) -> bytes | None:
        row = self._db.execute("SELECT facts FROM facts WHERE op = ?", (op,)).fetchone()
        return None if row is None else row[0]

    def is_discarded(self, name: str) -> bool:
        return self._db.execute("SELECT 1 FROM discards WHERE name = ?", (name,)).fetchone() is not None

    def locations(self) -> list[str]:
        """Of all frames that were not given back."""
        return [found for (found,) in self._db.execute("SELECT location FROM groups WHERE location != ''")]

    @property
    def num_frames(self) -> int:
        """How many frames the log needs."""
        return int(self._db.execute("SELECT COUNT(*) FROM groups WHERE location != ''").fetchone()[0])

    @property
    def commits(self) -> int:
        """Transactions that were committed: how far the log is, also where a transaction has no decision's number."""
        return self._commits

    @property
    def last_op(self) -> int:
        """The number of the last decision that is written down."""
        tables = ("groups", "records", "steps", "snapshots")
        found = (self._db.execute(f"SELECT MAX(op) FROM {name}").fetchone()[0] for name in tables)  # noqa: S608
        return max(op or 0 for op in found)

    def groups_in(self, state: State) -> list[GroupRow]:
        """The groups that are recorded in a state, in order."""
        return list(map(group_row, self._db.execute(f"{SELECT_GROUPS} WHERE state = ? ORDER BY op", (int(state),))))

    def groups(self, *, after: int = 0) -> Iterator[GroupRow]:
        """All groups behind a decision, in order, without their frames."""
        yield from map(group_row, self._db.execute(f"{SELECT_GROUPS} WHERE op > ? ORDER BY op", (after,)))

    def groups_of(self, ops: Iterable[int]) -> Iterator[GroupRow]:
        """These groups, without their frames."""
        for op in ops:
            yield from map(group_row, self._db.execute(f"{SELECT_GROUPS} WHERE op = ?", (op,)))

    def snapshot(self) -> tuple[int, bytes] | None:
        """(decision, what memory held after it), if it was ever kept."""
        found: tuple[int, bytes] | None = self._db.execute("SELECT op, data FROM snapshots").fetchone()
        return found

    def with_frames(self) -> set[int]:
        """The groups whose frames were not given back."""
        return {op for (op,) in self._db.execute("SELECT op FROM facts")}

    def totals(self) -> dict[tuple[State, str], int]:
        """Samples by recorded state and reason."""
        query = "SELECT state, reason, SUM(samples) FROM groups GROUP BY state, reason"
        return {(State(state), reason): samples for state, reason, samples in self._db.execute(query)}

    def records(self, *, after: int = 0) -> Iterator[tuple[int, Record]]:
        """(op, decision) behind a decision, in order."""
        for op, data in self._db.execute("SELECT op, data FROM records WHERE op > ? ORDER BY op", (after,)):
            yield op, read_record(data)

    def steps(self, *, first: int = 1) -> Iterator[tuple[int, int, bytes, State]]:
        """(step, op, manifest, state) from the first one on, in order."""
        for step, op, manifest, state in self._db.execute(
            "SELECT * FROM steps WHERE step >= ? ORDER BY step", (first,)
        ):
            yield step, op, manifest, STATES[state]

    def close(self) -> None:
        if self._checkpointer is not None:
            self._checkpointer.close()
        self._db.close()
        self._let_go()

    def _let_go(self) -> None:
        if self._witness is not None:
            self._witness.close()
            self._witness = None
        if self._lock is not None:
            fork.close(self._lock)
            self._lock = None
