"""What `penstock doctor RUN` examines of a run: what its folder holds, or whether the plane at its address answers."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

from penstock.commands.doctor_checks import Finding
from penstock.commands.which_run import is_address, plane_folder
from penstock.errors import InvalidInput, PenstockError

_ANSWER_S = 5.0


def examine_run(where: str, keys: Path | None) -> Iterator[Finding]:
    """The plane at an address, or the run in a folder; nothing for a folder that has none yet."""
    if is_address(where):
        yield _at_work(where, keys)
        return
    try:
        folder = plane_folder(where)
    except InvalidInput:
        return
    yield _in_folder(folder)


def _at_work(url: str, keys: Path | None) -> Finding:
    from penstock.client import open as open_plane
    from penstock.protocol import Timeouts

    begin = time.monotonic()
    try:
        with open_plane(url, keys=keys, timeouts=Timeouts(plane_s=_ANSWER_S)) as plane:
            status = plane.status()
    except PenstockError as error:
        return Finding(name="plane", verdict="failure", text=f"{url}: {error}")
    took = time.monotonic() - begin
    text = (
        f"{url}: run {status['run']!r} answers in {took * 1e3:.0f} ms; epoch {status['epoch']}, next step "
        f"{status['next_step']}, waiting for {status['waiting_for']}"
    )
    return Finding(name="plane", verdict="ok", text=text, value=took)


def _in_folder(folder: Path) -> Finding:
    from penstock.runs import read_run

    try:
        found = read_run(folder, steps=1, groups=0)
    except PenstockError as error:
        return Finding(name="run", verdict="failure", text=str(error))
    balanced = found["ledger"]["balanced"]
    text = (
        f"{folder}: epoch {found['epoch']}, next step {found['next_step']}, {found['held_groups']:,} groups held; "
        f"the ledger is {'balanced' if balanced else 'NOT BALANCED; keep the folder and report it'}"
    )
    return Finding(name="run", verdict="ok" if balanced else "failure", text=text)
