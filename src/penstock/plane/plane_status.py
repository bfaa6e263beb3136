"""Where everything is: what `penstock top` shows, and `plane.status()` returns."""

from __future__ import annotations

import socket
import time
from typing import Any

from penstock.plane.engine import Engine
from penstock.protocol import Admission, Coordinator


def status_of(engine: Engine, coordinator: Coordinator, admission: Admission) -> dict[str, Any]:
    """Plain values, all of bounded size."""
    settings = engine.settings
    return {
        "run": settings.run,
        "run_id": engine.log.run_id,
        "folder": None if engine.log.folder is None else str(engine.log.folder.resolve()),
        "log": engine.log.where,
        "host": socket.gethostname(),
        "ranks": settings.packing.ranks,
        "columns": {name: column.described() for name, column in settings.packing.own.items()},
        "epoch": coordinator.epoch,
        "session": coordinator.session,
        "phase": coordinator.phase.value,
        "waiting_for": coordinator.waits_for(time.monotonic()),
        "missing": [list(place) for place in coordinator.missing],
        "next_step": engine.next_step,
        "last_step": engine.last_step,
        "policy_version": engine.policy_version,
        "producers_waiting": admission.rooms.num_waiting,
        "oldest_wait_s": admission.rooms.oldest_s,
        "retain": "all" if engine.recorder.keeps_all else "steps",
        "held_groups": len(engine.run_tables),
        "held_bytes": engine.held_bytes,
        "max_disk_bytes": settings.max_disk_bytes,
        "max_held_bytes": settings.max_held_bytes,
        "ledger": engine.ledger.as_dict(),
        "quarantine": engine.quarantine(),
        "counts": dict(engine.counts),
        "durations": engine.durations.as_dict(),
        "metrics": engine.run_tables.metrics()
        | engine.acceptance.generated.metrics()
        | engine.state.evaluations.metrics(),
        "reported": engine.numbers,
        "runs": engine.runs(),
        "storage": engine.segments.status(),
    }
