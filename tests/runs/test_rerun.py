"""A run, decided again from its log and storage, makes the same steps; fed into another plane, it arrives as it did."""

from __future__ import annotations

import json
import sqlite3
import time
from contextlib import closing
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
import xxhash

import penstock as ps
from penstock.cli import main
from penstock.client.feeding import feed
from penstock.errors import CorruptFile, InvalidInput
from penstock.frames import encode
from penstock.plane.settings import Replay
from penstock.replay import Fifo, Prioritized, Uniform
from penstock.runs.recorded_run import RecordedRun
from penstock.runs.rerunning import rerun
from penstock.storage import Gone
from tests.runs.conftest import SETTINGS, end, open_engine, put, put_to, step, train
from tests.support.engines import DirectEngine, damage_frame
from tests.support.groups import named_group
from tests.support.task_model import STALENESS, TaskRun


def random_life(engine: DirectEngine, seed: int) -> None:
    """Puts, steps, priorities, groups too old, groups that no step can be made with, runs with shares."""
    rng = np.random.default_rng(seed)
    number = 0
    for _ in range(60):
        kind = rng.integers(10)
        if kind < 6:
            version = max(engine.policy_version - int(rng.integers(3)), 0)
            frame = encode(named_group(f"g{number}", policy_version=version))
            assert engine.put(number, f"g{number}", frame) is None
            engine.flush()
            number += 1
        elif kind == 6 and number:
            engine.report({f"g{rng.integers(number)}": float(rng.random())}, {})
        elif kind == 7 and number > 3:
            name = f"odd{number}"
            frame = encode([sample.replace(logprobs=None) for sample in named_group(name)])
            engine.put(name, name, frame)
            engine.flush()
        else:
            staged = engine.plan_step(engine.last_step + 1)
            if not isinstance(staged, str):
                engine.commit(engine.last_step, engine.policy_version + 1)


REPLAYS = {
    "queue": Replay(),
    "uniform": Replay(sampler=Uniform(), seed=3),
    "reuse": Replay(sampler=Uniform(), max_times_sampled=3, seed=4),
    "prioritized": Replay(sampler=Prioritized(0.6), remover=Fifo(), max_times_sampled=None, capacity=8, seed=5),
    "stale": Replay(max_staleness=1, seed=6),
}


@pytest.mark.parametrize("name", REPLAYS)
@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.deep)])
def test_every_step_of_a_run_that_keeps_everything_is_made_again(name: str, seed: int, tmp_path: Path) -> None:
    engine = open_engine(tmp_path / "run", retain="all", retain_steps=1, replay=REPLAYS[name])
    random_life(engine, seed)
    steps = engine.next_step - 1
    assert steps > 2
    end(engine)
    recorded = RecordedRun.open(tmp_path / "run")
    assert recorded.num_frames == len(recorded.groups)
    found = rerun(recorded, tmp_path / "again")
    assert (found.same, found.steps, found.skipped) == (True, steps, 0), found.sentence


def test_a_run_with_shares_and_other_settings_in_between_is_made_again(tmp_path: Path) -> None:
    engine = open_engine(tmp_path / "run", shares={"x": 1.0, "y": 2.0})

    def put_runs(engine: DirectEngine, *numbers: int) -> None:
        for number in numbers:
            for run in ("x", "y"):
                name = f"{run}{number}"
                assert engine.put(name, name, encode(named_group(name, run=run))) is None
        assert all(outcome.error is None for outcome in engine.flush())

    put_runs(engine, 0, 1, 2, 3)
    for number in (1, 2, 3):
        step(engine, number)
    engine.evict("x", "enough")
    end(engine)
    for _ in range(2):  # the second start changes nothing
        engine = open_engine(tmp_path / "run", shares={"x": 1.0, "y": 2.0}, retain_steps=65)
        if engine.next_step == 4:
            engine.share("x", 1.0)
            put_runs(engine, 4, 5, 6)
            for number in (4, 5, 6):
                step(engine, number)
        end(engine)
    recorded = RecordedRun.open(tmp_path / "run")
    assert len(recorded.settings) == 2
    found = rerun(recorded, tmp_path / "again")
    assert (found.same, found.steps) == (True, 6), found.sentence


