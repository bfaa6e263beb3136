"""A run's log in one SQLite file.

SQLite in WAL mode with full sync does what a log must: a transaction is on disk, or it never happened. One process owns
a run's folder, by a lock that ends with the process. The witness (`run_folder.py`) counts commits outside the database,
so a log that lost some of them is detected.
"""

from __future__ import annotations

import contextlib
import logging
import secrets
import sqlite3
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any

from penstock.errors import CorruptFile, DiskFull
from penstock.log.decision_log import FORMAT, Guard, Log
from penstock.log.log_rows import TABLES, definitions
from penstock.log.run_folder import Disk, Witness, check_log_is_there, check_witness, own, release
from penstock.log.sqlite_reader import check_objects, quick_check, typed_error, typed_errors

logger = logging.getLogger("penstock.log")
_PAGE = 4096
"""Bytes of a page. A commit writes every page it changed, and a put changes five: with pages of 16 kB that took 70 us
of processor time more."""
TIDY_BYTES = 16 << 20
"""Bytes written to the write-ahead log before a checkpoint is due."""
_COMMIT_PAGES = 5
"""Pages that a commit writes beside metadata and plans."""
_EPOCH = "SELECT value FROM meta WHERE name = 'epoch'"
_COUNT = "UPDATE meta SET value = ? WHERE name = 'commits'"
_LOOKED_UP = 32
"""Groups that are looked up with one query."""
_KNOWN = f"SELECT id FROM groups WHERE id IN ({', '.join('?' * _LOOKED_UP)})"  # noqa: S608 - only marks
TYPES = {"int": "INTEGER", "small": "INTEGER", "real": "REAL", "text": "TEXT", "blob": "BLOB", "any": ""}


def _create(table: str) -> str:
    # If the key is text, the table itself is ordered by it. An integer key is SQLite's own row number.
    end = " WITHOUT ROWID" if next(iter(TABLES[table].values())) == "text" else ""
    return f"CREATE TABLE IF NOT EXISTS {table} ({definitions(table, TYPES)}){end};"


