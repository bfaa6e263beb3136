"""Steps that ranks prefetch are never staler than `max_staleness` when they are trained."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from penstock.frames import encode
from penstock.plane.settings import Replay, Target
from penstock.protocol.steps import Staged
from tests.support.engines import DirectEngine
from tests.support.groups import named_group
from tests.support.planes import OpenEngine, OpenPlane


def put(engine: DirectEngine, name: str, version: int) -> None:
    assert engine.put(name, name, encode(named_group(name, policy_version=version))) is None
    assert [outcome.error for outcome in engine.flush()] == [None]


@pytest.mark.parametrize("most", [0, 1, 2])
def test_a_step_is_drawn_ahead_only_while_nothing_gets_too_stale(open_engine: OpenEngine, most: int) -> None:
    engine = open_engine(ranks=1, target=Target(groups=1), replay=Replay(max_staleness=most))
    for i in range(5):
        put(engine, f"g{i}", 0)
    planned = 0
    while isinstance(waits := engine.plan_step(engine.last_step + 1), Staged):
        planned += 1
    assert planned == most + 1  # at the version after each commit: 0, then 1, up to the most
    assert waits.startswith(f"step {planned} to be committed: groups of policy version 0 would be staler")
    for step in range(1, planned + 1):
        engine.received(step)
        engine.commit(step, step)
    assert engine.ledger.dropped == {"stale": 2 * (5 - planned)}


def staleness(engine: DirectEngine, step: int) -> int:
    """The most versions that a group of a step is behind when it is trained."""
    rows = engine.log.groups_of(engine.state.steps[step].groups)
    return max(engine.policy_version - (row.policy_version or 0) for row in rows)


@pytest.mark.parametrize("leap", [1, 2, 3])
@pytest.mark.parametrize("bound", ["groups", "tokens"])
def test_a_trainer_whose_commits_publish_several_versions_trains_nothing_too_stale(
    open_engine: OpenEngine, tmp_path: Path, caplog: pytest.LogCaptureFixture, bound: str, leap: int
) -> None:
    settings: dict[str, Any] = {"ranks": 1, "target": Target(groups=1), "snapshot_every": 1 if leap == 2 else 100}
    settings |= {"replay": Replay(max_staleness=2)} if bound == "groups" else {"max_token_staleness": 2}
    engine = open_engine(tmp_path, **settings)
    found, ahead = [], 0
    for step in range(1, 17):
        for i in range(1 if step > 1 else 2):
            put(engine, f"g{step}.{i}", engine.policy_version)
        for _ in range(2):  # as a rank does that prefetches one step
            if engine.last_step <= step:
                engine.plan_step(engine.last_step + 1)
        ahead += engine.last_step > step
        engine.received(step)
        oldest = engine.state.steps[step].oldest_version
        found.append(staleness(engine, step) if bound == "groups" else engine.policy_version - oldest)
        engine.commit(step, (step + 9) * leap)
        if step == 8:  # what was published is remembered
            engine.close()
            engine.log.close()
            engine = open_engine(tmp_path, **settings)
    assert max(found[3:]) <= 2  # by then two commits have shown what they publish
    assert ahead >= 14 if leap < 3 else ahead <= 3
    said = [text.partition(" published")[0] for text in caplog.messages if "staler than the bound" in text]
    assert said == ["the commit of step 1", *(["the commit of step 2"] if leap > 1 else [])]


def test_without_a_bound_steps_are_drawn_ahead(open_engine: OpenEngine) -> None:
    engine = open_engine(ranks=1, target=Target(groups=1))
    for i in range(3):
        put(engine, f"g{i}", 0)
    assert all(isinstance(engine.plan_step(step), Staged) for step in (1, 2, 3))


def test_a_source_that_prefetches_trains_nothing_staler_than_zero(open_plane: OpenPlane) -> None:
    plane = open_plane(ranks=1, groups_per_step=1, max_staleness=0)
    for name in ("a", "b"):
        plane.put(named_group(name, policy_version=0))
    with plane.source(0, prefetch=1) as source:
        for version in (0, 1, 2):
            if version:
                plane.put(named_group(f"v{version}", policy_version=version))
            step = source.step(timeout=60)
            names = {name for batch in step for name in batch.segments.ids}
            assert names == ({"a/0", "a/1"} if not version else {f"v{version}/0", f"v{version}/1"})
            source.commit(step, policy_version=version + 1)
            source.flush(60)
    assert plane.ledger.dropped["stale"] == 2