def test_a_run_whose_environments_share_steps_is_made_again(tmp_path: Path) -> None:
    for first, weights in ((0, {"math": 2.0, "code": 1.0}), (20, {"math": 1.0, "code": 1.0})):
        engine = open_engine(tmp_path / "run", retain="all", env_weights=weights)
        for name, env in [(f"{env}{first + number}", env) for env in weights for number in range(9)]:
            assert engine.put(name, name, encode(named_group(name, env=env))) is None
        assert all(outcome.error is None for outcome in engine.flush())
        for _ in range(3):
            step(engine, engine.last_step + 1)
        end(engine)
    found = rerun(RecordedRun.open(tmp_path / "run"), tmp_path / "again")
    assert (found.same, found.steps) == (True, 6), found.sentence


def alter_group(folder: Path, name: str, frame: bytes) -> None:
    """Write another frame in place of a group's, checksum and all: as if it had been put so."""
    log = sqlite3.connect(folder / "log.sqlite")
    ((location,),) = log.execute("SELECT location FROM groups WHERE id = ?", (name,))
    segment = location.partition(":")[0]
    path = folder / "storage" / "segments" / segment
    at = path.stat().st_size
    with path.open("ab") as file:
        file.write(frame)
    new = (f"{segment}:{at}:{len(frame)}", len(frame), xxhash.xxh3_128_digest(frame), name)
    log.execute("UPDATE groups SET location = ?, size = ?, digest = ? WHERE id = ?", new)
    log.commit()
    log.close()


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.deep) for seed in (1, 2))])
def test_a_run_with_leased_prompts_is_made_again(tmp_path: Path, seed: int) -> None:
    replay = Replay(max_staleness=STALENESS, capacity=1000)
    engine = open_engine(tmp_path / "run", retain="all", replay=replay)
    run = TaskRun(engine, Random(seed))
    run.open([f"n{number}" for number in range(8)], epochs=3, seed=seed)
    for number in range(80):
        run.lease(2)
        run.put()
        run.train()
        if number % 5 == 0:
            run.give_back()
            run.run_out()
    steps = engine.next_step - 1
    assert steps > 3 and run.engine.state.tasks.lists["p"].again
    end(engine)
    found = rerun(RecordedRun.open(tmp_path / "run"), tmp_path / "again")
    assert found.same, found.sentence
    assert found.steps == steps


def test_a_difference_is_named_by_step_and_rank(tmp_path: Path) -> None:
    engine = open_engine(tmp_path / "run")
    put_to(engine, *"abcdef")
    for number in (1, 2, 3):
        step(engine, number)
    end(engine)
    alter_group(tmp_path / "run", "d", encode(named_group("d", tokens=8)))
    found = rerun(RecordedRun.open(tmp_path / "run"), tmp_path / "again")
    assert not found.same and (found.steps, found.step) == (1, 2)
    assert found.sentence.startswith("The run first differs at step 2, rank ") and found.recorded != found.replayed
    alter_group(tmp_path / "run", "d", b"not a frame")
    found = rerun(RecordedRun.open(tmp_path / "run"), tmp_path / "third")
    assert not found.same and "Group d was accepted when it was recorded, and is refused now" in found.sentence


def test_steps_whose_frames_were_freed_are_left_out_and_said(tmp_path: Path) -> None:
    """The run keeps everything only since its second start."""
    engine = open_engine(tmp_path / "run", retain_steps=1)
    put_to(engine, *"abcdef")
    for number in (1, 2, 3):
        step(engine, number)
    end(engine)
    engine = open_engine(tmp_path / "run", retain_steps=1, retain="all")
    put_to(engine, *"gh")
    step(engine, 4)
    end(engine)
    recorded = RecordedRun.open(tmp_path / "run")
    assert len(recorded.groups) - recorded.num_frames == 4
    found = rerun(recorded, tmp_path / "again")
    assert (found.same, found.steps, found.skipped) == (True, 2, 2)
    assert "2 steps could not be compared" in found.sentence


def test_frames_that_are_freed_while_a_live_run_is_read_are_counted(tmp_path: Path) -> None:
    engine = open_engine(tmp_path / "run", retain_steps=0)
    put_to(engine, *"abcdef")
    step(engine, 1)
    recorded = RecordedRun.open(tmp_path / "run")  # beside the plane
    assert recorded.num_frames == 6 - 2 * (not recorded.has_frame(1))
    step(engine, 2)
    put_to(engine, "g")  # the transaction that frees the frames of step 2
    gone = [entry.id for entry in recorded.in_order() if _is_gone(recorded, entry.op)]
    assert {"c", "d"} <= set(gone) <= set("abcd")
    with ps.open("memory:", **SETTINGS) as plane:
        fed = feed(recorded, plane, speed=None)
    assert fed.groups == 2 and recorded.verify() == 2  # e and f, which are held
    end(engine)


