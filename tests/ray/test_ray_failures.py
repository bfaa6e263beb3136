"""What dies in a cluster: every rank gets the steps of a run that nothing happened to, or the same named error.

`make test-ray` prints how long each took; docs/ray.md has the table.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import replace

import pytest

from penstock.errors import StepAborted
from penstock.ray import LocalCluster
from penstock.ray.local_cluster import kill
from penstock.testing.kept_planes import eventually
from penstock.testing.ray_run import TIMEOUTS, RayRun, group_of, undisturbed, wait_until_gone

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
    run = begin(new_run(on=cluster.others[0], locking="wal"))
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


def test_a_plane_that_is_cut_off_and_locks_its_log_is_waited_for(new_run: NewRun, cluster: LocalCluster) -> None:
    """As on a network filesystem: whoever has the log locks it, so the new plane begins when the old one ended."""
    run = begin(new_run(on=cluster.others[0]))
    process = run.plane_process["pid"]
    kill(process, signal.SIGSTOP)
    died = time.monotonic()
    wake = threading.Timer(30, kill, (process, signal.SIGCONT))
    wake.start()
    cluster.kill_node(cluster.others[0], spare=process)
    run.put(range(8, 12))
    finish(run, "the plane cut off for 30 s, its log locked", died, 6)
    wake.join()
    wait_until_gone(process)
    assert run.plane.status()["epoch"] == 2 and run.plane.ledger.balanced


def test_a_keeper_process_dies(new_run: NewRun) -> None:
    run = begin(new_run(copies=1))
    for keeper in run.keepers:
        kill(keeper["pid"])
    died = time.monotonic()
    run.put(range(8, 12))
    finish(run, "every keeper's process", died, 6)


@pytest.mark.parametrize("copies", [2, 3])
def test_a_keeper_node_dies_and_a_copy_is_elsewhere(new_run: NewRun, cluster: LocalCluster, copies: int) -> None:
    run = begin(new_run(copies=copies, on=cluster.head))
    cluster.kill_node(cluster.others[0])
    died = time.monotonic()
    if copies == 3:
        cluster.add_node()  # with fewer keepers than copies puts would wait
    run.put(range(8, 12))
    finish(run, f"a keeper's node, copies={copies}", died, 6)


def test_a_keeper_node_dies_and_there_is_no_copy(new_run: NewRun, cluster: LocalCluster) -> None:
    """Every rank raises the same words, which name group and keeper; what is lost is counted; the rest is trained."""
    run = new_run(copies=1, on=cluster.head)
    lost = cluster.others[0]
    run.put(range(4), on=lost)
    run.put(range(4, 8))
    cluster.kill_node(lost)
    died = time.monotonic()
    run.join()
    words = set()
    for source in run.sources:
        with pytest.raises(StepAborted, match=r"group 'g\d': lost with keeper node") as found:
            source.step(timeout=200)
        words.add(str(found.value))
        source.close()
    print(f"\na keeper's node, copies=1: every rank knew after {time.monotonic() - died:.1f} s: {words}")
    assert len(words) == 1
    ledger = run.plane.ledger
    assert ledger.balanced and ledger.dropped["lost"] == sum(len(group_of(number)) for number in range(4))
    run.join()
    assert [run.take(), run.take()] == list(undisturbed([f"g{number}" for number in range(4, 8)], 2))


def test_a_node_that_comes_back_with_its_disk_has_what_it_kept(new_run: NewRun, cluster: LocalCluster) -> None:
    run = new_run(copies=1, on=cluster.head, timeouts=replace(TIMEOUTS, keeper_s=300.0))
    lost = cluster.others[0]
    run.put(range(4), on=lost)
    cluster.kill_node(lost)
    died = time.monotonic()
    cluster.add_node(cluster.names[lost])
    run.join()
    finish(run, "a keeper's node that comes back, copies=1", died, 2)


def test_a_shared_folder_waits_for_a_node_of_its_name(new_run: NewRun, cluster: LocalCluster) -> None:
    """For longer than `keeper_s`: the folder is safe, so nothing in it is lost."""
    run = new_run(copies="shared", on=cluster.head, timeouts=replace(TIMEOUTS, keeper_s=8.0))
    lost = cluster.others[0]
    run.put(range(4), on=lost)
    cluster.kill_node(lost)
    died = time.monotonic()
    eventually(lambda: max(keeper["silent_s"] for keeper in run.plane.status()["keepers"]) > 10.0)
    assert not run.plane.ledger.dropped
    cluster.add_node(cluster.names[lost])
    run.join()
    finish(run, "a keeper's node that is replaced, copies='shared'", died, 2)


def test_a_producer_dies_while_it_puts(new_run: NewRun) -> None:
    import ray

    run = new_run()

    def put_and_die(address: str) -> None:
        import penstock as ps
        from penstock.testing.ray_run import group_of

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


def test_a_node_that_joins_gets_a_keeper(new_run: NewRun, cluster: LocalCluster) -> None:
    run = new_run(copies=1)

    def nodes() -> set[str]:
        return {keeper["node"] for keeper in run.keepers}

    eventually(lambda: nodes() == {cluster.head, *cluster.others})
    node = cluster.add_node()
    eventually(lambda: node in nodes())
    cluster.kill_node(node)
