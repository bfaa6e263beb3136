"""A run's log, opened as the plane's settings say."""

from __future__ import annotations

from pathlib import Path

from penstock.errors import ConfigError
from penstock.serve.decisions.log import Log
from penstock.serve.settings import PlaneSettings


def open_log(folder: str | Path | None, settings: PlaneSettings) -> Log:
    """`None` keeps it in memory."""
    exclusive = settings.locking == "exclusive"
    if exclusive and settings.archive is not None:
        raise ConfigError(
            f'locking = "exclusive": an archive ({settings.archive}) reads the log beside the plane, which nobody may '
            "then; leave one of the two out"
        )
    return Log(
        folder,
        max_disk_bytes=settings.max_disk_bytes,
        disk_reserve_bytes=settings.disk_reserve_bytes,
        exclusive=exclusive,
    )
