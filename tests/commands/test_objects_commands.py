"""Commands that read a run whose frames are in an object store: check, recover, copy, replay, inspect."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

import penstock as ps
from penstock.cli import main
from penstock.errors import Conflict
from penstock.frames import encode
from penstock.runs.recorded_run import RecordedRun
from penstock.runs.run_log import read_stored
from penstock.storage import ObjectStorage, parse_location
from penstock.storage.interface import new_segment_name
from penstock.storage.object_requests import run
from tests.runs.conftest import SETTINGS, put, train
from tests.support.groups import named_group

pytestmark = pytest.mark.deep


@pytest.fixture
def where(s3_bucket: str) -> str:
    return f"s3://{s3_bucket}/runs/mine"


def a_run(folder: Path, where: str, *names: str, steps: int = 0, **settings: Any) -> list[tuple[str, ...]]:
    """A run that is over; returns the digests of its steps."""
    with ps.open(folder, **{**SETTINGS, "storage": where, **settings}) as plane:
        put(plane, *names)
        return train(plane, steps) if steps else []


def check(folder: Path, capsys: pytest.CaptureFixture[str], *flags: str, code: int = 0) -> dict[str, Any]:
    capsys.readouterr()
    assert main(["storage", "check", str(folder), "--json", *flags]) == code
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def overwrite(storage: ObjectStorage, name: str, data: bytes) -> None:
    """As a bad disk below the store would."""
    import obstore

    obstore.put(storage.store, name, data)


def object_of(location: str) -> str:
    at = parse_location(location)
    return f"segments/{at.segment}/{at.offset >> 23:06}"


def test_check_names_what_is_missing_damaged_or_unknown(
    tmp_path: Path, where: str, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, storage = tmp_path / "run", ObjectStorage(where)
    a_run(folder, where, "a", "b", "c")
    assert check(folder, capsys)["frames"] == check(folder, capsys, "--fast")["frames"] == 3
    recorded = RecordedRun.open(folder)
    at = {entry.id: entry.location for entry in recorded.groups.values()}
    frame = bytearray(storage.read(at["a"])[0])
    frame[-3] ^= 0x40
    overwrite(storage, object_of(at["a"]), bytes(frame))
    run(storage.remove([object_of(at["b"])]))
    overwrite(storage, object_of(at["c"]), bytes(storage.read(at["c"])[0])[:-1])
    segment = storage.create(new_segment_name())
    segment.append([[encode(named_group("lost"))]])
    found = check(folder, capsys, code=1)
    assert [bad["group"] for bad in found["damaged"]] == ["a"]
    assert sorted(bad["group"] for bad in found["missing"]) == ["b", "c"]
    assert found["lost_groups"] == ["lost"] and list(found["unregistered"]) == [segment.name]
    fast = check(folder, capsys, "--fast", code=1)
    assert sorted(bad["group"] for bad in fast["missing"]) == ["b", "c"]
    assert main(["storage", "check", str(folder)]) == 1
    assert f"frames in {where}" in capsys.readouterr().out


def test_recover_puts_back_what_a_lost_log_knew(tmp_path: Path, where: str, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "run"
    a_run(folder, where, "a", "b", "c", "d")
    for path in folder.glob("log*"):
        path.unlink()
    with pytest.raises(Conflict, match="and the log is empty"):
        ps.open(folder, **{**SETTINGS, "storage": where})
    for path in folder.glob("log*"):
        path.unlink()
    assert main(["storage", "recover", str(folder), "--storage", where, "--yes"]) == 0
    assert "4 groups were added" in capsys.readouterr().out
    assert (folder / "before-recover-1" / "marker").read_bytes().startswith(b'{"run_id"')
    with ps.open(folder, **{**SETTINGS, "storage": where}) as plane:
        assert not plane.put(named_group("a"))
        assert len(train(plane, 2)) == 2
    assert check(folder, capsys)["ok"]


def test_recover_adds_a_segment_that_no_log_registered(
    tmp_path: Path, where: str, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, storage = tmp_path / "run", ObjectStorage(where)
    a_run(folder, where, "a")
    segment = storage.create(new_segment_name())
    segment.append([[encode(named_group("b"))], [encode(named_group("c"))]])
    segment.append([[encode(named_group("d"))]])
    assert main(["storage", "recover", str(folder), "--yes", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["plan"]["groups"] == ["b", "c", "d"] and found["plan"]["register"] == [segment.name]
    with ps.open(folder, **{**SETTINGS, "storage": where}) as plane:
        assert len(train(plane, 2)) == 2
    assert main(["storage", "recover", where, "--into", str(tmp_path / "new"), "--yes"]) == 0
    assert "4 groups were added" in capsys.readouterr().out


def test_a_copy_in_a_folder_is_the_run(tmp_path: Path, where: str, capsys: pytest.CaptureFixture[str]) -> None:
    folder, target = tmp_path / "run", tmp_path / "copy"
    large = [sample.replace(routed_experts=None) for sample in named_group("large", samples=3, tokens=60)]
    with ps.open(folder, **{**SETTINGS, "storage": where}) as plane:
        put(plane, *(f"g{i}" for i in range(5)))
        plane.put(large)
        assert main(["copy", str(folder), str(target)]) == 0
    shutil.move(folder, tmp_path / "away")
    assert check(target, capsys)["frames"] == 6
    with ps.open(target, **SETTINGS) as plane:
        digests = train(plane, 3)
    with ps.open(tmp_path / "away", **{**SETTINGS, "storage": where}) as plane:
        assert train(plane, 3) == digests


def test_a_run_that_keeps_everything_is_replayed_and_looked_at(
    tmp_path: Path, where: str, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "run"
    digests = a_run(folder, where, "a", "b", "c", "d", steps=2, retain="all")
    assert len(digests) == 2
    assert main(["rerun", str(folder), "--diff"]) == 0
    assert main(["rerun", str(folder), "--verify"]) == 0
    assert main(["inspect", str(folder), "--json"]) == 0
    assert main(["quarantine", str(folder)]) == 0
    location = RecordedRun.open(folder).groups[1].location
    assert bytes(read_stored(folder, location)) == encode(named_group("a"))
    capsys.readouterr()
