"""A plane with `WindowedFifo` draws by dispatch, says which one a step waits for, and a restart draws the same."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.config import build
from penstock.errors import ConfigError
from penstock.frames import encode
from penstock.plane.settings import PlaneSettings, Replay, Target
from penstock.replay import Paced, WindowedFifo
from tests.support.engines import DirectEngine, train_next
from tests.support.groups import named_group
from tests.support.planes import OpenEngine


def put(engine: DirectEngine, *names: int) -> None:
    for name in names:
        assert engine.put(name, str(name), encode(named_group(str(name), tokens=10))) is None
        assert all(outcome.error is None for outcome in engine.flush())


@pytest.mark.parametrize("target", [Target(groups=2), Target(samples=4), Target(tokens=40)], ids=str)
def test_a_step_waits_for_a_gap_and_says_so_but_not_for_ever(
    open_engine: OpenEngine, tmp_path: Path, target: Target
) -> None:
    sampler = WindowedFifo(target_offpolicy=2, window=0.4, groups_per_step=None if target.groups else 2)
    settings = {"ranks": 1, "target": target, "replay": Replay(sampler=sampler, limiter=Paced(2))}
    engine = open_engine(tmp_path, **settings)  # 6 in flight: a window of 2, and 4 that wait are enough
    put(engine, 0, 1)
    engine.tenant_tables.table("").expect(0)  # older than everything, and never put
    assert "dispatch 0 has not arrived" in str(train_next(engine))
    assert "dispatch 0 has not arrived" in engine._missing()
    before = engine.tenant_tables.save()
    put(engine, 2, 3)
    assert train_next(engine) == ["0", "1"]  # four wait: enough
    assert isinstance(train_next(engine), str)
    engine.tenant_tables.load(engine.tenant_tables.save())  # as a snapshot: it still waits for it
    assert isinstance(train_next(engine), str)
    engine.tenant_tables.load(before)
    assert engine.tenant_tables.waits_for()


def test_groups_without_a_task_keep_the_order_of_acceptance_and_a_restart_draws_the_same(
    open_engine: OpenEngine, tmp_path: Path
) -> None:
    settings = {"ranks": 1, "replay": Replay(sampler=WindowedFifo(1)), "snapshot_every": 4}
    engine = open_engine(tmp_path, **settings)
    put(engine, *range(9))
    assert [train_next(engine) for _ in range(3)] == [["0", "1"], ["2", "3"], ["4", "5"]]
    row = engine.state.row_of("7")
    assert engine.state.dispatch_of(row) == row.op
    engine.close()
    engine.log.close()
    again = open_engine(tmp_path, **settings)
    assert train_next(again) == ["6", "7"]


def test_the_plane_tells_the_window_how_many_groups_make_a_step() -> None:
    given = {"packing": {"ranks": 1, "seq_len": 64}, "target": {"groups": 4}}
    found = build(PlaneSettings, given | {"replay": {"sampler": {"kind": "windowed_fifo", "target_offpolicy": 2}}}, "x")
    assert found.replay.sampler == WindowedFifo(2, 0.3, 4)
    again = {"replay": {"limiter": {"kind": "paced", "max_staleness": 1}}, "target": {"groups": 4}}
    assert build(PlaneSettings, given | again, "x").replay.limiter == Paced(1)


def test_a_window_that_does_not_fit_the_step_is_refused() -> None:
    given = {"packing": {"ranks": 1, "seq_len": 64}}
    for target, sampler, why in (
        ({"tokens": 99}, WindowedFifo(2), "about how many groups make a step"),
        ({"groups": 4}, WindowedFifo(2, 0.3, 8), "leave it out of the sampler"),
    ):
        with pytest.raises(ConfigError, match=why):
            build(PlaneSettings, given | {"target": target, "replay": Replay(sampler=sampler)}, "x")
