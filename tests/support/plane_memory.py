"""All that a plane holds in memory, as plain data that can be compared with another plane's."""

from __future__ import annotations

from typing import Any

import msgspec
import xxhash

from penstock.log import State
from tests.support.engines import DirectEngine


def memory_of(engine: DirectEngine) -> dict[str, Any]:
    """All that a plane holds in memory, as plain data.

    Two things are told again after a restart and not written down at once: that every rank has a step (ranks repeat
    it), and that a table is there although nothing was ever put into it.
    """
    saved: dict[str, Any] = msgspec.structs.asdict(engine.state.save())
    tables = msgspec.structs.asdict(saved.pop("tenant_tables"))
    ledger = dict(saved.pop("ledger"))
    ledger["scheduled"] += ledger.pop("delivered")
    states = {
        step: min(state, int(State.SCHEDULED)) + (state == State.COMMITTED)
        for step, (state, _) in saved["steps"].items()
    }
    return {
        **saved,
        **{f"tenant_tables.{name}": value for name, value in tables.items()},
        "ledger": ledger,
        "rows": sorted(saved["rows"]),
        "steps": {step: (states[step], sorted(ends)) for step, (_, ends) in saved["steps"].items()},
        "digests": {step: manifest.digests for step, manifest in engine.state.steps.items()},
        "bytes_of": _counted(saved["bytes_of"]),
        "tenant_tables.taken": _counted(tables["taken"]),
        "tenant_tables.tables": {
            name: found for name, data in tables["tables"].items() if (found := _table(engine, name, data))
        },
        "keys": list(map(str, engine.tenant_tables)),
        "evaluations": engine.state.evaluations.metrics(),
        "evaluations kept": engine.state.evaluations.kept,
        "runs": engine.tenants(),
    }


def _counted(counts: dict[str, int]) -> dict[str, int]:
    return {name: count for name, count in counts.items() if count}


def _table(engine: DirectEngine, name: str, data: bytes) -> Any:
    """A table's content, its draws to come included, and its numbers, which say more when they differ."""
    metrics = engine.tenant_tables.tables[name].metrics()
    used = metrics["gen/items"] or metrics["gen/refused_stale"]
    return (xxhash.xxh3_64_hexdigest(data), _without_waits(metrics)) if used else None


def _without_waits(metrics: dict[str, float]) -> dict[str, float]:
    return {name: value for name, value in metrics.items() if not name.endswith("wait_s")}
