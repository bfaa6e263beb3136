"""What a plane trains is archived once and in order, whatever the store and the plane do."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import penstock as ps
from penstock.archive import RecordedRun, open_place
from penstock.archive.recorded import numbers_of, segment_of
from penstock.assets.blobs import BlobInfo, Blobs
from penstock.commands.top import _from_plane, page
from penstock.encode import encode
from penstock.errors import ConfigError, StorageError
from penstock.hold import Uniform
from penstock.pack import Packing
from penstock.send.steps import Staged
from penstock.serve.decisions.log import Log
from penstock.serve.process.archiver import Archiver, Archiving, reader_of
from penstock.serve.process.prometheus import render
from penstock.serve.settings import PlaneSettings, Replay, Target
from penstock.testing.engines import DirectEngine, damage_frame
from penstock.testing.groups import named_group
from tests.archive.conftest import SETTINGS, folder_of, frames_of, put, train


def wait_for(condition: Callable[[], bool], timeout_s: float = 60.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "did not happen in time"
        time.sleep(0.01)


def is_archived(plane: ps.Plane, step: int) -> Callable[[], bool]:
    return lambda: plane.status()["archive"]["step"] >= step


def check_run(where: str, digests: list[tuple[str, ...]]) -> RecordedRun:
    """Everything that was put is there once, as it was put."""
    recorded = RecordedRun.open(where)
    assert [recorded.steps[n].digests for n in sorted(recorded.steps)] == digests
    found = frames_of(recorded)
    assert all(frame == encode(named_group(name)) for name, frame in found.items())
    return recorded


def test_trained_and_evaluation_groups_are_archived_with_all_that_a_replay_needs(tmp_path: Path) -> None:
    before = time.time()
    with ps.open(tmp_path / "run", archive=folder_of(tmp_path), run="demo", **SETTINGS) as plane:
        put(plane, "a", "b", "c", "d", "held")
        put(plane, "e0", evaluation=True)
        digests = train(plane, 2)
        wait_for(is_archived(plane, 2))
    recorded = check_run(folder_of(tmp_path), digests)
    assert list(frames_of(recorded)) == ["a", "b", "c", "d", "e0"]  # in the order in which they arrived
    names = {entry.id: entry for entry in recorded.groups.values()}
    assert names["e0"].evaluation and not names["a"].evaluation
    assert not recorded.has_frame(names["held"].op)  # known, and not trained yet
    assert before <= names["a"].at <= names["e0"].at <= time.time()
    assert recorded.run == "demo" and not recorded.missing
    assert [recorded.groups[op].id for op in recorded.steps[1].groups] == ["a", "b"]


def test_an_object_store_is_an_archive(tmp_path: Path, s3: Callable[[str], str]) -> None:
    where = s3("archived")
    with ps.open(tmp_path / "run", archive=where, **SETTINGS) as plane:
        put(plane, "a", "b", "c", "d")
        digests = train(plane, 2)
        wait_for(is_archived(plane, 2))
    recorded = check_run(where, digests)
    assert list(frames_of(recorded)) == ["a", "b", "c", "d"]
    assert recorded.verify() == 4


def test_a_plane_goes_on_while_its_store_is_away_and_the_archive_catches_up(tmp_path: Path) -> None:
    away = tmp_path / "mount"
    away.write_text("a file where the folder should be")
    with ps.open(tmp_path / "run", archive=str(away), retain_steps=1, **SETTINGS) as plane:
        put(plane, *"abcdefgh")
        digests = train(plane, 4)
        wait_for(lambda: bool(plane.status()["archive"]["error"]))
        status = plane.status()
        assert status["archive"]["behind_steps"] == 4
        assert status["archive"]["waiting_groups"] == 6  # of steps beyond retain_steps
        assert any("4 steps behind" in line and "writable folder" in line for line in page(_from_plane(status), {}))
        text = render(status)
        assert 'penstock_archive_behind_steps{run="run"} 4.0' in text
        assert 'penstock_archive_failing{run="run"} 1.0' in text
        away.unlink()
        wait_for(is_archived(plane, 4))
        wait_for(lambda: plane.status()["archive"]["waiting_groups"] == 0)
        status = plane.status()["archive"]
        assert (status["behind_steps"], status["not_archived"], status["error"]) == (0, 0, "")
    recorded = check_run(str(away), digests)
    assert list(frames_of(recorded)) == list("abcdefgh")


def test_what_is_left_at_the_end_is_sent_by_the_next_plane(tmp_path: Path) -> None:
    away = tmp_path / "mount"
    away.write_text("")
    with ps.open(tmp_path / "run", archive=str(away), retain_steps=0, **SETTINGS) as plane:
        put(plane, *"abcdef")
        digests = train(plane, 3)
    away.unlink()
    with ps.open(tmp_path / "run", archive=str(away), retain_steps=0, **SETTINGS) as plane:
        wait_for(is_archived(plane, 3))
    assert list(frames_of(check_run(str(away), digests))) == list("abcdef")


def test_an_archive_that_is_turned_off_gives_back_what_waited_for_it(tmp_path: Path) -> None:
    away = tmp_path / "mount"
    away.write_text("")
    with ps.open(tmp_path / "run", archive=str(away), retain_steps=0, **SETTINGS) as plane:
        put(plane, *"abcd")
        train(plane, 2)
        wait_for(lambda: plane.status()["archive"]["waiting_groups"] == 4)
    with ps.open(tmp_path / "run", retain_steps=0, **SETTINGS) as plane:
        assert plane.status()["archive"] is None
        put(plane, "e")
    log = Log(tmp_path / "run")
    assert len(log.locations()) == 1
    log.close()


def test_beyond_the_limit_groups_are_given_back_and_counted_as_not_archived(tmp_path: Path) -> None:
    away = tmp_path / "mount"
    away.write_text("")
    size = len(encode(named_group("a")))
    settings = {**SETTINGS, "retain_steps": 0, "archive_hold_bytes": 3 * size}
    with ps.open(tmp_path / "run", archive=str(away), **settings) as plane:
        put(plane, *"abcdefgh")
        train(plane, 4)
        wait_for(lambda: plane.status()["counts"].get("groups_not_archived", 0) >= 5)
        assert plane.status()["archive"]["waiting_bytes"] <= 3 * size
        away.unlink()
        wait_for(is_archived(plane, 4))
        assert plane.status()["archive"]["not_archived"] == 5
    recorded = RecordedRun.open(str(away))
    assert list(frames_of(recorded)) == list("fgh")
    assert [recorded.groups[op].id for op in sorted(recorded.missing)] == list("abcde")
    assert sorted(recorded.steps) == [1, 2, 3, 4]


def test_an_archive_of_another_run_is_left_alone_and_said(tmp_path: Path) -> None:
    for name in ("one", "two"):
        with ps.open(tmp_path / name, archive=folder_of(tmp_path), run=name, **SETTINGS) as plane:
            put(plane, "a", "b")
            train(plane, 1)
            if name == "one":
                wait_for(is_archived(plane, 1))
            else:
                wait_for(lambda: "give each run an archive of its own" in plane.status()["archive"]["error"])
                assert "'one'" in plane.status()["archive"]["error"]
    assert RecordedRun.open(folder_of(tmp_path)).run == "one"


def test_a_plane_that_cannot_be_archived_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="open it on a folder"):
        ps.open("memory:", archive=folder_of(tmp_path), **SETTINGS)
    for more in ({"locking": "exclusive"},):
        with pytest.raises(ConfigError, match=next(iter(more))):
            ps.open(tmp_path / "run", archive=folder_of(tmp_path), **{**SETTINGS, **more})
    with pytest.raises(ConfigError, match="ftp"):
        ps.open(tmp_path / "run", archive="ftp://x/y", **SETTINGS)


class Stuck:
    """A store that takes a request and never answers."""

    def __init__(self, blobs: Blobs) -> None:
        self._blobs, self.asked, self.answer = blobs, threading.Event(), threading.Event()

    def list(self, prefix: str) -> Iterator[BlobInfo]:
        return self._blobs.list(prefix)

    def url(self, name: str) -> str:
        return self._blobs.url(name)

    def put_if_absent(self, name: str, data: bytes) -> bool:
        self.asked.set()
        self.answer.wait()
        return self._blobs.put_if_absent(name, data)


def test_a_store_that_never_answers_stops_neither_training_nor_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stuck = Stuck(open_place(folder_of(tmp_path), create=True))
    monkeypatch.setattr("penstock.serve.process.archiver.open_place", lambda *_, **__: stuck)
    monkeypatch.setattr("penstock.serve.process.archiver.END_S", 0.2)
    with ps.open(tmp_path / "run", archive=folder_of(tmp_path), retain_steps=0, **SETTINGS) as plane:
        put(plane, "a", "b")
        train(plane, 1)
        assert stuck.asked.wait(60)
        put(plane, *"cdefgh")
        train(plane, 3, version=1)
        status = plane.status()
        assert status["archive"]["behind_steps"] == 4 and status["ledger"]["committed"] == 16
    stuck.answer.set()


# ------------------------------------------------------------------ stores that fail in between


class Unreliable:
    """A store whose requests fail at random, before or after they did their work."""

    def __init__(self, blobs: Blobs, rng: np.random.Generator) -> None:
        self._blobs, self._rng = blobs, rng

    def _try(self, act: Callable[[], Any]) -> Any:
        if self._rng.random() < 0.3:
            raise StorageError("lost on the way there")
        found = act()
        if self._rng.random() < 0.3:
            raise StorageError("lost on the way back")
        return found

    def put_if_absent(self, name: str, data: bytes) -> bool:
        return bool(self._try(lambda: self._blobs.put_if_absent(name, data)))

    def part(self, name: str, *, start: int, size: int) -> bytes:
        found: bytes = self._try(lambda: self._blobs.part(name, start=start, size=size))
        return found

    def list(self, prefix: str) -> Iterator[BlobInfo]:
        yield from self._try(lambda: list(self._blobs.list(prefix)))

    def url(self, name: str) -> str:
        return self._blobs.url(name)


def open_engine(folder: Path, **settings: Any) -> DirectEngine:
    made = PlaneSettings(packing=Packing(ranks=2, seq_len=64), target=Target(groups=2), **settings)
    return DirectEngine(made, Log(folder))


def step(engine: DirectEngine, number: int) -> None:
    staged = engine.plan_step(number)
    assert isinstance(staged, Staged), staged
    engine.commit(number, number)


def put_to(engine: DirectEngine, *names: str, evaluation: bool = False) -> None:
    for name in names:
        assert engine.put(name, name, encode(named_group(name)), evaluation=evaluation) is None
    assert all(outcome.error is None for outcome in engine.flush())


def end(engine: DirectEngine) -> None:
    engine.close()
    engine.log.close()


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("reuse", [False, True])
def test_nothing_is_missing_or_doubled_after_lost_requests_and_kills(
    seed: int, reuse: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Archivers are abandoned at random moments, as by kill -9, and requests are lost either way."""
    monkeypatch.setattr("penstock.serve.process.archiver._RETRY_S", 0.0)
    monkeypatch.setattr("penstock.serve.decisions.to_archive.SEGMENT_BYTES", 1500)  # several segments a step
    rng = np.random.default_rng(seed)
    where, folder = folder_of(tmp_path), tmp_path / "run"
    replay = Replay(sampler=Uniform(), max_times_sampled=3, seed=seed) if reuse else Replay()
    engine = open_engine(folder, archive=where, replay=replay)
    blobs = Unreliable(open_place(where, create=True), rng)

    def archiver() -> Archiver:
        read = reader_of(engine.storage)
        return Archiver(where, engine.settings, engine.log, read, collect_s=0.0, place=lambda: blobs)  # type: ignore[arg-type, return-value]

    names = iter(range(1000))
    running = archiver()
    for number in range(1, 13):
        put_to(engine, *(f"g{next(names)}" for _ in range(2)))
        put_to(engine, f"e{number}", evaluation=True)
        step(engine, number)
        running.poke()
        if rng.random() < 0.4:  # as good as killed: whatever it was doing ends somewhere, and another one begins
            monkeypatch.setattr("penstock.serve.process.archiver.END_S", 0.0)
            running.close()
            running = archiver()
    wait_for(lambda: running.progress.cursor.step == 12)
    running.close()
    running._thread.join()
    recorded = RecordedRun.open(where)
    recorded.verify()
    entries = [e for n in numbers_of(recorded.blobs) for e in _frames(recorded.blobs, n)]
    trained = {op for entry in recorded.steps.values() for op in entry.groups}
    assert sorted(recorded.steps) == list(range(1, 13))
    assert len(entries) == len(set(entries))
    assert set(entries) == trained | {op for op, g in recorded.groups.items() if g.evaluation}
    assert recorded.num_segments > 5
    largest = max(entry.size for entry in recorded.groups.values())
    for number in numbers_of(recorded.blobs):  # no more than that was ever in memory
        assert sum(entry.size for entry in segment_of(recorded.blobs, number).front.frames) < 1500 + largest
    end(engine)


