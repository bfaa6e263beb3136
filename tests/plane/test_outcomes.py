"""Events and the log: written with the state they tell of, whatever fails, also for runs of earlier versions."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.errors import DiskFull
from penstock.frames import encode
from penstock.log import SqliteLog
from penstock.plane.outcomes import page
from penstock.plane.settings import Replay
from penstock.protocol import FeedbackEvent
from penstock.protocol.steps import Staged
from tests.support.engines import DirectEngine
from tests.support.groups import named_group
from tests.support.planes import OpenEngine, sqlite_of


def put(engine: DirectEngine, *names: str, version: int = 0) -> None:
    for name in names:
        assert engine.put(name, name, encode(named_group(name, policy_version=version))) is None
    assert all(outcome.error is None for outcome in engine.flush())


def train(engine: DirectEngine, version: int | None = None) -> None:
    step = engine.last_step + 1
    assert isinstance(engine.plan_step(step), Staged)
    engine.received(step)
    engine.commit(step, version)


def events_of(engine: DirectEngine, size: int = 256) -> list[FeedbackEvent]:
    with engine.recorder.transaction():
        pass
    events: list[FeedbackEvent] = []
    while more := page(engine.log, len(events), size):
        events += more
    assert [event.number for event in events] == list(range(1, engine.log.num_events + 1))
    return events


def names(events: list[FeedbackEvent], outcome: str) -> list[str]:
    return [event.group for event in events if event.outcome == outcome]


def test_an_event_whose_transaction_fails_did_not_happen(open_engine: OpenEngine, tmp_path: Path) -> None:
    engine = open_engine(tmp_path)
    engine.discard("errored", 1, "first")
    database = sqlite_of(engine.log)
    (pages,) = database.execute("PRAGMA page_count").fetchone()
    database.execute(f"PRAGMA max_page_count = {pages}")
    with pytest.raises(DiskFull):
        for number in range(10_000):
            engine.discard("x" * 2000, 1, f"key {number}")
    database.execute("PRAGMA max_page_count = 1000000")
    engine.discard("errored", 1, "last")
    known = sum(1 for _ in engine.log.records())
    assert len(events_of(engine)) == known == engine.ledger.discarded.total()


@pytest.mark.parametrize("retain_steps", [0, 64])
@pytest.mark.parametrize("size", [1, 3, 256])
def test_every_drop_and_every_step_is_told_once_over_kills(
    open_engine: OpenEngine, tmp_path: Path, retain_steps: int, size: int
) -> None:
    settings = {"ranks": 1, "replay": Replay(max_staleness=1), "retain_steps": retain_steps, "snapshot_every": 5}
    for life in range(6):
        engine = open_engine(tmp_path, **settings)
        put(engine, *(f"g{life}.{number}" for number in range(3)), version=engine.policy_version)
        put(engine, f"old{life}", version=max(engine.policy_version - 2, 0))
        train(engine, engine.policy_version + 1)
        engine.log.close()  # nothing more is written: as after kill -9
    engine = open_engine(tmp_path, **settings)
    events = events_of(engine, size)
    dropped = [row.id for row in engine.log.groups() if row.reason == "stale"]
    assert sorted(names(events, "dropped")) == sorted(dropped)
    trained = names(events, "trained")
    assert len(trained) == len(set(trained)) == 12
    assert [event.step for event in events if event.outcome == "trained"] == sorted([*range(1, 7), *range(1, 7)])


def test_a_run_of_an_earlier_version_tells_of_its_steps(open_engine: OpenEngine, tmp_path: Path) -> None:
    engine = open_engine(tmp_path, ranks=1, retain_steps=1)
    put(engine, *"abcdef")
    for _ in range(3):
        train(engine)
    engine.close()
    engine.log.close()
    log = SqliteLog(tmp_path)
    with log.transaction():
        for table in ("outcomes", "summaries"):
            sqlite_of(log).execute(f"DROP TABLE {table}")
        sqlite_of(log).execute("DELETE FROM meta WHERE name = 'reported_step'")
    log.close()
    engine = open_engine(tmp_path, ranks=1, retain_steps=1)
    put(engine, "g", "h")
    train(engine)
    events = events_of(engine)
    assert names(events, "trained") == list("abcdefgh")
    assert [event.lengths for event in events] == [()] * 6 + [(6, 6)] * 2
