"""Durable storage for the model calls of unfinished rollouts: one SQLite file, shared by the processes of a host.

A call is stored under its rollout and its own name. Storing the same bytes again does nothing; other bytes raise
`Conflict`. `freeze` ends a rollout: it returns all calls as one snapshot, and later calls are rejected. `drop` deletes
the calls of snapshots that have not changed since. A row per rollout remains, which rejects late calls.

Every change increments the rollout's version. Writers wait for each other, and each write is synced before it returns.
"""

from __future__ import annotations

import secrets
import sqlite3
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import xxhash
import zstandard

from penstock.errors import Conflict, CorruptFile, InvalidInput, StorageError

FILE = "calls.sqlite"
_WAIT_S = 60.0
_TABLES = """
CREATE TABLE IF NOT EXISTS rollouts (
    id TEXT PRIMARY KEY, version INTEGER NOT NULL, snapshot TEXT, incomplete TEXT, retired_at REAL
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS calls (
    number INTEGER PRIMARY KEY AUTOINCREMENT, rollout TEXT NOT NULL, name TEXT NOT NULL, digest BLOB NOT NULL,
    entry BLOB NOT NULL, UNIQUE (rollout, name)
);
CREATE TABLE IF NOT EXISTS begun (rollout TEXT NOT NULL, name TEXT NOT NULL, PRIMARY KEY (rollout, name)) WITHOUT ROWID;
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """The calls of a rollout at the moment it was frozen."""

    rollout: str
    entries: tuple[bytes, ...]
    """The bytes that were put, in that order."""
    incomplete: str | None
    """Why a call is missing; None if the rollout is complete."""
    id: str
    version: int


class CallStore:
    """Stores calls in one folder. Safe to use from many threads and processes."""

    def __init__(self, folder: str | Path) -> None:
        self.path = Path(folder) / FILE
        self._lock = threading.Lock()
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            self.path.touch(mode=0o600)
        except OSError as error:
            raise StorageError(f"{folder}: {error.strerror}; give a folder that can be created and written") from None
        with self._errors():
            self._sql = sqlite3.connect(self.path, timeout=_WAIT_S, isolation_level=None, check_same_thread=False)
            self._sql.execute("PRAGMA journal_mode=WAL")
            self._sql.execute("PRAGMA synchronous=FULL")
            self._sql.executescript(_TABLES)

    def put(self, rollout: str, name: str, entry: bytes) -> bool:
        """Store a call, durably when this returns. Returns False if the same call was stored before."""
        _check_names(rollout, name)
        digest = xxhash.xxh3_128_digest(entry)
        packed = zstandard.ZstdCompressor(level=1).compress(entry)
        with self._writing() as sql:
            self._check_open(sql, rollout)
            row = sql.execute("SELECT digest FROM calls WHERE rollout = ? AND name = ?", (rollout, name)).fetchone()
            if row is None:
                sql.execute(
                    "INSERT INTO calls (rollout, name, digest, entry) VALUES (?, ?, ?, ?)",
                    (rollout, name, digest, packed),
                )
                _change(sql, rollout)
            elif row[0] != digest:
                _change(sql, rollout, incomplete=f"call {name!r} was put with two contents")
        if row is not None and row[0] != digest:  # raised after the commit, which stores the mark
            raise Conflict(f"rollout {rollout!r} call {name!r}: was put with other content; name each call once")
        return row is None

    def begin(self, rollout: str, name: str) -> None:
        """Record that a call is about to be made. If it never arrives, the rollout is incomplete."""
        _check_names(rollout, name)
        with self._writing() as sql:
            self._check_open(sql, rollout)
            sql.execute("INSERT OR IGNORE INTO begun VALUES (?, ?)", (rollout, name))

    def mark_incomplete(self, rollout: str, reason: str) -> None:
        """Record that a call was lost. Also possible after the rollout was frozen."""
        _check_names(rollout, "x")
        with self._writing() as sql:
            _change(sql, rollout, incomplete=reason)

    def freeze(self, rollout: str) -> Snapshot:
        """End a rollout and return all its calls. Later calls are rejected. Repeating it returns the same snapshot."""
        _check_names(rollout, "x")
        with self._writing() as sql:
            row = _row(sql, rollout)
            if row is not None and row[3] is not None:
                raise Conflict(f"rollout {rollout!r}: its calls were dropped; it cannot be read again")
            if row is None or row[1] is None:
                _change(sql, rollout)
                sql.execute("UPDATE rollouts SET snapshot = ? WHERE id = ?", (secrets.token_hex(16), rollout))
                row = _row(sql, rollout)
            found = sql.execute(
                "SELECT name, digest, entry FROM calls WHERE rollout = ? ORDER BY number", (rollout,)
            ).fetchall()
            begun = {name for (name,) in sql.execute("SELECT name FROM begun WHERE rollout = ?", (rollout,))}
        assert row is not None and row[1] is not None
        lost = sorted(begun - {name for name, _, _ in found})
        return Snapshot(
            rollout=rollout,
            entries=tuple(self._unpacked(rollout, name, digest, entry) for name, digest, entry in found),
            incomplete=row[2] or (f"call {lost[0]!r} was begun and never arrived" if lost else None),
            id=row[1],
            version=row[0],
        )

    def drop(self, snapshots: Iterable[tuple[str, str, int]]) -> int:
        """Delete the calls of each (rollout, snapshot, version), in one transaction. Returns the number of rollouts.

        A rollout whose version is another one by now is left alone: `mark_incomplete` may have come after `freeze`.
        """
        dropped = 0
        with self._writing() as sql:
            for rollout, snapshot, version in snapshots:
                row = _row(sql, rollout)
                if row is None or row[0] != version or row[1] != snapshot:
                    continue
                sql.execute("DELETE FROM calls WHERE rollout = ?", (rollout,))
                sql.execute("DELETE FROM begun WHERE rollout = ?", (rollout,))
                sql.execute("UPDATE rollouts SET retired_at = ? WHERE id = ?", (time.time(), rollout))
                dropped += 1
        return dropped

    def sweep(self, older_than_s: float) -> int:
        """Forget rollouts dropped longer ago than any of their calls can still arrive. Returns the number."""
        with self._writing() as sql:
            return sql.execute("DELETE FROM rollouts WHERE retired_at < ?", (time.time() - older_than_s,)).rowcount

    def after(self, rollout: str, number: int) -> list[tuple[int, bytes]]:
        """Return (number, entry) of the calls that were put after call `number`."""
        with self._reading() as sql:
            found = sql.execute(
                "SELECT number, name, digest, entry FROM calls WHERE rollout = ? AND number > ? ORDER BY number",
                (rollout, number),
            ).fetchall()
        return [(at, self._unpacked(rollout, name, digest, entry)) for at, name, digest, entry in found]

    def one(self, rollout: str, number: int) -> bytes:
        with self._reading() as sql:
            row = sql.execute("SELECT name, digest, entry FROM calls WHERE number = ?", (number,)).fetchone()
        if row is None:
            raise Conflict(f"rollout {rollout!r}: its calls were dropped; it cannot be read again")
        return self._unpacked(rollout, *row)

    def close(self) -> None:
        with self._lock:
            self._sql.close()

    def _check_open(self, sql: sqlite3.Connection, rollout: str) -> None:
        row = _row(sql, rollout)
        if row is not None and row[1] is not None:
            raise Conflict(f"rollout {rollout!r}: is frozen; put later calls under another rollout")

    def _unpacked(self, rollout: str, name: str, digest: bytes, entry: bytes) -> bytes:
        try:
            data = zstandard.ZstdDecompressor().decompress(entry)
        except zstandard.ZstdError:
            data = b""
        if xxhash.xxh3_128_digest(data) != digest:
            raise CorruptFile(f"{self.path}: rollout {rollout!r} call {name!r}: digest differs; the file is damaged")
        return data

    @contextmanager
    def _writing(self) -> Iterator[sqlite3.Connection]:
        with self._lock, self._errors():
            self._sql.execute("BEGIN IMMEDIATE")
            try:
                yield self._sql
            except BaseException:
                self._sql.execute("ROLLBACK")
                raise
            self._sql.execute("COMMIT")

    @contextmanager
    def _reading(self) -> Iterator[sqlite3.Connection]:
        with self._lock, self._errors():
            yield self._sql

    @contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except sqlite3.Error as error:
            raise StorageError(f"{self.path}: {error}") from None


def _row(sql: sqlite3.Connection, rollout: str) -> tuple[int, str | None, str | None, float | None] | None:
    """Return (version, snapshot, why incomplete, when dropped) of a rollout."""
    found: tuple[int, str | None, str | None, float | None] | None = sql.execute(
        "SELECT version, snapshot, incomplete, retired_at FROM rollouts WHERE id = ?", (rollout,)
    ).fetchone()
    return found


def _change(sql: sqlite3.Connection, rollout: str, *, incomplete: str | None = None) -> None:
    """Increment the rollout's version. The first reason why it is incomplete is kept."""
    sql.execute("INSERT OR IGNORE INTO rollouts (id, version) VALUES (?, 0)", (rollout,))
    sql.execute(
        "UPDATE rollouts SET version = version + 1, incomplete = coalesce(incomplete, ?) WHERE id = ?",
        (incomplete, rollout),
    )


def _check_names(rollout: str, name: str) -> None:
    if not rollout or not name:
        raise InvalidInput(f"rollout {rollout!r} call {name!r}: empty; name both")
