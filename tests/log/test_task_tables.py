"""Tasks with the log in PostgreSQL, and logs that were made before there were tasks."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

import penstock as ps
from penstock.log import copy_log
from penstock.log.postgres_address import schema_of
from tests.support.pace import pace
from tests.support.planes import FAST
from tests.support.postgres_server import PostgresServer

pytestmark = pytest.mark.process

SETTINGS: dict[str, Any] = {"ranks": 1, "seq_len": 64, "groups_per_step": 2, "timeouts": FAST}
PROMPTS = [{"name": f"p {number}", "text": "é" * number} for number in range(6)]


def work(plane: ps.Plane, most: int) -> list[str]:
    """Complete some tasks; leave one leased if there is a further one."""
    done: list[str] = []
    for task in plane.tasks(PROMPTS, epochs=2, lease_s=pace()):
        if len(done) == most:
            return done
        assert task.payload == next(prompt for prompt in PROMPTS if prompt["name"] == task.prompt)
        with task.group() as group:
            for reward in (0.0, 1.0):
                group.add(ps.Trajectory(turns=[ps.Turn([1, 2]), ps.Turn([3], logprobs=[-0.5])], reward=reward))
        done.append(task.prompt)
    return done


@pytest.mark.parametrize("kind", ["sqlite", "postgres"])
def test_tasks_go_on_after_restarts_also_in_a_log_that_had_no_table_for_them(
    kind: str, postgres: PostgresServer, tmp_path: Path
) -> None:
    folder, run = tmp_path / "run", f"tasks {tmp_path.name}"
    log: dict[str, Any] = {"log": postgres.url} if kind == "postgres" else {}
    with ps.open(folder, run=run, **log, **SETTINGS) as plane, plane.group("before", policy_version=0) as group:
        for reward in (0.0, 1.0):
            group.add(ps.Trajectory(turns=[ps.Turn([1, 2]), ps.Turn([3], logprobs=[-0.5])], reward=reward))
    if kind == "postgres":
        postgres.execute(f'DROP TABLE "{schema_of(run)}".prompts')
    else:
        with closing(sqlite3.connect(folder / "log.sqlite")) as db:
            db.execute("DROP TABLE prompts")
    copy_log(folder, tmp_path / "early.sqlite")
    done: list[str] = []
    for most in (3, 100):
        with ps.open(folder, run=run, **log, **SETTINGS) as plane:
            done += work(plane, most)
            demand = plane.demand()["prompts"]
    assert sorted(done) == sorted(2 * [prompt["name"] for prompt in PROMPTS])
    assert (demand["ended"], demand["held"]) == (True, 12)
    copy_log(folder, tmp_path / "copy.sqlite")
    with closing(sqlite3.connect(tmp_path / "copy.sqlite")) as db:
        assert len(db.execute("SELECT name, payload FROM prompts").fetchall()) == 6
