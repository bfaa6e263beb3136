"""Reads a log in SQLite without owning it: while a plane works on it, or long after.

Nothing is written and no lock is taken. A reader sees one consistent state: SQLite gives it a snapshot while the plane
writes.
"""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import quote

from penstock.errors import CorruptFile, DiskFull, PenstockError, StorageError
from penstock.log.decision_log import LogReader
from penstock.log.run_folder import LogInUse


class SqliteReader(LogReader):
    """One consistent state of a log."""

    def __init__(self, db: sqlite3.Connection, where: str) -> None:
        self._db, self.where = db, where

    def rows(self, query: str, values: Sequence[Any] = ()) -> Iterable[tuple[Any, ...]]:
        return self._db.execute(query, values)

    def tables(self) -> set[str]:
        return {name for (name,) in self._db.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}

    def damage(self) -> str:
        return quick_check(self._db)


def quick_check(db: sqlite3.Connection) -> str:
    found = str(db.execute("PRAGMA quick_check(1)").fetchone()[0])
    return "" if found == "ok" else found


@contextmanager
def reading_sqlite(path: Path) -> Iterator[SqliteReader]:
    """Read a log's file. Raises CorruptFile if it is damaged, LogInUse if its plane has it locked exclusively."""
    # Without a -wal file no process has the log open. "immutable" then reads it without creating files beside it.
    mode = "mode=ro" if path.with_name(f"{path.name}-wal").exists() else "immutable=1"
    try:
        log = sqlite3.connect(f"file:{quote(str(path.resolve()))}?{mode}", uri=True, isolation_level=None, timeout=1.0)
        try:
            log.execute("BEGIN")
            check_objects(log, str(path))
            yield SqliteReader(log, str(path))
        finally:
            log.close()
    except sqlite3.DatabaseError as error:
        if getattr(error, "sqlite_errorname", "").startswith("SQLITE_BUSY"):
            raise LogInUse(
                f"{path}: on a network filesystem its plane has it locked; ask the plane by its address, or stop it"
            ) from None
        raise CorruptFile(f"{path}: {error}; if a plane is just starting on it, try again") from None


def check_objects(db: sqlite3.Connection, where: str) -> None:
    """Raise CorruptFile if a log's file holds a view or a trigger. No plane makes one: a view in the place of a table
    can have no end, and a trigger would act on what a plane writes."""
    found = db.execute("SELECT type, name FROM sqlite_master WHERE type NOT IN ('table', 'index')").fetchone()
    if found is not None:
        raise CorruptFile(
            f"{where}: holds {found[0]} {str(found[1])[:60]!r}, which no plane makes; restore the folder from a copy"
        )


def back_up(source: Path, target: Path) -> None:
    """Copy a log with its write-ahead log to one file, even while its plane writes."""
    with ExitStack() as opened:
        log = _open_live(source)
        opened.callback(log.close)
        made = sqlite3.connect(target, isolation_level=None)
        opened.callback(made.close)
        log.backup(made)
        made.execute("PRAGMA journal_mode=DELETE")  # leaves one file, which can be renamed


def _open_live(path: Path) -> sqlite3.Connection:
    """Connect so that writes of a plane are seen, also of a plane that starts later."""
    where = f"file:{quote(str(path))}"
    log = sqlite3.connect(f"{where}?mode=ro", uri=True, isolation_level=None, timeout=5.0)
    try:
        log.execute("SELECT 1 FROM meta").fetchone()
    except sqlite3.OperationalError:
        log.close()
        if os.access(path.parent, os.W_OK) or path.with_name(f"{path.name}-wal").exists():
            raise
        # A read-only folder without a -wal file: no plane can write here, so there is nothing to see.
        return sqlite3.connect(f"{where}?immutable=1", uri=True, isolation_level=None)
    return log


@contextmanager
def typed_errors(where: str) -> Iterator[None]:
    """Raise our own errors for SQLite's."""
    try:
        yield
    except (sqlite3.DatabaseError, UnicodeDecodeError) as error:
        raise typed_error(error, where) from None


def typed_error(error: sqlite3.DatabaseError | UnicodeDecodeError, where: str) -> PenstockError:
    """Return our error for one of SQLite's: DiskFull, LogInUse, CorruptFile or StorageError, with what to do."""
    code = getattr(error, "sqlite_errorname", "")
    if code.startswith(("SQLITE_FULL", "SQLITE_IOERR_WRITE", "SQLITE_IOERR_SHMSIZE")):
        return DiskFull(f"{where}: {error}; nothing was written; make room, or raise max_disk_bytes")
    if code.startswith("SQLITE_BUSY"):
        return LogInUse(f"{where}: another process has it open; stop it or use another folder")
    # SQLite's message quotes damaged bytes, which need not be UTF-8.
    if code.startswith(("SQLITE_CORRUPT", "SQLITE_NOTADB")) or isinstance(error, UnicodeDecodeError):
        return CorruptFile(f"{where}: {error}; restore the folder from a copy")
    if code.startswith("SQLITE_CANTOPEN") and Path(where).is_dir():
        return StorageError(f"{where}: a folder, and the log is a file; move it away, or use another folder")
    if code.startswith("SQLITE_CANTOPEN"):
        return StorageError(f"{where}: {error}; let this user read and write the file and its folder")
    return StorageError(f"{where}: {error}")
