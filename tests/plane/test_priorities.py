"""Replay priorities: the same reports mean the same in any order, by any id, after a restart, and at put."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest

import penstock as ps
from penstock.errors import InvalidInput
from penstock.frames import encode
from penstock.plane.settings import Target
from penstock.replay import Fifo, Prioritized, Replay
from tests.support.engines import DirectEngine
from tests.support.groups import named_group
from tests.support.planes import OpenEngine, OpenPlane

REPLAY = {"sampler": ps.Prioritized(1.0), "remover": ps.Fifo(), "max_times_sampled": None}
SETTINGS: dict[str, Any] = {
    "ranks": 1,
    "target": Target(groups=2),
    "replay": Replay(sampler=Prioritized(1.0), remover=Fifo(), max_times_sampled=None, capacity=8),
}


def fill(engine: DirectEngine, names: str) -> None:
    for name in names:
        assert engine.put(name, name, encode(named_group(name))) is None
    assert all(outcome.error is None for outcome in engine.flush())


def weights(engine: DirectEngine) -> dict[str, float]:
    """The priority of each group, as its table has it."""
    store = engine.tenant_tables.tables[""]._store
    tree = store.sampling._tree.weights  # type: ignore[attr-defined]
    return {str(key): float(tree[slot]) for key, slot in store.slots.slot_of.items()}


def train(engine: DirectEngine, *reports: dict[str, float]) -> None:
    step = engine.last_step + 1
    engine.plan_step(step)
    engine.received(step)
    for priorities in reports:
        engine.report(priorities, {}, step)
    engine.commit(step, None)


def test_reports_of_one_step_mean_the_same_in_any_order(open_engine: OpenEngine) -> None:
    reports = [{"a/0": 100.0, "b": 2.0}, {"a/1": 1e-6}, {"b/1": 3.0, "c": 0.5}]
    for order in itertools.permutations(reports):
        engine = open_engine(**SETTINGS)
        fill(engine, "abcd")
        train(engine, *order)
        assert weights(engine) == {"a": 100.0, "b": 3.0, "c": 0.5, "d": 1.0}
        train(engine, {"a": 0.25})  # a later step counts, also where it is less
        assert weights(engine)["a"] == 0.25


def test_reports_take_effect_with_the_commit_and_outlive_a_kill_before_it(
    open_engine: OpenEngine, tmp_path: Path
) -> None:
    engine = open_engine(tmp_path, **SETTINGS)
    fill(engine, "abcd")
    engine.plan_step(1)
    engine.received(1)
    engine.report({"a": 7.0}, {}, 1)
    assert weights(engine)["a"] == 1.0
    engine.log.close()
    again = open_engine(tmp_path, **SETTINGS)
    again.report({"a": 5.0}, {}, 1)
    again.commit(1, None)
    assert weights(again)["a"] == 7.0
    again.close()
    again.log.close()
    assert weights(open_engine(tmp_path, **SETTINGS)) == weights(again)


def test_a_report_that_comes_late_is_combined_unless_a_later_step_has_reported(open_engine: OpenEngine) -> None:
    engine = open_engine(**SETTINGS)
    fill(engine, "abcd")
    train(engine, {"a": 7.0, "b": 7.0})
    engine.report({"a": 3.0, "b": 9.0}, {}, 1)
    assert weights(engine) == {"a": 7.0, "b": 9.0, "c": 1.0, "d": 1.0}
    train(engine, {"b": 2.0})
    engine.report({"b": 50.0}, {}, 1)
    assert weights(engine)["b"] == 2.0


def test_a_rewind_forgets_what_was_reported_of_steps_that_are_trained_again(
    open_engine: OpenEngine, tmp_path: Path
) -> None:
    engine = open_engine(tmp_path, **SETTINGS)
    fill(engine, "abcd")
    engine.plan_step(1)
    engine.received(1)
    engine.report({"a": 100.0}, {}, 1)
    engine.resume(2, 1)
    engine.report({"a": 4.0}, {}, 1)
    engine.commit(1, None)
    assert weights(engine)["a"] == 4.0
    engine.close()
    engine.log.close()
    assert weights(open_engine(tmp_path, **SETTINGS))["a"] == 4.0


def test_a_step_that_was_never_planned_has_no_priorities(open_engine: OpenEngine) -> None:
    engine = open_engine(**SETTINGS)
    fill(engine, "ab")
    with pytest.raises(InvalidInput, match="priorities of step 9: the last step that was planned is 0"):
        engine.report({"a": 1.0}, {}, 9)


@pytest.mark.parametrize("ids", [None, "mine-{0}-{1}", "other/{1}"])
def test_priorities_by_sample_id_reach_samples_of_any_name(open_plane: OpenPlane, ids: str | None) -> None:
    plane = open_plane(ranks=1, groups_per_step=2, **REPLAY)
    for name in "ab":
        samples = [sample.replace(group=name) for sample in named_group("x")]
        named: list[dict[str, Any]] = [
            {} if ids is None else {"id": ids.format(name, f"{name}{i}")} for i in range(len(samples))
        ]
        plane.put(
            [
                ps.Sample(
                    group=name,
                    token_ids=sample.token_ids,
                    loss_mask=sample["loss_mask"],
                    logprobs=sample["logprobs"],
                    advantages=1.0,
                    **more,
                )
                for sample, more in zip(samples, named, strict=True)
            ]
        )
    with plane.source(0) as source:
        step = source.step(timeout=60)
        source.report(step, priorities={name: 9.0 for batch in step for name in batch.segments.ids})
        source.commit(step)
        source.flush(60)
    status = plane.status()
    assert not status["counts"].get("priorities_unknown") and status["metrics"]["train/priority_updates"] == 2


def test_a_sample_named_like_a_sample_of_another_group_is_its_own_groups(open_engine: OpenEngine) -> None:
    engine = open_engine(**SETTINGS)
    crossed = [sample.replace(id=f"b/{i}") for i, sample in enumerate(named_group("a"))]
    assert engine.put("a", "a", encode(crossed)) is None
    fill(engine, "c")
    engine.plan_step(1)
    engine.received(1)
    fill(engine, "b")
    engine.report({"b/0": 7.0, "c/0": 3.0}, {}, 1)
    engine.commit(1, None)
    assert weights(engine) == {"a": 7.0, "c": 3.0, "b": 1.0}


@pytest.mark.parametrize("named", ["b/0", "b"])
def test_an_id_that_names_samples_of_two_groups_of_a_step_counts_for_both(
    open_engine: OpenEngine, tmp_path: Path, named: str
) -> None:
    engine = open_engine(tmp_path, **SETTINGS)
    crossed = [sample.replace(id=named if i == 0 else sample.id) for i, sample in enumerate(named_group("a"))]
    assert engine.put("a", "a", encode(crossed)) is None
    fill(engine, "b")
    engine.plan_step(1)
    engine.received(1)
    engine.log.close()
    engine = open_engine(tmp_path, **SETTINGS)  # the step remembers that its names clash
    engine.report({"b/1": 3.0, named: 7.0, "a/1": 2.0, "b/9": 4.0}, {}, 1)
    engine.commit(1, None)
    assert weights(engine) == {"a": 7.0, "b": 7.0}


def test_a_sample_named_like_a_group_of_another_step_is_its_own_groups(open_engine: OpenEngine) -> None:
    engine = open_engine(**SETTINGS)
    crossed = [sample.replace(id="b" if i == 0 else sample.id) for i, sample in enumerate(named_group("a"))]
    assert engine.put("a", "a", encode(crossed)) is None
    fill(engine, "c")
    engine.plan_step(1)
    engine.received(1)
    fill(engine, "b")
    engine.report({"b": 7.0}, {}, 1)
    engine.commit(1, None)
    assert weights(engine) == {"a": 7.0, "c": 1.0, "b": 1.0}


def test_a_group_can_be_put_with_a_priority(open_plane: OpenPlane, tmp_path: Path) -> None:
    settings = {"ranks": 1, "groups_per_step": 1, **REPLAY}
    plane = open_plane(tmp_path / "run", **settings)
    plane.put(named_group("never"), priority=0.0)
    plane.put(named_group("often"), priority=5.0)
    plane.put_frame("seldom", encode(named_group("seldom")), priority=0.0)
    with plane.group("p", id="collected", priority=0.0, policy_version=0) as group:
        group.add(ps.Trajectory(turns=[ps.Turn([1]), ps.Turn([2], logprobs=[-0.5])], reward=1.0))
    plane.close()
    plane = open_plane(tmp_path / "run", **settings)
    with plane.source(0) as source:
        for _ in range(6):
            step = source.step(timeout=60)
            assert {name for batch in step for name in batch.segments.ids} == {"often/0", "often/1"}
            source.commit(step)


@pytest.mark.parametrize("priority", [-1.0, float("nan"), float("inf")])
def test_a_priority_that_is_no_number_is_rejected_at_put(open_plane: OpenPlane, priority: float) -> None:
    plane = open_plane()
    with pytest.raises(InvalidInput, match="priority of 'g'"):
        plane.put(named_group("g"), priority=priority)
    assert plane.ledger.accepted == 0
