"""A plane and its keepers in threads of this process, over real sockets: for tests and short measurements."""

from __future__ import annotations

import threading
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import penstock as ps
from penstock.send.timeouts import Timeouts
from penstock.serve.keepers import KeeperServer, KeeperSettings


class ThreadKeeper:
    """A keeper in a thread."""

    def __init__(self, settings: KeeperSettings) -> None:
        self.server = KeeperServer(settings)
        self._thread = threading.Thread(target=self.server.run, name=f"keeper-{settings.node}", daemon=True)
        self._thread.start()

    @property
    def name(self) -> str:
        return self.server.name

    def stop(self) -> None:
        self.server.stop()
        self._thread.join(20)


class Cluster:
    """A plane in this process with keepers on nodes that are only names."""

    def __init__(self, folder: Path, *, nodes: str = "ab", timeouts: Timeouts, **settings: Any) -> None:
        self.folder, self._timeouts = folder, timeouts
        cuts = {"over_length": "truncate", "untrained_groups": "accept"}
        self._settings = {"ranks": 2, "seq_len": 64, "groups_per_step": 2, "copies": 2, **cuts, **settings}
        self.plane = self._open("tcp://127.0.0.1:*")
        self.keepers = {node: self._start(node) for node in nodes}

    def _open(self, listen: str) -> ps.Plane:
        plane = ps.open(self.folder / "run", listen=[listen], timeouts=self._timeouts, **self._settings)
        assert plane._server is not None
        self.url = plane._server.urls[1]
        return plane

    def _start(self, node: str, **more: Any) -> ThreadKeeper:
        settings = {"plane": self.url, "folder": str(self.folder / node), "node": node, "timeouts": self._timeouts}
        keys = self._settings.get("keys")
        return ThreadKeeper(KeeperSettings(**{**settings, "keys": keys, **more}))

    def start_keeper(self, node: str, **more: Any) -> None:
        self.keepers[node] = self._start(node, **more)

    def stop_keeper(self, node: str) -> None:
        self.keepers.pop(node).stop()

    def restart_plane(self, **settings: Any) -> None:
        """On its folder, with these settings changed."""
        self.plane.close()
        self._settings |= settings
        self.plane = self._open(self.url)

    def client(self, node: str = "") -> ps.Plane:
        return ps.open(self.url, timeouts=self._timeouts, node=node, **self._keys())

    def rank(self, rank: int, node: str = "", **more: Any) -> ps.Source:
        world = self._settings["ranks"]
        return ps.connect(self.url, rank=rank, world=world, node=node, timeouts=self._timeouts, **self._keys(), **more)

    def _keys(self) -> dict[str, Any]:
        return {"keys": self._settings["keys"]} if "keys" in self._settings else {}

    def close(self) -> None:
        for node in list(self.keepers):
            self.stop_keeper(node)
        self.plane.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
