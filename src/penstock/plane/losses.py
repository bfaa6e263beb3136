"""Groups whose frames cannot be read any more: what becomes of them and of the steps that need them.

waits for training          dropped, and counted: dropped["lost"]
planned, not delivered      the step is planned anew without it, and those behind it
delivered to all ranks      nothing, while their session lasts: they have it
committed                   the step cannot be served again, nor any before it: the oldest step moves up
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress

from penstock.errors import DiskFull
from penstock.log import Lose, State
from penstock.plane.engine import Engine


def lose(engine: Engine, lost: Mapping[int, str]) -> tuple[int, str] | None:
    """Write down that these are lost. The first step that is planned anew because of it, and why; None if none is."""
    state = engine.state
    assert not state.is_drawing
    record = Lose(groups={op: why[:500] for op, why in lost.items()})
    using = [step for step, manifest in state.steps.items() if lost.keys() & set(manifest.groups)]
    planned = (step for step in using if state.states[step] is State.SCHEDULED and step > engine.maybe_trained)
    first = min(planned, default=None)
    words = ""
    if first is None:
        engine.recorder.decide(record)
    else:
        op = next(op for op in state.steps[first].groups if op in lost)
        words = f"group {state.rows[op].id!r}: {lost[op]}"
        with engine.log.transaction():  # both, or neither
            engine.log.remove_steps(first)
            engine.log.add_record(state.op + 1, record)
        engine.recorder.rebuild()
    engine.counts["groups_lost"] += len(lost)
    trained = [s for s, m in engine.state.steps.items() if s < engine.next_step and lost.keys() & set(m.groups)]
    if trained:
        with suppress(DiskFull), engine.recorder.transaction():  # written with the next decision, at the latest
            engine.state.retire(max(trained) + 1)
    return None if first is None else (first, words)
