"""A PostgreSQL server for the tests of one process, and one that a test may kill."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from penstock.log import GroupRow, Log
from tests.support.postgres_server import PostgresServer


def add(log: Log, op: int) -> None:
    with log.transaction():
        log.add_groups([(GroupRow(op, f"g{op}", bytes(16), None, 1, 1, 1, location=f"s@{op}"), b"f")])


def ops(log: Log) -> list[int]:
    return [row.op for row in log.groups()]


@pytest.fixture(scope="session")
def postgres() -> Iterator[PostgresServer]:
    with PostgresServer() as server:
        yield server


@pytest.fixture
def own_postgres() -> Iterator[PostgresServer]:
    with PostgresServer() as server:
        yield server
