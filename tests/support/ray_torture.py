"""Kills a run again and again on a Ray cluster: the plane, its actor and entire hosts die as well.

Producers and ranks are processes that find the plane by its name; the plane is an actor, which Ray starts again on any
host. Every node has an address of its own. The log is in PostgreSQL and the frames are in one folder that all nodes
see, so nothing may be lost.
"""

from __future__ import annotations

import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path

from penstock.config import nested
from penstock.errors import PenstockError
from penstock.plane.settings import ClusterSettings
from penstock.ray import LocalCluster, calls, open_given
from penstock.ray.local_cluster import kill
from tests.support.postgres_server import PostgresServer
from tests.support.processes import timeouts_at
from tests.support.torture import RANKS, Result, Run

_NAME = "torture"
_ADDRESSES = ("127.0.0.1", "127.0.0.2", "127.0.0.3")
_PATIENCE_S = 300.0
"""Ray takes 20 s to find out that a node is gone; the machine may be busy as well."""


class RayTorture(Run):
    """The processes, the actors and the nodes, and the hand that kills them."""

    kinds = ("plane", "actor", "node", "producer", "rank")
    patience_s = _PATIENCE_S

    def __init__(self, folder: Path, cluster: LocalCluster, log: str, seed: int) -> None:
        super().__init__(folder, "ray", seed)
        self._cluster = cluster
        address = f"ray://{_NAME}"
        given = {
            "ranks": RANKS,
            "seq_len": 64,
            "groups_per_step": 2,
            "run": "torture",
            "over_length": "truncate",
            "untrained_groups": "accept",
            "max_held_bytes": 120_000,
            "retain_steps": 1 << 30,
            "timeouts": timeouts_at("ray://"),
            "folder": folder / "run",
            "log": log,
            "storage": folder / "run" / "storage",
            "movable": True,
        }
        self._plane = open_given(address, nested(ClusterSettings, given, address), node=cluster.others[0])

    def start(self, name: str) -> None:
        if name.startswith(("producer", "rank")):  # the others are started by Ray
            super().start(name)

    def kill(self, name: str) -> float:
        kind = name.partition("-")[0]
        step, died = self._step(), time.monotonic()
        if kind in ("plane", "actor"):
            kill(self._process("pid" if kind == "plane" else "actor"))
        elif kind == "node":
            lost = self._rng.choice(self._cluster.others)
            ip = next(node.ip for node in calls.nodes() if node.id == lost)
            kind = "node of the plane" if calls.ask(calls.actor_of(_NAME), "process")["node"] == lost else "other node"
            self._cluster.kill_node(lost)
            self._time_outage(kind, time.monotonic(), step)
            self._cluster.add_node(ip)
            return died
        else:
            died = super().kill(name)
        self._time_outage(kind, time.monotonic(), step)
        return died

    def _time_outage(self, kind: str, died: float, step: int) -> None:
        """Note the time until two more steps are trained: the next one may have been in flight already."""

        def watch() -> None:
            while self._step() < step + 2 and time.monotonic() - died < _PATIENCE_S:
                time.sleep(0.05)
            self.result.outages.setdefault(kind, []).append(time.monotonic() - died)

        threading.Thread(target=watch, daemon=True).start()

    def _process(self, which: str) -> int:
        """Of the plane or its actor, as soon as it listens."""
        deadline = time.monotonic() + _PATIENCE_S
        while True:
            try:
                found = calls.ask(calls.actor_of(_NAME), "process")
                if found["pid"] is not None:
                    return int(found[which])
            except PenstockError:
                if time.monotonic() > deadline:
                    raise
            time.sleep(0.2)

    def end(self) -> None:
        self._plane.kill()


def torture_ray(folder: Path, *, kills: int, seed: int = 0, progress: Callable[[str], None] = lambda _: None) -> Result:
    """Kill `kills` times, on a cluster of three hosts. Keeps the folder if anything was wrong."""
    folder.mkdir(parents=True)
    with PostgresServer() as server, LocalCluster(3, addresses=_ADDRESSES) as cluster:
        result = RayTorture(folder, cluster, server.url, seed).go(kills, progress)
    if result.good:
        shutil.rmtree(folder)
    return result
