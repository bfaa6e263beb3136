"""The demo on its own Ray cluster: three nodes on loopback, and one of them is lost during training.

The plane is an actor and starts on the node that is lost. Ray restarts it on another node, from the same folder.
Workers and ranks are processes as in any demo and find the plane by name. A new node joins afterwards.
"""

from __future__ import annotations

import dataclasses
import sys
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from penstock.config import Given, template
from penstock.demo.launch import Chaos, Launcher
from penstock.plane import ClusterSettings, PlaneSettings
from penstock.ray import LocalCluster, open_given
from penstock.train import TrainConfig

NODES = 3
_CLUSTERS_OWN = ("keys", "listen")
"""Settings that a plane in a cluster chooses itself."""
_LOSE_AFTER_S = 8.0
"""A third of the time until the loss (see `Launcher._run`): training must be under way by then."""


class NodeLoss(Launcher):
    """A launcher whose chaos is to kill one node, once."""

    def __init__(self, config: TrainConfig, cluster: LocalCluster) -> None:
        super().__init__(config, chaos=Chaos(every_s=_LOSE_AFTER_S))
        self._cluster = cluster

    def kill_one(self) -> None:
        assert self.chaos is not None
        if not self.chaos.kills["node"]:
            self._cluster.kill_node(self._cluster.others[-1])
            self.chaos.kills["node"] += 1
            self._cluster.add_node()


def say(message: str) -> None:
    print(f"penstock demo: {message}", file=sys.stderr, flush=True)


@contextmanager
def started(config: TrainConfig) -> Iterator[tuple[TrainConfig, LocalCluster]]:
    """Start a cluster and the run's plane in it. Yields the configuration that uses them, and the cluster."""
    folder = Path(config.folder).resolve()
    run = replace(config, plane=f"ray://{config.run}", timeouts=replace(config.timeouts, plane_s=120.0))
    own = {field.name: getattr(run, field.name) for field in dataclasses.fields(PlaneSettings)}
    settings = ClusterSettings(**own, folder=str(folder / "plane"))
    tables = tomllib.loads(template(settings, title="", all_values=True))
    given = Given({name: value for name, value in tables.items() if name not in _CLUSTERS_OWN}, "the demo")
    say(f"starting a Ray cluster of {NODES} nodes on this machine, loopback only")
    with LocalCluster(NODES, say=say) as cluster:
        say(f"starting the plane {run.plane} on the node that will be lost")
        with open_given(run.plane, given, node=cluster.others[-1]) as plane:
            say("the plane listens; starting workers and ranks")
            yield run, cluster
            plane.kill()
