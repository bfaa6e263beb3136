"""A keeper as an actor: the server of `penstock keep` on a thread, on the one node whose frames it keeps.

Ray starts it again on its node when its process dies; it goes on with what is in its folder. When the node is gone so
is the keeper, until a node of that name comes back. The plane's actor gives it the keys of a keeper, and says where the
plane is, each time it asks.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from pathlib import Path
from typing import Any

from penstock.config import build
from penstock.errors import PlaneLost
from penstock.ray import calls
from penstock.ray.calls import address_in
from penstock.send.resolving import Address
from penstock.send.timeouts import Timeouts
from penstock.serve.keepers import KeeperServer, KeeperSettings
from penstock.serve.process.daemon import Exit
from penstock.serve.process.log_format import log_lines

logger = logging.getLogger("penstock.keeper")
_LOOK_S = 0.2


class KeeperActor:
    """Made by `penstock.ray.placement`, one for each node."""

    def __init__(self, plane: str, node: str, frames: str, timeouts: dict[str, Any]) -> None:
        """`plane` is the name of its actor, `node` of the node this keeper is on."""
        self._plane, self._node = plane, node
        self._folder = Path(frames) / node
        self._timeouts = build(Timeouts, timeouts)
        log_lines()
        self._server: KeeperServer | None = None
        self._thread = threading.Thread(target=self._serve, name="penstock-keeper", daemon=True)
        self._thread.start()

    def process(self) -> dict[str, Any]:
        """Which process this is, on which node."""
        name = "" if self._server is None else self._server.name
        return {"pid": os.getpid(), "node": calls.my_node(), "name": name}

    def stop(self) -> None:
        """End in order."""
        if self._server is not None:
            self._server.stop()
            self._thread.join(calls.CALL_S / 2)

    # -------------------------------------------------------------- the thread of the server

    def _serve(self) -> None:
        try:
            self._server = self._open()
            self._server.run()
        except BaseException:
            logger.exception("the keeper failed")
            os._exit(Exit.FAILED)  # Ray starts it again

    def _open(self) -> KeeperServer:
        host = calls.my_address()
        settings = KeeperSettings(
            folder=str(self._folder), node=self._node, listen=f"tcp://{host}:*", timeouts=self._timeouts
        )
        while True:
            try:
                return KeeperServer(settings, resolve=self._where)
            except PlaneLost:  # it is being started
                time.sleep(_LOOK_S)

    def _where(self) -> Address:
        """Where the plane is, and a keeper's keys to it."""
        return address_in(self._plane, calls.ask(self._plane, "place_for_keeper"))
