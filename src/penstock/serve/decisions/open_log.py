"""A run's log, opened as the plane's settings say."""

from __future__ import annotations

import sqlite3
from pathlib import Path

from penstock.atomic import folder_errors
from penstock.errors import StorageError
from penstock.serve.decisions.log import Log
from penstock.serve.settings import PlaneSettings


def open_log(folder: str | Path | None, settings: PlaneSettings) -> Log:
    """`None` keeps it in memory."""
    with folder_errors(folder or "memory:"):
        try:
            return Log(
                folder,
                max_disk_bytes=settings.max_disk_bytes,
                disk_reserve_bytes=settings.disk_reserve_bytes,
                exclusive=settings.locking == "exclusive",
            )
        except sqlite3.Error as error:  # raised before the database is open, without its path
            words = f"{Path(folder or '') / 'log.sqlite'}: {error}; it must be a file that this user may write"
            raise StorageError(words) from None
