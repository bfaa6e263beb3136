"""A plane that was killed, or thought dead, decides what it would have decided."""

from __future__ import annotations

import sqlite3
import threading
import time
from pathlib import Path

import pytest

from penstock.errors import ConfigError, Conflict, Fenced, InvalidInput
from penstock.frames import encode
from penstock.log import SqliteLog, take_over
from penstock.plane.settings import Replay
from penstock.replay import Fifo, Prioritized, Uniform
from tests.plane.test_engine import plan, put
from tests.support.engines import DirectEngine
from tests.support.groups import named_group
from tests.support.planes import OpenEngine

POLICIES = {
    "queue": Replay(),
    "uniform": Replay(capacity=6, sampler=Uniform(), remover=Fifo(), max_times_sampled=3, seed=5),
    "prioritized": Replay(capacity=6, sampler=Prioritized(0.6), remover=Fifo(), max_times_sampled=None, seed=7),
    "stale": Replay(capacity=6, sampler=Uniform(), remover=Fifo(), max_times_sampled=2, max_staleness=2),
}


def _history(engine: DirectEngine, first: int, last: int) -> list[list[str]]:
    """Groups in, steps out, priorities back: what a run does between two step numbers."""
    digests = []
    for step in range(first, last):
        put(engine, *(f"g{step}-{i}" for i in range(3)), policy_version=step - 1)
        digests.append(plan(engine).digests)
        engine.received(step)
        engine.report({f"g{step}-{i}/0": 0.1 + (step * 7 + i) % 5 for i in range(3)}, {"loss": 0.5})
        engine.commit(step, step)
    return digests


@pytest.mark.deep
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("clean", [True, False], ids=["closed", "killed"])
def test_a_restart_changes_no_byte_of_what_follows(
    open_engine: OpenEngine, tmp_path: Path, policy: str, clean: bool
) -> None:
    straight = _history(open_engine(replay=POLICIES[policy]), 1, 13)
    got: list[list[str]] = []
    for first in range(1, 13, 3):
        engine = open_engine(tmp_path, replay=POLICIES[policy])
        before = engine.ledger.as_dict()
        assert before["balanced"]
        got += _history(engine, first, first + 3)
        after = engine.ledger.as_dict()
        if clean:
            engine.close()
        engine.log.close()  # nothing more is written: as after kill -9
        again = open_engine(tmp_path, replay=POLICIES[policy])
        assert again.ledger.as_dict() == after
        assert again.held_bytes == engine.held_bytes
        again.log.close()
    assert got == straight


@pytest.mark.deep
@pytest.mark.parametrize("policy", POLICIES)
def test_any_retained_step_is_served_again_to_the_byte(open_engine: OpenEngine, tmp_path: Path, policy: str) -> None:
    engine = open_engine(tmp_path, replay=POLICIES[policy], retain_steps=5)
    digests = _history(engine, 1, 11)
    held = engine.held_bytes
    for session, step in enumerate([10, 6, 8, 7, 11], start=2):
        engine.resume(session, step)
        assert engine.ledger.balanced
        for number in range(step, 11):
            assert engine.stage_again(number).digests == digests[number - 1]
    assert engine.held_bytes == held
    with pytest.raises(InvalidInput, match="before 6 were freed; resume from a checkpoint of step 5"):
        engine.resume(9, 5)
    with pytest.raises(InvalidInput, match="the last step that was delivered is 10"):
        engine.resume(9, 12)


def test_what_is_retained_does_not_depend_on_resuming(open_engine: OpenEngine, tmp_path: Path) -> None:
    engine = open_engine(tmp_path, retain_steps=3)
    _history(engine, 1, 11)
    engine.resume(2, 8)
    with pytest.raises(InvalidInput, match="steps before 8"):
        engine.resume(3, 7)
    engine.close()
    engine.log.close()
    again = open_engine(tmp_path, retain_steps=3)
    assert again.next_step == 8
    with pytest.raises(InvalidInput, match="steps before 8"):
        again.resume(3, 7)
    assert again.stage_again(8).digests


