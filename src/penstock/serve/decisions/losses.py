"""Groups whose frames no keeper has any more: which they are, and what becomes of them and of the steps that need them.

waits for training          dropped, and counted: dropped["lost"]
planned, not delivered      the step is planned anew without it, and those behind it
delivered to all ranks      nothing: they have it
committed                   the step cannot be served again, nor any before it: the oldest step moves up
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress

from penstock.errors import DiskFull
from penstock.send.roster import Roster
from penstock.serve.decisions.decision_records import Lose
from penstock.serve.decisions.engine import Engine
from penstock.serve.decisions.log import State


def lost_groups(engine: Engine, roster: Roster, awaited: int = 0, *, only_awaited: bool = False) -> dict[int, str]:
    """Groups that can never be had again, by op, each with the reason. `awaited` is a step that ranks ask for and that
    waits for its keepers: it counts as not delivered, whoever had it before."""
    state = engine.state
    ops = state.steps[awaited].groups if only_awaited and awaited in state.steps else list(state.rows)
    rows = [state.rows[op] for op in ops if op in state.rows]
    found = {row.op: why for row in rows if row.location and (why := roster.lost(row.location))}
    needed = {
        op
        for step, manifest in state.steps.items()
        if step < engine.next_step or _is_wanted(engine, step, awaited)
        for op in manifest.groups
    }
    # What all ranks have, and nobody else will want, may be lost without any change.
    return {op: why for op, why in found.items() if op in needed or engine.run_tables.is_waiting(state.rows[op])}


def _is_wanted(engine: Engine, step: int, awaited: int) -> bool:
    """Whether a planned step has still to be given to somebody."""
    return step >= engine.next_step and (step == awaited or engine.state.states[step] is State.SCHEDULED)


def lose(engine: Engine, lost: Mapping[int, str], awaited: int = 0) -> tuple[int, str] | None:
    """Write down that these are lost. The first step that is planned anew because of it, and why; None if none is."""
    state = engine.state
    assert not state.is_drawing
    record = Lose(groups={op: why[:500] for op, why in lost.items()})
    using = [step for step, manifest in state.steps.items() if lost.keys() & set(manifest.groups)]
    first = min((step for step in using if _is_wanted(engine, step, awaited)), default=None)
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
