"""A run's log in PostgreSQL: one schema in a database that you operate, and that outlives any plane.

A transaction is collected in memory and sent as one pipeline. Its first statement moves the counter of transactions
from the number this plane knows to the next, if the epoch is still its own. So a plane that was taken over writes
nothing, and a transaction that is sent again because its answer was lost is done once:

    epoch 4, transaction 17     sends 18; the connection is lost inside COMMIT
    reconnects, sends 18        the counter is at 17: it was not done, so it is done now
                                the counter is at 18: it was done; go on
                                the epoch is 5: another plane has the run; end
"""

from __future__ import annotations

import logging
import os
import secrets
import socket
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import psycopg
from psycopg import sql

from penstock.errors import Conflict, CorruptFile, Fenced
from penstock.log.decision_log import FORMAT, Guard, Log
from penstock.log.finding import check_url, note_url
from penstock.log.log_rows import TABLES, State
from penstock.log.postgres_address import lock_of, redacted, schema_of, split_run, with_run
from penstock.log.postgres_link import Connection, PostgresLink, first_line
from penstock.log.postgres_reader import as_sent, decoded, in_schema, table_names
from penstock.log.postgres_schema import FENCED, TYPES, create_tables, migrations
from penstock.log.run_folder import Disk

logger = logging.getLogger("penstock.log")
_PAGE, _KEYS = 20_000, 10_000
_MOST_KNOWN = 10_000
"""Names in the look-up cache, above which it is emptied. A transaction empties it too, but questions make none."""
_RELEASE_S = 10.0
"""How long to wait for the session of the previous plane to end."""
_KNOWN = "SELECT id, digest, state, location FROM groups WHERE id = ANY(%b::text[])"
_DISCARDED = "SELECT name FROM discards WHERE name = ANY(%b::text[])"
_open_here: set[str] = set()


@dataclass(frozen=True, slots=True)
class _Owner:
    """The row that names the owner of the run."""

    run_id: str
    epoch: int
    commits: int
    pid: int
    holder: str


