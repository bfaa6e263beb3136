"""`penstock runs`: what is in a database, a bucket, a folder; and deleting it, but never what another run has."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import psycopg
import pytest

import penstock as ps
from penstock.cli import main
from penstock.log.postgres_runs import DatabaseRun, drop_run, runs_in
from tests.log.test_no_folder import PLANE, put
from tests.support.postgres_server import PostgresServer

pytestmark = pytest.mark.process


def listed(where: str, capsys: pytest.CaptureFixture[str]) -> dict[str, dict[str, Any]]:
    capsys.readouterr()
    assert main(["runs", "list", where, "--json"]) == 0
    return {run["name"]: run for run in json.loads(capsys.readouterr().out)["runs"]}


def test_runs_of_a_database_and_a_bucket_are_listed_and_deleted(
    own_postgres: PostgresServer, s3_bucket: str, capsys: pytest.CaptureFixture[str]
) -> None:
    database, bucket = own_postgres.url, f"s3://{s3_bucket}/all"
    for name in ("one", "two"):
        with ps.open(f"{database}#{name}", storage=f"{bucket}/{name}", **PLANE) as plane:
            put(plane, "a")
            found = listed(database, capsys)[name]
            assert found["is_open"] and found["groups"] == 1 and found["storage"] == f"{bucket}/{name}"
            assert main(["runs", "delete", f"{database}#{name}", "--yes"]) == 1
            assert "has it open; stop that plane first" in capsys.readouterr().err
    assert listed(database, capsys).keys() == listed(bucket, capsys).keys() == {"one", "two"}
    assert not any(run["is_open"] for run in listed(database, capsys).values())
    assert main(["runs", "delete", f"{database}#one"]) == 1
    assert "pass --yes" in capsys.readouterr().err
    assert main(["runs", "delete", f"{database}#one", "--yes"]) == 0
    assert listed(database, capsys).keys() == listed(bucket, capsys).keys() == {"two"}
    assert main(["runs", "delete", f"{database}#one", "--yes"]) == 1
    assert "'one': not in that database" in capsys.readouterr().err
    with ps.open(f"{database}#two", storage=f"{bucket}/two", **PLANE) as plane:
        assert plane.status()["held_groups"] == 1
    assert main(["runs", "delete", f"{database}#two", "--keep-frames", "--yes"]) == 0
    assert listed(database, capsys) == {} and listed(bucket, capsys).keys() == {"two"}
    assert main(["runs", "delete", f"{bucket}/two", "--yes"]) == 1
    assert "give postgresql://USER@HOST/DB#RUN" in capsys.readouterr().err
    assert listed(bucket, capsys).keys() == {"two"}


def test_no_plane_starts_on_a_run_while_it_is_deleted(own_postgres: PostgresServer, tmp_path: Path) -> None:
    where = f"{own_postgres.url}#busy"
    with ps.open(where, storage=str(tmp_path), **PLANE) as plane:
        put(plane, "a")
    seen = []

    def try_again(_run: DatabaseRun) -> None:
        with (
            psycopg.connect(own_postgres.url, options="-c lock_timeout=200") as other,
            pytest.raises(psycopg.errors.LockNotAvailable),
        ):
            other.execute("SELECT epoch FROM penstock_busy.run")  # the first thing a plane asks
        seen.append(True)

    drop_run(where, try_again)
    assert seen and runs_in(where) == []


def test_frames_of_another_run_are_not_deleted(
    own_postgres: PostgresServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with ps.open(f"{own_postgres.url}#mine", storage=str(tmp_path / "a"), **PLANE) as plane:
        put(plane, "a")
    with ps.open(f"{own_postgres.url}#other", storage=str(tmp_path / "b"), **PLANE) as plane:
        put(plane, "b")
    (tmp_path / "a").rename(tmp_path / "aside")
    (tmp_path / "b").rename(tmp_path / "a")  # an operator's mistake
    assert main(["runs", "delete", f"{own_postgres.url}#mine", "--yes"]) == 1
    assert "nothing was deleted" in capsys.readouterr().err
    assert listed(own_postgres.url, capsys).keys() == {"mine", "other"}
    assert list((tmp_path / "a" / "segments").iterdir())


def test_runs_of_a_folder_are_listed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("x", "y"):
        with ps.open(tmp_path / name, run=name, **PLANE) as plane:
            put(plane, "a")
    assert listed(str(tmp_path), capsys).keys() == {"x", "y"}
    assert main(["runs", "list", str(tmp_path)]) == 0
    assert "storage" in capsys.readouterr().out
    assert main(["runs", "list", str(tmp_path / "nowhere")]) == 1
    assert main(["runs", "delete", str(tmp_path), "--yes"]) == 1
    assert "a run with an SQLite log is a folder" in capsys.readouterr().err
