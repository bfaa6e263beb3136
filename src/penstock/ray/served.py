"""The program that the plane's actor runs: the server process of `penstock serve`, with its settings on stdin.

    stdin     one line of JSON: an `Order`
    stdout    lines of JSON: {"waiting": MESSAGE} while another process has the log, then {"ready": {...}} or
              {"error": [KIND, MESSAGE]}
    stderr    log lines

It is a separate process, so that a plane in a cluster has everything other planes have: the watchdog, signals, pages
over HTTP. It ends with the actor's process, however that ends.
"""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
import time
import tomllib
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from penstock.config import build
from penstock.errors import Conflict, PenstockError
from penstock.log import LogInUse, is_run, reading, take_over, with_run
from penstock.plane import ClusterSettings
from penstock.server import Exit, Ready, run_plane

_LOOK_S = 0.5
_TAKE_OVER_S = 5.0
"""How long to wait for the previous process to let go of the log. Ray ends it when its node is lost, if it can."""


class Order(msgspec.Struct, frozen=True, kw_only=True):
    """The actor's instructions."""

    address: str
    """ray://NAME, for messages."""
    settings: str
    """Text of a plane.toml."""
    host: str
    """The address to listen at."""
    keys: dict[str, str]
    """Files of a key folder: relative path -> content."""
    run_id: str
    """Id of the run that the log must hold; empty: a new run may begin."""
    parent: int
    """Pid of the actor."""


def main() -> int:
    order = msgspec.json.decode(sys.stdin.buffer.readline(), type=Order)
    settings = build(ClusterSettings, tomllib.loads(order.settings), order.address)
    try:
        with tempfile.TemporaryDirectory(prefix="penstock-keys-", ignore_cleanup_errors=True) as keys:
            write_keys(order.keys, Path(keys))
            listen = (f"tcp://{order.host}:*",)
            return _serve(replace(settings, keys=keys, listen=listen), order)
    except (PenstockError, OSError) as error:
        _say({"error": [type(error).__name__, _message(error, settings.folder)]})
        return Exit.REFUSED


def _serve(settings: ClusterSettings, order: Order) -> int:
    """Run the plane as soon as the previous process has let go of the log, or can be taken over."""
    folder = Path(settings.folder)
    while True:
        try:
            if order.run_id:
                check_known(settings, order.run_id, order.address)
            take_over(folder, _TAKE_OVER_S)
            return run_plane(settings, ready=partial(_say_ready, settings), parent=order.parent)
        except LogInUse as error:
            # On a network filesystem the lock cannot be taken over. Wait until Ray has ended the other plane. Its lock
            # is not tried meanwhile: a plane that starts in that moment would find it taken, and fail.
            _say({"waiting": str(error)})
            time.sleep(_LOOK_S)


def check_known(settings: ClusterSettings, run_id: str, address: str) -> None:
    """Raise Conflict unless the log holds this run. A restarted plane must not begin a new run in an empty folder."""
    found = _run_id_in(settings)
    if found == run_id:
        return
    where = settings.log or f"{settings.folder} on this host"
    what = f"the log of run {found[:12]}" if found else "no log"
    raise Conflict(
        f"{address}: this plane is at work on run {run_id[:12]}, and {where} holds {what}; mount the folder or restore "
        f"the log of that run; to begin a new run, end this plane first (`penstock serve --ray "
        f"{address.removeprefix('ray://')} --end`)"
    )


def _run_id_in(settings: ClusterSettings) -> str:
    if settings.log is not None:
        from penstock.log import reading_postgres

        with reading_postgres(with_run(settings.log, settings.run)) as log:
            return log.all_meta().get("run_id", "") if "run" in log.tables() else ""
    if not is_run(settings.folder):
        return ""
    with reading(settings.folder) as log:
        return log.all_meta().get("run_id", "") if "meta" in log.tables() else ""


def write_keys(files: dict[str, str], folder: Path) -> None:
    """Write the files of a key folder."""
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(mode=0o700, exist_ok=True)
        path.touch(mode=0o600)
        path.write_text(text, encoding="ascii")


def _say_ready(settings: ClusterSettings, ready: Ready) -> None:
    assert settings.keys is not None
    shutil.rmtree(settings.keys)  # the keys were read; leave none on disk if this process is killed
    _say({"ready": asdict(ready) | {"http_token": None}})  # the token stays in the run's folder


def _say(line: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(line) + "\n")
    sys.stdout.flush()


def _message(error: PenstockError | OSError, folder: str) -> str:
    if isinstance(error, PenstockError):
        return str(error)
    return f"{error.filename or folder}: {error.strerror}; give a folder that can be made and written there"


if __name__ == "__main__":
    raise SystemExit(main())
