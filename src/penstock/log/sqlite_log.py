"""A run's log in one SQLite file.

SQLite in WAL mode with full sync does what a log must: a transaction is on disk, or it never happened. One process owns
a run's folder, by a lock that dies with it.

A log that lost something is never believed: the witness (`witness.py`) counts commits outside the database.
"""

from __future__ import annotations

import contextlib
import secrets
import sqlite3
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from penstock.errors import CorruptFile, DiskFull
from penstock.log import fork
from penstock.log.decision_log import FORMAT, Guard, Log
from penstock.log.sqlite_reader import quick_check, typed_errors
from penstock.log.volume import Disk, own
from penstock.log.wal_checkpointer import TIDY_BYTES, WalCheckpointer
from penstock.log.witness import Witness, check_log_is_there, check_witness

_PAGE = 16384
SCHEMA = """
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


class SqliteLog(Log):
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
        self._written_bytes = 0
        """In the transaction under way."""
        self._path = ":memory:" if self.folder is None else str(self.folder / "log.sqlite")
        self.where = "memory" if self.folder is None else str(self.folder)
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
            self._db.executescript(SCHEMA)
            self._commits = self.meta("commits", 0)
            if self.folder is not None:
                check_witness(self.folder, self.text("run_id"), self._commits)
            # What an earlier process could not sync may be readable and still not be on disk: carrying the
            # write-ahead log over writes and syncs all of it again.
            self._db.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()
            self.take_over()

    def _check_format(self) -> None:
        # Tables without a format are of a plane that was killed while it made them: nothing is in them.
        found = self.meta("format", FORMAT) if "meta" in self.tables() else FORMAT
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
                    self.check_epoch()
                    yield
                    self._db.execute("UPDATE meta SET value = ? WHERE name = 'commits'", (self._commits + 1,))
                    started = time.perf_counter()
                    self._db.execute("COMMIT")
                    self._committed()
                    self.on_commit(time.perf_counter() - started)
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

    # -------------------------------------------------------------- statements

    def rows(self, query: str, values: Sequence[Any] = ()) -> list[tuple[Any, ...]]:
        with typed_errors(self.where):
            return self._db.execute(query, values).fetchall()

    def tables(self) -> set[str]:
        return {name for (name,) in self._db.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}

    def damage(self) -> str:
        return quick_check(self._db)

    def current_epoch(self) -> int:
        return self.meta("epoch", 0)

    @property
    def commits(self) -> int:
        return self._commits

    def _write(self, query: str, values: Sequence[Any] = ()) -> None:
        self._db.execute(query, values)
        self._written_bytes += sum(len(value) for value in values if isinstance(value, bytes))

    def _write_keyed(self, query: str, values: Sequence[Any], keys: Sequence[Any]) -> None:
        self._db.executemany(f"{query} = ?", [(*values, key) for key in keys])

    def _insert(self, table: str, columns: str, rows: Sequence[tuple[Any, ...]], *, known: str = "") -> None:
        marks = ", ".join("?" * (columns.count(",") + 1))
        self._db.executemany(f"INSERT INTO {table} ({columns}) VALUES ({marks}) {known}", rows)  # noqa: S608 - ours
        if rows and isinstance(rows[0][-1], bytes):
            self._written_bytes += sum(len(row[-1]) for row in rows)

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
