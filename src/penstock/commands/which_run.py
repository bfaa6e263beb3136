"""Find the run that a command is about, from its folder, its plane's folder or its plane's address.

runs/demo/                    a run, in the layout of `penstock demo` and `penstock train`
runs/demo/plane/              its plane's folder: log, frames
runs/demo/token_exports/      the trainer's token exports
tcp://127.0.0.1:7440          its plane, which knows its folder
ray://demo                    the same, in a Ray cluster
postgresql://me@db/runs#demo  its log, if that is in a database; after # the run's name
"""

from __future__ import annotations

import atexit
import shutil
import tempfile
from argparse import ArgumentTypeError
from pathlib import Path
from socket import gethostname
from typing import TYPE_CHECKING

from penstock.errors import ConfigError, InvalidInput
from penstock.log import check_address, check_where, is_postgres, split_run, with_run

if TYPE_CHECKING:
    from penstock.client import Plane

RUN_HELP = "the run: its folder, its plane's folder, its plane's address, or postgresql://...#NAME"
_ANSWER_S = 5.0


def checked_where(text: str) -> str:
    """Return the argument of a command that takes a run, a folder or an address, unless it is none of them."""
    try:
        check_where(text)
    except ConfigError as error:
        raise ArgumentTypeError(str(error)) from None
    return text


def is_address(where: str) -> bool:
    """Check whether this is the address of a plane."""
    return "://" in where and not is_postgres(where)


def asking(url: str, keys: Path | None) -> Plane:
    """Open a running plane, to ask it something. It has a few seconds to answer."""
    from penstock.client import open as open_plane
    from penstock.protocol import Timeouts

    return open_plane(url, keys=keys, timeouts=Timeouts(plane_s=_ANSWER_S))


def plane_folder(where: str, keys: Path | None = None) -> Path:
    """Return the folder of a run's plane."""
    from penstock.log import LOG, PLANE, plane_of

    found = plane_of(_folder(where, keys))
    if found is None:
        raise InvalidInput(f"{where}: no {LOG} in it or in {PLANE}/; give the folder of a run, or its plane's address")
    return found


def export_folder(where: str, keys: Path | None = None) -> Path:
    """Return the folder with a run's token exports, which may lie beside its plane's folder."""
    from penstock.log import PLANE
    from penstock.view import EXPORTS

    folder = _folder(where, keys)
    is_laid_out = folder.name == PLANE and not (folder / EXPORTS).is_dir()
    return folder.parent if is_laid_out else folder


def _folder(where: str, keys: Path | None) -> Path:
    if is_postgres(where):
        return folder_for(where)
    folder = _folder_of_plane(where, keys) if is_address(where) else Path(where)
    if not folder.exists():
        raise InvalidInput(f"{where}: no such folder; give the folder of a run, or its plane's address")
    if not folder.is_dir():
        raise InvalidInput(f"{where}: not a folder; give the folder of a run, or its plane's address")
    return folder.resolve() if folder.name in ("", ".", "..") else folder


def _folder_of_plane(url: str, keys: Path | None) -> Path:
    """Return the folder of the plane at an address, if it can be read from here.

    That is so on the plane's host, on a filesystem that both hosts share, or if its log is in a database.
    """
    with asking(url, keys) as plane:
        status = plane.status()
    folder, host = status["folder"], status["host"]
    if folder is None and is_postgres(status["log"]):
        return folder_for(status["log"])
    if folder is None:
        raise InvalidInput(f"{url}: its plane has no folder; `penstock top {url}` shows what it holds")
    if host == gethostname() and Path(folder).is_dir():
        return Path(folder)
    if _holds(Path(folder), status["run_id"]):
        return Path(folder)
    if is_postgres(status["log"]):
        return folder_for(status["log"])
    raise InvalidInput(f"{url}: its run is in {folder} on host {host}; run this command there, or copy that folder")


def _holds(folder: Path, run_id: str) -> bool:
    """Check whether a folder on a shared filesystem holds the run. On a local disk it could only be a copy."""
    from penstock.log import is_run, reading
    from penstock.storage import is_shared

    if not is_shared(folder) or not is_run(folder):
        return False
    with reading(folder) as log:
        return log.all_meta().get("run_id") == run_id


def folder_for(log: str) -> Path:
    """Create a temporary folder that refers to a log in a database. It is removed when this process ends."""
    from penstock.log import note_url

    base, run = split_run(log)
    check_address(base)
    folder = Path(tempfile.mkdtemp(prefix="penstock-run-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    note_url(folder, with_run(base, run))
    return folder
