"""Which run a command is about: every command takes its folder, its plane's folder or its plane's address.

runs/demo/                    a run, as `penstock demo` and `penstock train` lay it out
runs/demo/plane/              its plane's folder: log, frames
runs/demo/token_exports/      what the trainer wrote of its tokens
tcp://127.0.0.1:7440          its plane, which says where its folder is
"""

from __future__ import annotations

from pathlib import Path
from socket import gethostname

from penstock.errors import InvalidInput

RUN_HELP = "the run: its folder, its plane's folder, or its plane's address"
_PLANE = "plane"
_ANSWER_S = 5.0


def is_address(where: str) -> bool:
    return "://" in where


def plane_folder(where: str, keys: Path | None = None) -> Path:
    """The folder of a run's plane."""
    from penstock.log import is_run
    from penstock.log.sqlite_reader import LOG

    folder = _folder(where, keys)
    for path in (folder, folder / _PLANE):
        if is_run(path):
            return path
    raise InvalidInput(f"{where}: no plane's {LOG} in it or in {_PLANE}/; give the folder of a run, or its address")


def export_folder(where: str, keys: Path | None = None) -> Path:
    """The folder that has a run's token exports beside its plane, or instead of one."""
    from penstock.view.folders import EXPORTS

    folder = _folder(where, keys)
    is_laid_out = folder.name == _PLANE and not (folder / EXPORTS).is_dir()
    return folder.parent if is_laid_out else folder


def _folder(where: str, keys: Path | None) -> Path:
    folder = _folder_of_plane(where, keys) if is_address(where) else Path(where)
    if not folder.exists():
        raise InvalidInput(f"{where}: no such folder; give the folder of a run, or its plane's address")
    if not folder.is_dir():
        raise InvalidInput(f"{where}: not a folder; give the folder of a run, or its plane's address")
    return folder.resolve() if folder.name in ("", ".", "..") else folder


def _folder_of_plane(url: str, keys: Path | None) -> Path:
    """Where the plane at an address keeps its run, if that is on this host."""
    from penstock.send.timeouts import Timeouts
    from penstock.serve.clients.api import open as open_plane

    with open_plane(url, keys=keys, timeouts=Timeouts(plane_s=_ANSWER_S)) as plane:
        status = plane.status()
    folder, host = status["folder"], status["host"]
    if folder is None:
        raise InvalidInput(f"{url}: its plane keeps nothing in a folder; `penstock top {url}` shows what it holds")
    if host != gethostname() or not Path(folder).is_dir():
        raise InvalidInput(
            f"{url}: its run is in {folder} on host {host}, not here; call this there, or copy that folder"
        )
    return Path(folder)
