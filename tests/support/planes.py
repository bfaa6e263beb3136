"""Planes that must balance at the end of every test."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import penstock as ps
from penstock.errors import PenstockError
from penstock.log import Log, SqliteLog
from penstock.packing import Packing
from penstock.plane.settings import PlaneSettings, Replay, Target
from penstock.protocol.timeouts import Timeouts
from tests.support.engines import DirectEngine
from tests.support.pace import pace, stretched

FAST = stretched(Timeouts(heartbeat_s=0.2, peer_s=1.0, delivery_s=3.0, plane_s=5.0, resend_s=0.2), pace())
"""Short on an idle machine; as long as a busy one needs, measured when the tests begin."""

PATIENT = Timeouts(heartbeat_s=20.0, peer_s=60.0, delivery_s=60.0, plane_s=60.0, resend_s=20.0)
"""Nothing is repeated on a busy machine, for tests that count messages."""

OpenPlane = Callable[..., ps.Plane]
OpenEngine = Callable[..., DirectEngine]


@pytest.fixture
def open_plane() -> Iterator[OpenPlane]:
    """`ps.open` with short timeouts; every plane it opened must balance in the end."""
    opened: list[ps.Plane] = []

    def open_(where: str | Path = "memory:", **settings: Any) -> ps.Plane:
        # Tests of room and of disks put samples of thousands of tokens.
        settings.setdefault("untrained_groups", "accept")
        small = {"ranks": 2, "seq_len": 64, "groups_per_step": 2, "over_length": "truncate", "timeouts": FAST}
        plane = ps.open(where, **{**small, **settings})
        opened.append(plane)
        return plane

    yield open_
    for plane in opened:
        try:
            ledger = plane.ledger
        except PenstockError:
            continue  # closed, or killed, by the test itself
        assert ledger.balanced, ledger
        plane.close()


@pytest.fixture
def open_engine() -> Iterator[OpenEngine]:
    """An engine over a log; every one of them must balance, and so must what it wrote down."""
    opened: list[DirectEngine] = []

    def open_(folder: Path | None = None, *, log: Log | None = None, **settings: Any) -> DirectEngine:
        replay = settings.pop("replay", Replay())
        target = settings.pop("target", Target(groups=2))
        settings.setdefault("over_length", "truncate")
        settings.setdefault("untrained_groups", "accept")
        packing = Packing(ranks=settings.pop("ranks", 2), seq_len=64)
        log = log or SqliteLog(folder, max_disk_bytes=settings.get("max_disk_bytes"))
        engine = DirectEngine(PlaneSettings(packing=packing, target=target, replay=replay, **settings), log)
        opened.append(engine)
        return engine

    yield open_
    for engine in opened:
        assert engine.ledger.balanced, engine.ledger
        try:
            engine.close()
        except PenstockError:
            continue  # its log was closed, or taken over, by the test itself
        check_written(engine)
        engine.log.close()


def sqlite_of(log: Log) -> sqlite3.Connection:
    """The connection of a log, to damage it or to look over its shoulder."""
    assert isinstance(log, SqliteLog)
    return log._db


def check_written(engine: DirectEngine) -> None:
    """What the log says of every group is what the ledger counts."""
    totals = {(state.name.lower(), reason): n for (state, reason), n in engine.log.totals().items()}
    counted = engine.ledger.as_dict()
    names = ("waiting", "held", "scheduled", "delivered", "committed", "evaluation")
    expected = {(name, ""): counted[name] for name in names if counted[name]}
    expected |= {("dropped", reason): n for reason, n in counted["dropped"].items()}
    assert {key: n for key, n in totals.items() if key[0] != "quarantined"} == expected
    assert sum(n for key, n in totals.items() if key[0] == "quarantined") == counted["quarantined"]
