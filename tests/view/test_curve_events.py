"""What happened to a run is read from its log, its launcher's file and its exports, and stands at its step."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

import penstock as ps
from penstock.log import RunEvent, is_alive, is_gone, pid_space, reading, run_events_of
from penstock.log import pids as pids_module
from penstock.view import Export, TokenExporter, note_death
from penstock.view.history import Noted, PlaneNotes, of_exports, plane_state
from penstock.view.library import Library
from tests.support.exports import make_export
from tests.support.postgres_server import PostgresServer

pytestmark = pytest.mark.process

KILLED = """
import os, signal, sys
import penstock as ps
more = {"log": sys.argv[2]} if len(sys.argv) > 2 else {}
plane = ps.open(sys.argv[1], ranks=1, seq_len=16, groups_per_step=1, **more)
for i in range(2):
    with plane.group(f"prompt {i}", id=f"g{i}", policy_version=0) as group:
        group.add(ps.Trajectory(turns=[ps.Turn([1]), ps.Turn([2], logprobs=[-0.5])], reward=1.0, env="math"))
source = plane.source(0, prefetch=0)
for _ in range(2):
    source.commit(source.step(timeout=60))
source.flush(60)
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.fixture(scope="module", params=["sqlite", "postgresql"])
def where(request: pytest.FixtureRequest) -> Iterator[list[str]]:
    """The address of a database for the log, or none."""
    if request.param == "sqlite":
        yield []
        return
    with PostgresServer() as server:
        yield [server.url]


def read(folder: Path) -> Noted:
    return PlaneNotes(folder).read()


