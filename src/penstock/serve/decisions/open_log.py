"""A run's log, opened as the plane's settings say."""

from __future__ import annotations

from pathlib import Path

from penstock.serve.decisions.log import Log
from penstock.serve.settings import PlaneSettings


def open_log(folder: str | Path | None, settings: PlaneSettings) -> Log:
    """`None` keeps it in memory."""
    return Log(
        folder,
        max_disk_bytes=settings.max_disk_bytes,
        disk_reserve_bytes=settings.disk_reserve_bytes,
        exclusive=settings.locking == "exclusive",
    )
