"""Groups whose frames cannot be read any more: counted, and no step waits for them."""

from __future__ import annotations

from pathlib import Path

from penstock.frames import encode
from penstock.log import State
from penstock.plane.damage import lose
from penstock.protocol.steps import Staged
from tests.support.engines import DirectEngine
from tests.support.groups import named_group
from tests.support.planes import OpenEngine


def put(engine: DirectEngine, *names: str) -> dict[str, int]:
    """Group -> op."""
    for name in names:
        assert engine.put(name, name, encode(named_group(name))) is None
    assert all(outcome.error is None for outcome in engine.flush())
    return {row.id: row.op for row in engine.state.rows.values() if row.id in names}


def test_a_waiting_group_that_is_lost_is_dropped_and_counted(open_engine: OpenEngine, tmp_path: Path) -> None:
    engine = open_engine(tmp_path)
    ops = put(engine, "a", "b", "c")
    assert lose(engine, {ops["a"]: "its segment is gone"}) is None
    assert engine.ledger.dropped == {"lost": 2} and engine.counts["groups_lost"] == 1
    assert isinstance(engine.plan_step(1), Staged)
    assert {engine.state.rows[op].id for op in engine.state.steps[1].groups} == {"b", "c"}


def test_a_step_that_needs_it_is_planned_again_without_it(open_engine: OpenEngine, tmp_path: Path) -> None:
    engine = open_engine(tmp_path)
    ops = put(engine, "a", "b", "c")
    assert isinstance(engine.plan_step(1), Staged)
    assert lose(engine, {ops["a"]: "its segment is gone"}) == (1, "group 'a': its segment is gone")
    assert not engine.log.groups_in(State.SCHEDULED)
    assert isinstance(engine.plan_step(1), Staged)
    assert {engine.state.rows[op].id for op in engine.state.steps[1].groups} == {"b", "c"}


def test_a_committed_step_that_needs_it_cannot_be_served_again(open_engine: OpenEngine, tmp_path: Path) -> None:
    engine = open_engine(tmp_path)
    ops = put(engine, "a", "b")
    assert isinstance(engine.plan_step(1), Staged)
    engine.received(1)
    engine.commit(1, None)
    assert lose(engine, {ops["a"]: "its segment is gone"}) is None
    assert engine.state.oldest_step == 2
