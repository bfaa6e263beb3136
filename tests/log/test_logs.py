"""SQLite and PostgreSQL pass the one suite."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from penstock.log import Log, SqliteLog
from penstock.log.postgres_address import schema_of
from penstock.log.postgres_log import PostgresLog
from penstock.testing.log_suite import LogSuite
from tests.support.postgres_server import PostgresServer


class TestSqlite(LogSuite):
    opener = (
        "from pathlib import Path\nfrom penstock.log import SqliteLog\nfrom penstock.log import take_over\n"
        "take_over(Path(sys.argv[1]), 0)\nlog = SqliteLog(sys.argv[1])"
    )

    def open(self, folder: Path, **options: Any) -> Log:
        return SqliteLog(folder, **options)

    def set_format(self, folder: Path, number: int) -> None:
        with closing(sqlite3.connect(folder / "log.sqlite", isolation_level=None)) as db:
            db.execute("UPDATE meta SET value = ? WHERE name = 'format'", (number,))


class TestPostgres(LogSuite):
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
