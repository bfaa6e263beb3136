"""A log in PostgreSQL that is taken over: from a plane at work, and from an earlier version."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from penstock.errors import CorruptFile, Fenced, StorageError
from penstock.log import FORMAT, GroupOutcome
from penstock.log.postgres_address import schema_of
from penstock.log.postgres_log import PostgresLog
from penstock.log.postgres_schema import MIGRATIONS
from tests.log.conftest import add, ops
from tests.support.postgres_server import PostgresServer

pytestmark = pytest.mark.process

ADD_AT = "ALTER TABLE groups ADD COLUMN at double precision NOT NULL DEFAULT 0"
ADD_CLEAN = "ALTER TABLE segments ADD COLUMN clean smallint NOT NULL DEFAULT 0"


@pytest.fixture
def run(tmp_path: Path) -> str:
    return f"run of {tmp_path.name}"


def begin_earlier(postgres: PostgresServer, run: str, number: int) -> PostgresLog:
    """A log as a version of that format left it, without a column for each later format; its plane is still at work."""
    log = PostgresLog(postgres.url, run=run)
    add(log, 1)
    schema = schema_of(run)
    postgres.execute(f'ALTER TABLE "{schema}".groups DROP COLUMN at')
    if number < FORMAT - 1:
        postgres.execute(f'ALTER TABLE "{schema}".segments DROP COLUMN clean')
    postgres.execute(f'UPDATE "{schema}".run SET format = {number}')
    return log


def state(postgres: PostgresServer, run: str) -> tuple[int, int, bool]:
    """Format, epoch, and whether the newest column is there."""
    schema = schema_of(run)
    ((number, epoch),) = postgres.execute(f'SELECT format, epoch FROM "{schema}".run')
    query = f"SELECT 1 FROM information_schema.columns WHERE table_schema = '{schema}' AND column_name = 'at'"
    return number, epoch, bool(postgres.execute(query))


def test_a_log_is_taken_over_from_a_plane_that_goes_on_writing(postgres: PostgresServer, run: str) -> None:
    old, more, ended = PostgresLog(postgres.url, run=run), threading.Event(), list[BaseException]()
    add(old, 1)

    def write() -> None:
        try:
            for op in range(2, 1_000_000):
                add(old, op)
                more.set()
        except Fenced as error:
            ended.append(error)

    def guard(**_: object) -> None:
        more.clear()
        more.wait(1.0)  # the storage takes its time to answer, and the old plane may write meanwhile

    thread = threading.Thread(target=write)
    thread.start()
    assert more.wait(60)
    new = PostgresLog(f"{postgres.url}?connect_timeout=10", run=run, guard=guard)
    thread.join(60)
    assert ended and new.epoch == 2
    known = ops(new)
    add(new, known[-1] + 1)
    assert ops(new) == list(range(1, known[-1] + 2))
    new.close()
    old.close()


def test_a_log_of_the_previous_format_is_migrated_and_its_plane_fenced(
    postgres: PostgresServer, run: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = begin_earlier(postgres, run, FORMAT - 1)
    monkeypatch.setitem(MIGRATIONS, FORMAT - 1, (ADD_AT,))
    new = PostgresLog(f"{postgres.url}?connect_timeout=10", run=run)  # as another process would: by another address
    assert state(postgres, run) == (FORMAT, 2, True)
    with pytest.raises(Fenced):
        add(old, 2)
    add(new, 2)
    assert ops(new) == [1, 2]
    new.close()
    old.close()
    again = PostgresLog(postgres.url, run=run)
    assert (again.epoch, ops(again)) == (3, [1, 2])
    again.close()


def test_a_log_without_the_tables_of_events_gets_them(postgres: PostgresServer, run: str) -> None:
    log = PostgresLog(postgres.url, run=run)
    add(log, 1)
    log.close()
    for table in ("summaries", "outcomes"):
        postgres.execute(f'DROP TABLE "{schema_of(run)}".{table}')
    log = PostgresLog(postgres.url, run=run)
    assert (ops(log), log.num_events) == ([1], 0)
    with log.transaction():
        log.add_outcomes([(1, GroupOutcome(outcome="dropped", reason="stale", groups=(1,)))])
    assert log.num_events == 1
    log.close()


def test_several_formats_are_passed_in_order(
    postgres: PostgresServer, run: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    begin_earlier(postgres, run, FORMAT - 2).close()
    monkeypatch.setitem(MIGRATIONS, FORMAT - 1, (ADD_AT, "CREATE INDEX in_order ON segments (clean)"))
    with pytest.raises(CorruptFile, match=f"format {FORMAT - 2}; this version reads format {FORMAT}"):
        PostgresLog(postgres.url, run=run)
    monkeypatch.setitem(MIGRATIONS, FORMAT - 2, (ADD_CLEAN,))
    log = PostgresLog(postgres.url, run=run)
    assert state(postgres, run) == (FORMAT, 2, True)
    assert ops(log) == [1]
    log.close()


def test_a_migration_that_fails_changes_nothing_and_fences_nobody(
    postgres: PostgresServer, run: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    begin_earlier(postgres, run, FORMAT - 1).close()
    monkeypatch.setitem(MIGRATIONS, FORMAT - 1, (ADD_AT, "SELECT 1 / 0"))
    with pytest.raises(StorageError, match="division by zero"):
        PostgresLog(postgres.url, run=run)
    assert state(postgres, run) == (FORMAT - 1, 1, False)
