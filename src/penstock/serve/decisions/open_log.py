"""A run's log and its storage, opened as the plane's settings say."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from penstock.atomic import folder_errors
from penstock.serve.decisions.log import Log
from penstock.serve.settings import PlaneSettings
from penstock.storage import FolderStorage, MemoryStorage, Storage, check_log, is_shared, open_storage


def open_log(folder: str | Path | None, settings: PlaneSettings) -> Log:
    """The log in a folder; None: in memory. Refuses a log that does not belong to its storage, or is behind it.

    SQLite's write-ahead log shares memory between the processes of one host. On a filesystem that other hosts see, the
    plane therefore has the log to itself.
    """
    with folder_errors(folder or "memory:"):
        if folder is not None:  # first: what is wrong with it should be said of it, not of what is inside
            Path(folder).mkdir(parents=True, exist_ok=True, mode=0o700)
        return Log(
            folder,
            max_disk_bytes=settings.max_disk_bytes,
            disk_reserve_bytes=settings.disk_reserve_bytes,
            exclusive=folder is not None and is_shared(folder),
            guard=partial(check_log, storage_of(settings, folder)),
        )


def storage_of(settings: PlaneSettings, folder: str | Path | None) -> Storage:
    """Where a plane's frames are: as the settings say, else in the folder of its log, or in memory as that is."""
    if settings.storage is not None:
        return open_storage(settings.storage)
    return MemoryStorage() if folder is None else FolderStorage(Path(folder).resolve() / "storage")
