"""A recorded run, decided again, makes the same steps; fed into another plane, it arrives as it did."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xxhash

import penstock as ps
from penstock.archive import RecordedRun, open_place
from penstock.archive.recorded import segment_of
from penstock.archive.segment import name_of, write_segment
from penstock.cli import main
from penstock.encode import encode
from penstock.errors import InvalidInput
from penstock.hold import Fifo, Prioritized, Uniform
from penstock.serve.clients.feed import feed
from penstock.serve.process.archiver import Archiver, reader_of
from penstock.serve.process.rerun import rerun
from penstock.serve.settings import Replay
from penstock.testing.engines import DirectEngine
from penstock.testing.groups import named_group
from tests.archive.conftest import SETTINGS, folder_of, put, train
from tests.archive.test_archiving import end, open_engine, put_to, step, wait_for


def archive_of(engine: DirectEngine, where: str) -> RecordedRun:
    """Send everything that there is."""
    archiver = Archiver(where, engine.settings, engine.log, reader_of(engine.storage), collect_s=0.0)
    wait_for(lambda: archiver.progress.cursor.step == engine.next_step - 1)
    archiver.close()
    end(engine)
    return RecordedRun.open(where)


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
@pytest.mark.parametrize("seed", range(2))
def test_every_step_of_a_recorded_run_is_made_again(name: str, seed: int, tmp_path: Path) -> None:
    engine = open_engine(tmp_path / "run", archive=folder_of(tmp_path), replay=REPLAYS[name])
    random_life(engine, seed)
    steps = engine.next_step - 1
    assert steps > 2
    recorded = archive_of(engine, folder_of(tmp_path))
    found = rerun(recorded, tmp_path / "again")
    assert (found.same, found.steps, found.skipped) == (True, steps, 0), found.sentence


def test_a_run_with_shares_and_other_settings_in_between_is_made_again(tmp_path: Path) -> None:
    where = folder_of(tmp_path)
    engine = open_engine(tmp_path / "run", archive=where, shares={"x": 1.0, "y": 2.0})

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
    archive_of(engine, where)
    engine = open_engine(tmp_path / "run", archive=where, shares={"x": 1.0, "y": 2.0}, retain_steps=2)
    engine.share("x", 1.0)
    put_runs(engine, 4, 5, 6)
    for number in (4, 5, 6):
        step(engine, number)
    recorded = archive_of(engine, where)
    assert len(recorded.settings) == 2
    found = rerun(recorded, tmp_path / "again")
    assert (found.same, found.steps) == (True, 6), found.sentence


def test_a_difference_is_named_by_step_and_rank(tmp_path: Path) -> None:
    where = folder_of(tmp_path)
    engine = open_engine(tmp_path / "run", archive=where)
    put_to(engine, *"abcdef")
    for number in (1, 2, 3):
        step(engine, number)
    archive_of(engine, where)
    alter_group(where, "d", encode(named_group("d", tokens=8)))
    found = rerun(RecordedRun.open(where), tmp_path / "again")
    assert not found.same and (found.steps, found.step) == (1, 2)
    assert found.sentence.startswith("The run first differs at step 2, rank ") and found.recorded != found.replayed
    alter_group(where, "d", b"not a frame")
    found = rerun(RecordedRun.open(where), tmp_path / "third")
    assert not found.same and "Group d was accepted when it was recorded, and is refused now" in found.sentence


def alter_group(where: str, name: str, frame: bytes) -> None:
    """Write the last segment anew with another frame for a group, checksums and all: as if it had been recorded so."""
    import msgspec

    blobs = open_place(where)
    number = RecordedRun.open(where).num_segments
    segment = segment_of(blobs, number)
    front, op = segment.front, next(g.op for g in RecordedRun.open(where).groups.values() if g.id == name)
    bodies, frames, at = [], [], 0
    for entry in front.frames:
        data = blobs.part(name_of(number), start=segment.start + entry.offset, size=entry.size)
        data = frame if entry.op == op else data
        frames.append(msgspec.structs.replace(entry, offset=at, size=len(data), digest=xxhash.xxh3_128_digest(data)))
        bodies.append(data)
        at += len(data)
    blobs.delete(name_of(number))
    blobs.put_if_absent(name_of(number), write_segment(msgspec.structs.replace(front, frames=tuple(frames)), bodies))


def test_steps_whose_frames_were_given_back_are_left_out_and_said(tmp_path: Path) -> None:
    """The archive was set when the run had begun."""
    engine = open_engine(tmp_path / "run", retain_steps=1)
    put_to(engine, *"abcdef")
    for number in (1, 2, 3):
        step(engine, number)
    end(engine)
    engine = open_engine(tmp_path / "run", retain_steps=1, archive=folder_of(tmp_path))
    put_to(engine, *"gh")
    step(engine, 4)
    recorded = archive_of(engine, folder_of(tmp_path))
    assert len(recorded.missing) == 4
    found = rerun(recorded, tmp_path / "again")
    assert (found.same, found.steps, found.skipped) == (True, 2, 2)
    assert "2 steps could not be compared" in found.sentence


# ------------------------------------------------------------------ into another plane


def record(tmp_path: Path, *names: str) -> str:
    where = folder_of(tmp_path)
    with ps.open(tmp_path / "run", archive=where, **SETTINGS) as plane:
        put(plane, *names)
        put(plane, "e0", evaluation=True)
        train(plane, len(names) // 2)
        wait_for(lambda: plane.status()["archive"]["step"] == len(names) // 2)
    return where


def test_a_plane_that_is_fed_a_recorded_run_makes_the_same_steps(tmp_path: Path) -> None:
    recorded = RecordedRun.open(record(tmp_path, *"abcdef"))
    with ps.open(tmp_path / "new", **SETTINGS) as plane:
        for entry in list(recorded.in_order())[:3]:  # a replay that was interrupted
            plane.put_frame(entry.id, recorded.frame(entry.op), evaluation=entry.evaluation)
        fed = feed(recorded, plane, speed=None)
        assert (fed.groups, fed.known) == (4, 3)
        assert train(plane, 3) == [recorded.steps[n].digests for n in (1, 2, 3)]
        assert plane.ledger.evaluation == 2


@pytest.mark.parametrize("speed", [1.0, 4.0])
def test_groups_arrive_in_their_order_and_time(tmp_path: Path, speed: float, monkeypatch: pytest.MonkeyPatch) -> None:
    where = folder_of(tmp_path)
    engine = open_engine(tmp_path / "run", archive=where)
    at = [1000.0]
    monkeypatch.setattr("penstock.serve.decisions.log.time.time", lambda: at[0])
    for name, when in zip("abcd", (1000.0, 1000.5, 1000.6, 1002.0), strict=True):
        at[0] = when
        put_to(engine, name)
    for number in (1, 2):
        step(engine, number)
    monkeypatch.undo()
    recorded = archive_of(engine, where)
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
    where = record(tmp_path, *"abcd")
    assert main(["replay", where]) == 0
    assert "2 steps, 5 groups (1 for evaluation)" in capsys.readouterr().out
    assert main(["replay", where, "--verify"]) == 0
    assert "5 frames read: all as written" in capsys.readouterr().out
    assert main(["replay", f"file://{where}", "--diff"]) == 0
    assert capsys.readouterr().out == "No difference in 2 steps of run 'run'.\n"
    alter_group(where, "c", encode(named_group("c", tokens=8)))
    assert main(["replay", where, "--diff", "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert (found["same"], found["step"]) == (False, 2)
    (tmp_path / "archive" / name_of(1)).write_bytes(b"x")
    assert main(["replay", where]) == 1
    assert "segments/00000001" in capsys.readouterr().err
    assert main(["replay", str(tmp_path / "none")]) == 1
    assert "no such folder" in capsys.readouterr().err


def test_the_command_feeds_a_plane_from_an_object_store(
    tmp_path: Path, s3: Callable[[str], str], capsys: pytest.CaptureFixture[str]
) -> None:
    where = s3("replayed")
    with ps.open(tmp_path / "run", archive=where, **SETTINGS) as plane:
        put(plane, *"abcd")
        digests = train(plane, 2)
        wait_for(lambda: plane.status()["archive"]["step"] == 2)
    url = f"ipc://{tmp_path}/socket"
    with ps.open(tmp_path / "new", listen=[url], **SETTINGS) as plane:
        assert main(["replay", where, "--plane", url, "--as-fast-as-possible"]) == 0
        assert "4 groups put, 0 were there already" in capsys.readouterr().out
        assert main(["replay", where, "--plane", url, "--speed", "100", "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["known"] == 4
        assert train(plane, 2) == digests


def test_help_tells_replaying_a_run_from_replay_tables(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--help"])
    found: Any = capsys.readouterr().out
    assert "put an archived run into a plane again" in " ".join(found.split())
