"""The transport suite over the client that asks an actor where its plane is."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import zmq

from penstock.ray import LocalCluster, calls
from penstock.ray.calls import actor_of
from penstock.ray.ray_plane import client
from penstock.testing.transport_suite import Ends, RestartableSuite
from penstock.transport.keys import PlaneKeys
from penstock.transport.sockets import SocketPlane
from tests.support.ray_run import AddressActor

_numbers = itertools.count(1)


class TestRayClient(RestartableSuite):
    """Every plane has another port and other keys than the one before."""

    @pytest.fixture(autouse=True)
    def _on(self, cluster: LocalCluster) -> None:
        """Needs the cluster."""

    def ends(self, folder: Path) -> Ends:
        name = f"transport{next(_numbers)}"
        calls.start(AddressActor, actor_of(name), node=calls.my_node())

        def plane() -> SocketPlane:
            (public, secret), (mine, my_secret) = zmq.curve_keypair(), zmq.curve_keypair()
            made = SocketPlane(keys=PlaneKeys(public=public, secret=secret, allowed=frozenset([mine])))
            calls.ask(actor_of(name), "tell", {"url": made.url, "plane": public, "public": mine, "secret": my_secret})
            return made

        return Ends(plane=plane, client=lambda: client(name))
