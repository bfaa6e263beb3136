"""Open the log and the storage of a run as the plane's settings say."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path

import msgspec

from penstock.atomic import folder_errors
from penstock.errors import ConfigError, Conflict, DiskFull
from penstock.extras import require
from penstock.log import Guard, Log, LogReader, SqliteLog, check_is_sqlite, is_postgres, redacted, with_run
from penstock.plane.settings import PlaneSettings
from penstock.storage import FolderStorage, MemoryStorage, Storage, check_log, is_shared, open_storage, read_marker

_LISTENS_AT = "listens_at"


def run_folder(where: str, settings: PlaneSettings) -> str | None:
    """Return the folder of a run, or None if the run is in memory, or in a database and a storage."""
    if where == "memory:" and settings.log is not None:
        raise ConfigError(f"log: {redacted(settings.log)} with memory:, which keeps nothing; give a folder, or none")
    if "://" in where:  # as a folder's name it would make the folder "tcp:"
        raise ConfigError(f"{where}: an address, not a folder; give a folder, the address is the setting `listen`")
    return None if where in ("", "memory:") else where


def open_log(folder: str | Path | None, settings: PlaneSettings) -> Log:
    """Open the log in a run's folder, or in memory if `folder` is None.

    Raises if the log does not belong to its storage or is older than it. SQLite's write-ahead log needs memory shared
    between its processes, which only one host has. On a filesystem that other hosts see, the plane therefore opens the
    log exclusively.
    """
    with folder_errors(folder or "memory:"):
        if folder is not None:  # first: an error should name the folder, not a file inside
            Path(folder).mkdir(parents=True, exist_ok=True, mode=0o700)
        if settings.log is not None and is_postgres(settings.log):
            return _open_postgres(folder, settings, settings.log)
        if folder is not None:
            check_is_sqlite(Path(folder))
        return SqliteLog(
            folder,
            max_disk_bytes=settings.max_disk_bytes,
            disk_reserve_bytes=settings.disk_reserve_bytes,
            exclusive=folder is not None and is_shared(folder),
            guard=partial(check_log, storage_of(settings, folder)),
        )


def _open_postgres(folder: str | Path | None, settings: PlaneSettings, address: str) -> Log:
    if folder is None and settings.storage is None:
        raise ConfigError(
            f"log: {redacted(address)} without a folder and without storage; give `storage` a folder that the plane's "
            "hosts share or an object store, or give the run a folder"
        )
    require("log", "psycopg")
    from penstock.log import PostgresLog

    return PostgresLog(
        address,
        run=settings.run,
        folder=None if folder is None else Path(folder),
        deadline_s=settings.timeouts.log_s,
        max_disk_bytes=settings.max_disk_bytes,
        guard=_guard_shared(storage_of(settings, folder), with_run(address, settings.run)),
    )


def _guard_shared(storage: Storage, address: str) -> Guard:
    """Check as `check_log` does, and reject a log of another run that has the same name in the same database."""
    from penstock.log import reading_postgres

    def check(*, run_id: str, epoch: int, commits: int, held: int, is_new: bool) -> None:
        check_log(storage, run_id=run_id, epoch=epoch, commits=commits, held=held, is_new=is_new)
        if is_new or read_marker(storage) is not None:
            return
        with reading_postgres(address) as log:  # a plane marks its storage before it registers a segment
            if log.segments():
                raise Conflict(
                    f"{storage.url}: new, and the run in {log.where} has its frames elsewhere; give this run another "
                    "name (`run`), or the storage of that one"
                )

    return check


def note_listening(log: Log, urls: Sequence[str]) -> None:
    """Record where the plane listens. Clients that know the log's address find a plane that moved."""
    found = msgspec.json.encode(list(urls)).decode()
    if found != (log.text(_LISTENS_AT) or "[]"):
        with suppress(DiskFull), log.transaction():  # a plane on a full disk must start: only training makes room
            log.set_meta(_LISTENS_AT, found)


def listens_at(log: LogReader) -> list[str]:
    """Return the addresses where the plane of a run listened last."""
    found: list[str] = msgspec.json.decode(log.text(_LISTENS_AT) or "[]", type=list[str])
    return [url for url in found if url.startswith(("tcp://", "ipc://"))]


def storage_of(settings: PlaneSettings, folder: str | Path | None) -> Storage:
    """Return the storage for frames: of the settings, else in the folder of the log, or in memory like the log."""
    if settings.storage is not None:
        return open_storage(settings.storage)
    return MemoryStorage() if folder is None else FolderStorage(Path(folder).resolve() / "storage")
