"""A Ray cluster of several nodes on this machine: real raylets and object stores, one kernel, loopback only.

For tests, the demo and measurements. `kill_node` loses a node as a machine is lost: SIGKILL to all its processes.

Ray takes 127.0.0.1 in a cluster's address for "this host" and connects to the host's own address instead, where nothing
listens if the nodes were given 127.0.0.1. So nodes get the address that Ray will connect to, and Ray is kept on
loopback by the switch that it uses on macOS and Windows.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from penstock.extras import require

_ON_LOOPBACK = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"
"""Off: Ray's name for this host is 127.0.0.1, whatever other addresses it has."""
_CONNECT_S = 10.0
_OBJECT_STORE_BYTES = 80 << 20
"""Ray's own minimum is 75 MB. We keep nothing in an object store."""


class LocalCluster:
    """A head node and further nodes, with this process attached to the head. Use it as a context manager."""

    def __init__(
        self,
        nodes: int = 3,
        *,
        addresses: Sequence[str] = (),
        say: Callable[[str], None] = lambda _: None,
    ) -> None:
        """`addresses` has one address of this machine per node; nodes with different addresses count as different
        hosts. `say` is called with a progress message before each wait."""
        require("a local Ray cluster", "ray")
        self._say = say
        if not addresses:
            os.environ.setdefault(_ON_LOOPBACK, "0")  # before Ray is imported, and for the processes we start
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
        # Short, because it holds Unix sockets, whose paths are limited to about 100 bytes.
        self._folder = Path(tempfile.mkdtemp(prefix="psr-", dir="/tmp"))
        (self._folder / "ray").mkdir()
        os.environ["RAY_TMPDIR"] = str(self._folder)
        import ray
        from ray.cluster_utils import Cluster

        own = ray.util.get_node_ip_address()
        self._settings = {
            "num_cpus": 2,
            "object_store_memory": _OBJECT_STORE_BYTES,
            "include_dashboard": False,
        }
        self._cluster: Any = Cluster()
        self._nodes: dict[str, Any] = {}
        self._default_address = own
        for number in range(nodes):
            self._say(f"starting node {number + 1} of {nodes}, which takes a few seconds")
            self.add_node(addresses[number] if addresses else own)
        self._attach()

    def _attach(self) -> None:
        import ray

        self._say(f"connecting to the cluster at {self.address}")
        host, _, port = self.address.rpartition(":")
        socket.create_connection((host, int(port)), timeout=_CONNECT_S).close()  # fail now; Ray would try for minutes
        os.environ["RAY_ADDRESS"] = self.address  # for processes that this one starts
        ray.init(address=self.address, logging_level="ERROR", log_to_driver=False)

    @property
    def address(self) -> str:
        return str(self._cluster.address)

    @property
    def head(self) -> str:
        """The id of the head node."""
        return str(self._cluster.head_node.node_id)

    @property
    def others(self) -> list[str]:
        """The ids of all nodes but the head."""
        return [node for node in self._nodes if node != self.head]

    def add_node(self, address: str | None = None) -> str:
        """Start a node at an address of this machine. Returns its id.

        Ray gives a node half a minute to start, which is too short on a busy machine: tries three times.
        """
        settings = self._settings | {"node_ip_address": address or self._default_address}
        for last in (False, False, True):
            before = set(descendants(os.getpid()))
            try:
                node = self._cluster.add_node(**settings)
            except Exception:  # Ray raises plain Exception
                if last:
                    raise
                self._say("Ray gave up on the node after half a minute; starting it again")
                for process in set(descendants(os.getpid())) - before:
                    kill(process)
            else:
                self._nodes[node.node_id] = node
                return str(node.node_id)
        raise AssertionError

    def kill_node(self, node: str, *, spare: int | None = None) -> None:
        """Kill every process of a node. `spare` is a process to leave alive, cut off from the cluster."""
        lost = self._nodes.pop(node)
        raylet = self.raylet_of(lost)
        for process in [*descendants(raylet), raylet]:
            if process != spare:
                kill(process)
        self._cluster.remove_node(lost, allow_graceful=False)

    def raylet(self, node: str) -> int:
        """Return the pid of a node's raylet."""
        return self.raylet_of(self._nodes[node])

    @staticmethod
    def raylet_of(node: Any) -> int:
        (found,) = node.all_processes["raylet"]
        return int(found.process.pid)

    def close(self) -> None:
        import ray

        with contextlib.suppress(Exception):  # a cluster with killed nodes does not always shut down cleanly
            ray.shutdown()
        for node in [*self.others, self.head]:
            raylet = self.raylet_of(self._nodes[node])
            for process in descendants(raylet):
                kill(process)
        with contextlib.suppress(Exception):
            self._cluster.shutdown()
        for name in ("RAY_ADDRESS", "RAY_TMPDIR", _ON_LOOPBACK):
            os.environ.pop(name, None)
        shutil.rmtree(self._folder, ignore_errors=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def kill(process: int, sign: signal.Signals = signal.SIGKILL) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(process, sign)


def descendants(process: int) -> Iterator[int]:
    """Yield the pids of all descendants of a process, from /proc."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            with contextlib.suppress(OSError, IndexError):
                parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
                children.setdefault(parent, []).append(int(entry.name))
    waiting = [process]
    while waiting:
        below = children.get(waiting.pop(), [])
        yield from below
        waiting += below
