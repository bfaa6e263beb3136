"""Hosts that are lost: a plane that is pinned to one, a plane that may move, and a folder that is empty all at once.

Nodes with different addresses count as different hosts. All of them are on this machine, and so see the same files.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import penstock as ps
from penstock.errors import ConfigError, PlaneLost
from penstock.protocol.timeouts import Timeouts
from penstock.ray import LocalCluster, calls, end_ray
from penstock.ray.calls import actor_of
from penstock.ray.local_cluster import kill
from penstock.ray.plane_actor import record_of
from tests.support.pace import eventually
from tests.support.postgres_server import PostgresServer
from tests.support.ray_run import RANKS, RayRun, undisturbed

NewRun = Callable[..., RayRun]
_OTHER = "127.0.0.2"
_SHORT = Timeouts(heartbeat_s=0.5, peer_s=4.0, plane_s=20.0, resend_s=0.5)
_LONG_S = 120.0


@pytest.fixture
def other_host(cluster: LocalCluster) -> Iterator[str]:
    """A node with an address of its own."""
    node = cluster.add_node(_OTHER)
    yield node
    for found in calls.nodes():
        if found.ip == _OTHER and found.id in cluster.others:
            cluster.kill_node(found.id)


@pytest.fixture(scope="module")
def postgres() -> Iterator[PostgresServer]:
    with PostgresServer() as server:
        yield server


def _take_all(run: RayRun, steps: int) -> list[list[str]]:
    taken = [run.take() for _ in range(steps)]
    run.flush()
    return taken


def test_a_pinned_plane_is_named_while_its_host_is_gone_and_goes_on_when_it_is_back(
    new_run: NewRun, cluster: LocalCluster, other_host: str
) -> None:
    run = new_run(on=other_host)
    run.put(range(8))
    run.join()
    taken = _take_all(run, 2)
    for source in run.sources:
        source.close()
    waiting = ps.connect(run.address, rank=0, world=RANKS, timeouts=_SHORT)
    assert run.plane_process["node"] == other_host
    cluster.kill_node(other_host)
    died = time.monotonic()
    named = rf"the plane {run.address} is pinned to node {other_host[:12]} \(host .*, {_OTHER}\), which is gone: its"
    with pytest.raises(PlaneLost, match=named):
        ps.open(run.address, timeouts=_SHORT)
    print(f"\nthe host of a pinned plane: named after {time.monotonic() - died:.1f} s")
    with pytest.raises(PlaneLost, match=named):
        waiting.step(timeout=_LONG_S)
    cluster.add_node(_OTHER)
    back = time.monotonic()
    run.join()
    taken += _take_all(run, 2)
    print(f"\nthe host is back: the next steps came after {time.monotonic() - back:.1f} s")
    assert taken == list(undisturbed(run.put_names, 4))
    assert run.plane.status()["epoch"] == 2


def test_a_plane_with_a_shared_log_and_shared_storage_moves_to_another_host(
    new_run: NewRun, cluster: LocalCluster, other_host: str, postgres: PostgresServer, tmp_path: Path
) -> None:
    run = new_run(on=other_host, run="moves", log=postgres.url, storage=tmp_path / "frames", movable=True)
    run.put(range(8))
    run.join()
    taken = _take_all(run, 2)
    cluster.kill_node(other_host)
    died = time.monotonic()
    taken += _take_all(run, 1)
    print(f"\nthe host of a plane that moves: the next step came after {time.monotonic() - died:.1f} s")
    taken += _take_all(run, 1)
    assert taken == list(undisturbed(run.put_names, 4))
    status = run.plane.status()
    assert status["epoch"] == 2 and run.plane.ledger.balanced
    assert run.plane_process["node"] != other_host


def test_an_empty_folder_for_a_known_run_is_refused_and_the_run_goes_on_when_it_is_back(new_run: NewRun) -> None:
    run = new_run()
    run.put(range(2))
    folder = run.folder / run.name / "log"
    record = record_of(run.name)
    assert record is not None and record.pinned and record.folder == str(folder)
    folder.rename(folder.with_name("away"))
    kill(run.plane_process["pid"])
    eventually(lambda: "holds no log" in _waiting(run.name))
    words = _waiting(run.name)
    assert f"is at work on run {record.run_id[:12]}, and {folder} on this host holds no log" in words
    assert not (folder / "log.sqlite").exists()
    if folder.exists():
        folder.rmdir()
    folder.with_name("away").rename(folder)
    found = run.plane.status()
    assert found["held_groups"] == 2 and found["run_id"] == record.run_id and found["epoch"] == 2


def test_a_database_without_the_known_run_is_refused(new_run: NewRun, postgres: PostgresServer, tmp_path: Path) -> None:
    run = new_run(run="gone", log=postgres.url, storage=tmp_path / "frames", movable=True)
    postgres.execute("DROP SCHEMA penstock_gone CASCADE")
    eventually(lambda: "holds no log" in _waiting(run.name))
    words = _waiting(run.name)
    assert "postgresql://postgres@" in words and "to begin a new run, end this plane first" in words


def test_an_ended_plane_is_forgotten_and_its_name_may_begin_a_new_run(new_run: NewRun, tmp_path: Path) -> None:
    run = new_run()
    first = run.plane.status()["run_id"]
    end_ray(run.address)
    assert record_of(run.name) is None
    again = RayRun(run.cluster, run.name, tmp_path / "elsewhere")
    assert again.plane.status()["run_id"] != first
    run.plane = again.plane


def test_a_password_in_the_address_of_the_log_is_refused_and_not_shown(cluster: LocalCluster) -> None:
    with pytest.raises(ConfigError, match=r"contains a password") as caught:
        ps.open("ray://secret", ranks=1, seq_len=16, groups_per_step=1, log="postgresql://me:hush@db/runs")
    assert "hush" not in str(caught.value)
    assert calls.find(actor_of("secret"), refresh=True) is None


def _waiting(name: str) -> str:
    """What the plane says it waits for."""
    try:
        return str(calls.ask(actor_of(name), "place").get("waiting", ""))
    except PlaneLost:
        return ""
