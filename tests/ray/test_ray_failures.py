"""What dies in a cluster: every rank gets the steps of a run that nothing happened to, or the same named error.

`make test-ray` prints how long each took; docs/ray.md has the table.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable

import pytest

from penstock.ray import LocalCluster
from penstock.ray.local_cluster import kill
from tests.support.ray_run import RayRun, undisturbed, wait_until_gone

NewRun = Callable[..., RayRun]


def finish(run: RayRun, what: str, died: float, steps: int) -> None:
    """Put and take until so many steps are taken, and compare with the undisturbed run."""
    taken = [run.take()]
    print(f"\n{what}: the next step came after {time.monotonic() - died:.1f} s")
    taken += [run.take() for _ in range(steps - len(run.taken) - 1)]
    run.flush()
    assert [*run.taken, *taken] == list(undisturbed(run.put_names, steps))
    assert run.plane.ledger.balanced


def begin(run: RayRun, *, put_on: str | None = None) -> RayRun:
    """Two steps are taken; groups for two more wait."""
    run.put(range(8), on=put_on)
    run.join()
    run.taken = [run.take(), run.take()]
    return run


def test_the_plane_process_dies(new_run: NewRun) -> None:
    run = begin(new_run())
    kill(run.plane_process["pid"])
    died = time.monotonic()
    run.put(range(8, 12))
    print(f"\nthe plane's process: the next put returned after {time.monotonic() - died:.1f} s")
    finish(run, "the plane's process", died, 6)
    assert run.plane.status()["epoch"] == 2


def test_the_plane_node_dies(new_run: NewRun, cluster: LocalCluster) -> None:
    run = begin(new_run(on=cluster.others[0]))
    assert run.plane_process["node"] == cluster.others[0]
    cluster.kill_node(cluster.others[0])
    died = time.monotonic()
    run.put(range(8, 12))
    print(f"\nthe plane's node: the next put returned after {time.monotonic() - died:.1f} s")
    finish(run, "the plane's node", died, 6)
    assert run.plane.status()["epoch"] == 2


def test_a_plane_that_is_cut_off_and_lives_writes_nothing_more(new_run: NewRun, cluster: LocalCluster) -> None:
    """Its raylet is gone, so Ray starts it elsewhere. The old process is stopped, so nobody can end it."""
    run = begin(new_run(on=cluster.others[0]))
    process = run.stop_plane()
    died = time.monotonic()
    try:
        cluster.kill_node(cluster.others[0], spare=process)
        run.put(range(8, 12))
        finish(run, "the plane cut off while it lives", died, 6)
    finally:
        kill(process, signal.SIGCONT)
    wait_until_gone(process)
    assert run.plane.status()["epoch"] == 2 and run.plane.ledger.balanced


def test_another_node_dies(new_run: NewRun, cluster: LocalCluster) -> None:
    """Whatever was put from it is in the plane's folder."""
    run = begin(new_run(on=cluster.head), put_on=cluster.others[0])
    cluster.kill_node(cluster.others[0])
    died = time.monotonic()
    run.put(range(8, 12))
    finish(run, "a node that is not the plane's", died, 6)
    assert run.plane.status()["epoch"] == 1


def test_a_producer_dies_while_it_puts(new_run: NewRun) -> None:
    import ray

    run = new_run()

    def put_and_die(address: str) -> None:
        import penstock as ps
        from tests.support.ray_run import group_of

        plane = ps.open(address)
        plane.put(group_of(0))
        plane.put(group_of(1))
        os.kill(os.getpid(), signal.SIGKILL)

    with pytest.raises(ray.exceptions.WorkerCrashedError):
        ray.get(ray.remote(put_and_die).options(num_cpus=0, max_retries=0).remote(run.address))
    run.put_names = ["g0", "g1"]
    assert run.plane.status()["held_groups"] == 2
    run.put(range(2, 4))
    run.join()
    assert [run.take(), run.take()] == list(undisturbed(run.put_names, 2))
