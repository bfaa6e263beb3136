"""Evaluation groups: recorded, durable and counted like the others, and never in a step."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

import penstock as ps
from penstock.arrays import Sample
from penstock.convert import ZeroVariance
from penstock.errors import Conflict, DiskFull, Evicted, InvalidInput, Overloaded
from penstock.frames import encode
from penstock.log import State
from penstock.plane.settings import Replay
from penstock.protocol.steps import Staged
from penstock.server.prometheus import render
from tests.support.engines import DirectEngine
from tests.support.groups import named_group
from tests.support.planes import OpenEngine, OpenPlane
from tests.support.torture import address

SIZE = len(encode(named_group("e0")))


def evaluate(engine: DirectEngine, *names: str, **more: object) -> list[str]:
    """Put evaluation groups; the names of what was raised, empty where they were accepted."""
    at_once = [engine.put(name, name, encode(named_group(name, **more)), evaluation=True) for name in names]  # type: ignore[arg-type]
    outcomes = [*(outcome for outcome in at_once if outcome), *engine.flush()]
    return [str(outcome.error or "") for outcome in outcomes]


def train(engine: DirectEngine, *names: str) -> None:
    for name in names:
        assert engine.put(name, name, encode(named_group(name))) is None
    assert all(outcome.error is None for outcome in engine.flush())


def kept(engine: DirectEngine) -> list[str]:
    """The evaluation groups whose frames are kept."""
    return [row.id for row in engine.log.groups_in(State.EVALUATION) if row.location]


def restarted(open_engine: OpenEngine, engine: DirectEngine, folder: Path, **settings: object) -> DirectEngine:
    engine.log.close()  # nothing more is written: as after kill -9
    return open_engine(folder, **settings)


# ------------------------------------------------------------------ the ledger


def test_an_evaluation_group_is_recorded_and_in_no_step(open_engine: OpenEngine) -> None:
    engine = open_engine()
    assert evaluate(engine, "e0", "e1") == ["", ""]
    assert engine.plan_step(1) == "generation: 0 of 2 groups"
    train(engine, "a", "b")
    staged = engine.plan_step(1)
    assert isinstance(staged, Staged)
    assert [place.group for place in engine.planned(1)[1]] == ["a", "b"]
    ledger = engine.ledger
    assert (ledger.accepted, ledger.evaluation, ledger.scheduled, ledger.held) == (8, 4, 4, 0)
    assert ledger.balanced
    engine.commit(1, None)
    assert engine.plan_step(2) == "generation: 0 of 2 groups"


def test_evaluation_groups_need_no_room_in_a_table(open_engine: OpenEngine) -> None:
    engine = open_engine(replay=Replay(capacity=2), max_held_bytes=2 * SIZE)
    train(engine, "a", "b")
    refused = engine.put("c", "c", encode(named_group("c")))
    assert refused is not None and isinstance(refused.error, Overloaded)
    assert evaluate(engine, *(f"e{i}" for i in range(5))) == [""] * 5
    assert engine.held_bytes == 2 * SIZE
    assert len(engine.tenant_tables) == 2


def test_what_only_training_asks_for_is_not_asked_of_them(open_engine: OpenEngine) -> None:
    engine = open_engine(needs=("teacher_logprobs",), replay=Replay(max_staleness=1))
    long = Sample.from_prompt(id="e/0", group="e", prompt_ids=[1], completion_ids=[2] * 200)
    assert engine.put("e", "e", encode([long]), evaluation=True) is None  # no version, no column, beyond seq_len
    assert [outcome.error for outcome in engine.flush()] == [None]
    assert engine.ledger.evaluation == 1


def test_a_frame_that_is_none_is_refused(open_engine: OpenEngine) -> None:
    engine = open_engine()
    outcome = engine.put("e", "e", b"no frame", evaluation=True)
    assert outcome is not None and outcome.error is not None
    assert evaluate(engine, "e") == [""]


def test_an_evaluation_group_put_again_is_recognised_and_one_put_otherwise_refused(open_engine: OpenEngine) -> None:
    engine = open_engine()
    frame = encode(named_group("e"))
    for _ in range(2):
        assert engine.put("first", "e", frame, evaluation=True) is None  # under way: answered when it is written
    assert [outcome.duplicate for outcome in engine.flush()] == [False, True]
    again = engine.put("again", "e", frame, evaluation=True)
    assert again is not None and again.duplicate and again.error is None
    for name, evaluation, words in (("e", False, "for evaluation, now to be trained"), ("a", True, "to be trained")):
        if name == "a":
            train(engine, "a")
        other = engine.put("other", name, encode(named_group(name)), evaluation=evaluation)
        assert other is not None and isinstance(other.error, Conflict) and words in str(other.error)
    assert (engine.ledger.accepted, engine.ledger.evaluation) == (4, 2)


def test_an_evicted_run_puts_no_evaluation_groups_either(open_engine: OpenEngine) -> None:
    engine = open_engine(shares={"a": 1.0, "b": 1.0})
    assert evaluate(engine, "e0", run="a") == [""]
    engine.evict("a", "for a test")
    outcome = engine.put("e1", "e1", encode(named_group("e1", run="a")), evaluation=True)
    assert outcome is not None and isinstance(outcome.error, Evicted)
    assert kept(engine) == ["e0"]  # what was recorded stays
    assert engine.ledger.evaluation == 2


# ------------------------------------------------------------------ restarts and rewinds


@pytest.mark.parametrize("snapshot_every", [1, 20_000])
def test_they_survive_a_kill_and_a_rewind(open_engine: OpenEngine, tmp_path: Path, snapshot_every: int) -> None:
    engine = open_engine(tmp_path, snapshot_every=snapshot_every)
    for step in (1, 2, 3):
        evaluate(engine, f"e{step}", policy_version=step)
        train(engine, f"a{step}", f"b{step}")
        assert isinstance(engine.plan_step(step), Staged)
        engine.received(step)
        engine.commit(step, step)
    evaluate(engine, "e4")
    before, metrics = engine.ledger.as_dict(), engine.state.evaluations.metrics()
    again = restarted(open_engine, engine, tmp_path, snapshot_every=snapshot_every)
    assert again.ledger.as_dict() == before
    assert again.state.evaluations.metrics() == metrics
    assert kept(again) == ["e1", "e2", "e3", "e4"]
    again.resume(2, 2)
    assert (again.ledger.evaluation, again.ledger.balanced) == (8, True)
    assert again.stage_again(2).step == 2
    assert bytes(again.storage.read(again.log.groups_in(State.EVALUATION)[0].location)[0]) == encode(
        named_group("e1", policy_version=1)
    )


# ------------------------------------------------------------------ space


def test_beyond_retain_eval_bytes_the_oldest_are_freeing_and_counted(open_engine: OpenEngine, tmp_path: Path) -> None:
    engine = open_engine(tmp_path, retain_eval_bytes=3 * SIZE)
    for number in range(5):
        evaluate(engine, f"e{number}")
    assert kept(engine) == ["e2", "e3", "e4"]
    metrics = engine.state.evaluations.metrics()
    assert (metrics["eval/groups"], metrics["eval/freeing_groups"], metrics["eval/kept_bytes"]) == (5, 2, 3 * SIZE)
    assert (engine.ledger.evaluation, engine.ledger.balanced) == (10, True)
    assert engine.segments.live_bytes == 3 * SIZE
    again = engine.put("again", "e0", encode(named_group("e0")), evaluation=True)
    assert again is not None and again.duplicate  # known as long as the run lives
    smaller = restarted(open_engine, engine, tmp_path, retain_eval_bytes=SIZE)
    assert smaller.state.evaluations.num_bytes == SIZE
    train(smaller, "a")  # with the next write
    assert kept(smaller) == ["e4"]
    assert smaller.segments.live_bytes == 2 * SIZE


def test_one_that_could_never_be_kept_is_refused(open_engine: OpenEngine) -> None:
    engine = open_engine(retain_eval_bytes=SIZE - 1)
    outcome = engine.put("e", "e", encode(named_group("e0")), evaluation=True)
    assert outcome is not None and isinstance(outcome.error, InvalidInput)
    assert "at most" in str(outcome.error) and "retain_eval_bytes" in str(outcome.error)


def test_they_count_in_the_quota_and_make_room_for_training(open_engine: OpenEngine, tmp_path: Path) -> None:
    engine = open_engine(tmp_path, max_disk_bytes=4 << 20)
    large = [named_group(f"e{i}", tokens=30_000) for i in range(40)]
    found = [
        engine.put(i, group[0].group, encode(group), evaluation=True) or engine.flush()[0]
        for i, group in enumerate(large)
    ]
    assert all(outcome.error is None for outcome in found)  # the oldest make room for the newest
    used = engine.log.used_bytes + engine.segments.num_bytes
    assert used <= 4 << 20
    assert engine.counts["eval_groups_freeing_early"] > 0
    before = engine.state.evaluations.freeing
    groups = [named_group(f"a{i}", tokens=30_000) for i in range(40)]
    refused = None
    for group in groups:
        refused = engine.put(group[0].group, group[0].group, encode(group))
        if refused is not None:
            break
        engine.flush()
    assert refused is not None and isinstance(refused.error, DiskFull)
    assert engine.state.evaluations.freeing > before
    assert engine.state.evaluations.num_bytes == 0  # all of it, before a group to be trained is refused


# ------------------------------------------------------------------ as users see it


def rollout(reward: float) -> ps.Trajectory:
    turns = [ps.Turn([1, 2]), ps.Turn([3, 4], logprobs=[-0.5, -0.25])]
    return ps.Trajectory(turns=turns, reward=reward, env="math")


@pytest.mark.parametrize("transport", ["embedded", "tcp", "ipc", "file"])
def test_evaluation_groups_arrive_over_every_transport(open_plane: OpenPlane, tmp_path: Path, transport: str) -> None:
    (tmp_path / "transport").mkdir()
    url = "" if transport == "embedded" else address(transport, tmp_path)
    local = open_plane(tmp_path / "run", ranks=1, groups_per_step=1, listen=[url] if url else [])
    plane = ps.open(url) if url else local
    for version, rewards in ((1, (0.0, 0.0)), (2, (1.0, 0.0, 1.0, 1.0))):
        with plane.group("17", policy_version=version, evaluation=True) as group:
            for reward in rewards:
                group.add(rollout(reward))
    big = named_group("big", tokens=20_000)
    assert plane.put(big, evaluation=True)
    assert not plane.put(big, evaluation=True)
    with pytest.raises(Conflict, match="accepted before for evaluation, now to be trained"):
        plane.put(big)
    assert (plane.ledger.evaluation, plane.ledger.accepted, plane.ledger.balanced) == (8, 8, True)
    metrics = plane.status()["metrics"]
    assert (metrics["eval/groups"], metrics["eval/reward/math"], metrics["eval/policy_version/math"]) == (3, 0.75, 2)
    assert metrics["eval/sampled_tokens/math"] == 2.0
    page = render(plane.status())
    assert 'penstock_eval_reward{env="math",run="run"} 0.75' in page
    assert 'penstock_ledger_samples{run="run",state="evaluation"} 8.0' in page
    with local.source(0) as source, ThreadPoolExecutor(1) as pool:
        step = pool.submit(source.step)
        assert plane.put(named_group("a"))
        assert {name for batch in step.result(60) for name in batch.segments.ids if name} == {"a/0", "a/1"}
    if plane is not local:
        plane.close()


def test_an_evaluation_group_keeps_every_rollout_and_needs_no_reward(open_plane: OpenPlane) -> None:
    plane = open_plane(ranks=1)
    with pytest.raises(InvalidInput, match="1 filters; leave them out, evaluation keeps all"):
        plane.group("17", evaluation=True, filters=[ZeroVariance()])
    with plane.group("17", evaluation=True) as group:
        group.add(ps.Trajectory(turns=[ps.Turn([1, 2]), ps.Turn([3], logprobs=[-0.5])]))
    assert plane.ledger.evaluation == 1
    assert "eval/reward/all" not in plane.status()["metrics"]


def test_a_producer_that_waits_for_room_evaluates_meanwhile(open_plane: OpenPlane) -> None:
    plane = open_plane(ranks=1, capacity=2, groups_per_step=2)
    for name in "ab":
        plane.put(named_group(name))
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(plane.put, named_group("c"))
        with pytest.raises(Overloaded):
            plane.put(named_group("d"), timeout=0)
        assert plane.put(named_group("e"), evaluation=True)
        assert not waiting.done()
        with plane.source(0) as source:
            source.commit(source.step())
            source.flush()
            assert waiting.result(60)
