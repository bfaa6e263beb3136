"""A keeper on every node: those that are there, and those that join.

The plane's actor looks at the cluster every few seconds and starts what is missing. A keeper is detached: it outlives
the plane's process, which may be lost at any moment, and is found again by its name.
"""

from __future__ import annotations

import logging
import threading
from typing import Any

from penstock.errors import PenstockError
from penstock.ray import calls
from penstock.ray.keeper_actor import KeeperActor

logger = logging.getLogger("penstock.plane")
LOOK_S = 2.0


class Placement:
    """Starts keepers, on a thread of its own, until `stop`."""

    def __init__(self, plane: str, frames: str, timeouts: dict[str, Any]) -> None:
        """`plane` is its name, `frames` the folder of every node."""
        self._plane, self._arguments = plane, (frames, timeouts)
        self._placed: set[str] = set()
        """Ids of nodes that have one."""
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._work, name="penstock-placement", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stopping.set()

    def _work(self) -> None:
        while not self._stopping.is_set():
            try:
                self.place()
            except PenstockError as error:
                logger.warning("keepers: %s", error)
            self._stopping.wait(LOOK_S)

    def place(self) -> None:
        """Start what is missing."""
        frames, timeouts = self._arguments
        up = calls.nodes()
        self._placed &= {node.id for node in up}
        for node in up:
            if node.id not in self._placed:
                name, plane = calls.keeper_of(self._plane, node.id), calls.actor_of(self._plane)
                calls.start(KeeperActor, name, plane, node.name, frames, timeouts, node=node.id, stays=True)
                self._placed.add(node.id)
                logger.info("a keeper on node %s", node.name)