SCHEMA = "\n".join(map(_create, TABLES))


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
        """`folder` None keeps the log in memory: the same code, nothing durable. `exclusive` uses no shared memory
        beside the file, so the file may lie on a network filesystem, but no other process can read it while it is open.
        `guard` is called before anything is changed."""
        self.folder = None if folder is None else Path(folder).resolve()
        self._lock = None if self.folder is None else own(self.folder)
        self.disk = Disk(self.folder, quota=max_disk_bytes, reserve_bytes=disk_reserve_bytes)
        # The write-ahead log must fit into the reserve several times over: on a full volume it is what steps write to.
        self._wal_bytes = (
            TIDY_BYTES if self.folder is None else max(min(TIDY_BYTES, self.disk.reserve_bytes // 8), _PAGE)
        )
        self._exclusive, self._guard = exclusive, guard
        self._witness: Witness | None = None
        self.commits = 0
        self._written_bytes = 0
        """Bytes of blobs in the transaction under way."""
        self._path = ":memory:" if self.folder is None else str(self.folder / "log.sqlite")
        self.where = "memory" if self.folder is None else str(self.folder)
        try:
            try:
                self._open()
            except DiskFull:  # opening writes an epoch: on a full volume that needs the reserve
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
            if self._exclusive:  # before journal_mode: write-ahead logging then keeps its index in this process
                self._db.execute("PRAGMA locking_mode=EXCLUSIVE")
            self._db.execute("PRAGMA journal_mode=WAL")
            # The file's own: earlier versions made logs with larger pages.
            self._page = int(self._db.execute("PRAGMA page_size").fetchone()[0])
            self._db.execute("PRAGMA synchronous=FULL")
            self._db.execute(f"PRAGMA journal_size_limit={4 * self._wal_bytes}")
            # The checkpointer's thread should do this. If it cannot keep up, a commit does it at four times the size.
            self._db.execute(f"PRAGMA wal_autocheckpoint={max(4 * self._wal_bytes // self._page, 1)}")
            check_objects(self._db, self._path)
            self._check_format()
            self._db.executescript(SCHEMA)
            self.commits = self.meta("commits", 0)
            if self.folder is not None:
                check_witness(self.folder, self.text("run_id"), self.commits)
            # What an earlier process failed to sync may be readable from the page cache and still not be on disk.
            # A checkpoint writes and syncs all of it again.
            self._db.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()
            self.take_over()

    def _check_format(self) -> None:
        # Tables without a format were left by a plane that was killed while it created them. They are empty.
        found = self.meta("format", FORMAT) if "meta" in self.tables() else FORMAT
        if found != FORMAT:
            raise CorruptFile(
                f"{self._path}: format {found}; this version reads format {FORMAT}; finish the run with the version of "
                "Penstock that began it, or copy its groups to a new one with `penstock storage recover --into`"
            )

    def take_over(self) -> None:
        """Begin a new epoch. From now on earlier planes can write nothing."""
        epoch = self.meta("epoch", 0) + 1
        found = self.text("run_id")
        self.run_id = found or secrets.token_hex(16)
        if self._guard is not None:
            self._guard(run_id=self.run_id, epoch=epoch, commits=self.commits, held=self.num_frames, is_new=not found)
        self.epoch = epoch
        if self.folder is not None and self._witness is None:
            self._witness = Witness(self.folder)
        self._new = set[str]()
        """Groups that the log did not have when they were looked up, until something is written."""
        self._has_discards = self.first("SELECT 1 FROM discards LIMIT 1") is not None
        self._db.execute("BEGIN IMMEDIATE")
        self.set_meta("format", FORMAT)
        self.set_meta("run_id", self.run_id)
        self.set_meta("epoch", self.epoch)
        self.set_meta("commits", self.commits + 1)
        self._db.execute("COMMIT")
        self._committed()

    def _committed(self) -> None:
        """Count a commit in the witness. Raises StorageError if the log's file was replaced under us."""
        self.commits += 1
        if self._witness is not None:
            self._witness.write(self.run_id, self.commits)

    @property
    def used_bytes(self) -> int:
        """Bytes of the log itself: pages in use, and the write-ahead log."""
        pages, free = (
            int(self._db.execute(f"PRAGMA {name}").fetchone()[0]) for name in ("page_count", "freelist_count")
        )
        wal = 0
        if self.folder is not None:
            with contextlib.suppress(OSError):
                wal = (self.folder / "log.sqlite-wal").stat().st_size
        return (pages - free) * self._page + wal

    def shrink(self) -> None:
        """Checkpoint the write-ahead log and truncate it."""
        with contextlib.suppress(sqlite3.DatabaseError):
            self._db.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """Commit everything written in the block, or nothing. Raises Fenced once another plane has the run."""
        try:
            began = time.perf_counter()
            self._db.execute("BEGIN IMMEDIATE")
            locked_s = time.perf_counter() - began
            self._written_bytes = 0
            self._new = set()
            try:
                # Inside the transaction: BEGIN IMMEDIATE holds the write lock, so the epoch cannot change before our
                # commit.
                if self._db.execute(_EPOCH).fetchone() != (self.epoch,):
                    self.check_epoch()
                yield
                self._db.execute(_COUNT, (self.commits + 1,))
                started = time.perf_counter()
                self._db.execute("COMMIT")
                synced = time.perf_counter()
                self._committed()  # after the commit: the witness may be behind the log, never ahead
                ended = time.perf_counter()
                self.on_commit(
                    locked_s + ended - started,
                    lambda: (
                        f"lock {locked_s * 1e3:.0f} ms, sync {(synced - started) * 1e3:.0f} ms, witness "
                        f"{(ended - synced) * 1e3:.0f} ms, {self._written_bytes:,} bytes of blobs"
                    ),
                )
                if self._checkpointer is not None:
                    self._checkpointer.note(self._written_bytes + _COMMIT_PAGES * self._page)
            except BaseException:
                if self._db.in_transaction:
                    self._db.execute("ROLLBACK")
                raise
        except (DiskFull, sqlite3.DatabaseError, UnicodeDecodeError) as error:
            found = error if isinstance(error, DiskFull) else typed_error(error, str(self.folder or "memory"))
            # Nothing was written. Make room, so that the next step or commit finds some; the caller decides whether
            # this transaction is worth repeating.
            if isinstance(found, DiskFull) and self.disk.release():
                self.shrink()
            raise found from None

    # -------------------------------------------------------------- statements

    def rows(self, query: str, values: Sequence[Any] = ()) -> list[tuple[Any, ...]]:
        try:
            return self._db.execute(query, values).fetchall()
        except (sqlite3.DatabaseError, UnicodeDecodeError) as error:
            raise typed_error(error, self.where) from None

    def tables(self) -> set[str]:
        return {name for (name,) in self._db.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}

    def damage(self) -> str:
        return quick_check(self._db)

    def look_up(self, groups: Sequence[str], discards: Sequence[str]) -> None:  # noqa: ARG002 - only groups are many
        self._new = set()
        for start in range(0, len(groups), _LOOKED_UP):
            names = groups[start : start + _LOOKED_UP]
            found = self.rows(_KNOWN, [*names, *[""] * (_LOOKED_UP - len(names))])  # no group is called ""
            self._new.update(names)
            self._new.difference_update([name for (name,) in found])

    def digest_of(self, group: str) -> bytes | None:
        return None if group in self._new else super().digest_of(group)

    def is_discarded(self, name: str) -> bool:
        # Most runs discard nothing, and every put asks.
        return self._has_discards and super().is_discarded(name)

    def add_discard(self, name: str) -> None:
        self._has_discards = True
        super().add_discard(name)

    def current_epoch(self) -> int:
        return self.meta("epoch", 0)

    def _write(self, query: str, values: Sequence[Any] = ()) -> None:
        self._db.execute(query, values)
        self._written_bytes += sum(len(value) for value in values if isinstance(value, bytes))

    def set_manifest(self, step: int, manifest: bytes) -> None:
        # Not an UPDATE: SQLite merges pages when a row is deleted, never when it becomes shorter. A plan that is
        # forgotten would keep its room for ever, 20 times what is left of it.
        found = self.first("SELECT op, state FROM steps WHERE step = ?", (step,))
        if found is not None:
            self._write("DELETE FROM steps WHERE step = ?", (step,))
            self._insert("steps", "step, op, manifest, state", [(step, found[0], manifest, found[1])])

    def _write_keyed(self, query: str, values: Sequence[Any], keys: Sequence[Any]) -> None:
        self._db.executemany(f"{query} = ?", [(*values, key) for key in keys])

    def _insert(self, table: str, columns: str, rows: Sequence[tuple[Any, ...]], *, known: str = "") -> None:
        self._db.executemany(_insertion(table, columns, known), rows)
        if rows and isinstance(rows[0][-1], bytes):
            self._written_bytes += sum([len(row[-1]) for row in rows])

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
            release(self._lock)
            self._lock = None


@lru_cache(maxsize=64)
def _insertion(table: str, columns: str, known: str) -> str:
    marks = ", ".join("?" * (columns.count(",") + 1))
    return f"INSERT INTO {table} ({columns}) VALUES ({marks}) {known}"  # noqa: S608 - our own names


class WalCheckpointer:
    """Checkpoints one database from a thread of its own. Call `note` after each commit.

    SQLite itself checkpoints inside the commit that finds the write-ahead log too long, and the caller of that commit
    waits for 16 MB to be written and synced: in a stream of groups that is every fiftieth commit. A passive checkpoint
    on another connection blocks no writer.
    """

    def __init__(self, path: str, every_bytes: int = TIDY_BYTES) -> None:
        self._path, self._written, self._every_bytes = path, 0, every_bytes
        self._due, self._ending = threading.Event(), False
        self._thread = threading.Thread(target=self._run, name="penstock-log", daemon=True)
        self._thread.start()

    def note(self, num_bytes: int) -> None:
        """Count a commit of about `num_bytes`; start a checkpoint if one is due."""
        # The size of the -wal file does not tell: after a checkpoint SQLite writes it again from its start.
        self._written += num_bytes
        if self._written > self._every_bytes:
            self._written = 0
            self._due.set()

    def close(self) -> None:
        self._ending = True
        self._due.set()
        self._thread.join()

    def _run(self) -> None:
        db = sqlite3.connect(self._path, isolation_level=None, check_same_thread=False)
        try:
            while self._due.wait() and not self._ending:
                self._due.clear()
                try:
                    db.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchone()
                except sqlite3.DatabaseError as error:
                    logger.warning("%s: checkpoint failed: %s; the next commit tries again", self._path, error)
        finally:
            db.close()