def test_a_killed_plane_a_rewind_and_a_closed_plane_are_seen_in_both_databases(
    where: list[str], tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    assert read(folder) == Noted()
    dead = subprocess.run([sys.executable, "-c", KILLED, str(folder), *where], timeout=300, check=False)
    assert dead.returncode == -9
    noted = read(folder)
    assert noted.state is not None and (noted.state.state, noted.state.of) == ("gone", "plane")
    assert noted.events == () and noted.last is not None and noted.last <= (noted.state.ended or 0)
    more: Any = {"log": where[0]} if where else {}
    with ps.open(folder, ranks=1, seq_len=16, groups_per_step=1, **more) as plane:
        with plane.source(0, resume_step=2, prefetch=0) as source:
            source.commit(source.step(timeout=60))
            source.flush(60)
        now = read(folder)
        assert now.state is not None and now.state.state == "running" and now.state.began == noted.state.began
        rewound, killed = now.events
        assert (rewound.kind, rewound.step) == ("rewind", 2) and "step 2 was trained again" in rewound.text
        assert rewound.at is not None and killed.at is not None and rewound.at > killed.at
        assert (killed.kind, killed.step) == ("kill", 3) and "started again (epoch 2)" in killed.text
    closed = read(folder)
    assert closed.state is not None and closed.state.state == "stopped" and closed.state.ended is not None
    with ps.open(folder, ranks=1, seq_len=16, groups_per_step=1, **more) as plane:
        plane.source(0).close()
    # Whether the trainer joined before it left is another event behind it, or none.
    (again,) = (event for event in read(folder).events if "was closed and started again" in event.text)
    assert (again.kind, again.step) == ("restart", 3)


def train_one(plane: ps.Plane, name: str) -> None:
    with plane.group(name, policy_version=0) as group:
        group.add(ps.Trajectory(turns=[ps.Turn([1]), ps.Turn([2], logprobs=[-0.5])], reward=1.0))
    with plane.source(0, prefetch=0) as source:
        source.commit(source.step(timeout=60))
        source.flush(60)


def test_a_trainer_that_left_and_one_that_was_lost_are_told_apart(tmp_path: Path) -> None:
    with ps.open(tmp_path, ranks=1, seq_len=16, groups_per_step=1) as plane:
        for i in range(3):
            train_one(plane, f"prompt {i}")
        with plane.group("prompt 3", policy_version=0) as group:
            group.add(ps.Trajectory(turns=[ps.Turn([1]), ps.Turn([2], logprobs=[-0.5])], reward=1.0))
        lost = plane.source(0, prefetch=0)
        lost.step(timeout=60)
        lost.fail("out of memory")
        train_one(plane, "prompt 4")
        lost.close()
    found = [(one.kind, one.step, one.text) for one in read(tmp_path).events]
    assert found[:3] == [("restart", step, "the trainer joined again") for step in (2, 3, 4)]
    assert found[3][:2] == ("kill", 4) and "out of memory" in found[3][2]


def test_evictions_and_quarantines_stand_before_the_step_that_was_planned_next(dropped_run: Path) -> None:
    notes = PlaneNotes(dropped_run)
    (event,) = notes.read().events
    assert event.kind == "quarantine" and event.text.startswith("1 group was quarantined: ")
    assert event.step in (2, 3) and event.at is not None
    with reading(dropped_run / "plane") as log:
        assert log.last_op > 0
    assert notes.read().events == (event,), "records are read once"


def test_an_environment_that_left_is_not_called_a_tenant(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"ranks": 1, "seq_len": 64, "groups_per_step": 1}
    for weights in ({"math": 1.0, "code": 1.0}, {"math": 1.0}):
        ps.open(tmp_path / "plane", **settings, env_weights=weights).close()
    texts = [one.text for one in read(tmp_path).events]
    assert "environment 'code' was evicted: no longer in env_weights" in texts


def test_only_the_newest_events_are_kept_in_the_log(tmp_path: Path) -> None:
    from penstock.log import ended, started

    class Values:
        where, value = "here", ""

        def text(self, _name: str) -> str:
            return self.value

    log: Any = Values()
    log.value = msgspec.json.encode([RunEvent(kind="start", at=1.0, step=1)] * 1000).decode()
    log.value = started(log, step=7, epoch=1202)
    found = run_events_of(log)
    assert len(found) == 1000 and found[-1].epoch == 1202 and found[-1].is_lost
    log.value = ended(log, step=1202, epoch=1202)
    log.value = started(log, step=1202, epoch=1203)
    assert not run_events_of(log)[-1].is_lost
    log.value = '[{"kind": 7}]'
    with pytest.raises(ps.PenstockError, match="here: its events cannot be read"):
        run_events_of(log)
    log.value = ended(log, step=1, epoch=9)
    assert [one.epoch for one in run_events_of(log)] == [9], "a plane starts all the same"


def test_a_plane_is_gone_only_if_its_process_is_or_its_database_has_not_seen_it_for_long() -> None:
    space = pid_space()
    alive = RunEvent(kind="start", at=1.0, step=1, pid=1, space=space)
    assert is_alive(1)
    state = plane_state([alive], None, 0.0)
    assert state is not None and state.state == "running"
    lost = plane_state([alive], False, 0.0)
    assert lost is not None and lost.state == "gone" and lost.ended == 1.0
    fresh = plane_state([alive], False, time.time())
    assert fresh is not None and fresh.state == "running", "a pooler may lose the lock"
    assert plane_state([], None, 0.0) is None


def test_without_proc_a_pid_is_known_by_its_machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait(60)
    monkeypatch.setattr(pids_module, "_BOOT", tmp_path / "no" / "proc")
    assert pid_space() == "" and not is_gone(pid_space(), ended.pid), "a container may have a pid namespace of its own"
    monkeypatch.setattr(sys, "platform", "darwin")
    assert pid_space().startswith("darwin ") and is_gone(pid_space(), ended.pid)


# ---------------------------------------------------------------- without a plane


def test_processes_that_a_launcher_saw_die_are_marked(tmp_path: Path) -> None:
    make_export(tmp_path, steps=1, groups=1, size=1)
    note_death(tmp_path, step=5, what="worker-0 was killed (SIGKILL)")
    with (tmp_path / "events.jsonl").open("a") as file:
        file.write('{"at": 1.0, "ste')
    library = Library(exports={"run": Export(tmp_path)})
    (event,) = library.events("run", "")
    assert (event.kind, event.step, event.text) == ("kill", 5, "worker-0 was killed (SIGKILL)")
    assert library.run("run", "")["events"] == [event]
    assert library.overview()["exports"][0]["runs"][0]["events"] == 1


def test_exports_show_steps_that_were_trained_again_and_another_start(tmp_path: Path) -> None:
    for attempt, steps in (("1", (1, 2)), ("2", (2, 3, 4)), ("3", (5,))):
        for step in steps:
            with TokenExporter(tmp_path, attempt=attempt) as exporter:
                exporter.close_step(step)
    points = Library(exports={"run": Export(tmp_path)}).points("run", "")["steps"]
    assert [(one.kind, one.step) for one in of_exports(points)] == [("rewind", 2), ("restart", 5)]
