"""Decisions about a run whose plane is stopped: written to its log, carried out when the next plane starts.

settle_offline    release or drop a group in quarantine
forget            end `retain="all"`: from now on the run keeps recent steps only. Plans that no trainer can ask for
                  are dropped at once; the next plane frees the frames, as it frees every other frame.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import msgspec

from penstock.errors import Conflict, InvalidInput, UnknownKey
from penstock.log import DropGroup, ReleaseGroup, State, open_existing, reading
from penstock.plane import read_manifest

_ENDED = (int(State.COMMITTED), int(State.DROPPED))


def settle_offline(folder: Path, group: str, *, drop: bool) -> None:
    """Release or drop a group in quarantine. Raises Conflict while a plane has the folder."""
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


@dataclass(frozen=True, slots=True)
class Forgettable:
    """What a run would free if it kept recent steps only."""

    run_id: str
    groups: int
    num_bytes: int
    before_step: int
    """Plans of steps before this one are dropped."""


def forgettable(folder: Path) -> Forgettable:
    """Count what `forget` would free, without evaluation groups. Raises InvalidInput if `retain` is not "all"."""
    with reading(folder) as log:
        meta = log.all_meta()
        if meta.get("retain") != "all":
            raise InvalidInput(
                f'{folder}: keeps what `retain_steps` says already; it was never started with retain="all"'
            )
        oldest = log.meta("oldest_step", 1)
        rows = log.rows("SELECT op, size FROM groups WHERE location != '' AND state IN (?, ?)", _ENDED)
        sizes = {int(op): int(size) for op, size in rows}
        for (data,) in log.rows("SELECT manifest FROM steps WHERE step >= ?", (oldest,)):
            for op in read_manifest(data).groups:
                sizes.pop(op, None)
    return Forgettable(meta.get("run_id", ""), len(sizes), sum(sizes.values()), oldest)


def forget(folder: Path) -> None:
    """Let the run keep recent steps only. Raises Conflict while a plane has the folder."""
    try:
        log = open_existing(folder)
    except Conflict as error:
        raise Conflict(f"{error}; a run forgets only while its plane is stopped") from None
    try:
        oldest = log.meta("oldest_step", 1)
        with log.transaction():
            log.set_meta("retain", "steps")
            for step, _, data, _ in log.steps():
                if step >= oldest:
                    break
                slim = msgspec.structs.replace(read_manifest(data), rank_plans=(), needs=(), digests=())
                log.set_manifest(step, msgspec.msgpack.encode(slim))
    finally:
        log.close()
