"""Lists and drops the runs that have their logs in one database."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass

import psycopg
from psycopg import sql

from penstock.errors import Conflict, InvalidInput
from penstock.log.postgres_address import check_address, lock_of, redacted, schema_of, split_run
from penstock.log.postgres_link import Connection, connected
from penstock.log.postgres_reader import LOCKED

_SCHEMAS = "SELECT nspname FROM pg_namespace WHERE nspname LIKE 'penstock\\_%' ORDER BY nspname"
_BYTES = "SELECT coalesce(sum(pg_total_relation_size(oid)), 0) FROM pg_class WHERE relnamespace = %s::regnamespace"


@dataclass(frozen=True, slots=True, kw_only=True)
class DatabaseRun:
    """A run whose log is in a database."""

    name: str
    run_id: str
    epoch: int
    groups: int
    """Number of groups in the log."""
    num_bytes: int
    """Size of the log."""
    storage: str
    """Where its frames are; empty: in a folder that only its host knows."""
    holder: str
    """The process that opened it last."""
    is_open: bool
    """Whether that process has it open now."""


def runs_in(address: str) -> list[DatabaseRun]:
    """Return all runs in a database that this user may read."""
    with _connected(address, writes=False) as connection:
        schemas = [schema for (schema,) in connection.execute(_SCHEMAS)]
        found = [_run_in(connection, schema) for schema in schemas]
    return [run for run in found if run is not None]


def drop_run(address: str, first: Callable[[DatabaseRun], None] = lambda _run: None) -> None:
    """Delete the log of a run; the address ends in `#RUN`. Raises Conflict while a plane has it open.

    Calls `first` with the run before deleting. The run's tables are locked meanwhile: a plane that starts has to wait,
    and then finds no run."""
    base, run = split_run(address)
    schema = schema_of(run)
    with _connected(base, writes=True) as connection:
        found = _run_in(connection, schema)
        if found is None:
            raise InvalidInput(f"{redacted(address)}: no such run; `penstock runs list {redacted(base)}` shows all")
        taken = connection.execute("SELECT pg_try_advisory_lock(%s)", (lock_of(schema),)).fetchone()
        if taken is None or not taken[0]:
            raise Conflict(f"{redacted(address)}: {found.holder} has it open; stop that plane first")
        with connection.transaction():
            locked = sql.SQL("LOCK TABLE {} IN ACCESS EXCLUSIVE MODE").format(sql.Identifier(schema, "run"))
            connection.execute(locked)
            connection.execute("SET LOCAL idle_in_transaction_session_timeout = 0")  # `first` may take minutes
            first(found)
            connection.execute(sql.SQL("DROP SCHEMA {} CASCADE").format(sql.Identifier(schema)))


def _run_in(connection: Connection, schema: str) -> DatabaseRun | None:
    """Return the run in a schema; None if the schema is not one of ours, or this user may not read it."""
    names = {name: sql.Identifier(schema, name) for name in ("run", "groups", "meta")}
    try:
        query = sql.SQL("SELECT name, run_id, epoch, holder FROM {run}").format(**names)
        row = connection.execute(query).fetchone()
        if row is None:
            return None
        count = connection.execute(sql.SQL("SELECT count(*) FROM {groups}").format(**names)).fetchone()
        where = connection.execute(
            sql.SQL("SELECT value FROM {meta} WHERE name = 'storage'").format(**names)
        ).fetchone()
    except (psycopg.errors.UndefinedTable, psycopg.errors.InsufficientPrivilege, psycopg.errors.UndefinedColumn):
        return None
    num_bytes = connection.execute(_BYTES, (schema,)).fetchone()
    locked = connection.execute(LOCKED, (lock_of(schema),)).fetchone()
    return DatabaseRun(
        name=row[0],
        run_id=row[1],
        epoch=row[2],
        holder=row[3],
        groups=0 if count is None else int(count[0]),
        num_bytes=0 if num_bytes is None else int(num_bytes[0]),
        storage="" if where is None else str(where[0]),
        is_open=locked is not None and bool(locked[0]),
    )


def _connected(address: str, *, writes: bool) -> AbstractContextManager[Connection]:
    base, _ = split_run(address)
    check_address(base)
    return connected(base, redacted(base), writes=writes)
