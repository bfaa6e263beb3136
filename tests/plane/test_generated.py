"""`gen/` says how good what is generated is, apart from what is trained."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import penstock as ps
from penstock.commands.top import _from_plane, page
from penstock.server.prometheus import render
from tests.support.pace import pace
from tests.support.planes import OpenPlane

PATIENCE_S = 60 * pace()


def put(plane: ps.Plane, name: str, reward: float, **fields: Any) -> None:
    turns = [ps.Turn([1, 2]), ps.Turn([3, 4, 5], logprobs=[-0.5] * 3)]
    with plane.group(name, policy_version=0) as group:
        group.add(ps.Trajectory(turns=turns, reward=reward, **fields))
        group.add(ps.Trajectory(turns=turns, reward=reward))


def test_a_step_says_what_was_put_since_the_one_before(open_plane: OpenPlane) -> None:
    replay = {"sampler": ps.Lifo(), "remover": ps.Fifo(), "max_times_sampled": None}
    plane = open_plane(ranks=1, groups_per_step=1, **replay)
    put(plane, "a", 1.0, truncated=True, seconds=3.0)
    with plane.source(0, prefetch=0) as source:
        first = source.step(timeout=PATIENCE_S)
        source.commit(first, policy_version=1)
        put(plane, "b", 0.0)
        put(plane, "c", 0.5)
        second = source.step(timeout=PATIENCE_S)
        source.commit(second, policy_version=2)
        third = source.step(timeout=PATIENCE_S)  # nothing was put: replayed
    expected = {"samples": 2, "reward": 1.0, "length": 5.0, "completion_length": 3.0, "truncated": 0.5, "seconds": 3.0}
    assert {name: first.numbers[f"gen/{name}"] for name in expected} == expected
    assert (second.numbers["gen/samples"], second.numbers["gen/reward"]) == (4, 0.25)
    assert second.numbers["buffer/staleness_mean"] == 1.0 and second.numbers["buffer/items"] == 3
    assert third.numbers["gen/samples"] == 0 and "gen/reward" not in third.numbers


def test_status_top_and_metrics_page_have_the_newest(open_plane: OpenPlane) -> None:
    plane = open_plane(ranks=1, groups_per_step=1)
    put(plane, "a", 0.5, truncated=True, seconds=3.0)
    status = plane.status()
    assert status["metrics"]["gen/reward"] == 0.5
    line = next(line for line in page(_from_plane(status), {}) if line.startswith("generated"))
    assert "reward 0.500, 5 tokens, 50% truncated, 3.0 s" in line
    assert "penstock_gen_truncated" in render(status)


def test_evaluation_groups_do_not_count(open_plane: OpenPlane) -> None:
    plane = open_plane(ranks=1, groups_per_step=1)
    with plane.group("e", policy_version=0, evaluation=True) as group:
        group.add(ps.Trajectory(turns=[ps.Turn([1]), ps.Turn([2], logprobs=[-1])], reward=1.0))
    assert plane.status()["metrics"]["gen/samples"] == 0


def test_bias_compares_everything_put_with_everything_trained(open_plane: OpenPlane) -> None:
    plane = open_plane(ranks=1, groups_per_step=1, max_staleness=0)
    put(plane, "a", 1.0)
    with plane.source(0, prefetch=0) as source:
        source.commit(source.step(timeout=PATIENCE_S), policy_version=1)
        long = [ps.Turn([1, 2]), ps.Turn([3] * 9, logprobs=[-0.5] * 9)]
        with plane.group("late", policy_version=0) as group:  # dropped as stale
            group.add(ps.Trajectory(turns=long, reward=0.0))
            group.add(ps.Trajectory(turns=long, reward=0.0))
        found = plane.status()["metrics"]
        assert (found["gen/length_mean"], found["train/length_mean"]) == (8.0, 5.0)
        assert found["train/length_bias"] == 5 / 8 - 1
        assert (found["gen/reward_mean"], found["train/reward_mean"], found["train/reward_bias"]) == (0.5, 1.0, 0.5)
        with plane.group("b", policy_version=1) as group:
            group.add(ps.Trajectory(turns=long, reward=0.0))
        step = source.step(timeout=PATIENCE_S)
        assert step.numbers["gen/length_mean"] == (2 * 5 + 3 * 11) / 5  # the step's own group is in both
        source.commit(step, policy_version=2)
    status = plane.status()
    assert 'penstock_train_length_bias{run="run"}' in render(status)
    assert any(line.startswith("bias       length -") for line in page(_from_plane(status), {}))


@pytest.mark.parametrize("snapshot_every", [1, 10_000])
def test_bias_goes_on_after_a_restart(open_plane: OpenPlane, tmp_path: Path, snapshot_every: int) -> None:
    settings: dict[str, Any] = {"ranks": 1, "groups_per_step": 1, "max_staleness": 0}
    settings |= {"needs": ("rewards",), "needs_deadline_s": 3600, "snapshot_every": snapshot_every}
    plane = open_plane(tmp_path / "run", **settings)
    put(plane, "a", 1.0)
    with plane.source(0, prefetch=0) as source:
        source.commit(source.step(timeout=PATIENCE_S), policy_version=1)
        source.flush()
    put(plane, "b", 0.0)  # dropped as stale
    turns = [ps.Turn([1, 2]), ps.Turn([3] * 9, logprobs=[-0.5] * 9)]
    for name in ("c", "d"):
        with plane.group(name, id=name, policy_version=1, advantage="grpo") as group:
            for _ in range(2):
                group.add(ps.Trajectory(turns=turns))
    plane.attach("rewards", {"c": {"c/0": 0.0, "c/1": 1.0}})  # d is still not scored, and counts later
    before = bias(plane)
    assert before["gen/reward_mean"] == pytest.approx(0.5) and before["train/reward_mean"] == 1.0
    plane.close()
    again = open_plane(tmp_path / "run", **settings)
    assert bias(again) == pytest.approx(before)
    again.attach("rewards", {"d": {"d/0": 0.0, "d/1": 0.0}})
    assert bias(again)["gen/length_mean"] == pytest.approx((4 * 5 + 4 * 11) / 8)


def bias(plane: ps.Plane) -> dict[str, float]:
    found = plane.status()["metrics"]
    return {name: found[name] for name in found if name.endswith(("_mean", "_bias")) and "staleness" not in name}
