"""The delivery and ingest benchmarks at a tiny size: every row is there, every byte arrives, nothing stays behind."""

from __future__ import annotations

import multiprocessing
from pathlib import Path

import numpy as np
import pytest

import penstock as ps
from benchmarks import deliver, ingest, log
from benchmarks.links import digest
from benchmarks.report import as_table
from penstock.commands.bench import BENCHES
from penstock.frames import decode

pytestmark = pytest.mark.process


def silent(_what: str) -> None:
    return


def test_log_measures_commits_and_restarts_of_both_logs() -> None:
    rows = {row.name: row for row in log.run(commits=20, held=120, steps=3)}
    assert len(rows) == 8
    for name in ("SQLite", "PostgreSQL"):
        assert rows[f"{name}, groups per second, 8 a commit"].ours
        assert rows[f"{name}, restart after kill -9, 120 held groups, 3 committed steps"].target
    assert rows["PostgreSQL, commit of 8 groups, p99"].target == 10.0


def test_deliver_measures_every_way_and_leaves_nothing_behind() -> None:
    rows = deliver.run(full=False, progress=silent, num_bytes=400_000, repeats=2)
    assert not multiprocessing.active_children()
    pairs = {(row.name.rpartition(": ")[2], row.rival_name) for row in rows if row.rival is not None}
    assert {
        (deliver.TCP, deliver.RAW_TCP),
        (deliver.IPC, deliver.RAW_IPC),
        (deliver.TCP, deliver.QUEUE),
    } <= pairs
    assert {row.target for row in rows} == {None, 0.8}
    assert "raw ZeroMQ tcp" in as_table("deliver", rows)


def test_bytes_that_do_not_arrive_fail_the_benchmark() -> None:
    class Liar:
        def join(self) -> None:
            return

        def step(self, frames: object) -> list[bytes]:
            return [digest(b"something else")]

        def close(self) -> None:
            return

    with pytest.raises(AssertionError, match="other bytes arrived"):
        deliver._measure({"liar": Liar()}, silent, [b"sent"], 1, silent, "")


def test_ingest_measures_puts_that_are_durable() -> None:
    rows = {row.name: row for row in ingest.run(full=False, progress=silent, groups=8)}
    assert len(rows) == 7
    assert "4 rounds of 8 groups" in rows["embedded, 4 threads: samples/s"].note
    assert (rows["served, 2 producer processes: samples/s"].ours or 0) > 0
    assert (rows["embedded, 4 threads: acknowledgement p99"].ours or 0) > 0
    assert not multiprocessing.active_children()


def test_its_groups_are_what_it_says_they_are() -> None:
    frames = ingest.make_frames("g", 3)
    assert [name for name, _ in frames] == ["g-0", "g-1", "g-2"]
    assert all(abs(len(frame) / ingest.SIZE - 4096) < 150 for _, frame in frames)
    samples = decode(frames[1][1])
    assert len(samples) == ingest.SIZE
    assert set(samples.text["group"]) == {"g-1"}


def test_producing_reports_one_acknowledgement_per_group(tmp_path: Path) -> None:
    with ps.open(tmp_path / "run", ranks=1, seq_len=2048, groups_per_step=100) as plane:
        puts = ingest.produce(plane, ingest.make_frames("g", 5), 2)
        assert plane.ledger.held == 5 * ingest.SIZE
    assert len(puts.acks) == 5
    assert puts.seconds >= float(np.max(puts.acks)) > 0


def test_both_are_registered() -> None:
    assert {"deliver", "ingest"} <= set(BENCHES)
