"""A run without a folder: its log in PostgreSQL, its frames in a bucket. It can be started on any host."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest

import penstock as ps
from penstock.cli import main
from penstock.errors import ConfigError, PlaneLost
from penstock.protocol.timeouts import Timeouts
from penstock.server import PlaneProcess
from tests.support.postgres_server import PostgresServer

pytestmark = pytest.mark.process

SETTINGS = ["--ranks=1", "--seq-len=64", "--groups-per-step=1", "--listen=tcp://127.0.0.1:*", "--http=127.0.0.1:0"]
PLANE: dict[str, Any] = {"ranks": 1, "seq_len": 64, "groups_per_step": 1}


def put(plane: ps.Plane, name: str) -> None:
    with plane.group(name, id=name) as group:
        for reward in (0.0, 1.0):
            group.add(ps.Trajectory(turns=[ps.Turn([1, 2]), ps.Turn([3], logprobs=[-0.5])], reward=reward))


def test_a_killed_plane_is_started_elsewhere_and_goes_on(
    postgres: PostgresServer,
    s3_bucket: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = ["--run=moving", f"--log={postgres.url}", f"--storage=s3://{s3_bucket}/moving", *SETTINGS]
    here, there = tmp_path / "here", tmp_path / "there"
    for host in (here, there):
        host.mkdir()
    monkeypatch.chdir(here)
    with PlaneProcess(words) as first:
        assert first.ready["folder"].endswith("#moving") and first.ready["http_token"]
        with ps.open(first.ready["urls"][0]) as plane:
            put(plane, "a")
            put(plane, "b")
        os.kill(first.pid, signal.SIGKILL)
    monkeypatch.chdir(there)
    with PlaneProcess(words) as second:
        with ps.connect(second.ready["urls"][0], rank=0, world=1) as source:
            source.commit(source.step(timeout=60))
            source.flush()
        assert main(["top", second.ready["urls"][0], "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["epoch"] == 2
        assert main(["inspect", second.ready["urls"][0]]) == 0
        assert "2 committed" in capsys.readouterr().out
    assert list(here.iterdir()) == list(there.iterdir()) == []
    where = f"{postgres.url}#moving"
    assert main(["inspect", where]) == 0
    assert "epoch 2" in capsys.readouterr().out
    assert main(["storage", "check", where]) == 0
    assert main(["copy", where, str(tmp_path / "copy")]) == 0
    capsys.readouterr()
    assert main(["top", str(tmp_path / "copy"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["ledger"]["committed"] == 2


def test_clients_that_know_the_log_find_a_plane_that_moved(postgres: PostgresServer, tmp_path: Path) -> None:
    words = ["--run=found", f"--log={postgres.url}", f"--storage={tmp_path / 'frames'}", *SETTINGS]
    where, patient = f"{postgres.url}#found", Timeouts(plane_s=120.0)
    with PlaneProcess(words) as first, ps.open(where, timeouts=patient) as producer:
        put(producer, "a")
        with ps.connect(where, rank=0, world=1, timeouts=patient) as source:
            source.commit(source.step(timeout=60))
            source.flush()
            os.kill(first.pid, signal.SIGKILL)
            with PlaneProcess(words) as second:
                assert second.ready["urls"] != first.ready["urls"]
                put(producer, "b")
                source.commit(source.step(timeout=60))
                source.flush()
                assert producer.status()["epoch"] == 2 and producer.ledger.committed == 4


def test_a_run_that_nobody_started_is_named(postgres: PostgresServer) -> None:
    with (
        ps.open(f"{postgres.url}#never", timeouts=Timeouts(plane_s=4.0)) as plane,
        pytest.raises(PlaneLost, match=r"#never: no plane of this run has listened yet"),
    ):
        put(plane, "a")


def test_a_plane_in_this_process_needs_no_folder_either(postgres: PostgresServer, tmp_path: Path) -> None:
    where = f"{postgres.url}#inside"
    for step in (1, 2):
        with ps.open(where, storage=str(tmp_path / "frames"), **PLANE) as plane:
            put(plane, f"group-{step}")
            with plane.source(rank=0) as source:
                source.commit(source.step(timeout=60))
                source.flush()
            assert plane.ledger.committed == 2 * step
    assert [path.name for path in tmp_path.iterdir()] == ["frames"]


def test_what_is_missing_or_too_much_is_said(
    postgres: PostgresServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(ConfigError, match="without a folder and without storage; give `storage`"):
        ps.open(f"{postgres.url}#x", **PLANE)
    with pytest.raises(ConfigError, match="with memory:, which keeps nothing"):
        ps.open("memory:", log=postgres.url, **PLANE)
    with pytest.raises(ConfigError, match="contains a password, which others can see") as caught:
        ps.open("postgresql://me:hidden-word@host/db", storage=str(tmp_path), **PLANE)
    assert "hidden-word" not in str(caught.value)
    assert main(["inspect", "postgresql://me:hidden-word@host/db#x"]) == 1
    said = capsys.readouterr().err
    assert "contains a password" in said and "hidden-word" not in said
