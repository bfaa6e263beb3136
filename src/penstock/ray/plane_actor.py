"""The plane as an actor: it runs the server process, starts it again when it dies, and tells callers where it listens.

Ray starts the actor again when its process or its node is lost; `__init__` runs again then, on whichever node may have
it, and the plane continues from the log. Ray does not fence: the process that was lost may still run. The log does, by
its epoch: a plane that was taken over finds out within a second, and ends.

A second, tiny actor keeps the record of the plane: which run it works on, and where. So a plane that is started again
and finds an empty folder refuses to begin a new run, and a plane whose host is gone can be named.
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
"""Pauses before the server process is started again, while none of them gets to listen."""
_RECORD_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class PlaneRecord:
    """What the cluster knows of a plane, also while the plane is away."""

    run_id: str
    folder: str
    log: str | None
    storage: str | None
    pinned: bool
    """Whether it stays on the host it began on."""
    node: str
    """Where it began."""
    ip: str
    host: str


class RecordActor:
    """Keeps the record of a plane. Ray starts it again with the same record."""

    def __init__(self, record: dict[str, Any]) -> None:
        self._record = record

    def record(self) -> dict[str, Any]:
        return self._record


class PlaneActor:
    """Made by `penstock.ray.opening`; nothing in here takes long, or raises for what a setting says."""

    def __init__(self, name: str, settings: str, keys: dict[str, str], pinned: bool) -> None:
        """`settings` is what `plane.toml` would hold; `keys` is what `new_keys` made."""
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
        """Where the server listens and the keys for it; `error` if it was refused; `waiting` while it starts."""
        if self._error is not None:
            return {"error": self._error}
        return self._place or {"waiting": self._waiting}

    def process(self) -> dict[str, Any]:
        """The server's process, the actor's, and the node they are on."""
        pid = None if self._process is None or self._place is None else self._process.pid
        return {"pid": pid, "actor": os.getpid(), "node": calls.my_node()}

    def stop(self) -> None:
        """End in order: what has arrived is answered first."""
        self._stopping.set()
        if self._process is not None:
            with suppress(ProcessLookupError):
                self._process.send_signal(signal.SIGTERM)
        self._thread.join(calls.CALL_S / 2)

    # -------------------------------------------------------------- the thread of the server process

    def _supervise(self) -> None:
        """Keep a server process running. This thread starts it: the kernel ends the process with this thread."""
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
            failures = 0 if was_ready else min(failures + 1, len(_AGAIN_S) - 1)
            self._stopping.wait(_AGAIN_S[failures])

    def _live(self) -> bool:
        """One life of the server process; True if it listened."""
        self._process = process = self._start()
        assert process.stdout is not None
        was_ready = False
        try:
            for line in process.stdout:
                said = json.loads(line)
                if "ready" in said:
                    was_ready = self._ready(said["ready"])
                elif "waiting" in said:
                    self._waiting = said["waiting"]
                else:
                    self._refuse(said["error"])
        except BaseException:
            process.kill()  # a plane that nobody can find must not have the run
            process.wait()
            raise
        self._place = None
        code = process.wait()
        if was_ready or not self._error:
            logger.warning("the plane's process %d ended with code %d", process.pid, code)
        if was_ready:
            self._waiting = f"its process ended with code {code} and is started again"
        if code == Exit.FENCED:
            os._exit(code)  # another plane has the run; if Ray still wants this one, it starts it again
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
        """Tell callers where it listens; but first write down which run it is."""
        if not self._run_id:
            self._make_record(ready["run_id"])
        own = client_keys(self._keys)
        keys = {"plane": own.plane, "public": own.public, "secret": own.secret}
        self._place = {"url": ready["urls"][0], "metrics": ready["metrics"], "http": ready["http"], **keys}
        return True

    def _refuse(self, error: list[str]) -> None:
        """A plane that has never listened is refused for good. One that has may find its folder mounted again later."""
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
    """What is known of a plane; None if it never listened, or was ended. Raises PlaneLost if nobody can be asked."""
    actor = calls.record_name(name)
    if calls.find(actor, anew=True) is None:
        return None
    return PlaneRecord(**calls.ask(actor, "record"))


def new_keys() -> dict[str, str]:
    """A pair for the plane and one for its clients, as the files of a key folder."""
    with tempfile.TemporaryDirectory(prefix="penstock-keys-") as folder:
        return {str(path.relative_to(folder)): path.read_text(encoding="ascii") for path in make_keys(folder)}


def client_keys(files: dict[str, str]) -> ClientKeys:
    with tempfile.TemporaryDirectory(prefix="penstock-keys-") as folder:
        write_keys(files, Path(folder))
        return ClientKeys.load(folder)


def _at_home(settings: ClusterSettings, name: str) -> ClusterSettings:
    """With a folder: by default one in the home of whoever runs Ray on this node."""
    return replace(settings, folder=settings.folder or str(Path.home() / ".penstock" / name))
