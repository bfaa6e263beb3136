"""Whether a run is at work: one small file in its folder, written when it starts and when it ends.

A run whose process was killed could not write that it ended; its process id says so, to who looks on the same machine.
"""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

import msgspec

from penstock.atomic import replacing

FILE = "state.json"


class RunState(msgspec.Struct, frozen=True, kw_only=True):
    """What a run says of itself."""

    state: Literal["running", "finished", "stopped", "failed", "gone"]
    """gone: its process ended without a word."""
    began: float
    ended: float | None = None
    pid: int = 0
    host: str = ""


# Made at import: msgspec crashes when two threads are the first to decode a type.
_READ = msgspec.json.Decoder(RunState)


@contextmanager
def at_work(folder: Path) -> Iterator[None]:
    """Say that the run in a folder is running, and at the end how it ended."""
    running = RunState(state="running", began=time.time(), pid=os.getpid(), host=platform.node())
    _write(folder, running)
    word: Literal["finished", "stopped", "failed"] = "failed"
    try:
        yield
        word = "finished"
    except KeyboardInterrupt:
        word = "stopped"
        raise
    finally:
        _write(folder, msgspec.structs.replace(running, state=word, ended=time.time()))


def state_of(folder: Path) -> RunState | None:
    """What the run in a folder last said; None where nothing is known."""
    try:
        found = _READ.decode((folder / FILE).read_bytes())
    except (FileNotFoundError, NotADirectoryError, msgspec.DecodeError, UnicodeDecodeError):
        return None
    if found.state == "running" and found.host == platform.node() and not _is_alive(found.pid):
        return msgspec.structs.replace(found, state="gone")
    return found


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except (PermissionError, OverflowError):
        return True
    return True


def _write(folder: Path, state: RunState) -> None:
    with replacing(folder / FILE) as file:
        file.write(msgspec.json.encode(state))
