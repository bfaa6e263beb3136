"""Steps that ranks prefetch are never staler than `max_staleness` when they are trained."""

from __future__ import annotations

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