def _is_gone(recorded: RecordedRun, op: int) -> bool:
    try:
        recorded.frame(op)
    except Gone:
        return True
    return False


def test_damage_is_told_from_a_frame_that_was_freed(tmp_path: Path) -> None:
    engine = open_engine(tmp_path / "run", retain="all")
    put_to(engine, *"abcd")
    step(engine, 1)
    damage_frame(engine, "b")
    step(engine, 2)
    end(engine)
    recorded = RecordedRun.open(tmp_path / "run")
    with pytest.raises(CorruptFile, match="group 'b'"):
        recorded.verify()
    found = rerun(recorded, tmp_path / "again")
    assert (found.same, found.steps, found.skipped) == (True, 1, 1)


SIZES = "[target]\ngroups = 2\n[packing]\nseq_len = 64\n"
ALTERED = [
    ("groups", "state", 2**31, "has state 2147483648; states 0 to 7 are known"),
    ("groups", "state", -1, "has state -1"),
    ("groups", "kinds", b"\xff" * 50, "kinds cannot be read"),
    ("groups", "kinds", 1, "kinds cannot be read"),
    ("groups", "size", 2**60, "size is 1152921504606846976"),
    ("groups", "samples", -1, "samples is -1"),
    ("groups", "at", float("inf"), "at is inf"),
    ("groups", "op", 77, "has group 1, which the log does not have"),
    ("groups", "location", b"\xff", "location is b'"),
    ("records", "data", b"\xc1", "a decision cannot be read"),
    ("records", "data", 1, "a decision cannot be read"),
    ("steps", "manifest", b"", "step manifest"),
    ("steps", "manifest", 1, "step manifest"),
    ("steps", "step", -1, "step -1 comes after step 0"),
    ("steps", "op", "x", "its decision is 'x'"),
    ("meta", "format", "", "format "),
    ("meta", "next_step", "x", "next_step is 'x', not a number"),
    ("meta", "settings", "ranks 1", "the recorded settings cannot be read"),
    ("meta", "settings", SIZES + "ranks = 1000000000", "ranks: 1000000000"),
    ("meta", "settings", SIZES + "ranks = 2\n[replay]\ncapacity = 1000000000000", "capacity: 1000000000000"),
]


