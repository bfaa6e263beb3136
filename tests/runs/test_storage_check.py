"""`penstock storage check`: what is missing, damaged or left over is reported exactly, and nothing is written."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from penstock.cli import main
from penstock.frames import encode
from penstock.log import State
from penstock.plane.settings import PlaneSettings
from penstock.storage import FolderStorage, parse_location
from tests.runs.test_recover import files_in, train_one
from tests.storage.test_operator_mistakes import SETTINGS, close, kill, opened, put, run_with
from tests.support.engines import damage_frame
from tests.support.groups import named_group


def check(folder: Path, capsys: pytest.CaptureFixture[str], *flags: str, code: int = 0) -> dict[str, Any]:
    capsys.readouterr()
    assert main(["storage", "check", str(folder), "--json", *flags]) == code
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert found["ok"] is (code == 0)
    return found


def locations(folder: Path) -> dict[str, str]:
    engine = opened(folder)
    found = {row.id: row.location for row in engine.log.groups()}
    close(engine)
    return found


def test_a_healthy_run_is_healthy_also_while_its_plane_works(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "run"
    engine = opened(folder)
    put(engine, "a", "b", "c")
    before = {name: data for name, data in files_in(folder).items() if not name.endswith("-shm")}
    found = check(folder, capsys)
    assert (found["frames"], found["missing"], found["damaged"], found["lost"]) == (3, [], [], 0)
    assert found["marker"]["run_id"] == found["run_id"] == engine.log.run_id
    assert found["witness"]["commits"] == engine.log.meta("commits", 0)
    assert found["disagreements"] == {}
    assert found["dead_bytes"] == 0
    assert {name: data for name, data in files_in(folder).items() if not name.endswith("-shm")} == before
    close(engine)
    assert check(folder, capsys, "--fast")["frames"] == 3


def test_damaged_and_missing_frames_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "run"
    engine = opened(folder)
    put(engine, "a", "b", "c", "d")
    damage_frame(engine, "b")
    storage = engine.storage
    assert isinstance(storage, FolderStorage)
    storage.delete([engine.log.location_of("c")])
    close(engine)
    run_with(folder, "e")
    at = {name: parse_location(text) for name, text in locations(folder).items()}
    storage.path(at["e"].segment).unlink()
    os.truncate(storage.path(at["d"].segment), at["d"].end - 1)
    found = check(folder, capsys, code=1)
    assert sorted(bad["group"] for bad in found["missing"]) == ["c", "d", "e"]
    assert [bad["group"] for bad in found["damaged"]] == ["b"]
    assert found["frames"] == 5
    fast = check(folder, capsys, "--fast", code=1)
    assert sorted(bad["group"] for bad in fast["missing"]) == ["d", "e"]
    assert fast["damaged"] == []
    assert main(["storage", "check", str(folder)]) == 1
    out = capsys.readouterr().out
    assert f"damaged: group 'b' at {at['b']}" in out
    assert "Put these segments back from a copy" in out


def test_a_frame_with_other_samples_is_damaged(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "run"
    run_with(folder, "a")
    at = parse_location(locations(folder)["a"])
    other = [sample.replace(rewards=3.0) for sample in named_group("a")]
    frame = next(f for f in (encode(other), encode(named_group("b"))) if len(f) == at.size)
    FolderStorage(folder / "storage").path(at.segment).write_bytes(frame)
    found = check(folder, capsys, code=1)
    assert [bad["group"] for bad in found["damaged"]] == ["a"]
    assert "other samples" in found["damaged"][0]["why"]


def test_evaluation_groups_are_checked_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "run"
    engine = opened(folder)
    assert engine.put("e", "e", encode(named_group("e")), evaluation=True) is None
    engine.flush()
    (row,) = engine.log.groups_in(State.EVALUATION)
    close(engine)
    assert check(folder, capsys)["frames"] == 1
    at = parse_location(row.location)
    with FolderStorage(folder / "storage").path(at.segment).open("r+b") as file:
        file.seek(at.end - 3)
        file.write(b"\xff\xff\xff")
    assert [bad["group"] for bad in check(folder, capsys, code=1)["damaged"]] == ["e"]


def test_orphaned_bytes_segments_and_groups_are_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "run"
    run_with(folder, "a")
    segments = folder / "storage" / "segments"
    (own,) = segments.iterdir()
    lost = encode(named_group("b"))
    with own.open("ab") as file:
        file.write(lost + b"torn")
    (segments / "0123456789abcdef").write_bytes(encode(named_group("c")) + encode(named_group("a")))
    found = check(folder, capsys)
    assert found["lost_groups"] == ["b", "c"] or found["lost_groups"] == ["c", "b"]
    assert list(found["unregistered"]) == ["0123456789abcdef"]
    assert found["dead_bytes"] == len(lost) + 4
    assert check(folder, capsys, "--fast")["lost"] == 0


def test_pending_deletions_are_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "run"
    settings = PlaneSettings(
        packing=SETTINGS.packing, target=SETTINGS.target, retain_steps=0, disk_reserve_bytes=8 << 20
    )
    run_with(folder, "a", "b", "c")
    (folder / "storage" / "segments" / "0123456789abcdef").write_bytes(b"")  # stops all deletion
    engine = opened(folder, settings)
    train_one(engine)
    close(engine)
    found = check(folder, capsys)
    assert found["pending_frees"] >= 2
    assert found["frames"] == 1
    assert found["dead_bytes"] > 0
    assert found["lost"] == 0


def test_what_keeps_a_plane_from_starting_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder, copy = tmp_path / "run", tmp_path / "copy"
    run_with(folder, "a")
    shutil.copytree(folder, copy)
    run_with(folder, "b")
    shutil.copy(copy / "log.sqlite", folder / "log.sqlite")
    found = check(folder, capsys, code=1)
    assert "it lacks decisions" in found["disagreements"]["marker"]
    assert "it lacks decisions" in found["disagreements"]["witness"]
    assert found["lost_groups"] == ["b"]
    (folder / "log.sqlite").unlink()
    assert check(folder, capsys, code=1)["disagreements"] == {"log": "missing"}
    (folder / "storage" / "marker").unlink()
    assert check(folder, capsys, code=1)["disagreements"]["marker"] == "missing"


def test_the_storage_that_a_plane_was_given_is_found(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    settings = PlaneSettings(packing=SETTINGS.packing, target=SETTINGS.target, storage=f"file://{tmp_path}/elsewhere")
    engine = opened(tmp_path / "run", settings)
    put(engine, "a")
    kill(engine)
    found = check(tmp_path / "run", capsys)
    assert found["frames"] == 1
    assert found["storage"] == str(tmp_path / "elsewhere")


def test_a_run_of_demo_is_named_by_its_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_with(tmp_path / "run" / "plane", "a")
    assert check(tmp_path / "run", capsys)["frames"] == 1


def test_what_is_not_a_run_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["storage", "check", str(tmp_path / "nowhere")]) == 1
    assert "no such folder; give the folder of a run" in capsys.readouterr().err
    assert main(["storage", "check", str(tmp_path)]) == 1
    assert "empty; give the folder of a run" in capsys.readouterr().err
    assert main(["storage", "recover", str(tmp_path)]) == 1
