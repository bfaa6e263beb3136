"""A step that is undone puts its groups back, also where others took their room since."""

from __future__ import annotations

from pathlib import Path

import pytest

import penstock as ps
from penstock.errors import Overloaded
from penstock.plane.engine import Drawn
from penstock.plane.settings import Replay, Target
from penstock.protocol.steps import Staged
from tests.support.engines import DirectEngine, damage_frame
from tests.support.groups import named_group
from tests.support.planes import OpenEngine

FULL = {"target": Target(groups=2), "replay": Replay(capacity=4)}


def put(engine: DirectEngine, *names: str) -> None:
    for name in names:
        outcome = engine.put(name, name, ps.encode(named_group(name)))
        if outcome is not None and outcome.error is not None:
            raise outcome.error
    assert all(outcome.error is None for outcome in engine.flush())


def groups_of(engine: DirectEngine, step: int) -> list[str]:
    return [engine.state.rows[op].id for op in engine.state.steps[step].groups]


def train(engine: DirectEngine) -> list[str]:
    """One step to its end; the groups it used."""
    step = engine.last_step + 1
    assert isinstance(engine.plan_step(step), Staged)
    used = groups_of(engine, step)
    engine.received(step)
    engine.commit(step, None)
    return used


@pytest.mark.parametrize("snapshot_every", [1, 20_000])
@pytest.mark.parametrize("restart", [False, True])
def test_groups_of_an_undone_draw_wait_for_room(
    open_engine: OpenEngine, tmp_path: Path, snapshot_every: int, restart: bool
) -> None:
    engine = open_engine(tmp_path, snapshot_every=snapshot_every, **FULL)
    put(engine, "a", "b", "c", "d")
    drawn = engine.draw_step(1)
    assert isinstance(drawn, Drawn)
    put(engine, "e", "f")  # where a and b were
    engine.undo_draw(drawn, {0: "odd"})
    if restart:
        engine.log.close()
        engine = open_engine(tmp_path, snapshot_every=snapshot_every, **FULL)
    assert (engine.ledger.held, engine.ledger.quarantined) == (10, 2) and len(engine.tenant_tables) == 5
    with pytest.raises(Overloaded):
        put(engine, "g")
    assert [train(engine), train(engine)] == [["b", "c"], ["d", "e"]]
    put(engine, "g")
    assert train(engine) == ["f", "g"]


def test_a_damaged_frame_of_a_planned_step_beside_a_full_table(open_engine: OpenEngine, tmp_path: Path) -> None:
    engine = open_engine(tmp_path, **FULL)
    put(engine, "a", "b", "c", "d")
    assert isinstance(engine.plan_step(1), Staged)
    put(engine, "e", "f")
    damage_frame(engine, "a")
    engine.stage_again(1)  # without a, and planned anew
    assert groups_of(engine, 1) == ["b", "c"] and [row.id for row in engine.state.quarantined.values()] == ["a"]
    engine.received(1)
    engine.commit(1, None)
    assert train(engine) == ["d", "e"]


def test_a_group_in_line_can_be_set_aside_and_its_run_evicted(open_engine: OpenEngine) -> None:
    engine = open_engine(**FULL)
    engine.share("mine", 1.0)
    for name in "abcd":
        engine.put(name, name, ps.encode([s.replace(run="mine") for s in named_group(name)]))
    engine.flush()
    drawn = engine.draw_step(1)
    assert isinstance(drawn, Drawn)
    for name in "ef":
        engine.put(name, name, ps.encode([s.replace(run="mine") for s in named_group(name)]))
    engine.flush()
    engine.undo_draw(drawn, {})
    assert len(engine.tenant_tables.overflow["mine"]) == 2
    engine._quarantine({engine.state.by_id["e"]: "odd"})
    assert [waiting.key for waiting in engine.tenant_tables.overflow["mine"]] == ["f"]
    engine.evict("mine", "enough of it")
    assert not engine.tenant_tables.overflow and engine.ledger.held == 0 and engine.ledger.dropped == {"evicted": 10}


def test_a_step_that_may_be_trained_is_not_undone_before_the_trainer_says_where_it_begins(
    open_engine: OpenEngine, tmp_path: Path
) -> None:
    engine = open_engine(tmp_path, **FULL)
    put(engine, "a", "b", "c", "d")
    assert isinstance(engine.plan_step(1), Staged)
    assert isinstance(engine.plan_step(2), Staged)  # and both were trained, which the plane did not hear
    engine.log.close()
    engine = open_engine(tmp_path, **FULL)
    assert not engine.unplan(1, "a", "damaged")
    assert engine.last_step == 2
    assert "count as trained" in engine.resume(2, 3)
    put(engine, "e", "f")
    assert isinstance(engine.plan_step(3), Staged)
    engine.log.close()
    engine = open_engine(tmp_path, **FULL)
    engine.resume(3, 3)  # from the same checkpoint: the third step is served again
    assert engine.unplan(3, "e", "damaged")
    assert engine.last_step == 2
