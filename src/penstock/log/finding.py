"""Finds the log of a run's folder: a file in the folder, or a database that the folder names.

log.sqlite      the log itself
log.url         one line, the address of its database and the run's name: postgresql://host/db#my-run
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from traceback import extract_tb

import msgspec

from penstock.atomic import read_small
from penstock.errors import ConfigError, Conflict, CorruptFile, PenstockError
from penstock.log.decision_log import Log, LogReader
from penstock.log.run_folder import LOG
from penstock.log.sqlite_log import SqliteLog
from penstock.log.sqlite_reader import reading_sqlite

URL = "log.url"
PLANE = "plane"
"""The folder of a run's plane, in the layout of `penstock demo` and `penstock train`."""


def is_run(folder: str | Path) -> bool:
    """Return whether a folder holds a run."""
    return (Path(folder) / LOG).is_file() or (Path(folder) / URL).is_file()


def plane_of(folder: Path) -> Path | None:
    """Return the folder of a run's plane, the run's own or `plane` inside it; None if there is none."""
    return next((path for path in (folder, folder / PLANE) if is_run(path)), None)


def url_of(folder: str | Path) -> str:
    """Return the address of a run's log if it is in a database, else ""."""
    try:
        return read_small(Path(folder) / URL).decode().strip()
    except (FileNotFoundError, NotADirectoryError):
        return ""


_ODD = (
    ValueError,
    TypeError,
    LookupError,
    ArithmeticError,
    AttributeError,
    AssertionError,
    RecursionError,
    msgspec.MsgspecError,
)
"""Errors that reading raises for values that no plane writes, such as text for a number, or bytes of no record."""


@contextmanager
def as_corrupt(where: str | Path) -> Iterator[None]:
    """Raise CorruptFile if a log holds values that no plane writes: a stranger may have made it, or it is damaged.

    Wrap what reads the log and nothing else. The error names our line that failed, because it may also be our bug."""
    try:
        yield
    except (PenstockError, OSError):
        raise
    except _ODD as error:
        ours = [frame for frame in extract_tb(error.__traceback__) if "penstock" in Path(frame.filename).parts][-1]
        found = f"{type(error).__name__}: {str(error)[:300]} ({Path(ours.filename).name}, line {ours.lineno})"
        raise CorruptFile(
            f"{where}: its log holds values that no plane writes: {found}; restore the run from a copy, "
            "or report this if the run is sound"
        ) from error


@contextmanager
def reading(folder: str | Path) -> Iterator[LogReader]:
    """Open a run's log to read one consistent state of it, while its plane works or long after."""
    url = url_of(folder)
    if not url:
        with reading_sqlite(Path(folder) / LOG) as log, as_corrupt(folder):
            yield log
        return
    from penstock.log.postgres_reader import reading_postgres  # psycopg is an extra

    with reading_postgres(url) as found, as_corrupt(folder):
        yield found


def open_existing(folder: Path) -> Log:
    """Open the log of a run whose plane is stopped, to write a decision. Raises Conflict while a plane has it."""
    url = url_of(folder)
    if not url:
        return SqliteLog(folder)
    from penstock.log.postgres_log import PostgresLog

    return PostgresLog(url, folder=folder, take_over=False)


def check_url(folder: Path, url: str) -> None:
    """Raise Conflict if the folder's log is not the one at `url`."""
    found = url_of(folder)
    if found and found != url:
        raise Conflict(f"{folder}: its log is in {found}, not in {url}; give that address, or another folder")
    if (folder / LOG).exists():
        raise Conflict(f"{folder}: its log is {LOG}, not {url}; leave `log` out, or give another folder")


def note_url(folder: Path, url: str) -> None:
    """Write the address of a run's log into its folder."""
    if url_of(folder) != url:
        (folder / URL).write_text(f"{url}\n", encoding="utf-8")


def check_is_sqlite(folder: Path) -> None:
    """Raise ConfigError if the log of a folder is in a database."""
    if url := url_of(folder):
        raise ConfigError(f"{folder}: its log is in {url}; give log={url.partition('#')[0]!r}, or another folder")
