"""One connection to PostgreSQL on a thread of its own, which reconnects when the connection is lost.

The caller waits for its answer and calls `while_waiting` meanwhile, so a plane's heartbeats go on while the database is
slow or unreachable. A job may run more than once, so it must be safe to repeat.

    connection lost, server restarting, standby       reconnect, check that we still own the run, repeat the job
    silent for a quarter of the deadline              cut the connection, then the same
    deadline passed                                   LogAway
"""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from queue import SimpleQueue
from typing import Any, Generic, TypeVar

import psycopg

from penstock.errors import (
    ConfigError,
    Conflict,
    CorruptFile,
    DiskFull,
    Fenced,
    LogAway,
    PenstockError,
    StorageError,
)

logger = logging.getLogger("penstock.log")
Connection = psycopg.Connection[tuple[Any, ...]]
_T = TypeVar("_T")
_LOOK_S = 0.2
_CONNECT_S = 10.0
_AWAY = ("08", "57P", "53300", "25006", "40001", "40P01", "55P03", "25P03")
"""SQL states, or their first characters: no connection, shutdown, too many connections, read only, try again."""
_NO_POOLER = "connect to the server itself, not to a pooler such as PgBouncer"


class _Task(Generic[_T]):
    """A job and its outcome."""

    def __init__(self, job: Callable[[Connection], _T], deadline: float, *, is_repeated: bool) -> None:
        self.job, self.deadline, self.is_repeated = job, deadline, is_repeated
        self.done = threading.Event()
        self.given_up = threading.Event()
        self.began = time.monotonic()
        """Start of the attempt under way."""
        self.result: _T
        self.error: BaseException | None = None


class PostgresLink:
    """Runs jobs with a connection, one at a time."""

    def __init__(self, address: str, where: str, *, deadline_s: float) -> None:
        """`where` names the log in messages."""
        self._address, self._where, self._deadline_s = address, where, deadline_s
        self._attempt_s = max(deadline_s / 4, 2.0)
        self.while_waiting: Callable[[], None] = lambda: None
        self.on_connect: Callable[[Connection], None] = lambda _: None
        """Called with every new connection, on this object's thread."""
        self._connection: Connection | None = None
        self._lock = threading.Lock()
        """Held while a connection is closed, so that `_cut` never shuts down a descriptor that was reused."""
        self._tasks: SimpleQueue[_Task[Any] | None] = SimpleQueue()
        self._failure: PenstockError | None = None
        """The error after which the log cannot be used any longer."""
        self._process = os.getpid()
        self._thread = threading.Thread(target=self._work, name="penstock-log", daemon=True)
        self._thread.start()

    def run(self, job: Callable[[Connection], _T], *, is_repeated: bool = True) -> _T:
        """Run a job and return its result. Repeats it if the connection is lost, until the deadline: then LogAway."""
        if self._failure is not None:  # a new error each time: raising one object twice would grow its traceback
            raise type(self._failure)(str(self._failure))
        task = _Task(job, time.monotonic() + self._deadline_s, is_repeated=is_repeated)
        self._tasks.put(task)
        while not task.done.wait(_LOOK_S):
            self.while_waiting()
            now = time.monotonic()
            if now - task.began > (self._attempt_s if is_repeated else self._deadline_s):
                task.began = now
                self._cut()
            # The thread itself gives up at the deadline. If even that does not happen, it hangs inside libpq.
            if now > task.deadline + self._attempt_s + 1.0:
                task.given_up.set()
                task.error = LogAway(f"{self._where}: no answer for {self._deadline_s:g} s (timeouts.log_s)")
                break
        if isinstance(task.error, (LogAway, CorruptFile, Fenced)):
            self._failure = task.error
        if task.error is not None:
            raise task.error
        return task.result

    def close(self) -> None:
        if self._process != os.getpid():  # a forked child: connection and thread belong to its parent
            return
        self._tasks.put(None)
        self._thread.join(0.0 if self._failure else self._attempt_s)
        if self._thread.is_alive():
            self._cut()
            self._thread.join(self._attempt_s)

    # -------------------------------------------------------------- on the thread of this object

    def _work(self) -> None:
        while (task := self._tasks.get()) is not None:
            try:
                task.result = self._attempt(task)
            except BaseException as error:  # noqa: BLE001 - raised by the caller
                task.error = task.error or error
            task.done.set()
        self._drop()

    def _attempt(self, task: _Task[_T]) -> _T:
        pause = 0.02
        while True:
            task.began = time.monotonic()
            try:
                return task.job(self._connected())
            except psycopg.Error as error:
                is_lost = self._connection is None or self._connection.closed or is_away(error)
                if not is_lost:
                    self._roll_back()
                    raise typed(error, self._where) from None
                self._drop()
                message = first_line(error)
            if time.monotonic() + pause > task.deadline or task.given_up.is_set() or not task.is_repeated:
                after = f"; tried for {self._deadline_s:g} s (timeouts.log_s)" if task.is_repeated else ""
                raise LogAway(f"{self._where}: {message}{after}")
            if pause < 0.03:  # the first failure only
                logger.warning("%s: %s; reconnecting", self._where, message)
            task.given_up.wait(pause)
            pause = min(2 * pause, 1.0)

    def _connected(self) -> Connection:
        if self._connection is None:
            self._connection = connect(self._address, self._where, timeout_s=self._attempt_s)
            try:
                self.on_connect(self._connection)
            except BaseException:
                self._drop()
                raise
        return self._connection

    def _roll_back(self) -> None:
        with suppress(psycopg.Error):
            if self._connection is not None:
                self._connection.rollback()

    def _drop(self) -> None:
        with self._lock:
            found, self._connection = self._connection, None
            if found is not None:
                with suppress(psycopg.Error):
                    found.close()

    def _cut(self) -> None:
        """End whatever this object's thread waits for. Called from the caller's thread."""
        with self._lock:
            found = self._connection
            if found is None or found.closed:
                return
            # The descriptor belongs to libpq. Shutting down a duplicate ends the connection without closing libpq's.
            with suppress(OSError, psycopg.Error), socket.socket(fileno=os.dup(found.fileno())) as copy:
                copy.shutdown(socket.SHUT_RDWR)


