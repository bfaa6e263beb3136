"""Decisions about a run whose plane is not at work: written to its log, and done when the next plane starts."""

from __future__ import annotations

from pathlib import Path

from penstock.errors import Conflict, UnknownKey
from penstock.log import DropGroup, ReleaseGroup, State, open_existing


def settle_offline(folder: Path, group: str, *, drop: bool) -> None:
    """What is to become of a group in quarantine; raises Conflict while a plane has the folder."""
    try:
        log = open_existing(folder)
    except Conflict as error:
        raise Conflict(f"{error}; its plane is at work: give its address instead of the folder") from None
    try:
        waiting = {row.id: row for row in log.groups_in(State.QUARANTINED)}
        if group not in waiting:
            known = ", ".join(map(repr, list(waiting)[:5])) or "none"
            raise UnknownKey(f"group {group!r}: not in quarantine; there are: {known}")
        op = waiting[group].op
        with log.transaction():
            log.add_record(log.last_op + 1, DropGroup(op=op) if drop else ReleaseGroup(op=op))
            log.mark_settled(op)
    finally:
        log.close()
