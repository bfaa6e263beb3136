"""Copies a run's log into one SQLite file, from SQLite or PostgreSQL, and makes a copied log another run's."""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Sequence
from contextlib import closing
from itertools import islice
from pathlib import Path

from penstock.log.decision_log import LogReader
from penstock.log.finding import reading, url_of
from penstock.log.log_rows import TABLES
from penstock.log.run_folder import LOG
from penstock.log.sqlite_log import SCHEMA
from penstock.log.sqlite_reader import back_up, typed_errors

_ROWS = 5000
"""Rows read and inserted at a time."""


def copy_log(folder: Path, target: Path) -> None:
    """Copy a run's log to one file, in one consistent state, even while its plane writes."""
    if url_of(folder):
        with reading(folder) as log:
            _copy_tables(log, target)
    else:
        back_up(folder / LOG, target)


def _copy_tables(log: LogReader, target: Path) -> None:
    with closing(sqlite3.connect(target, isolation_level=None)) as made:
        made.executescript(SCHEMA)
        made.execute("BEGIN")
        existing = log.tables()
        for table in (name for name in TABLES if name in existing):
            columns = [row[1] for row in made.execute(f"PRAGMA table_info({table})")]
            if table == "meta":  # in PostgreSQL run id, epoch and commits are in a table of their own
                rows = iter([(name, _typed(value)) for name, value in log.all_meta().items()])
            else:
                rows = iter(log.rows(f"SELECT {', '.join(columns)} FROM {table}"))  # noqa: S608 - our own names
            marks = ", ".join("?" * len(columns))
            while batch := list(islice(rows, _ROWS)):
                made.executemany(f"INSERT INTO {table} VALUES ({marks})", batch)  # noqa: S608 - our own names
        made.execute("COMMIT")


def _typed(value: str) -> int | str:
    """Return a named value as SQLite stores it: numbers as integers, which PostgreSQL keeps as text."""
    return int(value) if value.isdecimal() and len(value) < 19 else value


def sign_copy(
    path: Path, *, run_id: str, copied_from: str, lacks: str, dropped: Sequence[str], segments: Sequence[str]
) -> dict[str, int]:
    """Turn a copied log into the copy's own: its run id, storage and origin, and what it still has to delete.

    `dropped` are locations and segment names, `segments` the segment names among them. Returns `epoch` and `commits`.
    """
    with typed_errors(str(path.parent)), closing(sqlite3.connect(path, isolation_level=None)) as log:
        meta = {name: int(value) for name, value in log.execute(_NUMBERS)}
        mine = {"run_id": run_id, "storage": "", "copied_from": copied_from}
        more = {"copied_commits": meta["commits"], "copy_lacks": lacks}
        log.execute("BEGIN IMMEDIATE")
        log.executemany("INSERT OR REPLACE INTO meta VALUES (?, ?)", list((mine | more).items()))
        log.executemany("INSERT OR IGNORE INTO frees VALUES (?)", [(name,) for name in dropped])
        # A plane that finds an unregistered segment deletes nothing at all. So these stay registered until deleted.
        rows = [(name, "copy", meta["epoch"], time.time(), 1) for name in segments]
        log.executemany("INSERT OR IGNORE INTO segments VALUES (?, ?, ?, ?, ?)", rows)
        log.execute("COMMIT")
    return meta


_NUMBERS = "SELECT name, value FROM meta WHERE name IN ('epoch', 'commits')"


def set_identity(path: Path, *, run_id: str, epoch: int, least_commits: int) -> tuple[str, int]:
    """Set a log's run id (unless empty) and epoch, and raise its number of commits to `least_commits` at least.

    Returns run id and commits."""
    with closing(sqlite3.connect(path, isolation_level=None)) as db:
        if run_id:
            db.execute("UPDATE meta SET value = ? WHERE name = 'run_id'", (run_id,))
        db.execute("UPDATE meta SET value = ? WHERE name = 'epoch'", (epoch,))
        db.execute("UPDATE meta SET value = MAX(value, ?) WHERE name = 'commits'", (least_commits,))
        meta = dict(db.execute("SELECT name, value FROM meta WHERE name IN ('run_id', 'commits')"))
    return str(meta["run_id"]), int(meta["commits"])


def carry_over(path: Path) -> bool:
    """Checkpoint a log's write-ahead log and truncate it. Returns False if another process has the log open."""
    with typed_errors(str(path)), closing(sqlite3.connect(path, isolation_level=None)) as db:
        return not db.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()[0]