def _frames(blobs: Blobs, number: int) -> list[int]:
    return [entry.op for entry in segment_of(blobs, number).front.frames]


def test_a_step_that_was_planned_anew_after_a_rewind_is_archived_anew(tmp_path: Path) -> None:
    where, folder = folder_of(tmp_path), tmp_path / "run"
    engine = open_engine(folder, archive=where)
    archiving = Archiving(engine, collect_s=0.0)
    put_to(engine, *"abcdef")
    for number in (1, 2, 3):
        step(engine, number)
    archiving.turn()
    wait_for(lambda: (archiving.status() or {})["step"] == 3)
    archiving.turn()
    engine.resume(2, 2)
    damage_frame(engine, "c")
    assert engine.unplan(2, "c", "damaged")
    put_to(engine, "g")
    for number in (2, 3):
        step(engine, number)
    archiving.turn()
    wait_for(lambda: RecordedRun.open(where).steps[3].groups[-1] == engine.state.steps[3].groups[-1])
    recorded = RecordedRun.open(where)
    made = {n: [recorded.groups[op].id for op in recorded.steps[n].groups] for n in (1, 2, 3)}
    assert made == {1: ["a", "b"], 2: ["d", "e"], 3: ["f", "g"]}
    assert recorded.verify() == 7
    archiving.close()
    end(engine)


