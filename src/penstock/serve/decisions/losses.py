"""Groups whose frames no keeper has any more: which they are, and what becomes of them and of the steps that need them.

waits for training          dropped, and counted: dropped["lost"]
planned, not delivered      the step is planned anew without it, and those behind it
delivered to all ranks      nothing, while their session lasts: they have it
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


def lost_groups(engine: Engine, roster: Roster) -> dict[int, str]:
    """Groups that can never be had again, by op, each with the reason."""
    state = engine.state
    found = {row.op: why for row in state.rows.values() if row.location and (why := roster.lost(row.location))}
    needed = {
        op
        for step, manifest in state.steps.items()
        if step < engine.next_step or state.states[step] is State.SCHEDULED
        for op in manifest.groups
    }
    # What all ranks of a session have, and nobody else will want, may be lost without any change.
    return {op: why for op, why in found.items() if op in needed or engine.run_tables.is_waiting(state.rows[op])}


def lose(engine: Engine, lost: Mapping[int, str]) -> tuple[int, str] | None:
    """Write down that these are lost. The first step that is planned anew because of it, and why; None if none is."""
    state = engine.state
    assert not state.is_drawing
    record = Lose(groups={op: why[:500] for op, why in lost.items()})
    using = [step for step, manifest in state.steps.items() if lost.keys() & set(manifest.groups)]
    first = min((step for step in using if state.states[step] is State.SCHEDULED), default=None)
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