# ------------------------------------------------------------------ connections


_SESSION = (
    # By default TCP notices a dead host after two hours. A lost plane must not block its successor that long.
    ("tcp_keepalives_idle", "10"),
    ("tcp_keepalives_interval", "5"),
    ("tcp_keepalives_count", "3"),
    ("idle_in_transaction_session_timeout", "60s"),
    # A role may have other defaults. How long we wait is decided here, and fencing must see rows as they are now.
    ("statement_timeout", "0"),
    ("lock_timeout", "0"),
    ("default_transaction_isolation", "read committed"),
)


def connect(address: str, where: str, *, timeout_s: float, writes: bool = True) -> Connection:
    """Connect to a log's database. With `writes`, raises ConfigError for a server that would lose commits."""
    made: Connection = psycopg.connect(
        address,
        autocommit=True,
        prepare_threshold=1,
        connect_timeout=max(int(timeout_s), 2),
        keepalives_idle=10,
        keepalives_interval=5,
        keepalives_count=3,
        application_name="penstock",
    )
    try:
        if writes:
            _check_session(made, where)
            for name, value in _SESSION:
                made.execute("SELECT set_config(%s, %s, false)", (name, value))
            # Set it to its current value: otherwise a later change of the server's configuration reaches this session.
            made.execute("SELECT set_config('synchronous_commit', current_setting('synchronous_commit'), false)")
    except BaseException:
        made.close()
        raise
    return made


@contextmanager
def connected(address: str, where: str, *, writes: bool) -> Iterator[Connection]:
    """Connect to a log's database for as long as the block takes. Raises LogAway if it cannot be reached."""
    try:
        with connect(address, where, timeout_s=_CONNECT_S, writes=writes) as made:
            yield made
    except psycopg.Error as error:
        if is_away(error):
            raise LogAway(f"{where}: {first_line(error)}") from None
        raise typed(error, where) from None


def _check_session(made: Connection, where: str) -> None:
    """Reject settings that lose acknowledged groups, and poolers that mix sessions."""
    for name in ("synchronous_commit", "fsync"):
        if _one(made, f"SHOW {name}") == "off":
            raise ConfigError(
                f"{where}: {name} is off, so a crash of the server loses groups that were acknowledged; set it to on "
                f"for this database (ALTER DATABASE ... SET {name} = on, or postgresql.conf)"
            )
    # A pooler reports a pid of its own, or switches sessions between transactions. Both show as more than one pid.
    pids = {int(_one(made, "SELECT pg_backend_pid()")) for _ in range(3)}
    if pids != {made.info.backend_pid}:
        raise ConfigError(f"{where}: a pooler is in between, and fencing needs one session; {_NO_POOLER}")
    if _one(made, "SELECT pg_is_in_recovery()"):
        raise psycopg.errors.ReadOnlySqlTransaction("the server is a standby, and takes no writes")


def _one(made: Connection, query: str) -> Any:
    row = made.execute(query, prepare=False).fetchone()  # a pooler may not know a prepared statement
    assert row is not None
    return row[0]


# ------------------------------------------------------------------ errors


def is_away(error: psycopg.Error) -> bool:
    """Return whether trying again later may help."""
    state = error.sqlstate or ""
    if not state:
        return isinstance(error, (psycopg.OperationalError, psycopg.InterfaceError))
    return state.startswith(_AWAY)


def first_line(error: BaseException) -> str:
    """Return a database's message in one line, without the password in PGPASSWORD."""
    message = " ".join(str(error).split()) or type(error).__name__
    secret = os.environ.get("PGPASSWORD", "")
    return message.replace(secret, "***")[:300] if secret else message[:300]


def typed(error: psycopg.Error, where: str) -> StorageError | Conflict:
    """Return our error for one of PostgreSQL's."""
    message = first_line(error)
    if error.sqlstate == "53100":
        return DiskFull(f"{where}: {message}; nothing was written; make room on the database's disk")
    if (error.sqlstate or "").startswith("XX"):
        return CorruptFile(f"{where}: {message}; restore the database from a backup")
    if error.sqlstate in ("3F000", "42P01"):
        return CorruptFile(f"{where}: no such run in this database: {message}")
    return StorageError(f"{where}: {message}")