def test_a_folder_that_is_an_earlier_copy_is_not_archived_over_the_later_one(tmp_path: Path) -> None:
    import shutil

    with ps.open(tmp_path / "run", archive=folder_of(tmp_path), **SETTINGS) as plane:
        put(plane, "a", "b")
        train(plane, 1)
    shutil.copytree(tmp_path / "run", tmp_path / "copy")
    with ps.open(tmp_path / "run", archive=folder_of(tmp_path), **SETTINGS) as plane:
        put(plane, "c", "d")
        train(plane, 1, version=1)
        wait_for(is_archived(plane, 2))
    with ps.open(tmp_path / "copy", archive=folder_of(tmp_path), **SETTINGS) as plane:
        wait_for(lambda: "earlier copy" in plane.status()["archive"]["error"])


def test_a_full_disk_gives_back_what_waits_for_the_archive(tmp_path: Path) -> None:
    away = tmp_path / "mount"
    away.write_text("")
    engine = open_engine(tmp_path / "run", archive=str(away), retain_steps=0)
    put_to(engine, *"abcd")
    for number in (1, 2):
        step(engine, number)
    put_to(engine, "e")
    assert engine.state.given_back.num_waiting == 4
    while engine.acceptance._give_back():
        pass
    assert engine.state.given_back.num_waiting == 0
    assert engine.counts["groups_not_archived"] == 4
    end(engine)


def test_a_folder_of_a_plane_that_wrote_no_times_is_archived_too(tmp_path: Path) -> None:
    import sqlite3

    with ps.open(tmp_path / "run", **SETTINGS) as plane:
        put(plane, "a")
    with sqlite3.connect(tmp_path / "run" / "log.sqlite") as log:
        log.execute("ALTER TABLE groups DROP COLUMN at")
    log.close()
    with ps.open(tmp_path / "run", archive=folder_of(tmp_path), **SETTINGS) as plane:
        put(plane, "b")
        digests = train(plane, 1)
        wait_for(is_archived(plane, 1))
    recorded = check_run(folder_of(tmp_path), digests)
    assert [entry.at > 0 for entry in recorded.in_order()] == [False, True]
