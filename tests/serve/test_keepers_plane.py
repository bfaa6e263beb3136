"""A plane whose frames are with keepers: what is put, taken, lost and forgotten. In threads, over real sockets."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import penstock as ps
from penstock.commands.top import _from_plane, page
from penstock.errors import InvalidInput, Overloaded, PenstockError, StepAborted
from penstock.send.keys import make_keys
from penstock.testing.cluster import Cluster
from penstock.testing.groups import named_group
from tests.serve.conftest import FAST
from tests.serve.processes import embedded_digests, trained_digests, wait_until

TIMES = replace(FAST, keeper_s=3 * FAST.peer_s)


def group(name: str) -> list[ps.Sample]:
    return named_group(name, samples=3, tokens=12)


def digests(cluster: Cluster, steps: int, **more: Any) -> list[list[str]]:
    return trained_digests(lambda rank: cluster.rank(rank, **more), steps)


NAMES = [f"g{i}" for i in range(6)]


def test_steps_from_keepers_are_those_of_a_plane_that_keeps_frames_itself(tmp_path: Path) -> None:
    with Cluster(tmp_path, timeouts=TIMES) as cluster, cluster.client("b") as client:
        for name in NAMES:
            assert client.put(group(name), timeout=60)
        assert not client.put(group("g0"))
        found = digests(cluster, 3)
        assert client.ledger.committed == 18
        assert client.ledger.balanced
    assert found == embedded_digests(tmp_path / "alone", NAMES, TIMES)


def test_every_frame_is_on_two_nodes_and_forgotten_on_both(tmp_path: Path) -> None:
    with Cluster(tmp_path, timeouts=TIMES, retain_steps=0) as cluster:
        for name in NAMES:
            cluster.plane.put(group(name), timeout=60)
        assert [len(keeper.server._frames) for keeper in cluster.keepers.values()] == [6, 6]
        status = cluster.plane.status()
        assert status["copies"] == {"wanted": 2, "groups_too_few": 0, "groups_none_up": 0}
        assert [keeper["up"] for keeper in status["keepers"]] == [True, True]
        digests(cluster, 3)
        cluster.plane.put(group("next"), timeout=60)  # what is given back is written with the next decision
        wait_until(lambda: all(len(keeper.server._frames) == 1 for keeper in cluster.keepers.values()))


def test_the_plane_sees_facts_only(tmp_path: Path) -> None:
    with Cluster(tmp_path, timeouts=TIMES) as cluster:
        cluster.plane.put(group("a"), timeout=60)
        assert not list((tmp_path / "run").glob("frames/*"))


def test_with_one_keeper_of_two_a_put_waits_and_names_who_is_missing(tmp_path: Path) -> None:
    with Cluster(tmp_path, timeouts=TIMES) as cluster:
        cluster.plane.put(group("a"), timeout=60)
        gone = cluster.keepers["b"].name
        cluster.stop_keeper("b")
        wait_until(lambda: cluster.plane.status()["copies"]["groups_too_few"] == 1)
        with pytest.raises(
            Overloaded, match=rf"2 copies are wanted .* up: {cluster.keepers['a'].name}; down: .*{gone}"
        ):
            cluster.plane.put(group("b"), timeout=4 * TIMES.peer_s)
        assert cluster.plane.ledger.accepted == 3
        shown = "\n".join(page(_from_plane(cluster.plane.status()), {}))
        assert "keepers    1 up, 1 down; 2 copies; too few up of 1 groups, none of 0" in shown
        assert f"{gone}: DOWN for" in shown
        cluster.start_keeper("b")
        cluster.plane.put(group("b"), timeout=60)
        assert cluster.plane.status()["copies"]["groups_too_few"] == 0


def test_a_keeper_that_restarts_while_the_plane_is_away_does_not_end_its_producers(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    times = replace(TIMES, plane_s=60.0)
    with Cluster(tmp_path, timeouts=times) as cluster, cluster.client("a") as client:
        client.put(group("a"), timeout=60)
        url = cluster.keepers["a"].server.url
        cluster.stop_keeper("a")
        cluster.plane.close()
        cluster.start_keeper("a", listen=url)  # it cannot know its run now
        with ThreadPoolExecutor() as pool:
            putting = pool.submit(client.put, group("b"), timeout=60)
            wait_until(lambda: putting.done() or "looking for another keeper" in caplog.text)
            cluster.restart_plane()
            assert putting.result()
        assert cluster.plane.ledger.accepted == 6


def test_with_two_copies_a_keeper_may_be_lost(tmp_path: Path) -> None:
    with Cluster(tmp_path, timeouts=TIMES) as cluster:
        for name in NAMES:
            cluster.plane.put(group(name), timeout=60)
        cluster.stop_keeper("a")
        found = digests(cluster, 3)
        assert cluster.plane.ledger.dropped == {}
    assert found == embedded_digests(tmp_path / "alone", NAMES, TIMES)


def test_with_one_copy_its_loss_ends_the_step_on_every_rank_and_is_counted(tmp_path: Path) -> None:
    with Cluster(tmp_path, timeouts=TIMES, copies=1) as cluster:
        with cluster.client("a") as a, cluster.client("b") as b:
            for name in NAMES[:2]:
                a.put(group(name), timeout=60)
            for name in NAMES[2:]:
                b.put(group(name), timeout=60)
        lost = cluster.keepers["a"].name
        cluster.stop_keeper("a")

        def first(rank: int) -> str:
            with cluster.rank(rank) as source, pytest.raises(StepAborted) as raised:
                source.step(timeout=120)
            return str(raised.value)

        with ThreadPoolExecutor() as pool:
            words = set(pool.map(first, range(2)))
        assert len(words) == 1
        assert f"group 'g0': lost with keeper {lost}: gone for" in words.pop()
        ledger = cluster.plane.ledger
        assert (dict(ledger.dropped), ledger.balanced) == ({"lost": 6}, True)
        found = digests(cluster, 2)
        assert cluster.plane.ledger.committed == 12
    assert found == embedded_digests(tmp_path / "alone", NAMES[2:], TIMES)


def test_a_keeper_that_comes_back_in_time_loses_nothing(tmp_path: Path) -> None:
    with Cluster(tmp_path, timeouts=replace(TIMES, keeper_s=600.0), copies=1) as cluster:
        for name in NAMES:
            cluster.plane.put(group(name), timeout=60)
        for node in "ab":
            cluster.stop_keeper(node)
        wait_until(lambda: cluster.plane.status()["copies"]["groups_none_up"] == 6)
        with ThreadPoolExecutor() as pool:
            under_way = pool.submit(digests, cluster, 3)
            wait_until(lambda: "to come back" in cluster.plane.status()["waiting_for"])
            for node in "ab":
                cluster.start_keeper(node)
            found = under_way.result()
        assert cluster.plane.ledger.dropped == {}
    assert found == embedded_digests(tmp_path / "alone", NAMES, TIMES)


def test_a_shared_folder_that_is_lost_for_good_is_given_up_by_a_plane_with_one_copy(tmp_path: Path) -> None:
    with Cluster(tmp_path, copies="shared", timeouts=TIMES) as cluster:
        with cluster.client("a") as client:
            client.put(group("g0"), timeout=60)
        lost = cluster.keepers["a"].name
        cluster.stop_keeper("a")
        wait_until(lambda: _silent_s(cluster, lost) > TIMES.keeper_s + TIMES.heartbeat_s)
        assert not cluster.plane.ledger.dropped
        cluster.restart_plane(copies=1)
        wait_until(lambda: cluster.plane.ledger.dropped["lost"] == 3)
        assert cluster.plane.ledger.balanced


def _silent_s(cluster: Cluster, name: str) -> float:
    return float(next(keeper["silent_s"] for keeper in cluster.plane.status()["keepers"] if keeper["name"] == name))


def test_a_plane_that_restarts_finds_its_keepers_and_they_forget_what_nobody_wants(tmp_path: Path) -> None:
    with Cluster(tmp_path, timeouts=TIMES) as cluster:
        for name in NAMES:
            cluster.plane.put(group(name), timeout=60)
        keeper = cluster.keepers["a"].server
        orphan = keeper._frames.keep([("nobody", b"x" * 16, b"frame")])
        cluster.restart_plane()
        wait_until(lambda: keeper._frames.get(orphan[0]) is None)
        assert len(keeper._frames) == 6
        assert digests(cluster, 3) == embedded_digests(tmp_path / "alone", NAMES, TIMES)


def test_what_was_lost_moves_the_oldest_step_one_may_resume_from(tmp_path: Path) -> None:
    with Cluster(tmp_path, timeouts=TIMES, copies=1, nodes="ab") as cluster:
        with cluster.client("a") as a, cluster.client("b") as b:
            for i, name in enumerate(NAMES):
                (a if i < 2 else b).put(group(name), timeout=60)
        digests(cluster, 3)
        cluster.stop_keeper("a")
        wait_until(lambda: cluster.plane.status()["counts"].get("groups_lost", 0) == 2)
        assert cluster.plane.ledger.dropped == {}

        def resume(rank: int) -> str:
            with cluster.rank(rank, resume_step=1) as source, pytest.raises(PenstockError) as raised:
                source.step(timeout=120)
            return str(raised.value)

        with ThreadPoolExecutor() as pool:
            assert all("steps before 2 were given back" in words for words in pool.map(resume, range(2)))
        assert len(digests(cluster, 2, resume_step=2)[0]) == 2


def test_a_keeper_that_is_full_makes_puts_wait(tmp_path: Path) -> None:
    with Cluster(tmp_path, timeouts=TIMES, copies=1, nodes="") as cluster:
        cluster.start_keeper("a", quota_bytes=1000)
        cluster.plane.put(group("g0"), timeout=60)
        with pytest.raises(Overloaded, match=r"keeper a\.\w+: .* do not fit its quota of 1,000"):
            for name in NAMES[1:]:
                cluster.plane.put(group(name), timeout=2 * TIMES.heartbeat_s)


def test_evaluation_groups_go_through_keepers_too(tmp_path: Path) -> None:
    with Cluster(tmp_path, timeouts=TIMES) as cluster:
        cluster.plane.put(group("e"), evaluation=True, timeout=60)
        assert cluster.plane.ledger.evaluation == 3
        assert cluster.plane.status()["metrics"]["eval/groups"] == 1


def test_a_bad_group_is_refused_by_the_keeper_in_words(tmp_path: Path) -> None:
    with Cluster(tmp_path, timeouts=TIMES, requires=["logprobs"]) as cluster:
        with pytest.raises(InvalidInput, match="other"):
            cluster.plane.put_frame("other", ps.encode(group("a")), timeout=60)
        with pytest.raises(InvalidInput, match="which this plane requires"):
            bare = [ps.Sample(id="b/0", group="b", token_ids=[1, 2], loss_mask=[False, True])]
            cluster.plane.put(bare, timeout=60)
        wait_until(lambda: all(not len(keeper.server._frames) for keeper in cluster.keepers.values()))


def test_puts_and_steps_go_through_keepers_with_keys(tmp_path: Path) -> None:
    keys = str(tmp_path / "keys")
    make_keys(keys, keepers=("keeper",))
    with Cluster(tmp_path, timeouts=TIMES, keys=keys) as cluster, cluster.client("b") as client:
        for name in NAMES:
            client.put(group(name), timeout=120)
        assert digests(cluster, 3) == embedded_digests(tmp_path / "alone", NAMES, TIMES)


def test_a_put_that_does_not_wait_for_room_waits_for_the_answer(tmp_path: Path) -> None:
    with Cluster(tmp_path, timeouts=TIMES, capacity=2) as cluster, cluster.client("b") as client:
        client.put(group("g0"), timeout=60)  # both keepers are here
        assert client.put(group("g1"), timeout=0)
        with pytest.raises(Overloaded, match="wait for the trainer"):
            client.put(group("g2"), timeout=0)
        digests(cluster, 1)
        assert client.put(group("g2"), timeout=0)
