"""The plane's process waits while another process has the log, without touching that process's lock."""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from penstock.config import build, template
from penstock.log import SqliteLog
from penstock.plane import ClusterSettings
from penstock.ray.plane_actor import new_keys
from penstock.ray.served import Order
from tests.support.pace import pace

pytestmark = pytest.mark.process
PATIENCE_S = 120 * pace()


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Any]:
    """Starts the program that the plane's actor runs."""
    started: list[subprocess.Popen[bytes]] = []

    def start(folder: Path, run_id: str) -> subprocess.Popen[bytes]:
        given = {"folder": str(folder), "packing": {"ranks": 1, "seq_len": 64}, "target": {"groups": 1}}
        settings = template(build(ClusterSettings, given, "test"), title="A plane.", all_values=True)
        order = Order(
            address="ray://served",
            settings=settings,
            host="127.0.0.1",
            keys=new_keys(),
            run_id=run_id,
            parent=os.getpid(),
        )
        words = [sys.executable, "-m", "penstock.ray.served"]
        process = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        started.append(process)
        assert process.stdin is not None
        process.stdin.write(msgspec.json.encode(order) + b"\n")
        process.stdin.flush()
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()


def lines(process: subprocess.Popen[bytes]) -> Iterator[dict[str, Any]]:
    assert process.stdout is not None
    deadline = time.monotonic() + PATIENCE_S
    while select.select([process.stdout], [], [], max(deadline - time.monotonic(), 0))[0]:
        line = process.stdout.readline()
        if not line:
            return
        yield json.loads(line)


def test_a_log_that_is_locked_exclusively_is_waited_for(served: Any, tmp_path: Path) -> None:
    """As on a network filesystem, where the lock of the log outlives that of the folder."""
    log = SqliteLog(tmp_path / "run", exclusive=True)
    try:
        said = lines(served(tmp_path / "run", log.run_id))
        first = next(said)
        assert "waiting" in first and "locked" in first["waiting"], first
    finally:
        log.close()
    last = next(one for one in said if "waiting" not in one)
    assert "ready" in last, last
