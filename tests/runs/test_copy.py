"""A copy of a run, made beside its plane or after it, is a run: it opens, trains and compares as the source does."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import penstock as ps
from penstock.cli import main
from penstock.errors import Conflict, InvalidInput, StepAborted
from penstock.log import SegmentRow, SqliteLog
from penstock.runs.recorded_run import RecordedRun
from penstock.runs.rerunning import rerun
from penstock.runs.run_copy import RunCopy
from penstock.runs.run_log import read_run
from penstock.storage import FolderStorage, read_marker
from tests.runs.conftest import SETTINGS, end, names_kept, open_engine, put, put_to, step, train
from tests.support.engines import damage_frame
from tests.support.pace import pace


def files_of(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_steps_of_a_copy_made_beside_training_have_the_same_digests(tmp_path: Path) -> None:
    run, target = tmp_path / "run", tmp_path / "copy"
    with ps.open(run, retain="all", **SETTINGS) as plane:
        put(plane, *"abcdefgh")
        first = train(plane, 2)
        with RunCopy(run, target) as copy:
            copied = copy.round()
        assert (copied.groups, copied.damaged) == (8, {})
        rest = train(plane, 2, version=2)  # the source goes on
    assert read_run(target)["run_id"] != read_run(run)["run_id"]
    marker = read_marker(FolderStorage(target / "storage"))
    assert marker is not None and marker.run_id == read_run(target)["run_id"] == copied.run_id
    recorded = RecordedRun.open(target)
    assert recorded.verify() == 8 and [recorded.steps[n].digests for n in (1, 2)] == first
    with ps.open(target, **SETTINGS) as plane:
        assert plane.status()["retain"] == "all"  # remembered by the copy too
        assert train(plane, 2, version=2) == rest
        put(plane, "a", "i", "j")  # a is known
        train(plane, 1, version=4)
    assert names_kept(run) == list("abcdefgh") and names_kept(target) == list("abcdefghij")
    assert rerun(RecordedRun.open(target), tmp_path / "again").steps == 5


def test_a_copy_is_brought_up_to_date_and_frees_what_the_source_freed(tmp_path: Path) -> None:
    run, target = tmp_path / "run", tmp_path / "copy"
    with ps.open(run, retain_steps=0, **SETTINGS) as plane, RunCopy(run, target) as copy:
        put(plane, *"abcd")
        assert copy.round().groups == 4 and not copy.is_behind()
        put(plane, *"ef")
        train(plane, 2)
        put(plane, *"gh")  # the transaction that frees the frames of step 2
        assert copy.is_behind()
        found = copy.round()
        assert found.groups == 4 and found.freed >= 2
        assert names_kept(target) == list("efgh") == names_kept(run)
        with pytest.raises(Conflict, match="has it open already"):
            RunCopy(run, target)
        with pytest.raises(Conflict):
            ps.open(target, **SETTINGS)
    with RunCopy(run, target) as copy:  # after the plane has ended, and from another process than before
        assert copy.round().groups == 0 and names_kept(target) == list("efgh")
    with ps.open(target, retain_steps=0, **SETTINGS) as plane:
        train(plane, 2, version=2)
        assert not plane.status()["counts"].get("deletions_failed")
    log = SqliteLog(target)
    registered = {row.name for row in log.segments()}
    log.close()
    assert FolderStorage(target / "storage").segments().keys() <= registered
    with pytest.raises(Conflict, match="a plane was opened on this copy"):
        RunCopy(run, target)


def test_a_copy_without_anything_new_frees_nothing(tmp_path: Path) -> None:
    run, target = tmp_path / "run", tmp_path / "copy"
    with ps.open(run, retain="all", **SETTINGS) as plane:
        put(plane, "a", "b")
    log = SqliteLog(run)
    with log.transaction():  # a writer that put nothing
        log.add_segment(SegmentRow("0123456789abcdef", "somebody", 1, 0.0, False))
        log.seal_segment("0123456789abcdef", at=1.0, clean=True)
    log.close()
    for _ in range(2):
        with RunCopy(run, target) as copy:
            assert copy.round().freed == 0


def test_frames_that_are_freed_while_a_copy_is_made_cost_another_look_at_the_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = open_engine(tmp_path / "run", retain_steps=0)
    put_to(engine, *"abcdef")
    copy = RunCopy(tmp_path / "run", tmp_path / "copy")
    copy_log, looks = copy._copy_log, []

    def copy_log_then_train() -> Any:
        needed = copy_log()
        looks.append(len(needed))
        if len(looks) == 1:
            step(engine, 1)
            put_to(engine, "g")  # frees a and b
        return needed

    monkeypatch.setattr(copy, "_copy_log", copy_log_then_train)
    with copy:
        found = copy.round()
    assert looks == [6, 5] and found.groups == 5 and not found.damaged
    assert names_kept(tmp_path / "copy") == list("cdefg")
    end(engine)


@pytest.mark.parametrize("same_run", [False, True])
def test_a_closed_run_may_keep_its_id(tmp_path: Path, same_run: bool) -> None:
    run, target = tmp_path / "run", tmp_path / "copy"
    with ps.open(run, storage=str(tmp_path / "elsewhere"), **SETTINGS) as plane:
        put(plane, *"abcd")
        with pytest.raises(Conflict, match="without --same-run"):
            RunCopy(run, target, same_run=True)
    flags = ["--same-run"] if same_run else []
    assert main(["copy", str(run), str(target), *flags]) == 0
    assert (read_run(target)["run_id"] == read_run(run)["run_id"]) is same_run
    shutil.rmtree(tmp_path / "elsewhere")
    with ps.open(target, **SETTINGS) as plane:
        train(plane, 2)


def test_damaged_frames_are_named_and_the_rest_is_copied(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    engine = open_engine(tmp_path / "run")
    put_to(engine, *"abcd")
    damage_frame(engine, "b")
    end(engine)
    for _ in range(2):  # a second round tries again
        assert main(["copy", str(tmp_path / "run"), str(tmp_path / "copy")]) == 1
        assert "not copied: group 'b'" in capsys.readouterr().out
    with ps.open(tmp_path / "copy", **SETTINGS) as plane:
        with pytest.raises(StepAborted, match="group 'b'"):
            train(plane, 1)
        train(plane, 1)
        assert plane.ledger.quarantined == 2


def test_targets_that_are_not_copies_are_refused_and_left_alone(tmp_path: Path) -> None:
    run, other = tmp_path / "run", tmp_path / "other"
    for folder in (run, other):
        with ps.open(folder, **SETTINGS) as plane:
            put(plane, folder.name)
    before = files_of(other)
    with pytest.raises(InvalidInput, match="not a copy of"):
        RunCopy(run, other)
    assert {name: data for name, data in files_of(other).items() if name != "lock"} == {
        name: data for name, data in before.items() if name != "lock"
    }
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "notes.txt").write_text("mine")
    with pytest.raises(InvalidInput, match=r"notes\.txt"):
        RunCopy(run, tmp_path / "full")
    assert [path.name for path in (tmp_path / "full").iterdir()] == ["notes.txt"]
    with pytest.raises(InvalidInput, match="elsewhere"):
        RunCopy(run, run / "storage" / "copy")
    with pytest.raises(InvalidInput, match=r"log\.sqlite"):
        RunCopy(tmp_path / "full", tmp_path / "new")


def test_a_source_that_was_restored_from_an_older_state_takes_nothing_from_its_copy(tmp_path: Path) -> None:
    run, target = tmp_path / "run", tmp_path / "copy"
    with ps.open(run, **SETTINGS) as plane:
        put(plane, "a", "b")
    shutil.copytree(run, tmp_path / "old")
    with ps.open(run, **SETTINGS) as plane:
        put(plane, "c", "d")
    with RunCopy(run, target) as copy:
        copy.round()
    shutil.rmtree(run)
    shutil.copytree(tmp_path / "old", run)
    with RunCopy(run, target) as copy, pytest.raises(Conflict, match="restored from an older state"):
        copy.round()
    assert names_kept(target) == list("abcd")


def test_a_copy_that_was_killed_between_log_and_marker_is_repaired_by_the_next_round(tmp_path: Path) -> None:
    run, target = tmp_path / "run", tmp_path / "copy"
    with ps.open(run, **SETTINGS) as plane:
        put(plane, "a", "b")
        with RunCopy(run, target) as copy:
            copy.round()
        witness, marker = (target / "log.witness").read_bytes(), (target / "storage" / "marker").read_bytes()
        put(plane, "c", "d")
        with RunCopy(run, target) as copy:
            copy.round()
    (target / "log.witness").write_bytes(witness)
    (target / "storage" / "marker").write_bytes(marker)
    again = tmp_path / "again"
    shutil.copytree(target, again)
    with RunCopy(run, target) as copy:
        copy.round()
    for folder in (target, again):  # also without a further round: both are behind the log, never ahead of it
        with ps.open(folder, **SETTINGS) as plane:
            train(plane, 2)


@pytest.mark.process
def test_the_command_follows_a_run_beside_training(tmp_path: Path) -> None:
    run, target = tmp_path / "run", tmp_path / "copy"
    with ps.open(run, retain="all", **SETTINGS) as plane:
        put(plane, "a", "b")
        command = [
            sys.executable,
            "-m",
            "penstock",
            "copy",
            str(run),
            str(target),
            "--follow",
            "--every",
            "0.05",
            "--json",
        ]
        listen = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)  # ignored where the suite runs in the background
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=os.environ, preexec_fn=listen) as process:
            assert process.stdout is not None
            try:
                assert '"groups": 2' in process.stdout.readline()
                put(plane, *"cdef")
                digests = train(plane, 2)
                # Not by its lines: a pass that copies a commit alone prints none.
                while names_kept(target) != list("abcdef") or read_run(target)["next_step"] != 3:
                    assert process.poll() is None
                    time.sleep(0.05)
                process.send_signal(signal.SIGINT)
                assert process.wait(60 * pace()) == 0
            finally:
                process.kill()
    recorded = RecordedRun.open(target)
    assert [recorded.steps[n].digests for n in (1, 2)] == digests
    with ps.open(target, **SETTINGS) as plane:
        train(plane, 1, version=2)
