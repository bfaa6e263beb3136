"""The plane as an actor: today's server on a thread, and who calls the actor is told where it listens.

Ray starts the actor again when its process or its node is lost; `__init__` runs again then, on whichever node may
have it, and the server goes on from the log. Ray does not fence: the process that was lost may still run. The log does,
by its epoch: a plane that was taken over finds out within a second, and ends.

Its keys were made with the actor, and are the same in all its lives. Whoever may call the actor may have the clients'
pair; so Ray's own credentials say who may join, and nobody carries keys.
"""

from __future__ import annotations

import logging
import os
import threading
import time
import tomllib
from pathlib import Path
from typing import Any

import zmq

from penstock.config import build
from penstock.errors import ConfigError, Conflict, Fenced, PenstockError
from penstock.log import Log
from penstock.log.volume import take_over
from penstock.ray import calls
from penstock.send.keys import PlaneKeys
from penstock.send.sockets import SocketPlane
from penstock.serve.decisions.open_log import open_log
from penstock.serve.process.daemon import Exit
from penstock.serve.process.log_format import log_lines
from penstock.serve.process.server import Server
from penstock.serve.settings import ClusterSettings

logger = logging.getLogger("penstock.plane")
_LOOK_S = 0.5
_TAKE_OVER_S = 5.0
"""How long to wait for the process that had the log: Ray ends it when it lost its node, unless it cannot."""


class PlaneActor:
    """Made by `penstock.ray.opening`; nothing in here takes long, or raises for what a setting says."""

    def __init__(self, name: str, settings: str, keys: dict[str, bytes]) -> None:
        """`settings` is what `plane.toml` would hold; `keys` is what `new_keys` made."""
        self._text, self._keys = settings, keys
        self._settings = build(ClusterSettings, tomllib.loads(settings), f"ray://{name}")
        log_lines()
        self._refused: PenstockError | None = None
        self._place: dict[str, Any] | None = None
        self._server: Server | None = None
        self._thread = threading.Thread(target=self._serve, name="penstock-plane", daemon=True)
        self._thread.start()

    def settings(self) -> str:
        return self._text

    def place(self) -> dict[str, Any]:
        """Where the server listens and the keys for it; `error` if it could not start; neither while it starts."""
        if self._refused is not None:
            return {"error": [type(self._refused).__name__, str(self._refused)]}
        return self._place or {}

    def process(self) -> dict[str, Any]:
        """Which process this is, on which node."""
        return {"pid": os.getpid(), "node": calls.my_node()}

    def stop(self) -> None:
        """End in order: what has arrived is answered first."""
        if self._server is not None:
            self._server.stop()
            self._thread.join(calls.CALL_S / 2)

    # -------------------------------------------------------------- the thread of the server

    def _serve(self) -> None:
        try:
            server = self._open()
        except (PenstockError, OSError) as error:
            logger.exception("the plane does not start")
            self._refused = error if isinstance(error, PenstockError) else _folder_error(error, self._settings.log)
            return
        try:
            server.run()
        except Fenced as error:
            logger.error("fenced: %s", error)  # noqa: TRY400 - the sentence says it all
            os._exit(Exit.FENCED)
        except BaseException:
            logger.exception("the plane failed")
            os._exit(Exit.FAILED)  # a plane that serves nobody must not be found: Ray starts it again

    def _open(self) -> Server:
        own = self._keys
        keys = PlaneKeys(public=own["plane"], secret=own["plane_secret"], allowed=frozenset([own["public"]]))
        log = self._open_log()
        try:
            largest = self._settings.max_message_bytes
            carrier = SocketPlane(f"tcp://{calls.my_address()}:*", keys=keys, max_message=largest)
            self._server = server = Server(self._settings, log, [carrier])
        except BaseException:
            log.close()
            raise
        self._place = {"url": carrier.url, **{name: own[name] for name in ("plane", "public", "secret")}}
        return server

    def _open_log(self) -> Log:
        """The log, as soon as the process that had it lets go of it, or can be taken over."""
        assert self._settings.log is not None  # as `opening` made it
        while True:
            take_over(Path(self._settings.log), _TAKE_OVER_S)
            try:
                return open_log(self._settings.log, self._settings)
            except Conflict as error:  # on a network filesystem nobody can be taken over: Ray ends it, or its host did
                logger.warning("%s", error)
                time.sleep(_LOOK_S)


def new_keys() -> dict[str, bytes]:
    """A pair for the plane and one for its clients."""
    made: dict[str, bytes] = {}
    for public, secret in (("plane", "plane_secret"), ("public", "secret")):
        made[public], made[secret] = zmq.curve_keypair()
    return made


def _folder_error(error: OSError, folder: str | None) -> ConfigError:
    return ConfigError(f"log: {folder}: {error.strerror}; give a folder that can be made and written there")
