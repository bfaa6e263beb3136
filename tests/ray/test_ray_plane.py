"""A plane as an actor: started or found by its name, refused with both values, ended when told to."""

from __future__ import annotations

from collections.abc import Callable

import pytest

import penstock as ps
from penstock.errors import ConfigError, InvalidInput
from penstock.ray import LocalCluster, calls
from penstock.ray.calls import actor_of
from tests.support.ray_run import RayRun, undisturbed, wait_until_gone

NewRun = Callable[..., RayRun]


def test_a_run_gives_the_steps_of_a_plane_in_a_folder(new_run: NewRun) -> None:
    run = new_run()
    run.put(range(8))
    run.join()
    assert [run.take() for _ in range(4)] == list(undisturbed(run.put_names, 4))
    run.flush()
    ledger = run.plane.ledger
    assert ledger.balanced and ledger.committed == ledger.accepted


def test_a_plane_is_found_by_its_name_with_and_without_its_settings(new_run: NewRun) -> None:
    run = new_run()
    run.put(range(1))
    with ps.open(run.address) as found:
        assert found.status()["held_groups"] == 1
    with ps.open(run.address, ranks=2, seq_len=4096) as found:
        assert found.status()["held_groups"] == 1


def test_other_settings_than_the_running_planes_are_refused_with_both_values(new_run: NewRun) -> None:
    run = new_run()
    with pytest.raises(ConfigError, match=rf"{run.address}: seq_len: 64 here, 4096 in the plane that runs there"):
        ps.open(run.address, ranks=2, seq_len=64, groups_per_step=2)


def test_a_plane_that_nobody_started_is_named(cluster: LocalCluster) -> None:
    with pytest.raises(ConfigError, match="ray://nobody: the cluster has no such plane; give ranks, seq_len"):
        ps.open("ray://nobody")
    with pytest.raises(ConfigError, match=r"address 'ray://a/b': must be ray://NAME"):
        ps.open("ray://a/b")
    with pytest.raises(ConfigError, match="keys: 'x'; the plane makes its own"):
        ps.open("ray://nobody", keys="x")


def test_what_keeps_a_plane_from_starting_is_raised_and_leaves_no_actor(cluster: LocalCluster) -> None:
    with pytest.raises((ConfigError, OSError), match=r"/proc/nowhere"):
        ps.open("ray://cannot", ranks=1, seq_len=16, groups_per_step=1, folder="/proc/nowhere")
    with pytest.raises(ConfigError, match="no such plane"):
        ps.open("ray://cannot")


def test_a_killed_plane_is_gone_and_goes_on_in_its_folder_when_it_is_started_again(new_run: NewRun) -> None:
    run = new_run()
    run.put(range(2))
    process = run.plane_process["pid"]
    run.plane.kill()
    assert calls.find(actor_of(run.name)) is None
    wait_until_gone(process)
    with pytest.raises(ConfigError, match="no such plane"):
        ps.open(run.address)
    again = RayRun(run.cluster, run.name, run.folder)
    assert again.plane.status()["held_groups"] == 2
    run.plane = again.plane


def test_only_a_plane_of_a_cluster_can_be_killed() -> None:
    with (
        ps.open("memory:", ranks=1, seq_len=16, groups_per_step=1) as plane,
        pytest.raises(InvalidInput, match="close"),
    ):
        plane.kill()


def test_a_process_on_any_node_can_put_without_ports_or_keys(new_run: NewRun, cluster: LocalCluster) -> None:
    run = new_run()
    for number, node in enumerate([cluster.head, *cluster.others]):
        run.put(range(number, number + 1), on=node)
    assert run.plane.status()["held_groups"] == 3
