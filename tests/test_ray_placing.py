"""Which planes of a cluster may move, and which folders are refused; no Ray is needed for this."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import penstock as ps
from penstock.errors import ConfigError, Conflict
from penstock.packing import Packing
from penstock.plane.settings import ClusterSettings, ServerSettings, Target
from penstock.ray.ray_plane import absolute, is_movable
from penstock.ray.served import check_known
from penstock.storage import is_shared

PLANE = ClusterSettings(packing=Packing(ranks=1, seq_len=16), target=Target(groups=1))
DATABASE = "postgresql://db/runs"
SHARED_AND_LOCAL = [("/mnt/all", True), ("/var/runs", False)]


@pytest.fixture
def mounts(monkeypatch: pytest.MonkeyPatch) -> None:
    """A host that sees one shared filesystem, /mnt/all."""
    table = "36 35 98:0 / / rw - ext4 /dev/sda rw\n40 36 0:45 / /mnt/all rw - nfs4 host:/ rw"
    monkeypatch.setattr("penstock.ray.ray_plane.is_shared", lambda folder: is_shared(folder, table))


@pytest.mark.usefixtures("mounts")
@pytest.mark.parametrize(("folder", "movable"), SHARED_AND_LOCAL)
def test_a_plane_with_sqlite_moves_only_if_its_folder_is_shared(folder: str, movable: bool) -> None:
    assert is_movable(replace(PLANE, folder=folder)) is movable
    assert is_movable(PLANE) is False


@pytest.mark.usefixtures("mounts")
@pytest.mark.parametrize(("storage", "movable"), SHARED_AND_LOCAL)
def test_a_plane_with_postgresql_moves_only_if_its_storage_is_shared(storage: str, movable: bool) -> None:
    assert is_movable(replace(PLANE, log=DATABASE, storage=storage)) is movable
    assert is_movable(replace(PLANE, log=DATABASE)) is False
    assert is_movable(replace(PLANE, log=DATABASE, storage="s3://bucket/run")) is True
    assert is_movable(replace(PLANE, storage="s3://bucket/run")) is False
    assert is_movable(replace(PLANE, folder="/mnt/all", storage=storage)) is movable


def test_movable_needs_a_log_in_postgresql_and_a_storage() -> None:
    assert is_movable(replace(PLANE, log=DATABASE, storage="/fuse/frames", movable=True))
    with pytest.raises(ConfigError, match=r"movable: on with log None and storage None; a plane that may move needs"):
        replace(PLANE, movable=True)


@pytest.mark.parametrize("setting", ["folder", "storage"])
def test_a_folder_that_ray_removes_is_refused(setting: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job = tmp_path / "ray" / "session_2026-11-18_04-00-00_000000_17" / "runtime_resources" / "working_dir_files" / "pkg"
    job.mkdir(parents=True)
    given: dict[str, Any] = {setting: "runs/demo"}
    monkeypatch.chdir(job)  # as `ray job submit --working-dir` does
    with pytest.raises(ConfigError, match=rf"ray://x: {setting}: .*/pkg/runs/demo is in a folder that Ray removes"):
        absolute("ray://x", replace(PLANE, **given))


def test_relative_paths_start_at_the_callers_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    found = absolute("ray://x", replace(PLANE, folder="runs/demo", metrics_token="secrets/metrics"))
    assert (found.folder, found.storage) == (str(tmp_path / "runs" / "demo"), None)
    assert found.metrics_token == str(tmp_path / "secrets" / "metrics")


def test_a_plane_of_a_cluster_has_every_setting_of_a_server_process() -> None:
    assert issubclass(ClusterSettings, ServerSettings)


def test_settings_of_a_server_are_named_where_there_is_no_server() -> None:
    with pytest.raises(ConfigError, match=r"memory: metrics: a setting of `penstock serve` and of ray:// planes"):
        ps.open("memory:", ranks=1, seq_len=16, groups_per_step=1, metrics="127.0.0.1:0")


def test_an_empty_folder_or_another_run_is_not_the_known_run(tmp_path: Path) -> None:
    with ps.open(tmp_path / "run", ranks=1, seq_len=16, groups_per_step=1) as plane:
        run_id = str(plane.status()["run_id"])
    settings = replace(PLANE, folder=str(tmp_path / "run"))
    check_known(settings, run_id, "ray://x")
    with pytest.raises(Conflict, match=rf"ray://x: this plane is at work on run {'0' * 12}, .* the log of run"):
        check_known(settings, "0" * 32, "ray://x")
    with pytest.raises(Conflict, match=rf"work on run {run_id[:12]}, .* holds no log; .*penstock serve --ray x --end"):
        check_known(replace(settings, folder=str(tmp_path / "empty")), run_id, "ray://x")
    assert [path.name for path in tmp_path.iterdir()] == ["run"]
