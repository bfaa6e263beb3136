"""A run with `retain="all"` frees nothing, remembers that, and forgets only on command."""

from __future__ import annotations

import io
import json
import logging
from pathlib import Path
from typing import Any

import pytest

import penstock as ps
from penstock.cli import main
from penstock.errors import DiskFull
from penstock.frames import encode
from penstock.log import SqliteLog
from penstock.plane.manifest import read_manifest
from penstock.runs.run_log import kept_groups
from tests.runs.conftest import SETTINGS, names_kept, put, train
from tests.support.groups import named_group

KEEP: dict[str, Any] = SETTINGS | {"retain_steps": 0, "retain_eval_bytes": 4096, "snapshot_every": 1}


def plans_kept(folder: Path) -> list[int]:
    log = SqliteLog(folder)
    try:
        return [step for step, _, data, _ in log.steps() if read_manifest(data).rank_plans]
    finally:
        log.close()


def test_nothing_that_was_accepted_is_freed(tmp_path: Path) -> None:
    """Trained, dropped as stale, for evaluation beyond the limit: all of it stays, over a restart too."""
    run = tmp_path / "run"
    big = encode(named_group("big", samples=16, tokens=200))
    with ps.open(run, retain="all", max_staleness=1, **KEEP) as plane:
        assert plane.status()["retain"] == "all"
        put(plane, *"abcdefgh")
        put(plane, *(f"e{i}" for i in range(8)), evaluation=True)
        train(plane, 2)  # with version 2 the four groups that are left become too old
        before = plane.ledger.as_dict()
        assert before["dropped"] == {"stale": 8}
        assert len(big) > KEEP["retain_eval_bytes"]
        plane.put_frame("big", big, evaluation=True)
    with ps.open(run, retain="all", max_staleness=1, **KEEP) as plane:
        assert plane.ledger.as_dict()["dropped"] == before["dropped"]
        assert plane.ledger.committed == before["committed"]
    assert [row.id for row in kept_groups(run)][-1] == "big"
    assert [row.id for row in kept_groups(run)][:-1] == [*"abcdefgh", *(f"e{i}" for i in range(8))]
    assert plans_kept(run) == [1, 2]
    log = SqliteLog(run)
    assert all(log.metadata(row.op) is not None for row in log.groups()) and not log.frees()
    log.close()


def test_a_later_start_without_it_goes_on_keeping_and_says_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    run = tmp_path / "run"
    with ps.open(run, retain="all", **KEEP) as plane:
        put(plane, *"abcd")
        train(plane, 1)
    with caplog.at_level(logging.WARNING), ps.open(run, **KEEP) as plane:
        assert plane.status()["retain"] == "all"
        train(plane, 1, version=1)
        put(plane, *"efgh")
        train(plane, 1, version=2)
    assert sum("penstock storage forget" in line for line in caplog.messages) == 1
    assert names_kept(run) == list("abcdefgh")


@pytest.mark.deep
def test_a_full_quota_stops_puts_and_says_why_nothing_is_freed(tmp_path: Path) -> None:
    with ps.open(
        tmp_path / "run", retain="all", max_disk_bytes=600_000, disk_reserve_bytes=0, **{**KEEP, "seq_len": 512}
    ) as plane:
        words = ""
        for number in range(400):
            try:
                put(plane, f"g{number}", samples=4, tokens=200)
            except DiskFull as error:
                words = str(error)
                break
            if number % 2:
                train(plane, 1, version=number)
        assert 'retain="all"' in words and "penstock storage forget" in words
        assert "wait until steps are committed" not in words
        counts = plane.status()["counts"]
        assert not counts.get("steps_freeing_early") and not counts.get("eval_groups_freeing_early")
    assert len(kept_groups(tmp_path / "run")) == number


def test_forget_asks_and_then_the_next_plane_frees(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "run"
    with ps.open(run, retain="all", **KEEP) as plane:
        put(plane, *"abcdef")
        train(plane, 2)
        assert main(["storage", "forget", str(run), "--yes"]) == 1
        assert "stopped" in capsys.readouterr().err
    monkeypatch.setattr("sys.stdin", io.StringIO("y\n"))
    assert main(["storage", "forget", str(run)]) == 1  # a program that does not say --yes
    assert "--yes" in capsys.readouterr().err
    assert main(["storage", "forget", str(run), "--json"]) == 1
    planned = json.loads(capsys.readouterr().out)
    assert (planned["groups"], planned["done"]) == (4, False)
    assert names_kept(run) == list("abcdef")
    assert main(["storage", "forget", str(run), "--yes"]) == 0
    assert "would free 4 groups" in capsys.readouterr().out
    assert plans_kept(run) == []
    with ps.open(run, **KEEP) as plane:
        assert plane.status()["retain"] == "steps"
        put(plane, "g", "h")
    assert names_kept(run) == list("efgh")
    assert main(["storage", "forget", str(run), "--yes"]) == 1
    assert "already" in capsys.readouterr().err
