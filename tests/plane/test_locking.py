"""A log that nobody else may read: for network filesystems, where write-ahead logging can share no memory."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

import penstock as ps
from penstock.errors import Conflict
from penstock.log import SqliteLog
from penstock.packing import Packing
from penstock.plane.loop import PlaneLoop
from penstock.plane.settings import PlaneSettings, Target
from penstock.runs.run_log import read_run
from penstock.transport.memory import MemoryPlane
from tests.support.groups import named_group

SMALL: Any = {"ranks": 1, "seq_len": 64, "groups_per_step": 1}


def opened(folder: Path) -> ps.Plane:
    """A plane as `ps.open` makes it on a network filesystem."""
    settings = PlaneSettings(packing=Packing(ranks=1, seq_len=64), target=Target(groups=1))
    memory = MemoryPlane()
    server = PlaneLoop(settings, SqliteLog(folder, exclusive=True), [memory])
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    return ps.Plane(memory.connect, url=str(folder), server=server, thread=thread)


def test_an_exclusive_log_has_no_shared_memory_and_loses_nothing(tmp_path: Path) -> None:
    with opened(tmp_path) as plane:
        for number in range(5):
            plane.put(named_group(f"g{number}"))
        assert not list(tmp_path.glob("*-shm"))
    with opened(tmp_path) as plane, plane.source(rank=0) as source:
        for _ in range(5):
            source.commit(source.step(timeout=60))
        source.flush()
        assert plane.ledger.committed == plane.ledger.accepted
    assert read_run(tmp_path)["next_step"] == 6


def test_what_is_killed_between_is_read_by_a_plane_of_either_kind(tmp_path: Path) -> None:
    with opened(tmp_path) as plane:
        plane.put(named_group("a"))
    with ps.open(tmp_path, **SMALL) as plane:
        assert plane.ledger.held == plane.ledger.accepted > 0
        plane.put(named_group("b"))
    with opened(tmp_path) as plane:
        assert not plane.put(named_group("a"))


def test_nobody_else_reads_it_and_is_told_whom_to_ask(tmp_path: Path) -> None:
    with opened(tmp_path) as plane:
        plane.put(named_group("a"))
        with pytest.raises(Conflict, match="ask the plane by its address"):
            read_run(tmp_path)
    assert read_run(tmp_path)["held_groups"] == 1


def test_a_second_log_is_refused_by_the_file_too(tmp_path: Path) -> None:
    log = SqliteLog(tmp_path, exclusive=True)
    (tmp_path / "lock").unlink()  # as when another host takes a folder over whose locks do not travel
    with pytest.raises(Conflict, match="another process has it open"):
        SqliteLog(tmp_path, exclusive=True)
    log.close()
