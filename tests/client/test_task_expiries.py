"""A prompt that kills every process which works on it is given up, and everything says so."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import penstock as ps
from penstock.commands.top import _from_plane, page
from tests.support.pace import eventually, pace
from tests.support.planes import FAST

pytestmark = pytest.mark.process

WORKER = """
import os, signal, sys
import penstock as ps

with ps.open(sys.argv[1]) as plane:
    for task in plane.tasks(["good-1", "poison", "good-2"], lease_s=float(sys.argv[2]), max_expiries=3):
        if task.prompt == "poison":
            os.kill(os.getpid(), signal.SIGKILL)
        with task.group() as group:
            for reward in (0.0, 1.0):
                group.add(ps.Trajectory(turns=[ps.Turn([1, 2]), ps.Turn([3], logprobs=[-0.5])], reward=reward))
"""


def run_worker(plane: ps.Plane) -> int:
    """Run a worker until it is killed, or has nothing left to do, and its lease is over."""
    status = subprocess.run(
        [sys.executable, "-c", WORKER, plane.url, str(0.5 * pace())], timeout=120, check=False
    ).returncode
    eventually(lambda: plane.demand()["prompts"]["leased"] == 0)
    return status


def test_a_prompt_that_kills_its_workers_is_given_up_for_the_epoch_and_said_everywhere(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    settings: dict[str, Any] = {"ranks": 1, "seq_len": 64, "groups_per_step": 2, "timeouts": FAST}
    with ps.open(tmp_path, listen=["tcp://127.0.0.1:*"], **settings) as plane:
        assert [run_worker(plane) for _ in range(2)] == [-9, -9]
        assert plane.demand()["prompts"]["dropped"] == {}
    with ps.open(tmp_path, listen=["tcp://127.0.0.1:*"], **settings) as plane:  # the count goes on after a restart
        assert [run_worker(plane) for _ in range(2)] == [-9, 0]
        demand, ledger = plane.demand()["prompts"], plane.ledger
        assert (demand["dropped"], demand["ended"], demand["held"]) == ({"lease expired": 1}, True, 2)
        assert ledger.balanced and ledger.given_up == {"lease expired": 1}
        assert plane.status()["counts"]["prompts_expired"] == 1
        assert "dropped: 1 lease expired" in "\n".join(page(_from_plane(plane.status()), {}))
        with plane.source(0) as source:
            source.commit(source.step(timeout=60))
            source.flush()
        events = sorted((event.outcome, event.prompt, event.reason, event.group) for event in plane.feedback())
        assert events == [
            ("dropped", "poison", "lease expired", "task:prompts:1:1:0"),
            ("trained", "good-1", "", "task:prompts:1:0:0"),
            ("trained", "good-2", "", "task:prompts:1:2:0"),
        ]
    assert "prompt 'poison' is given up for this epoch (task:prompts:1:1:0): lease expired" in caplog.text
