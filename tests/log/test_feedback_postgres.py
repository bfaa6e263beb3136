"""The feedback stream of a run whose log is in PostgreSQL, over kill -9 of its plane."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import penstock as ps
from penstock.server import PlaneProcess
from tests.support.groups import named_group
from tests.support.postgres_server import PostgresServer

pytestmark = pytest.mark.process


def test_events_are_there_once_after_a_kill(postgres: PostgresServer, tmp_path: Path) -> None:
    words = [
        "--run=feedback",
        f"--log={postgres.url}",
        f"--storage={tmp_path}/storage",
        "--ranks=1",
        "--seq-len=64",
        "--groups-per-step=1",
        f"--listen=ipc://{tmp_path}/s",
    ]
    told: list[Any] = []
    for life in range(3):
        with PlaneProcess(words) as process:
            with ps.open(process.url) as plane:
                plane.put(named_group(f"g{life}"))
                plane.discard("zero\0variance", 2, group=f"d{life}")
                with ps.connect(process.url, rank=0, world=1) as source:
                    source.commit(source.step(timeout=60))
                    source.flush()
                told += plane.feedback(after=told[-1].cursor if told else "") if life else []
            process.kill()
    with PlaneProcess(words) as process, ps.open(process.url) as plane:
        events = list(plane.feedback())
        told += plane.feedback(after=told[-1].cursor)
    assert told == events
    assert [event.number for event in events] == list(range(1, 7))
    assert [event.group for event in events if event.outcome == "trained"] == ["g0", "g1", "g2"]
    assert [event.reason for event in events if event.outcome == "filtered"] == ["zero\0variance"] * 3
