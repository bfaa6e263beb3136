"""Events of a run's processes: planes that start and end, trainers that join. Noted in the log for its readers.

Decisions have numbers and no times, and none of them says that a plane was killed. So a plane notes the few moments a
reader wants to see beside the steps. No decision depends on them.
"""

from __future__ import annotations

import logging
import os
import platform
import time
from typing import Literal

import msgspec

from penstock.errors import CorruptFile
from penstock.log.decision_log import LogReader
from penstock.log.pids import pid_space

logger = logging.getLogger("penstock.log")
EVENTS = "events"
"""The name of the value that holds them."""
_MAX_REASON = 200
_MOST = 1000
"""Events kept: the newest. A plane that is restarted every minute by a supervisor must not fill its log with them."""


class RunEvent(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One moment of a run."""

    kind: Literal["start", "end", "trainer"]
    """A plane started, a plane closed its log, or a trainer began a session."""
    at: float
    """Unix time."""
    step: int
    """The step that was to be trained next."""
    epoch: int = 0
    was: int = 0
    """trainer: the step that would have come next without it. Larger than `step` after a rewind."""
    is_lost: bool = False
    """start: the plane before did not close its log."""
    after: str = ""
    """trainer: why the session before failed; empty if its processes left it, or there was none."""
    pid: int = 0
    host: str = ""
    space: str = ""
    """The process that started, and where its pid means something."""


# Made at import: msgspec crashes when two threads are the first to decode a type.
_READ = msgspec.json.Decoder(list[RunEvent])


def run_events_of(log: LogReader) -> list[RunEvent]:
    """Return a run's events, oldest first. Empty for runs of earlier versions."""
    return _decoded(log.text(EVENTS), log.where)


def started(log: LogReader, *, step: int, epoch: int) -> str:
    """Return the events with the start of this process's plane, to be stored under `EVENTS`."""
    found = _known(log)
    is_lost = next((one.kind == "start" for one in reversed(found) if one.kind in ("start", "end")), False)
    event = RunEvent(
        kind="start",
        at=time.time(),
        step=step,
        epoch=epoch,
        is_lost=is_lost,
        pid=os.getpid(),
        host=platform.node(),
        space=pid_space(),
    )
    return _with(found, event)


def ended(log: LogReader, *, step: int, epoch: int) -> str:
    """Return the events with the end of this plane."""
    return _with(_known(log), RunEvent(kind="end", at=time.time(), step=step, epoch=epoch))


def trainer_joined(log: LogReader, *, step: int, was: int, after: str, epoch: int) -> str:
    """Return the events with a trainer that begins a session at `step`."""
    event = RunEvent(kind="trainer", at=time.time(), step=step, was=was, after=after[:_MAX_REASON], epoch=epoch)
    return _with(_known(log), event)


def _known(log: LogReader) -> list[RunEvent]:
    """Return the events so far. A plane whose events cannot be read begins a new list: no decision depends on them."""
    try:
        return run_events_of(log)
    except CorruptFile as error:
        logger.warning("started a new list of events: %s", error)
        return []


def _with(found: list[RunEvent], event: RunEvent) -> str:
    return msgspec.json.encode([*found, event][-_MOST:]).decode()


def _decoded(text: str, where: str) -> list[RunEvent]:
    try:
        return _READ.decode(text) if text else []
    except msgspec.DecodeError as error:
        raise CorruptFile(f"{where}: its events cannot be read: {error}; restore the log from a copy") from None
