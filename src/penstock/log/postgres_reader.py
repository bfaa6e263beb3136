"""Reads a log in PostgreSQL without owning it, in one consistent state, while a plane writes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from psycopg import sql

from penstock.log.decision_log import LogReader
from penstock.log.postgres_address import lock_of, redacted, schema_of, split_run
from penstock.log.postgres_link import Connection, connected

_OWNER = ("format", "run_id", "epoch", "commits")
LOCKED = (
    "SELECT EXISTS (SELECT FROM pg_locks WHERE locktype = 'advisory' AND granted AND objsubid = 1 "
    "AND ((classid::bigint << 32) | objid::bigint) = %s)"
)
"""Whether a plane holds the advisory lock of a run."""
_ESCAPE = "\x1a"


class PostgresReader(LogReader):
    """One consistent state of a log."""

    def __init__(self, connection: Connection, where: str, schema: str) -> None:
        self._connection, self.where, self._schema = connection, where, schema
        self._cursors = 0

    def rows(self, query: str, values: Sequence[Any] = ()) -> Iterable[tuple[Any, ...]]:
        sent = [as_sent(value) for value in values]
        self._cursors += 1
        with self._connection.cursor(name=f"rows_{self._cursors}", binary=True) as cursor:
            cursor.itersize = 5000
            cursor.execute(query.replace("?", "%b"), sent)
            for row in cursor:
                yield decoded([row])[0]

    def all_meta(self) -> dict[str, str]:
        return super().all_meta() | {name: str(value) for name, value in self._owner().items()}

    def meta(self, name: str, default: int) -> int:
        return int(self._owner().get(name, default)) if name in _OWNER else super().meta(name, default)

    def text(self, name: str) -> str:
        return str(self._owner().get(name, "")) if name in _OWNER else super().text(name)

    def _owner(self) -> dict[str, Any]:
        """Return the values that PostgreSQL keeps in a row of their own, which every transaction locks."""
        row = self.first(f"SELECT {', '.join(_OWNER)} FROM run")  # noqa: S608 - our own names
        return {} if row is None else dict(zip(_OWNER, row, strict=True))

    def tables(self) -> set[str]:
        return table_names(self._connection, self._schema)

    def is_open(self) -> bool | None:
        row = self._connection.execute(LOCKED, (lock_of(self._schema),)).fetchone()
        return row is not None and bool(row[0])


@contextmanager
def reading_postgres(address: str) -> Iterator[PostgresReader]:
    """Read a run's log; the address ends in `#RUN`. Raises LogAway if the database cannot be reached."""
    base, run = split_run(address)
    where, schema = redacted(address), schema_of(run)
    with connected(base, where, writes=False) as connection:  # a standby or a pooler will do: nothing is written
        connection.execute("BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY")
        in_schema(connection, schema)
        yield PostgresReader(connection, where, schema)


def in_schema(connection: Connection, schema: str) -> None:
    """Make unqualified names refer to the tables of a run."""
    connection.execute(sql.SQL("SET search_path TO {}").format(sql.Identifier(schema)))


def table_names(connection: Connection, schema: str) -> set[str]:
    query = "SELECT tablename FROM pg_catalog.pg_tables WHERE schemaname = %s"
    return {name for (name,) in connection.execute(query, (schema,))}


# ------------------------------------------------------------------ text that PostgreSQL cannot hold


def as_sent(value: Any) -> Any:
    r"""Escape a value. PostgreSQL's text cannot hold a zero character, and a group's name may: it becomes two others.

    >>> as_sent("a\0b\x1ac")
    'a\x1a0b\x1aec'
    """
    if isinstance(value, list):
        return [as_sent(one) for one in value]
    if isinstance(value, str) and ("\0" in value or _ESCAPE in value):
        return value.replace(_ESCAPE, _ESCAPE + "e").replace("\0", _ESCAPE + "0")
    return value


def decoded(rows: list[tuple[Any, ...]]) -> list[tuple[Any, ...]]:
    """Undo `as_sent` in rows that were read."""
    for number, row in enumerate(rows):
        if any(isinstance(value, str) and _ESCAPE in value for value in row):
            rows[number] = tuple(_unescaped(value) if isinstance(value, str) else value for value in row)
    return rows


def _unescaped(text: str) -> str:
    return text.replace(_ESCAPE + "0", "\0").replace(_ESCAPE + "e", _ESCAPE)
