"""A served plane that is killed again and again archives every group once."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import penstock as ps
from penstock.archive import RecordedRun
from penstock.archive.recorded import numbers_of, segment_of
from penstock.cli import main
from penstock.serve.process.plane_process import PlaneProcess
from penstock.testing.torture import address
from tests.archive.conftest import FAST, folder_of, put
from tests.serve.processes import wait_until


def test_a_plane_killed_at_any_moment_leaves_no_gap_and_no_double(tmp_path: Path) -> None:
    where, url = folder_of(tmp_path), address("ipc", tmp_path)
    words = ("--ranks=1", "--seq-len=64", "--groups-per-step=1", f"--listen={url}", f"--archive={where}")
    for life in range(3):
        with PlaneProcess([str(tmp_path / "run"), *words]) as process, ps.open(url, timeouts=FAST) as plane:
            for number in range(4):
                put(plane, f"g{life}-{number}")
            with plane.source(rank=0, prefetch=0) as source:
                for _ in range(4):
                    source.commit(source.step(timeout=60))
                source.flush()
            if life == 2:
                wait_until(lambda plane=plane: plane.status()["archive"]["step"] == 12)  # type: ignore[misc]
            else:
                os.kill(process.pid, signal.SIGKILL)
    recorded = RecordedRun.open(where)
    ops = [entry.op for n in numbers_of(recorded.blobs) for entry in segment_of(recorded.blobs, n).front.frames]
    assert sorted(recorded.steps) == list(range(1, 13)) and len(ops) == len(set(ops)) == 12
    assert main(["replay", where, "--diff"]) == 0
