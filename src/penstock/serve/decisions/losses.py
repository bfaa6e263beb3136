"""Groups whose frames no keeper has any more: which they are, and what becomes of them and of the steps that need them.

waits for training          dropped, and counted: dropped["lost"]
planned, not delivered      the step is planned anew without it, and those behind it
delivered to all ranks      nothing: they have it
committed                   the step cannot be served again, nor any before it: the oldest step moves up
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import suppress

from penstock.errors import DiskFull
from penstock.send.roster import Roster
from penstock.serve.decisions.decision_records import Lose
from penstock.serve.decisions.engine import Engine
from penstock.serve.decisions.log import GroupRow, State


def lost_groups(engine: Engine, roster: Roster, *, planned_only: bool = False) -> dict[int, str]:
    """Groups that can never be had again, by op, each with the reason. `planned_only` looks at steps that are planned
    and not delivered: one of them waits for its keepers."""
    found = {row.op: why for row in _rows(engine, planned_only) if row.location and (why := roster.lost(row.location))}
    return {op: why for op, why in found.items() if _matters(engine, op)}


def _rows(engine: Engine, planned_only: bool) -> Iterable[GroupRow]:
    state = engine.state
    if not planned_only:
        return list(state.rows.values())
    ops = {op for step in _undelivered(engine) for op in state.steps[step].groups}
    return [state.rows[op] for op in ops if op in state.rows]


def _undelivered(engine: Engine) -> list[int]:
    state = engine.state
    return [step for step, at in state.states.items() if at is State.SCHEDULED and step >= engine.next_step]


def _matters(engine: Engine, op: int) -> bool:
    """Whether anything changes by its loss: not if all ranks have it, and nobody else will want it."""
    state = engine.state
    if engine.run_tables.is_waiting(state.rows[op]):
        return True
    others = (step for step, manifest in state.steps.items() if op in manifest.groups)
    return any(state.states[step] is not State.DELIVERED for step in others)


def lose(engine: Engine, lost: Mapping[int, str]) -> tuple[int, str] | None:
    """Write down that these are lost. The first step that is planned anew because of it, and why; None if none is."""
    state = engine.state
    assert not state.is_drawing
    record = Lose(groups={op: why[:500] for op, why in lost.items()})
    first = min((step for step in _undelivered(engine) if lost.keys() & set(state.steps[step].groups)), default=None)
    words = ""
    if first is None:
        engine.journal.decide(record)
    else:
        op = next(op for op in state.steps[first].groups if op in lost)
        words = f"group {state.rows[op].id!r}: lost with {lost[op]}"
        with engine.log.transaction():  # both, or neither
            engine.log.remove_steps(first)
            engine.log.add_record(state.op + 1, record)
        engine.journal.rebuild()
    engine.counts["groups_lost"] += len(lost)
    trained = [s for s, m in engine.state.steps.items() if s < engine.next_step and lost.keys() & set(m.groups)]
    if trained:
        with suppress(DiskFull), engine.journal.transaction():  # written with the next decision, at the latest
            engine.state.retire(max(trained) + 1)
    return None if first is None else (first, words)
