"""Carries SQLite's write-ahead log over into the database, from a thread of its own.

SQLite does this inside the commit that finds the log too long, and whoever waits for that commit waits for 16 MB to be
written and synced: in a stream of groups that is every fiftieth. A passive checkpoint beside the writer blocks nobody.
"""

from __future__ import annotations

import logging
import sqlite3
import threading

logger = logging.getLogger("penstock.log")
TIDY_BYTES = 16 << 20
"""Written since the last time, from which on it is carried over."""
_COMMIT_BYTES = 64 << 10
"""What a commit writes beside frames: a few pages."""


class WalCheckpointer:
    """For one database file; `note` each commit."""

    def __init__(self, path: str, every_bytes: int = TIDY_BYTES) -> None:
        self._path, self._written, self._every_bytes = path, 0, every_bytes
        self._due, self._ending = threading.Event(), False
        self._thread = threading.Thread(target=self._run, name="penstock-log", daemon=True)
        self._thread.start()

    def note(self, num_bytes: int) -> None:
        """So many bytes of frames were committed; begin, if there is enough to do."""
        self._written += num_bytes + _COMMIT_BYTES  # the file itself does not tell: it is written again from its start
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
                    logger.warning("%s: not tidied now: %s", self._path, error)  # the next commit tries again
        finally:
            db.close()
