"""A Ray cluster of several nodes on this machine: real raylets and object stores, one kernel, loopback only.

For tests, the demo and measurements. A node is lost as a machine is: all its processes at once, by SIGKILL.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from penstock.extras import require

OBJECT_STORE_BYTES = 80 << 20
"""Ray's own minimum is 75 MB. Nothing of ours lies in an object store."""


class LocalCluster:
    """The head and some more nodes; this process is attached to the head. Use it as a context."""

    def __init__(self, nodes: int = 3, *, cpus: int = 2, object_store_bytes: int = OBJECT_STORE_BYTES) -> None:
        require("a local Ray cluster", "ray")
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
        self._folder = Path(tempfile.mkdtemp(prefix="psr-", dir="/tmp"))  # sockets lie in it: their paths must be short
        (self._folder / "ray").mkdir()
        os.environ["RAY_TMPDIR"] = str(self._folder)
        from ray.cluster_utils import Cluster

        self._settings = {
            "num_cpus": cpus,
            "object_store_memory": object_store_bytes,
            "node_ip_address": "127.0.0.1",
            "include_dashboard": False,
        }
        self._cluster: Any = Cluster()
        self._nodes: dict[str, Any] = {}
        for _ in range(nodes):
            self.add_node()
        self._attach()

    def _attach(self) -> None:
        import ray

        os.environ["RAY_ADDRESS"] = self.address  # processes that this one starts find it by this
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
        """The ids of the nodes that may be lost."""
        return [node for node in self._nodes if node != self.head]

    def add_node(self) -> str:
        """One more; its id.

        Ray gives a node half a minute to start, which is not enough on a busy machine: it is tried three times.
        """
        for last in (False, False, True):
            before = set(descendants(os.getpid()))
            try:
                node = self._cluster.add_node(**self._settings)
            except Exception:  # Ray raises no other
                if last:
                    raise
                for process in set(descendants(os.getpid())) - before:
                    kill(process)
            else:
                self._nodes[node.node_id] = node
                return str(node.node_id)
        raise AssertionError

    def kill_node(self, node: str, *, spare: int | None = None) -> None:
        """The node is gone, with every process on it but one, if that is named: it is cut off."""
        lost = self._nodes.pop(node)
        raylet = self.raylet_of(lost)
        for process in [*descendants(raylet), raylet]:
            if process != spare:
                kill(process)
        self._cluster.remove_node(lost, allow_graceful=False)

    def raylet(self, node: str) -> int:
        """The process of a node's raylet."""
        return self.raylet_of(self._nodes[node])

    @staticmethod
    def raylet_of(node: Any) -> int:
        (found,) = node.all_processes["raylet"]
        return int(found.process.pid)

    def close(self) -> None:
        import ray

        with contextlib.suppress(Exception):  # a cluster whose nodes were killed does not always end in order
            ray.shutdown()
        for node in [*self.others, self.head]:
            raylet = self.raylet_of(self._nodes[node])
            for process in descendants(raylet):
                kill(process)
        with contextlib.suppress(Exception):
            self._cluster.shutdown()
        for name in ("RAY_ADDRESS", "RAY_TMPDIR"):
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
    """The processes below a process, as /proc has them now."""
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
