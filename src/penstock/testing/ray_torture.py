"""The run that is killed again and again, on a Ray cluster: the plane and whole nodes die as well.

Producers and ranks are processes that find the plane by its name; the plane is an actor, which Ray starts again on any
node. Log and frames lie in one folder that all nodes see, so nothing may be lost.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from pathlib import Path

from penstock.config import nested
from penstock.errors import PenstockError
from penstock.ray import LocalCluster, calls, open_given
from penstock.ray.local_cluster import kill
from penstock.serve.settings import ClusterSettings
from penstock.testing.processes import timeouts_at
from penstock.testing.torture import RANKS, Result, Run

_NAME = "torture"
_PATIENCE_S = 300.0
"""Ray takes 20 s to find out that a node is gone; the machine may be busy as well."""


class RayTorture(Run):
    """The processes, the actors and the nodes, and the hand that kills them."""

    kinds = ("plane", "node", "producer", "rank")
    patience_s = _PATIENCE_S

    def __init__(self, folder: Path, cluster: LocalCluster, seed: int) -> None:
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
        }
        self._plane = open_given(address, nested(ClusterSettings, given, address), node=cluster.others[0])

    def start(self, name: str) -> None:
        if not name.startswith(("plane", "node")):  # those are started by Ray
            super().start(name)

    def kill(self, name: str) -> float:
        kind = name.partition("-")[0]
        if kind == "plane":
            kill(self._process(calls.actor_of(_NAME)))
        elif kind == "node":
            node_id = self._rng.choice(self._cluster.others)
            self._cluster.kill_node(node_id)
            self._cluster.add_node()
        else:
            return super().kill(name)
        return time.monotonic()

    def _process(self, actor: str) -> int:
        """Of an actor, as soon as it answers."""
        deadline = time.monotonic() + _PATIENCE_S
        while True:
            try:
                return int(calls.ask(actor, "process")["pid"])
            except PenstockError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.2)

    def end(self) -> None:
        self._plane.kill()


def torture_ray(folder: Path, *, kills: int, seed: int = 0, progress: Callable[[str], None] = lambda _: None) -> Result:
    """Kill so many times, on a cluster of three nodes. The folder is kept if anything was wrong."""
    folder.mkdir(parents=True)
    with LocalCluster(3) as cluster:
        result = RayTorture(folder, cluster, seed).go(kills, progress)
    if result.good:
        shutil.rmtree(folder)
    return result
