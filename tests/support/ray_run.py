"""A small run on a Ray cluster with faults, and the digests of the same run without any."""

from __future__ import annotations

import signal
import sqlite3
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import penstock as ps
from penstock.frames import encode
from penstock.log import SqliteLog
from penstock.log.run_folder import LOG
from penstock.packing import Packing
from penstock.plane.settings import PlaneSettings, Target
from penstock.protocol.steps import Staged
from penstock.protocol.timeouts import Timeouts
from penstock.ray import LocalCluster, calls
from penstock.ray.calls import actor_of
from penstock.ray.local_cluster import kill
from tests.support.engines import DirectEngine
from tests.support.groups import named_group
from tests.support.pace import eventually

RANKS, GROUPS_PER_STEP = 2, 2
TIMEOUTS = Timeouts(heartbeat_s=0.5, peer_s=4.0, delivery_s=30.0, plane_s=120.0, resend_s=0.5)
STEP_S = 150.0
"""Longer than any plane may be away."""


def group_of(number: int) -> list[ps.Sample]:
    return named_group(f"g{number}", samples=1 + number % 3, tokens=3000 if number % 4 == 0 else 30)


class AddressActor:
    """An actor that repeats what it was given, as a plane's actor reports where it listens."""

    def __init__(self) -> None:
        self._place: dict[str, Any] = {}

    def tell(self, place: dict[str, Any]) -> None:
        self._place = place

    def place(self) -> dict[str, Any]:
        return self._place


class RayRun:
    """A plane of its own; this process puts groups and is every rank."""

    def __init__(
        self, cluster: LocalCluster, name: str, folder: Path, *, on: str | None = None, **settings: Any
    ) -> None:
        """`on` is the node on which the plane begins: this process's own unless named."""
        self.cluster, self.name, self.folder = cluster, name, folder
        self.address = f"ray://{name}"
        given: dict[str, Any] = {"folder": folder / name / "log", "timeouts": TIMEOUTS}
        given |= {"ranks": RANKS, "seq_len": 4096, "groups_per_step": GROUPS_PER_STEP}
        on_node(on or cluster.head, _open, self.address, given | settings)
        self.plane = ps.open(self.address, timeouts=TIMEOUTS)
        self.sources: list[ps.Source] = []
        self.put_names: list[str] = []
        self.taken: list[list[str]] = []

    def put(self, numbers: range, *, on: str | None = None) -> None:
        """Connect from this process, or from one on the named node."""
        if on is None:
            _put(self.plane, numbers)
        else:
            on_node(on, _put_there, self.address, numbers)
        self.put_names += [f"g{number}" for number in numbers]

    def rank(self, rank: int) -> ps.Source:
        return ps.connect(self.address, rank=rank, world=RANKS, timeouts=TIMEOUTS)

    def join(self) -> None:
        self.sources = [self.rank(rank) for rank in range(RANKS)]

    def take(self) -> list[str]:
        """One step of every rank: its digests, after it was committed."""
        steps = [source.step(timeout=STEP_S) for source in self.sources]
        for source, step in zip(self.sources, steps, strict=True):
            source.commit(step)
        return [step.digest for step in steps]

    def flush(self) -> None:
        for source in self.sources:
            source.flush(STEP_S)

    @property
    def plane_process(self) -> dict[str, Any]:
        """Its process and node."""
        found: dict[str, Any] = calls.ask(actor_of(self.name), "process")
        return found

    def stop_plane(self) -> int:
        """Stop the plane's process where it stands, between two writes to its log; its process id.

        One that is stopped within a write has the log locked: the next plane waits then, and rightly.
        """
        process: int = self.plane_process["pid"]
        deadline = time.monotonic() + STEP_S
        while True:
            kill(process, signal.SIGSTOP)
            wait_until_stopped(process)
            if _may_write(self.folder / self.name / "log" / LOG):
                return process
            kill(process, signal.SIGCONT)
            assert time.monotonic() < deadline, "the plane writes without a pause"
            time.sleep(0.01)

    def close(self) -> None:
        for source in self.sources:
            source.close()
        self.plane.kill()


def on_node(node: str, function: Callable[..., Any], *arguments: object) -> Any:
    """Call a function on a node and return its result."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    there = ray.remote(function).options(num_cpus=0, scheduling_strategy=NodeAffinitySchedulingStrategy(node, False))
    return ray.get(there.remote(*arguments))


def _open(address: str, settings: dict[str, Any]) -> None:
    ps.open(address, **settings).close()


def _put(plane: ps.Plane, numbers: range) -> None:
    for number in numbers:
        assert plane.put(group_of(number), timeout=STEP_S)


def _put_there(address: str, numbers: range) -> None:
    with ps.open(address, timeouts=TIMEOUTS) as plane:
        _put(plane, numbers)


def _may_write(log: Path) -> bool:
    """Whether somebody else could write to a log on a local disk now."""
    db = sqlite3.connect(log, isolation_level=None, timeout=0)
    try:
        db.execute("BEGIN IMMEDIATE")
        db.execute("ROLLBACK")
    except sqlite3.OperationalError:  # it is locked
        return False
    finally:
        db.close()
    return True


def wait_until_stopped(process: int) -> None:
    """After SIGSTOP: a signal is sent at once, and every thread stops a little later."""
    tasks = Path(f"/proc/{process}/task")
    eventually(lambda: all(_state(task) == "T" for task in tasks.iterdir()))


def _state(task: Path) -> str:
    return (task / "stat").read_text().rpartition(")")[2].split()[0]


def wait_until_gone(process: int, timeout_s: float = 60.0) -> None:
    deadline = time.monotonic() + timeout_s
    while Path(f"/proc/{process}").exists():
        if time.monotonic() > deadline:
            raise AssertionError(f"process {process} still runs after {timeout_s:g} s")
        time.sleep(0.05)


def undisturbed(names: list[str], steps: int) -> Iterator[list[str]]:
    """The digests of each step, by rank, of a plane that takes these groups in this order, and nothing happens."""
    settings = PlaneSettings(packing=Packing(ranks=RANKS, seq_len=4096), target=Target(groups=GROUPS_PER_STEP))
    engine = DirectEngine(settings, SqliteLog(None))
    for number, name in enumerate(names):
        assert engine.put(number, name, encode(group_of(int(name[1:])))) is None
        assert engine.flush()[0].error is None
    for step in range(1, steps + 1):
        made = engine.plan_step(step)
        assert isinstance(made, Staged)
        yield made.digests
        engine.commit(step, None)
    engine.log.close()
