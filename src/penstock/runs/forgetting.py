"""End `retain="all"` for a run whose plane is not at work.

The log says at once that the run keeps steps only, and drops plans that no trainer can ask for. The frames are freed by
the next plane that is started on the folder, in the way in which every frame is freed.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import msgspec

from penstock.errors import Conflict, InvalidInput
from penstock.log import State, open_existing, reading
from penstock.plane import read_manifest

_ENDED = (int(State.COMMITTED), int(State.DROPPED))


@dataclass(frozen=True, slots=True)
class Forgettable:
    """What a run would free if it kept steps only."""

    run_id: str
    groups: int
    num_bytes: int
    before_step: int
    """Plans of steps before this one go."""


def forgettable(folder: Path) -> Forgettable:
    """What `forget` would free, evaluation groups aside. Raises InvalidInput for a run that keeps steps only."""
    with reading(folder) as log:
        meta = log.all_meta()
        if meta.get("retain") != "all":
            raise InvalidInput(
                f'{folder}: keeps what `retain_steps` says already; it was never started with retain="all"'
            )
        oldest = int(meta.get("oldest_step", 1))
        rows = log.rows("SELECT op, size FROM groups WHERE location != '' AND state IN (?, ?)", _ENDED)
        sizes = {int(op): int(size) for op, size in rows}
        for (data,) in log.rows("SELECT manifest FROM steps WHERE step >= ?", (oldest,)):
            for op in read_manifest(data).groups:
                sizes.pop(op, None)
    return Forgettable(meta.get("run_id", ""), len(sizes), sum(sizes.values()), oldest)


def forget(folder: Path) -> None:
    """Have the run keep steps only. Raises Conflict while a plane has the folder."""
    try:
        log = open_existing(folder)
    except Conflict as error:
        raise Conflict(f"{error}; a run forgets while its plane is stopped") from None
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
