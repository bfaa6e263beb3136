"""The plane as an actor: runs the server process, restarts it when it dies, and tells callers where it listens.

Ray restarts the actor when its process or its node is lost. `__init__` runs again, on any node it may run on, and the
plane continues from the log. Ray does not fence: the lost process may still run. The log does, by its epoch: a plane
that was taken over notices within a second, and ends.

A second, tiny actor keeps the plane's record: which run it works on, and where. So a restarted plane that finds an
empty folder refuses to begin a new run, and an error can name the host of a plane that is gone.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import sys
import tempfile
import threading
import tomllib
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from socket import gethostname
from typing import Any

import msgspec

from penstock.config import build, template
from penstock.errors import PenstockError
from penstock.plane import ClusterSettings
from penstock.ray import calls
from penstock.ray.served import Order, write_keys
from penstock.server import Exit, log_lines
from penstock.transport import ClientKeys, make_keys

logger = logging.getLogger("penstock.plane")
_AGAIN_S = (0.1, 1.0, 5.0)
"""Pauses before the server process is restarted; they grow while no process gets to listen."""
_RECORD_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class PlaneRecord:
    """What the cluster knows about a plane, even while the plane is down."""

    run_id: str
    folder: str
    log: str | None
    storage: str | None
    pinned: bool
    """Whether it stays on the host it started on."""
    node: str
    """Id of the node it started on."""
    ip: str
    host: str


class RecordActor:
    """Keeps the record of a plane. Ray restarts it with the same record."""

    def __init__(self, record: dict[str, Any]) -> None:
        self._record = record

    def record(self) -> dict[str, Any]:
        return self._record


class PlaneActor:
    """Supervises the server process of a plane. No method takes long, and bad settings are reported, not raised."""

    def __init__(self, name: str, settings: str, keys: dict[str, str], pinned: bool) -> None:
        """`settings` is the text of a `plane.toml`; `keys` is the result of `new_keys`."""
        self._name, self._text, self._keys, self._pinned = name, settings, keys, pinned
        self._settings = _at_home(build(ClusterSettings, tomllib.loads(settings), f"ray://{name}"), name)
        log_lines()
        self._run_id = ""
        self._error: list[str] | None = None
        self._waiting = "its process is starting"
        self._place: dict[str, Any] | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._supervise, name="penstock-plane", daemon=True)
        self._thread.start()

    def settings(self) -> str:
        return self._text

    def place(self) -> dict[str, Any]:
        """Return where the server listens, with keys, or `error` if it was rejected, or `waiting` while it starts."""
        if self._error is not None:
            return {"error": self._error}
        return self._place or {"waiting": self._waiting}

    def process(self) -> dict[str, Any]:
        """Return the pids of server and actor, and the node they are on."""
        pid = None if self._process is None or self._place is None else self._process.pid
        return {"pid": pid, "actor": os.getpid(), "node": calls.my_node()}

    def stop(self) -> None:
        """Shut down cleanly: messages that have arrived are answered first."""
        self._stopping.set()  # first, or the supervisor would restart the process we are ending
        if self._process is not None:
            with suppress(ProcessLookupError):
                self._process.send_signal(signal.SIGTERM)
        self._thread.join(calls.CALL_S / 2)

    # -------------------------------------------------------------- the thread of the server process

    def _supervise(self) -> None:
        """Keep a server process running. This thread must start it: the kernel kills it when the thread ends."""
        failures = 0
        while not self._stopping.is_set():
            try:
                self._find_record()
                was_ready = self._live()
            except PenstockError as error:  # Ray's control store does not answer
                was_ready, self._waiting = False, str(error)
            except Exception as error:
                logger.exception("the plane's process could not be started")
                was_ready, self._error = False, [type(error).__name__, str(error)]
            if self._error is not None:
                return
            # A process that listened and died is restarted at once; one that never gets that far, every 5 s.
            failures = 0 if was_ready else min(failures + 1, len(_AGAIN_S) - 1)
            self._stopping.wait(_AGAIN_S[failures])

    def _live(self) -> bool:
        """Run the server process once, until it ends. Returns whether it listened."""
        self._process = process = self._start()
        assert process.stdout is not None
        was_ready = False
        try:
            for line in process.stdout:
                message = json.loads(line)
                if "ready" in message:
                    was_ready = self._ready(message["ready"])
                elif "waiting" in message:
                    self._waiting = message["waiting"]
                else:
                    self._refuse(message["error"])
        except BaseException:
            process.kill()  # a plane that no client can find must not hold the run
            process.wait()
            raise
        self._place = None
        code = process.wait()
        if was_ready or not self._error:
            logger.warning("the plane's process %d ended with code %d", process.pid, code)
        if was_ready:
            self._waiting = f"its process ended with code {code} and is restarted"
        if code == Exit.FENCED:
            os._exit(code)  # another plane has the run; if this actor is still the current one, Ray restarts it
        return was_ready

    def _start(self) -> subprocess.Popen[bytes]:
        settings = template(self._settings, title=f"The plane ray://{self._name}.", all_values=True)
        order = Order(
            address=f"ray://{self._name}",
            settings=settings,
            host=calls.my_address(),
            keys=self._keys,
            run_id=self._run_id,
            parent=os.getpid(),
        )
        process = subprocess.Popen(
            [sys.executable, "-m", "penstock.ray.served"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},  # as Ray has set it up
        )
        assert process.stdin is not None
        with suppress(BrokenPipeError):
            process.stdin.write(msgspec.json.encode(order) + b"\n")
            process.stdin.close()
        return process

    def _ready(self, ready: dict[str, Any]) -> bool:
        """Publish where the plane listens, after recording which run it works on."""
        if not self._run_id:
            self._make_record(ready["run_id"])
        own = client_keys(self._keys)
        keys = {"plane": own.plane, "public": own.public, "secret": own.secret}
        self._place = {"url": ready["urls"][0], "metrics": ready["metrics"], "http": ready["http"], **keys}
        return True

    def _refuse(self, error: list[str]) -> None:
        """Handle an error at start. It is final for a plane that never listened. Others try again: perhaps the folder
        is only unmounted."""
        if self._run_id:
            self._waiting = error[1]
        else:
            self._error = error

    # -------------------------------------------------------------- the record

    def _find_record(self) -> None:
        if not self._run_id:
            found = record_of(self._name)
            self._run_id = "" if found is None else found.run_id

    def _make_record(self, run_id: str) -> None:
        record = PlaneRecord(
            run_id=run_id,
            folder=self._settings.folder,
            log=self._settings.log,
            storage=self._settings.storage,
            pinned=self._pinned,
            node=calls.my_node(),
            ip=calls.my_address(),
            host=gethostname(),
        )
        calls.start(RecordActor, calls.record_name(self._name), asdict(record), node=calls.head_node())
        calls.ask(calls.record_name(self._name), "record", timeout_s=_RECORD_S)
        self._run_id = run_id


def record_of(name: str) -> PlaneRecord | None:
    """Return a plane's record, or None if it never listened or was ended. Raises PlaneLost if Ray does not answer."""
    actor = calls.record_name(name)
    if calls.find(actor, refresh=True) is None:
        return None
    return PlaneRecord(**calls.ask(actor, "record"))


def new_keys() -> dict[str, str]:
    """Make a key pair for the plane and one for its clients. Returns the files of a key folder: path -> content."""
    with tempfile.TemporaryDirectory(prefix="penstock-keys-") as folder:
        return {str(path.relative_to(folder)): path.read_text(encoding="ascii") for path in make_keys(folder)}


def client_keys(files: dict[str, str]) -> ClientKeys:
    with tempfile.TemporaryDirectory(prefix="penstock-keys-") as folder:
        write_keys(files, Path(folder))
        return ClientKeys.load(folder)


def _at_home(settings: ClusterSettings, name: str) -> ClusterSettings:
    """Return settings with a folder; by default one in the home of the user that runs Ray on this node."""
    return replace(settings, folder=settings.folder or str(Path.home() / ".penstock" / name))