class PostgresLog(Log):
    """The log of one run, owned by this process until `close` or until another plane takes it over."""

    least_looked_up = 1  # every query costs a round trip

    def __init__(
        self,
        address: str,
        *,
        run: str | None = None,
        folder: Path | None = None,
        deadline_s: float = 60.0,
        max_disk_bytes: int | None = None,
        guard: Guard | None = None,
        take_over: bool = True,
    ) -> None:
        """`address` may end in `#RUN`. `deadline_s` is how long the database may be unreachable. With `take_over`
        False, raises Conflict while a plane has the run open."""
        base, named = split_run(address)
        self._run = run or named
        self.where = redacted(with_run(base, self._run))
        self._schema = schema_of(self._run)
        self.folder = None if folder is None else Path(folder).resolve()
        if self.where in _open_here:
            raise Conflict(f"{self.where}: this process has it open already; call close() on that plane first")
        if self.folder is not None:
            check_url(self.folder, self.where)
        self.disk = Disk(self.folder, quota=max_disk_bytes, reserve_bytes=0)
        self._guard, self._is_mine = guard, False
        self._writes: list[tuple[str, Sequence[Any]]] | None = None
        """Statements of the transaction under way; None outside a transaction."""
        self._known: dict[str, tuple[bytes, int, str] | None] = {}
        """(digest, state, location) of groups looked up since the last transaction."""
        self._discarded: dict[str, bool] = {}
        self._link = PostgresLink(base, self.where, deadline_s=deadline_s)
        self._link.on_connect = self._enter
        self._link.while_waiting = lambda: self.while_waiting()
        try:
            self._link.run(lambda connection: self._take_over(connection, take_over=take_over), is_repeated=False)
            if self.folder is not None:
                note_url(self.folder, self.where)
        except BaseException:
            self._link.close()
            raise
        self._is_mine = True
        _open_here.add(self.where)

    # -------------------------------------------------------------- ownership of the run; on the link's thread

    def _enter(self, connection: Connection) -> None:
        """Prepare a new connection: use our schema, and check that the run is still ours if it was."""
        in_schema(connection, self._schema)
        if not self._is_mine:
            return
        found = self._owner(connection)
        # One more than we know: the transaction whose answer was lost with the old connection.
        self._check_owner(found, {self.commits, self.commits + 1})
        self._end_session(connection, found)
        self._sign(connection, self.epoch, 0)
        self._hold(connection)

    def _check_owner(self, found: _Owner | None, commits: set[int]) -> None:
        if found is None or found.run_id != self.run_id:
            raise CorruptFile(f"{self.where}: holds another run now, or none; restore the database from a backup")
        if found.epoch != self.epoch:
            raise Fenced(
                f"{self.where}: epoch {self.epoch}: the run was taken over by epoch {found.epoch} ({found.holder}); "
                "this plane must end"
            )
        if found.commits not in commits:
            raise CorruptFile(
                f"{self.where}: ends at transaction {found.commits}, and {self.commits} were committed: a failover or "
                "a restore lost some; put the newest state back, or add what it lacks with `penstock storage recover`"
            )

    def _take_over(self, connection: Connection, *, take_over: bool) -> None:
        """Begin a new epoch. From now on earlier planes can write nothing."""
        self._make_tables(connection)
        # The advisory lock only says that a plane is at work. Fencing relies on the epoch: sessions die late and
        # poolers lose locks, but no commit passes `begin_commit` with an old epoch.
        is_free = self._try_lock(connection)
        found = self._owner(connection)
        if not is_free and not take_over:
            holder = "a plane" if found is None else f"the plane of {found.holder}"
            raise Conflict(f"{self.where}: {holder} has it open; stop it first")
        if not is_free and found is not None:
            logger.warning("%s: taken over from %s", self.where, found.holder)
        self._end_session(connection, found)
        with connection.transaction():
            # Locked until it is ours: the plane before may be at work, and what it writes now would not be known here.
            self._begin_epoch(connection, self._owner(connection, "FOR UPDATE"))
        self.commits += 1
        if not is_free:
            self._hold(connection)

    def _begin_epoch(self, connection: Connection, found: _Owner | None) -> None:
        """Write the new owner, inside the transaction that takes the run over."""
        self.run_id = secrets.token_hex(16) if found is None else found.run_id
        self.epoch, self.commits = (1, 0) if found is None else (found.epoch + 1, found.commits)
        if self._guard is not None:
            row = connection.execute("SELECT COUNT(*) FROM groups WHERE location != ''").fetchone()
            held = 0 if row is None else int(row[0])
            self._guard(run_id=self.run_id, epoch=self.epoch, commits=self.commits, held=held, is_new=found is None)
        if found is None:
            # Two planes may create the run at the same time. The key allows one row, so one of them inserts nothing.
            query = "INSERT INTO run VALUES (true, %s, %s, %s, 1, 1, 0, now(), '') ON CONFLICT DO NOTHING"
            if not connection.execute(query, (self._run, FORMAT, self.run_id)).rowcount:
                raise Conflict(f"{self.where}: another plane created it at the same moment; start this one again")
            self._sign(connection, 1, 0)
        else:
            self._migrate(connection)
            self._sign(connection, found.epoch, 1)

    def _make_tables(self, connection: Connection) -> None:
        if not table_names(connection, self._schema):
            with connection.transaction():
                # ~key: another lock than the plane's own, which is held for long. Look again once we have it: another
                # plane may have created the tables while we waited.
                connection.execute("SELECT pg_advisory_xact_lock(%s)", (~self._key,))
                if not table_names(connection, self._schema):
                    made = sql.SQL("CREATE SCHEMA IF NOT EXISTS {}").format(sql.Identifier(self._schema))
                    connection.execute(made)
                    connection.execute(create_tables(), prepare=False)
        found = connection.execute("SELECT name, format FROM run").fetchone()
        if found is not None:
            self._migrations(found[1])
        if found is not None and found[0] != self._run:
            raise Conflict(
                f"{self.where}: schema {self._schema} belongs to run {found[0]!r}; give this run another name"
            )

    def _migrations(self, found: int) -> list[str]:
        """Return the statements that bring a log of format `found` to this version's. Raises CorruptFile if none do."""
        statements = migrations(found, FORMAT)
        if statements is None:
            raise CorruptFile(
                f"{self.where}: format {found}; this version reads format {FORMAT}; finish the run with the version "
                "of Penstock that began it, or copy its groups to a new one with `penstock storage recover --into`"
            )
        return statements

    def _migrate(self, connection: Connection) -> None:
        """Bring the tables of an earlier version to this one's format, in the transaction under way."""
        row = connection.execute("SELECT format FROM run").fetchone()
        assert row is not None
        for statement in self._migrations(row[0]):
            connection.execute(statement.encode(), prepare=False)
        if missing := create_tables(table_names(connection, self._schema)):
            connection.execute(missing, prepare=False)
        if row[0] != FORMAT:
            connection.execute("UPDATE run SET format = %s", (FORMAT,))
            logger.warning("%s: format %d becomes %d", self.where, row[0], FORMAT)

    def _owner(self, connection: Connection, lock: str = "") -> _Owner | None:
        row = connection.execute(f"SELECT run_id, epoch, commits, pid, holder FROM run {lock}").fetchone()  # noqa: S608
        return None if row is None else _Owner(*row)

    def _sign(self, connection: Connection, seen: int, more: int) -> None:
        """Record that this session owns the run, if the run is still in epoch `seen`; otherwise raise Fenced."""
        query = (
            "UPDATE run SET epoch = epoch + %s, commits = commits + %s, holder = %s, pid = pg_backend_pid(), began = "
            "(SELECT backend_start FROM pg_stat_activity WHERE pid = pg_backend_pid()) WHERE epoch = %s"
        )
        holder = f"process {os.getpid()} of {socket.gethostname()}"
        if not connection.execute(query, (more, more, holder, seen)).rowcount:
            raise Fenced(f"{self.where}: another plane took the run over at the same moment; this one must end")

    def _end_session(self, connection: Connection, found: _Owner | None) -> None:
        """End the previous owner's session, which may hang inside a transaction and hold the row's lock.

        If this role may not do that, the epoch fences the session, and its transaction under way is waited for."""
        query = (
            "SELECT pg_terminate_backend(a.pid) FROM pg_stat_activity a, run r WHERE a.pid = r.pid AND a.backend_start "
            "= r.began AND a.pid <> pg_backend_pid()"
        )
        try:
            connection.execute(query).fetchall()
        except psycopg.errors.InsufficientPrivilege as error:
            holder = "unknown" if found is None else found.holder
            logger.warning("%s: the session of %s could not be ended: %s", self.where, holder, first_line(error))

    @property
    def _key(self) -> int:
        """Number of the advisory lock that tells others a plane is at work."""
        return lock_of(self._schema)

    def _try_lock(self, connection: Connection) -> bool:
        row = connection.execute("SELECT pg_try_advisory_lock(%s)", (self._key,)).fetchone()
        return row is not None and bool(row[0])

    def _hold(self, connection: Connection) -> None:
        """Take the advisory lock once the previous session has ended."""
        until = time.monotonic() + _RELEASE_S
        while not self._try_lock(connection):
            if time.monotonic() > until:
                logger.warning("%s: the previous session has not ended; it is fenced", self.where)
                return
            time.sleep(0.02)

    # -------------------------------------------------------------- transactions

    @contextmanager
    def transaction(self) -> Iterator[None]:
        assert self._writes is None
        writes = self._writes = []
        try:
            yield
        finally:
            self._writes = None
        started = time.perf_counter()
        try:
            self._link.run(lambda connection: self._commit(connection, writes))
        finally:
            # What was looked up may have changed, also when the outcome of the commit is unknown.
            self._known, self._discarded = {}, {}
        self.commits += 1
        self.on_commit(time.perf_counter() - started, lambda: f"{len(writes)} statements")

    def _commit(self, connection: Connection, writes: Sequence[tuple[str, Sequence[Any]]]) -> None:
        """Send a transaction. Runs on the link's thread and may be repeated."""
        try:
            with connection.pipeline(), connection.transaction():
                connection.execute("SELECT begin_commit(%s, %s)", (self.epoch, self.commits), prepare=True)
                for query, values in writes:
                    connection.execute(query, values, prepare=True)
        except psycopg.Error as error:
            if error.sqlstate != FENCED:
                raise
            # Either an earlier attempt committed and its answer was lost, or the run is no longer ours.
            self._check_owner(self._owner(connection), {self.commits + 1})

    def move_past(self, run_id: str, *, epoch: int, commits: int) -> None:
        """Take this run id (unless empty), with an epoch and a number of commits past these. For recoveries."""
        now = (run_id or self.run_id, max(self.epoch, epoch + 1), max(self.commits, commits) + 1)
        query = "UPDATE run SET run_id = %s, epoch = %s, commits = %s WHERE epoch = %s AND commits = %s"
        values = (*now, self.epoch, self.commits)
        if not self._link.run(lambda connection: connection.execute(query, values).rowcount, is_repeated=False):
            raise Fenced(f"{self.where}: another plane took the run over at the same moment; call this again")
        self.run_id, self.epoch, self.commits = now

    def current_epoch(self) -> int:
        row = self._link.run(lambda connection: connection.execute("SELECT epoch FROM run").fetchone())
        return 0 if row is None else int(row[0])

    def close(self) -> None:
        _open_here.discard(self.where)
        self._link.close()

    # -------------------------------------------------------------- statements

    def _write(self, query: str, values: Sequence[Any] = ()) -> None:
        assert self._writes is not None, "outside a transaction"
        self._writes.append((_marked(query), [as_sent(value) for value in values]))

    def _meta_value(self, value: int | str) -> str:
        return str(value)

    def _write_keyed(self, query: str, values: Sequence[Any], keys: Sequence[Any]) -> None:
        if keys:
            kind = "bigint" if isinstance(keys[0], int) else "text"
            self._write(f"{query} = ANY(?::{kind}[])", (*values, list(keys)))

    def _insert(self, table: str, columns: str, rows: Sequence[tuple[Any, ...]], *, known: str = "") -> None:
        if rows:
            query = _insertion(table, columns, known)
            self._write(query, [list(column) for column in zip(*rows, strict=True)])

    def rows(self, query: str, values: Sequence[Any] = ()) -> list[tuple[Any, ...]]:
        marked, sent = _marked(query), [as_sent(value) for value in values]

        def read(connection: Connection) -> list[tuple[Any, ...]]:
            with connection.cursor(binary=True) as cursor:
                return decoded(cursor.execute(marked, sent).fetchall())

        return self._link.run(read)

    def tables(self) -> set[str]:
        return self._link.run(lambda connection: table_names(connection, self._schema))

    def _ordered(self, query: str, key: str, after: int) -> Iterator[tuple[Any, ...]]:
        # Page by page: reading a long run again must not hold all rows, nor keep a transaction open for minutes.
        while page := self.rows(f"{query} WHERE {key} > ? ORDER BY {key} LIMIT ?", (after, _PAGE)):
            yield from page
            after = page[-1][0]

    def _keyed(self, query: str, keys: Sequence[int] | Sequence[str]) -> list[tuple[Any, ...]]:
        kind = "bigint" if keys and isinstance(keys[0], int) else "text"
        rows: list[tuple[Any, ...]] = []
        for first in range(0, len(keys), _KEYS):
            some = list(keys[first : first + _KEYS])
            found = {row[0]: row for row in self.rows(f"{query} = ANY(?::{kind}[])", (some,))}
            rows += (found[key] for key in some if key in found)
        return rows

    # -------------------------------------------------------------- groups looked up ahead

    def look_up(self, groups: Sequence[str], discards: Sequence[str]) -> None:
        ids = [as_sent(name) for name in dict.fromkeys(groups) if name not in self._known]
        names = [as_sent(name) for name in dict.fromkeys(discards) if name not in self._discarded]
        if not ids and not names:
            return
        if len(self._known) + len(self._discarded) > _MOST_KNOWN:
            self._known, self._discarded = {}, {}
            self.look_up(groups, discards)
            return

        def read(connection: Connection) -> tuple[list[tuple[Any, ...]], list[tuple[Any, ...]]]:
            with connection.pipeline():
                found = connection.execute(_KNOWN, (ids,), prepare=True, binary=True)
                gone = connection.execute(_DISCARDED, (names,), prepare=True, binary=True)
                return decoded(found.fetchall()), decoded(gone.fetchall())

        found, gone = self._link.run(read)
        self._known |= dict.fromkeys(group for group in groups if group not in self._known)
        self._known |= {row[0]: (row[1], row[2], row[3]) for row in found}
        self._discarded |= dict.fromkeys((name for name in discards if name not in self._discarded), False)
        self._discarded |= {name: True for (name,) in gone}

    def is_discarded(self, name: str) -> bool:
        self.look_up([], [name])
        return self._discarded[name]

    def _look_at(self, group: str) -> tuple[bytes, int, str] | None:
        self.look_up([group], [])
        return self._known[group]

    def digest_of(self, group: str) -> bytes | None:
        found = self._look_at(group)
        return None if found is None else found[0]

    def is_evaluation(self, group: str) -> bool:
        found = self._look_at(group)
        return found is not None and found[1] == State.EVALUATION

    def location_of(self, group: str) -> str:
        found = self._look_at(group)
        return "" if found is None else found[2]


@lru_cache(maxsize=256)
def _marked(query: str) -> str:
    """Replace our marks for values by psycopg's. `%b` sends binary: blobs are not escaped as text."""
    return query.replace("?", "%b")


@lru_cache(maxsize=64)
def _insertion(table: str, columns: str, known: str) -> str:
    """Return an INSERT that takes one list per column: one statement and one round trip for any number of rows."""
    lists = ", ".join(f"?::{TYPES[TABLES[table][name]]}[]" for name in columns.split(", "))
    return f"INSERT INTO {table} ({columns}) SELECT * FROM unnest({lists}) {known}"  # noqa: S608 - our own names
