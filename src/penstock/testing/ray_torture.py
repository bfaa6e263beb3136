"""The run that is killed again and again, on a Ray cluster: plane, keepers and whole nodes die as well.

Producers and ranks are processes that find the plane by its name; plane and keepers are actors, which Ray starts again.
A node that was killed comes back with its disk, as a host that is started again. Every group has two copies, and
nodes are lost one at a time; so nothing may be lost.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path

from penstock.encode.layout import Buffer
from penstock.errors import CorruptFrame, PenstockError
from penstock.keep import Keeper, MemoryKeeper
from penstock.keep.numbered import NumberedFrames
from penstock.ray import LocalCluster, calls
from penstock.ray.local_cluster import kill
from penstock.send.copies import copies_of
from penstock.serve.clients.api import open as open_plane
from penstock.serve.decisions.log import Log
from penstock.serve.settings import PlaneSettings
from penstock.testing.processes import timeouts_at
from penstock.testing.torture import RANKS, Result, Run

_NAME = "torture"
_PATIENCE_S = 300.0
"""Ray takes 20 s to find out that a node is gone; the machine may be busy as well."""


class RayTorture(Run):
    """The processes, the actors and the nodes, and the hand that kills them."""

    kinds = ("plane", "keeper", "node", "producer", "rank")
    patience_s = _PATIENCE_S

    def __init__(self, folder: Path, cluster: LocalCluster, seed: int) -> None:
        super().__init__(folder, "ray", seed)
        self._cluster = cluster
        self._plane = open_plane(
            f"ray://{_NAME}",
            ranks=RANKS,
            seq_len=64,
            groups_per_step=2,
            run="torture",
            over_length="truncate",
            untrained_groups="accept",
            max_held_bytes=120_000,
            retain_steps=1 << 30,
            timeouts=timeouts_at("ray://"),
            log=folder / "run",
            frames=folder / "frames",
            copies=2,
        )

    def start(self, name: str) -> None:
        if not name.startswith(("plane", "keeper", "node")):  # those are started by Ray
            super().start(name)

    def kill(self, name: str) -> float:
        kind = name.partition("-")[0]
        if kind == "plane":
            kill(self._process(calls.actor_of(_NAME)))
        elif kind == "keeper":
            self._await_keepers()
            node = self._rng.choice([self._cluster.head, *self._cluster.others])  # Ray still lists one that just died
            kill(self._process(calls.keeper_of(_NAME, node)))
        elif kind == "node":
            node_id = self._rng.choice(self._cluster.others)
            self._cluster.kill_node(node_id)
            self._cluster.add_node(self._cluster.names[node_id])
            self._await_keepers()
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

    def _await_keepers(self) -> None:
        """Until every node has a keeper again: one node is lost at a time, not two."""
        deadline = time.monotonic() + _PATIENCE_S
        while True:
            try:
                if sum(keeper["up"] for keeper in self._plane.status()["keepers"]) >= len(self._cluster.others) + 1:
                    return
            except PenstockError:
                pass
            if time.monotonic() > deadline:
                raise AssertionError(f"keepers did not come back: {self.folder}")
            time.sleep(0.2)

    def end(self) -> None:
        self._plane.kill()

    def settings(self) -> PlaneSettings:
        return replace(super().settings(), copies=2, locking="exclusive")

    def keeper(self, log: Log) -> Keeper:  # noqa: ARG002 - frames are not beside it
        return _KeptFrames(self.folder / "frames")


class _KeptFrames(MemoryKeeper):
    """What the keepers of a run that is over have in their folders."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        found = [NumberedFrames(path) for path in sorted(folder.iterdir())]
        self._by_id = {frames.id[:6]: frames for frames in found}

    def retain(self, locations: Iterable[str]) -> None:
        """Nothing is given back here."""

    def read(self, location: str) -> Buffer:
        for name, number in copies_of(location):
            frames = self._by_id[name.rpartition(".")[2]]
            if frames.get(number) is not None:
                return frames.read(number)
        raise CorruptFrame(f"{location}: no keeper has it")


def torture_ray(folder: Path, *, kills: int, seed: int = 0, progress: Callable[[str], None] = lambda _: None) -> Result:
    """Kill so many times, on a cluster of three nodes. The folder is kept if anything was wrong."""
    folder.mkdir(parents=True)
    with LocalCluster(3) as cluster:
        result = RayTorture(folder, cluster, seed).go(kills, progress)
    if result.good:
        shutil.rmtree(folder)
    return result
