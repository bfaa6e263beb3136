"""SQLite and PostgreSQL pass the one suite, and a plane's engine continues from either."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock.frames import encode
from penstock.log import Log, SqliteLog
from penstock.log.postgres_address import schema_of
from penstock.log.postgres_log import PostgresLog
from penstock.packing import Packing
from penstock.plane import PlaneSettings, Target
from penstock.protocol import AttachValues, Staged, StepPicks
from penstock.testing import LogSuite
from tests.support.engines import DirectEngine
from tests.support.groups import named_group
from tests.support.postgres_server import PostgresServer

pytestmark = pytest.mark.process


class EngineSuite(LogSuite):
    """The suite, and what the engine makes of a log."""

    def test_an_engine_goes_on_where_it_was(self, tmp_path: Path) -> None:
        packing = Packing(ranks=2, seq_len=64)
        settings = PlaneSettings(packing=packing, target=Target(groups=2), storage=str(tmp_path / "storage"))
        engine = DirectEngine(settings, self.open(tmp_path))
        for name in "abcdef":
            assert engine.put(name, name, encode(named_group(name))) is None
        assert all(outcome.error is None for outcome in engine.flush())
        for step in (1, 2):
            assert isinstance(engine.plan_step(step), Staged)
        engine.received(1)
        engine.commit(1, 5)
        ledger = engine.ledger.as_dict()
        planned = engine.planned(2)
        engine.log.close()  # as after a kill: nothing is tidied up
        again = DirectEngine(settings, self.open(tmp_path))
        assert (again.next_step, again.last_step, again.policy_version) == (2, 2, 5)
        assert again.ledger.as_dict() == ledger
        assert again.planned(2) == planned
        repeated = again.put("x", "a", encode(named_group("a")))
        assert repeated is not None
        assert repeated.duplicate
        again.close()
        again.log.close()

    def test_late_rewards_go_on_where_they_were(self, tmp_path: Path) -> None:
        settings = PlaneSettings(
            packing=Packing(ranks=1, seq_len=64),
            target=Target(groups=1),
            storage=str(tmp_path / "storage"),
            needs=("rewards",),
            needs_deadline_s=600.0,
        )
        engine = DirectEngine(settings, self.open(tmp_path))
        assert engine.put("a", "a", encode([sample.replace(rewards=None) for sample in named_group("a")])) is None
        assert all(outcome.error is None for outcome in engine.flush())
        for sample in ("a/0", "a/1"):
            message = AttachValues(ticket=1, column="rewards", values={"a": {sample: 0.5}})
            engine.late.offer("ticket", message)
            (result,) = engine.late.flush()
            assert (result.new, result.error) == (1, None)
            engine.log.close()  # as after a kill
            engine = DirectEngine(settings, self.open(tmp_path))
        assert (engine.ledger.held, engine.ledger.waiting) == (2, 0)
        staged = engine.plan_step(1)
        assert isinstance(staged, Staged)
        (picked,) = StepPicks.from_bytes(staged.picks[0]).groups
        assert picked.late["rewards"] == np.array([0.5, 0.5], "<f4").tobytes()
        engine.close()
        engine.log.close()


class TestSqlite(EngineSuite):
    opener = (
        "from pathlib import Path\nfrom penstock.log import SqliteLog\nfrom penstock.log import take_over\n"
        "take_over(Path(sys.argv[1]), 0)\nlog = SqliteLog(sys.argv[1])"
    )

    def open(self, folder: Path, **options: Any) -> Log:
        return SqliteLog(folder, **options)

    def set_format(self, folder: Path, number: int) -> None:
        with closing(sqlite3.connect(folder / "log.sqlite", isolation_level=None)) as db:
            db.execute("UPDATE meta SET value = ? WHERE name = 'format'", (number,))


class TestPostgres(EngineSuite):
    @pytest.fixture(autouse=True)
    def _server(self, postgres: PostgresServer) -> None:
        self.server = postgres

    def run(self, folder: Path) -> str:
        """Each test has a run of its own in the one database."""
        return f"{folder.parent.name} {folder.name}"

    def opener_of(self, folder: Path) -> str:
        return (
            "from pathlib import Path\nfrom penstock.log.postgres_log import PostgresLog\n"
            f"log = PostgresLog({self.server.url!r}, run={self.run(folder)!r}, folder=Path(sys.argv[1]))"
        )

    def open(self, folder: Path, **options: Any) -> Log:
        return PostgresLog(self.server.url, run=self.run(folder), folder=folder, **options)

    def set_format(self, folder: Path, number: int) -> None:
        self.server.execute(f'UPDATE "{schema_of(self.run(folder))}".run SET format = {number}')


def test_a_log_with_larger_pages_counts_its_own_bytes(tmp_path: Path) -> None:
    """Versions before this one made logs with pages of 16 kB, and such a log keeps them."""
    with closing(sqlite3.connect(tmp_path / "log.sqlite")) as made:
        made.execute("PRAGMA page_size=16384")
        made.execute("PRAGMA journal_mode=WAL")
    with closing(SqliteLog(tmp_path)) as log:
        log.shrink()
        assert log.used_bytes == (tmp_path / "log.sqlite").stat().st_size
        assert log.first("PRAGMA page_size") == (16384,)