def test_frames_are_freeing_when_their_step_is_no_longer_retained(open_engine: OpenEngine) -> None:
    engine = open_engine(retain_steps=2)
    _history(engine, 1, 7)
    engine.close()
    used = {op for step in engine.state.steps.values() for op in step.groups}
    keys = engine.tenant_tables
    held = {engine.state.by_id[str(key)] for key in keys}
    assert engine.log.with_frames() == used | held


def test_a_run_begun_with_other_replay_settings_is_refused(open_engine: OpenEngine, tmp_path: Path) -> None:
    engine = open_engine(tmp_path, replay=POLICIES["uniform"])
    _history(engine, 1, 6)
    engine.log.close()
    with pytest.raises(ConfigError, match=r"the run began with .*seed=5.* now .*seed=6"):
        open_engine(tmp_path, replay=Replay(capacity=6, sampler=Uniform(), remover=Fifo(), max_times_sampled=3, seed=6))


def test_a_priority_that_is_no_number_changes_nothing(open_engine: OpenEngine, tmp_path: Path) -> None:
    engine = open_engine(tmp_path, replay=POLICIES["prioritized"])
    put(engine, "a", "b", "c")
    for bad in (float("nan"), -1.0, float("inf")):
        with pytest.raises(InvalidInput, match="priority of 'b'"):
            engine.report({"a": 5.0, "b": bad}, {})
    engine.log.close()
    again = open_engine(tmp_path, replay=POLICIES["prioritized"])
    assert again.state.draw(9, 1, {"": 2}) == engine.state.draw(9, 1, {"": 2})


def test_an_old_plane_that_comes_back_writes_nothing(open_engine: OpenEngine, tmp_path: Path) -> None:
    engine = open_engine(tmp_path)
    put(engine, "a", "b")
    with sqlite3.connect(tmp_path / "log.sqlite") as db:
        db.execute("UPDATE meta SET value = value + 1 WHERE name = 'epoch'")
    db.close()
    engine.put(1, "c", encode(named_group("c")))
    assert isinstance(engine.flush()[0].error, Fenced)
    with pytest.raises(Fenced, match="taken over"):
        engine.plan_step(1)


def test_two_planes_cannot_have_one_folder(tmp_path: Path) -> None:
    log = SqliteLog(tmp_path)
    with pytest.raises(Conflict, match="has it open"):
        SqliteLog(tmp_path)
    log.close()
    SqliteLog(tmp_path).close()


def test_a_folder_that_is_taken_over_fences_the_plane_that_had_it(tmp_path: Path, open_engine: OpenEngine) -> None:
    lost = open_engine(tmp_path)
    put(lost, "a")
    assert take_over(tmp_path, 0.1)
    log = SqliteLog(tmp_path)
    assert log.epoch == lost.log.epoch + 1 and [row.id for row in log.groups()] == ["a"]
    lost.put(1, "b", encode(named_group("b")))
    assert isinstance(lost.flush()[0].error, Fenced)
    with pytest.raises(Conflict, match="has it open"):
        SqliteLog(tmp_path)  # the lock is that of the new one
    log.close()
    assert not take_over(tmp_path, 0.1)


def test_a_folder_whose_plane_ends_in_time_is_not_taken_from_it(tmp_path: Path) -> None:
    log = SqliteLog(tmp_path)
    timer = threading.Timer(0.2, log.close)
    timer.start()
    assert not take_over(tmp_path, 60)
    timer.join()
    SqliteLog(tmp_path).close()


def test_a_folder_that_is_waited_for_is_looked_at_several_times_a_second(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log, naps = SqliteLog(tmp_path), list[float]()
    sleep = time.sleep

    def nap(seconds: float) -> None:
        naps.append(seconds)
        sleep(seconds)

    monkeypatch.setattr(time, "sleep", nap)
    assert take_over(tmp_path, 0.1)
    assert naps and max(naps) <= 0.1
    log.close()
