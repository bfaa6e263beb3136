"""Rewards that are attached after the put: waiting, attaching, admission, deadlines, restarts."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import penstock as ps
from penstock.client import GroupState
from penstock.convert import ZeroVariance, make_group
from penstock.errors import ConfigError, Conflict, InvalidInput, UnknownKey
from tests.support.groups import named_group
from tests.support.late_groups import LATE, arrays_of, put_late, rollout, scores, taken
from tests.support.pace import eventually, pace
from tests.support.planes import OpenPlane

ONE: dict[str, Any] = {"ranks": 1, "groups_per_step": 1, **LATE}


# ------------------------------------------------------------------ the same as if put at once


@pytest.mark.parametrize("direct", [True, False], ids=["direct", "inline"])
@pytest.mark.parametrize("advantage", ["grpo", "grpo_std", "leave_one_out", "max_rl", "raw_rewards"])
def test_a_rank_gets_the_same_arrays_as_if_the_rewards_had_been_put(
    tmp_path: Path, open_plane: OpenPlane, advantage: str, direct: bool
) -> None:
    rng = np.random.default_rng(7)
    rewards = [0.1, -1e-30, 3.0, 1e30, 0.1, 7.25]
    rollouts = [rollout(rng) for _ in rewards]
    scored = [ps.Trajectory(turns=one.turns, reward=reward) for one, reward in zip(rollouts, rewards, strict=True)]
    at_once = open_plane(tmp_path / "at once", ranks=1, groups_per_step=1, direct=direct)
    late = open_plane(tmp_path / "late", direct=direct, **ONE)
    at_once.put(make_group(scored, id="g", prompt="p", advantage=advantage))
    late.put(make_group(rollouts, id="g", prompt="p", advantage=advantage))
    result = late.attach("rewards", {"g": {f"g/{i}": reward for i, reward in enumerate(rewards)}})
    assert result == (6, 0, 0)
    (had, first), (has, second) = taken(at_once), taken(late)
    assert has == had
    assert (second.loss_tokens, len(has[0]["rewards"])) == (first.loss_tokens, len(had[0]["rewards"]))


def test_branches_of_a_rollout_share_its_reward_and_count_once_in_the_baseline(open_plane: OpenPlane) -> None:
    plane = open_plane(**ONE)
    samples = [s.replace(rewards=None, advantages=None) for s in named_group("g", samples=3)]
    names = ["g/0", "g/0.1", "g/1"]
    put = [s.replace(id=name) for s, name in zip(samples, names, strict=True)]
    group = make_group([rollout(np.random.default_rng(0))], id="g", advantage="grpo")
    plane.put(replace(group, samples=put, origins=np.zeros(3, np.int64)))
    assert plane.attach("rewards", {"g": {"g/0": 1.0, "g/1": 0.0}}) == (2, 0, 0)
    (found,), _ = taken(plane)
    by_sample = dict(zip(found["ids"], np.array(found["advantages"]).reshape(3, 6)[:, 0].tolist(), strict=True))
    assert by_sample == {"g/0": 0.5, "g/0.1": 0.5, "g/1": -0.5}


# ------------------------------------------------------------------ attaching


def test_a_group_waits_in_a_state_of_its_own_until_every_trained_sample_has_its_value(open_plane: OpenPlane) -> None:
    plane = open_plane(**ONE)
    first, second = put_late(plane, "g")
    assert (plane.ledger.waiting, plane.has(["g"])["g"].state) == (2, "waiting")
    assert plane.attach("rewards", {"g": {first: 1.0}}) == (1, 0, 0)
    assert "1 groups wait for rewards" in _waiting_for(plane)
    assert plane.attach("rewards", {"g": {second: 0.0}}) == (1, 0, 0)
    assert (plane.ledger.waiting, plane.ledger.held) == (0, 2)
    counts = plane.status()["counts"]
    assert (counts["groups_awaited"], counts["groups_admitted"], counts["values_attached"]) == (1, 1, 2)


def _waiting_for(plane: ps.Plane) -> str:
    source = plane.source(rank=0)
    try:
        with pytest.raises(ps.PenstockError) as caught:
            source.step(timeout=1)
        return f"{caught.value} {plane.status()['waiting_for']}"
    finally:
        source.close()


def test_the_same_value_twice_is_known_and_another_one_a_conflict_that_attaches_nothing(open_plane: OpenPlane) -> None:
    plane = open_plane(**ONE)
    first, second = put_late(plane, "g")
    assert plane.attach("rewards", {"g": {first: 0.0}}) == (1, 0, 0)
    assert plane.attach("rewards", {"g": {first: 0.0}}) == (0, 1, 0)
    for other in (1.0, -0.0):
        with pytest.raises(Conflict, match=r"attach rewards: group 'g' sample 'g/0' has 0, now .*given once"):
            plane.attach("rewards", {"g": {second: 5.0, first: other}})
    with pytest.raises(Conflict, match="has 0, now an error"):
        plane.attach("rewards", {}, errors={"g": {first: "timed out"}})
    assert plane.attach("rewards", {"g": {second: 4.0}}) == (1, 0, 0)
    # admitted, then trained: values can be compared, not changed
    for _ in range(2):
        assert plane.attach("rewards", {"g": {first: 0.0, second: 4.0}}) == (0, 2, 0)
        with pytest.raises(Conflict, match="has 4, now 2"):
            plane.attach("rewards", {"g": {second: 2.0}})
        if plane.ledger.held:
            taken(plane)


@pytest.mark.parametrize(
    ("column", "values", "errors", "text"),
    [
        ("rewards", {"g": {"g/0": float("nan")}}, {}, "nan; give a finite number"),
        ("rewards", {"g": {"g/0": float("-inf")}}, {}, "-inf; give a finite number"),
        ("rewards", {"g": {"g/0": 1e39}}, {}, "finite number"),
        ("rewards", {"g": {"g/0": "good"}}, {}, "'good'; give a number"),
        ("rewards", {"g": {"g/7": 1.0}}, {}, "not in group 'g'"),
        ("rewards", {"h": {"h/0": 1.0}}, {}, "group 'h': it was not accepted"),
        ("rewards", {"g": {"g/0": 1.0}}, {"g": {"g/0": "no"}}, "has a value and an error"),
        ("advantages", {"g": {"g/0": 1.0}}, {}, "waits for rewards"),
        ("logprobs", {"g": {"g/0": 1.0}}, {}, "only rewards, advantages, .* may come after the put"),
        ("rewards", {f"g{i}": {"a": 1.0} for i in range(257)}, {}, "more than 256 groups"),
        ("rewards", {"g/0": 1.0}, {}, "give them by group and sample id"),
        ("rewards", {"g": [1.0, 0.0]}, {}, "give them by group and sample id"),
        ("rewards", {}, {"g/0": "no"}, "errors: .* give them by group and sample id"),
    ],
)
def test_what_cannot_be_attached_is_rejected_with_the_value(
    open_plane: OpenPlane, column: str, values: Any, errors: Any, text: str
) -> None:
    plane = open_plane(**ONE)
    put_late(plane, "g")
    with pytest.raises((InvalidInput, UnknownKey), match=text):
        plane.attach(column, values, errors=errors)
    assert plane.ledger.waiting == 2


def test_evaluation_groups_take_no_late_values(open_plane: OpenPlane) -> None:
    plane = open_plane(**ONE)
    plane.put([s.replace(rewards=None) for s in named_group("e")], evaluation=True)
    with pytest.raises(UnknownKey, match="group 'e': it was put for evaluation"):
        plane.attach("rewards", {"e": {"e/0": 1.0}})


def test_attaching_never_waits_for_room_because_waiting_groups_have_theirs(open_plane: OpenPlane) -> None:
    plane = open_plane(capacity=2, **ONE)
    names = [put_late(plane, name) for name in ("a", "bb")]
    with pytest.raises(ps.PenstockError, match="wait for the trainer"):
        put_late(plane, "ccc", timeout=0)
    for group, own in zip(("a", "bb"), names, strict=True):
        assert plane.attach("rewards", {group: scores(own)}) == (2, 0, 0)
    assert plane.ledger.held == 4


# ------------------------------------------------------------------ errors and filters


def test_a_sample_scored_as_error_leaves_the_baseline_and_the_step(open_plane: OpenPlane) -> None:
    plane = open_plane(**ONE)
    put_late(plane, "g", 3)
    assert plane.attach("rewards", {"g": {"g/0": 1.0, "g/1": 0.0}}, errors={"g": {"g/2": "timed out"}}) == (3, 0, 0)
    assert plane.attach("rewards", {}, errors={"g": {"g/2": "timed out again"}}) == (0, 1, 0)
    (found,), _ = taken(plane)
    assert (found["ids"], set(found["advantages"])) == (("g/0", "g/1"), {0.5, -0.5})
    assert (plane.ledger.committed, dict(plane.ledger.discarded)) == (3, {"scored as error": 1})


def test_a_group_scored_as_errors_only_is_dropped(open_plane: OpenPlane) -> None:
    plane = open_plane(**ONE)
    put_late(plane, "g")
    plane.attach("rewards", {}, errors={"g": {"g/0": "x", "g/1": "x"}})
    assert dict(plane.ledger.dropped) == {"scored as error": 2}
    assert plane.has(["g"])["g"] == GroupState("dropped", "scored as error")
    assert plane.attach("rewards", {"g": {"g/0": 1.0}}) == (0, 0, 1)


@pytest.mark.parametrize("zero_variance", ["zero_variance", "object"])
def test_a_filter_by_name_drops_the_group_at_admission_with_its_reason(
    open_plane: OpenPlane, zero_variance: str
) -> None:
    filters = ["zero_variance"] if zero_variance == "zero_variance" else [ZeroVariance()]
    plane = open_plane(**ONE)
    for name in ("flat", "not flat"):
        put_late(plane, name, filters=filters)
    assert plane.ledger.waiting == 4
    for name, second in (("flat", 1.0), ("not flat", 0.0)):
        plane.attach("rewards", {name: {f"{name}/0": 1.0, f"{name}/1": second}})
    assert (dict(plane.ledger.dropped), plane.ledger.held) == ({"zero variance": 2}, 2)


def test_a_filter_of_rollouts_leaves_out_its_samples(open_plane: OpenPlane) -> None:
    plane = open_plane(**ONE)
    rng = np.random.default_rng(1)
    with plane.group("p", id="g", advantage="grpo", filters=["truncated"]) as group:
        for cut in (True, False, False):
            group.add(rollout(rng, truncated=cut))
    plane.attach("rewards", {"g": {"g/0": 3.0, "g/1": 0.0, "g/2": 0.0}})
    (found,), _ = taken(plane)
    assert (found["ids"], set(found["advantages"])) == (("g/1", "g/2"), {-1.0})
    assert dict(plane.ledger.discarded) == {"truncated": 1}


@pytest.mark.parametrize("when", ["at put", "by the judge"])
def test_any_errored_drops_a_group_that_failed_in_the_producer_or_at_the_judge(
    open_plane: OpenPlane, when: str
) -> None:
    plane = open_plane(**ONE)
    rng = np.random.default_rng(1)
    with plane.group("p", id="g", advantage="grpo", filters=["any_errored"]) as group:
        group.add(rollout(rng, error="crashed" if when == "at put" else None))
        group.add(rollout(rng))
    if when == "at put":
        assert (plane.ledger.accepted, dict(plane.ledger.discarded)) == (0, {"group errored": 2})
    else:
        plane.attach("rewards", {"g": {"g/1": 1.0}}, errors={"g": {"g/0": "x"}})
        assert plane.ledger.dropped.total() == 2


def test_a_rollout_that_failed_before_the_put_needs_no_reward(open_plane: OpenPlane) -> None:
    rng = np.random.default_rng(5)
    rollouts = [rollout(rng), rollout(rng, error="crashed"), rollout(rng)]
    rewards = [1.0, None, 0.0]
    scored = [
        ps.Trajectory(turns=one.turns, reward=reward, error=one.error)
        for one, reward in zip(rollouts, rewards, strict=True)
    ]
    late, at_once = open_plane(**ONE), open_plane(ranks=1, groups_per_step=1)
    late.put(make_group(rollouts, id="g", advantage="grpo"))
    at_once.put(make_group(scored, id="g", advantage="grpo"))
    assert [s.id for s in next(iter(late.lacking("rewards"))).samples] == ["g/0", "g/2"]
    assert late.attach("rewards", {"g": {"g/0": 1.0, "g/2": 0.0}}) == (2, 0, 0)
    assert repr(taken(late)[0]) == repr(taken(at_once)[0])  # NaN where there is no reward


@pytest.mark.parametrize("error", ["crashed", ""])
def test_the_reward_of_a_rollout_that_failed_is_in_no_baseline(open_plane: OpenPlane, error: str) -> None:
    rng = np.random.default_rng(5)
    rollouts = [rollout(rng), rollout(rng, 0.0, error=error), rollout(rng)]
    scored = [
        ps.Trajectory(turns=one.turns, reward=reward, error=one.error)
        for one, reward in zip(rollouts, [1.0, 0.0, 0.5], strict=True)
    ]
    late, at_once = open_plane(**ONE), open_plane(ranks=1, groups_per_step=1)
    late.put(make_group(rollouts, id="g", advantage="grpo"))
    at_once.put(make_group(scored, id="g", advantage="grpo"))
    assert late.attach("rewards", {"g": {"g/0": 1.0, "g/2": 0.5}}) == (2, 0, 0)
    (found,), _ = taken(late)
    assert set(found["advantages"]) == {0.25, 0.0, -0.25}
    assert [found] == taken(at_once)[0]


@pytest.mark.parametrize("known", [None, 0.5], ids=["no reward", "some rewards"])
@pytest.mark.parametrize("over_length", ["truncate", "drop"])
def test_a_judge_scores_rollouts_that_seq_len_cuts_because_they_are_in_the_baseline(
    open_plane: OpenPlane, over_length: str, known: float | None
) -> None:
    settings: dict[str, Any] = {"seq_len": 16, "over_length": over_length}
    late, at_once = open_plane(**ONE, **settings), open_plane(ranks=1, groups_per_step=1, **settings)
    short, long = ps.Turn([1, 2]), ps.Turn(np.arange(20))
    answers = [ps.Turn(np.arange(n), logprobs=-np.ones(n)) for n in (3, 4, 5)]
    turns = [[short, answers[0]], [short, answers[1]], [long, answers[2]]]
    rewards = {"g/0": 0.5, "g/1": 0.5, "g/2": 2.0}
    given = [known, known, None]
    with late.group("p", id="g", advantage="grpo") as group:
        for one, reward in zip(turns, given, strict=True):
            group.add(ps.Trajectory(turns=one, reward=reward))
    with at_once.group("p", id="g") as group:
        for one, reward in zip(turns, rewards.values(), strict=True):
            group.add(ps.Trajectory(turns=one, reward=reward))
    (lease,) = late.lacking("rewards", timeout=0.0)
    lease.attach({sample.id: rewards[sample.id] for sample in lease.samples})
    found, _ = taken(late)
    assert -0.5 in {value for batch in found for value in batch["advantages"]}
    assert found == taken(at_once)[0]


def test_rewards_of_the_put_and_late_ones_make_one_baseline(open_plane: OpenPlane) -> None:
    plane = open_plane(**ONE)
    rng = np.random.default_rng(6)
    with plane.group("p", id="g", advantage="grpo") as group:
        for reward in (1.0, None, 0.25):
            group.add(rollout(rng, reward))
    (lease,) = plane.lacking("rewards", timeout=0.0)
    assert [sample.id for sample in lease.samples] == ["g/1"]
    with pytest.raises(Conflict, match="sample 'g/0' has 1, now 2"):
        plane.attach("rewards", {"g": {"g/0": 2.0}})
    assert plane.attach("rewards", {"g": {"g/0": 1.0, "g/1": 0.25}}) == (1, 1, 0)
    (found,), _ = taken(plane)
    assert (set(found["rewards"]), set(found["advantages"])) == ({1.0, 0.25}, {0.5, -0.25})


@pytest.mark.parametrize("filters", [["zero_variance"], []], ids=["filtered", "trained"])
def test_equal_rewards_of_the_put_and_of_a_judge_are_equal(open_plane: OpenPlane, filters: list[str]) -> None:
    plane = open_plane(**ONE)
    rng = np.random.default_rng(6)
    with plane.group("p", id="g", advantage="grpo_std", filters=filters) as group:
        for reward in (0.3, None):
            group.add(rollout(rng, reward))
    plane.attach("rewards", {"g": {"g/1": 0.3}})
    if filters:
        assert plane.ledger.dropped == {"zero variance": 2}
    else:
        (found,), _ = taken(plane)
        assert set(found["advantages"]) == {0.0}


def test_rewards_so_large_that_advantages_are_not_finite_drop_the_group(open_plane: OpenPlane) -> None:
    plane = open_plane(**ONE)
    put_late(plane, "g")
    plane.attach("rewards", {"g": {"g/0": 3e38, "g/1": -3e38}})
    put_late(plane, "hh", 3, advantage="max_rl")
    plane.attach("rewards", {"hh": {"hh/0": 3e38, "hh/1": -3e38, "hh/2": 1e-9}})
    assert plane.ledger.balanced
    assert set(plane.ledger.dropped) <= {"late columns cannot be used"}


# ------------------------------------------------------------------ what waits, and what does not


def test_without_a_deadline_a_put_without_a_needed_column_is_rejected(open_plane: OpenPlane) -> None:
    plane = open_plane(ranks=1, needs=("rewards",))
    text = r"no rewards in sample 'g/0' \(2 of 2 samples\), which this plane needs .* set `needs_deadline_s`"
    with pytest.raises(InvalidInput, match=text):
        put_late(plane, "g", advantage=None)


def test_columns_that_only_the_sampler_knows_are_asked_for_at_put(open_plane: OpenPlane) -> None:
    plane = open_plane(ranks=1, needs=("rewards", "logprobs"), needs_deadline_s=60)
    with pytest.raises(InvalidInput, match="no logprobs in sample 'g/0'"):
        plane.put([s.replace(logprobs=None, rewards=None) for s in named_group("g")])
    plane.put(named_group("h"))
    assert plane.ledger.held == 2


def test_a_name_that_could_not_be_applied_is_an_error_of_the_put(open_plane: OpenPlane) -> None:
    plane = open_plane(ranks=1)
    with pytest.raises(InvalidInput, match=r"advantage 'grpo' is to be computed from late rewards.*needs_deadline_s"):
        put_late(plane, "g")
    with pytest.raises(InvalidInput, match="advantage 'grop': unknown advantage; did you mean 'grpo'"):
        put_late(plane, "g", advantage="grop")
    with pytest.raises(InvalidInput, match="filter 'zero': unknown filter"):
        put_late(plane, "g", filters=["zero"])


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"needs": ("reward",)}, "needs: 'reward': unknown column; did you mean 'rewards'"),
        ({"needs_deadline_s": 5}, r"needs_deadline_s: 5 with needs \(\)"),
        ({"needs": ("logprobs",), "needs_deadline_s": 5}, "name a column that may be attached later"),
        ({**LATE, "on_missing": "wait"}, "on_missing"),
    ],
)
def test_settings_that_contradict_each_other_are_rejected(settings: Any, text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        ps.open("memory:", ranks=1, seq_len=8, groups_per_step=1, **settings)


# ------------------------------------------------------------------ deadlines, staleness, tenants


@pytest.mark.parametrize("on_missing", ["drop", "train"])
def test_what_misses_the_deadline_is_dropped_or_trained_without(open_plane: OpenPlane, on_missing: str) -> None:
    plane = open_plane(**{**ONE, "needs_deadline_s": 0.5 * pace()}, on_missing=on_missing)
    put_late(plane, "g")
    plane.attach("rewards", {"g": {"g/0": 1.0}})
    if on_missing == "train":
        (found,), _ = taken(plane)
        assert set(found["advantages"]) == {0.0}
        assert plane.attach("rewards", {"g": {"g/1": 0.0, "g/0": 1.0}}) == (0, 1, 1)
    else:
        eventually(lambda: plane.ledger.waiting == 0)
        assert dict(plane.ledger.dropped) == {"columns missing": 2}
        assert plane.attach("rewards", {"g": {"g/1": 0.0}}) == (0, 0, 1)
    counts = plane.status()["counts"]
    assert (counts["groups_overdue"], counts["values_late"]) == (1, 1)


def test_a_group_that_becomes_too_stale_while_it_waits_is_dropped(open_plane: OpenPlane) -> None:
    plane = open_plane(max_staleness=1, **ONE)
    put_late(plane, "g", policy_version=0)
    for version in (1, 2):
        plane.put(named_group(f"n{version}", policy_version=version))
        source = plane.source(rank=0)
        source.commit(source.step(timeout=60), policy_version=version)
        source.flush(60)
        source.close()
    assert (plane.ledger.waiting, dict(plane.ledger.dropped)) == (0, {"stale": 2})
    put_late(plane, "old", policy_version=0)
    assert dict(plane.ledger.dropped) == {"stale": 4}


def test_an_evicted_tenant_loses_its_waiting_groups(open_plane: OpenPlane) -> None:
    plane = open_plane(shares={"x": 1.0, "y": 1.0}, **ONE)
    for run in ("x", "y"):
        plane.put([s.replace(rewards=None, run=run) for s in named_group(run)])
    plane.evict("x", "test")
    assert (plane.ledger.waiting, dict(plane.ledger.dropped)) == (2, {"evicted": 2})


def test_a_priority_given_at_the_put_is_kept_while_the_group_waits(tmp_path: Path, open_plane: OpenPlane) -> None:
    settings = {**ONE, "sampler": ps.Prioritized(1.0), "max_times_sampled": 1}
    plane = open_plane(tmp_path, snapshot_every=1, **settings)
    for name in ("a", "bb"):
        put_late(plane, name, priority=1e6 if name == "bb" else 1e-6)
    plane.close()
    plane = open_plane(tmp_path, **settings)
    plane.attach("rewards", {"a": {"a/0": 1.0, "a/1": 0.0}, "bb": {"bb/0": 1.0, "bb/1": 0.0}})
    (found,), _ = taken(plane)
    assert found["ids"][0].startswith("bb")


# ------------------------------------------------------------------ restarts


@pytest.mark.parametrize("snapshot_every", [1, 20_000])
def test_a_restart_in_every_state_changes_nothing(tmp_path: Path, open_plane: OpenPlane, snapshot_every: int) -> None:
    def reopened(plane: ps.Plane) -> ps.Plane:
        before = plane.ledger.as_dict()
        plane.close()
        again = open_plane(tmp_path, snapshot_every=snapshot_every, **ONE)
        assert again.ledger.as_dict() == before
        return again

    plane = open_plane(tmp_path, snapshot_every=snapshot_every, **ONE)
    put_late(plane, "other")  # waits throughout
    put_late(plane, "g", filters=["zero_variance"])
    plane = reopened(plane)
    plane.attach("rewards", {"g": {"g/0": 1.0}})
    plane = reopened(plane)
    assert plane.attach("rewards", {"g": {"g/0": 1.0}}) == (0, 1, 0)
    with pytest.raises(Conflict):
        plane.attach("rewards", {"g": {"g/0": 2.0}})
    plane.attach("rewards", {"g": {"g/1": 0.25}})
    plane = reopened(plane)
    (found,), _ = taken(plane)
    assert (set(found["advantages"]), set(found["rewards"])) == ({0.375, -0.375}, {1.0, 0.25})
    plane = reopened(plane)
    assert plane.attach("rewards", {"g": {"g/0": 1.0, "g/1": 0.25}}) == (0, 2, 0)
    put_late(plane, "errors")
    plane.attach("rewards", {}, errors={"errors": {"errors/0": "x", "errors/1": "x"}})
    plane = reopened(plane)
    assert plane.ledger.waiting == 2


def test_a_plane_with_another_seq_len_keeps_the_values(tmp_path: Path, open_plane: OpenPlane) -> None:
    plane = open_plane(tmp_path, **ONE)
    put_late(plane, "g", 3)
    plane.attach("rewards", {"g": {"g/0": 1.0, "g/1": 0.0}}, errors={"g": {"g/2": "x"}})
    plane.close()
    plane = open_plane(tmp_path, **ONE, seq_len=4)
    found, _ = taken(plane)
    assert sorted((one["ids"], set(one["advantages"])) for one in found) == [(("g/0",), {0.5}), (("g/1",), {-0.5})]


def test_a_plane_that_no_longer_needs_the_column_still_completes_its_groups(
    tmp_path: Path, open_plane: OpenPlane
) -> None:
    plane = open_plane(tmp_path, **ONE)
    put_late(plane, "g")
    plane.close()
    plane = open_plane(tmp_path, ranks=1, groups_per_step=1)
    assert plane.ledger.waiting == 2
    plane.attach("rewards", {"g": {"g/0": 1.0, "g/1": 0.0}})
    assert plane.ledger.held == 2


def test_reuse_of_late_groups_and_a_rewind_serve_the_same_values(tmp_path: Path, open_plane: OpenPlane) -> None:
    plane = open_plane(tmp_path, max_times_sampled=2, **ONE)
    put_late(plane, "g")
    plane.attach("rewards", {"g": {"g/0": 1.0, "g/1": 0.0}})
    first, _ = taken(plane)
    second, _ = taken(plane)
    plane.close()
    plane = open_plane(tmp_path, max_times_sampled=2, **ONE)
    source = plane.source(rank=0, resume_step=1)
    again = source.step(timeout=120)
    assert first == second == [arrays_of(batch) for batch in again]
    source.close()


def test_samples_per_step_counts_admitted_groups_only(open_plane: OpenPlane) -> None:
    settings = {name: value for name, value in ONE.items() if name != "groups_per_step"}
    plane = ps.open("memory:", seq_len=64, samples_per_step=4, **settings)
    with plane:
        names = [put_late(plane, name) for name in ("a", "bb", "ccc")]
        assert plane.ledger.waiting == 6
        for group, own in zip(("ccc", "a"), (names[2], names[0]), strict=True):
            plane.attach("rewards", {group: scores(own)})
        (found,), _ = taken(plane)
        assert sorted({name.split("/")[0] for name in found["ids"]}) == ["a", "ccc"]
        assert plane.ledger.balanced