@pytest.mark.parametrize(("table", "column", "value", "words"), ALTERED, ids=lambda given: str(given)[:20])
def test_a_log_with_values_that_no_plane_writes_is_our_error(
    table: str, column: str, value: Any, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    engine = open_engine(tmp_path / "run", retain="all", retain_steps=1)
    put_to(engine, "a", "b", "c", "d")
    engine.report({"c": 2.0}, {})
    for number in (1, 2):
        step(engine, number)
    end(engine)
    with closing(sqlite3.connect(tmp_path / "run" / "log.sqlite")) as log, log:
        if table == "meta":
            log.execute("UPDATE meta SET value = ? WHERE substr(name, 1, ?) = ?", (value, len(column), column))
        else:
            change = f"UPDATE {table} SET {column} = ? WHERE rowid = (SELECT min(rowid) FROM {table})"
            log.execute(change, (value,))
    assert main(["rerun", str(tmp_path / "run"), "--diff"]) == 1
    assert words in capsys.readouterr().err
    for command in (["inspect"], ["storage", "check"], ["tokens"], ["quarantine"]):
        assert main([*command, str(tmp_path / "run")]) in (0, 1)  # reads other values; what it reads it can name


def test_a_storage_elsewhere_is_found(tmp_path: Path) -> None:
    with ps.open(tmp_path / "run", storage=str(tmp_path / "elsewhere"), **SETTINGS) as plane:
        put(plane, *"abcd")
        train(plane, 2)
    recorded = RecordedRun.open(tmp_path / "run")
    assert recorded.verify() == 4
    assert rerun(recorded, tmp_path / "again").same
    assert sorted(path.name for path in (tmp_path / "elsewhere" / "segments").iterdir())  # untouched by the rerun


# ------------------------------------------------------------------ into another plane


def record(tmp_path: Path, *names: str) -> Path:
    with ps.open(tmp_path / "run", retain="all", **SETTINGS) as plane:
        put(plane, *names)
        put(plane, "e0", evaluation=True)
        train(plane, len(names) // 2)
    return tmp_path / "run"


def test_a_plane_that_is_fed_a_recorded_run_makes_the_same_steps(tmp_path: Path) -> None:
    recorded = RecordedRun.open(record(tmp_path, *"abcdef"))
    with ps.open(tmp_path / "new", **SETTINGS) as plane:
        for entry in list(recorded.in_order())[:3]:  # a replay that was interrupted
            plane.put_frame(entry.id, recorded.frame(entry.op), evaluation=entry.is_evaluation)
        fed = feed(recorded, plane, speed=None)
        assert (fed.groups, fed.known, fed.gone) == (4, 3, 0)
        assert train(plane, 3) == [recorded.steps[n].digests for n in (1, 2, 3)]
        assert plane.ledger.evaluation == 2


@pytest.mark.parametrize("speed", [1.0, 4.0])
def test_groups_arrive_in_their_order_and_time(tmp_path: Path, speed: float, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = open_engine(tmp_path / "run")
    at = [1000.0]
    monkeypatch.setattr("penstock.log.decision_log.time.time", lambda: at[0])
    for name, when in zip("abcd", (1000.0, 1000.5, 1000.6, 1002.0), strict=True):
        at[0] = when
        put_to(engine, name)
    for number in (1, 2):
        step(engine, number)
    monkeypatch.undo()
    end(engine)
    recorded = RecordedRun.open(tmp_path / "run")
    assert [round(entry.at - 1000, 1) for entry in recorded.in_order()] == [0.0, 0.5, 0.6, 2.0]
    arrived: list[tuple[str, float]] = []
    with ps.open("memory:", **SETTINGS) as plane:
        began = time.monotonic()
        feed(recorded, plane, speed=speed, each=lambda entry, _: arrived.append((entry.id, time.monotonic() - began)))
    assert [name for name, _ in arrived] == list("abcd")
    for (_, seconds), due in zip(arrived, (0.0, 0.5, 0.6, 2.0), strict=True):
        assert seconds >= due / speed - 0.01


def test_a_speed_that_is_none_is_refused(tmp_path: Path) -> None:
    recorded = RecordedRun.open(record(tmp_path, *"ab"))
    with ps.open("memory:", **SETTINGS) as plane, pytest.raises(InvalidInput, match="speed"):
        feed(recorded, plane, speed=0.0)


# ------------------------------------------------------------------ the command


def test_the_command_shows_verifies_and_compares(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = record(tmp_path, *"abcd")
    assert main(["rerun", str(run)]) == 0
    assert "2 steps, 5 groups (1 for evaluation)" in capsys.readouterr().out
    assert main(["rerun", str(run), "--verify"]) == 0
    assert "5 frames read, all intact" in capsys.readouterr().out
    assert main(["rerun", str(run), "--diff"]) == 0
    assert capsys.readouterr().out == "No difference in 2 steps of run 'run'.\n"
    alter_group(run, "c", encode(named_group("c", tokens=8)))
    assert main(["rerun", str(run), "--diff", "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert (found["same"], found["step"]) == (False, 2)
    (path,) = [path for path in (run / "storage" / "segments").iterdir() if path.stat().st_size]
    path.write_bytes(b"x")
    assert main(["rerun", str(run), "--verify"]) == 1
    assert "group 'a'" in capsys.readouterr().err
    assert main(["rerun", str(tmp_path / "none")]) == 1
    assert "no such folder" in capsys.readouterr().err


def test_the_command_feeds_a_plane_and_reads_a_run_whose_plane_is_at_work(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    url = f"ipc://{tmp_path}/socket"
    with ps.open(tmp_path / "run", **SETTINGS) as old, ps.open(tmp_path / "new", listen=[url], **SETTINGS) as plane:
        put(old, *"abcd")
        digests = train(old, 2)
        assert main(["rerun", str(tmp_path / "run"), "--plane", url, "--as-fast-as-possible"]) == 0
        assert "4 groups put, 0 were already there" in capsys.readouterr().out
        assert main(["rerun", str(tmp_path / "run"), "--plane", url, "--speed", "100", "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["known"] == 4
        assert main(["rerun", str(tmp_path / "run"), "--diff"]) == 0
        assert train(plane, 2) == digests


def test_help_tells_replaying_a_run_from_replay_tables(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--help"])
    found: Any = capsys.readouterr().out
    assert "put a run into a plane again" in " ".join(found.split())
