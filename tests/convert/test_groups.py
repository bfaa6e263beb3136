from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest

from penstock.arrays import Sample
from penstock.capture import Trajectory, Turn
from penstock.convert import (
    AnyErrored,
    Errored,
    Group,
    Std,
    TooLong,
    Truncated,
    ZeroVariance,
    attach,
    grpo,
    make_group,
    unique_id,
)
from penstock.errors import Conflict, InvalidInput, UnknownKey


def rollout(reward: float | None, *, length: int = 2, **fields: Any) -> Trajectory:
    said = Turn(range(10, 10 + length), logprobs=[-0.5] * length)
    return Trajectory(turns=[Turn([1, 2]), said], reward=reward, **fields)


def forked(reward: float) -> Trajectory:
    said = Turn([3], logprobs=[-1.0])
    return Trajectory(turns=[Turn([1, 2]), said, Turn([4]), said], parents=[-1, 0, 0, 2], reward=reward)


def test_a_group_names_its_samples_by_rollout_and_branch() -> None:
    group = make_group([rollout(1.0), forked(0.0)], id="p7", policy_version=3)
    assert [s.id for s in group.samples] == ["p7/0", "p7/1", "p7/1.1"]
    assert {s.group for s in group.samples} == {"p7"}
    assert group.origins.tolist() == [0, 1, 1]
    assert [float(s["advantages"]) for s in group.samples] == [0.5, -0.5, -0.5]
    assert [float(s["rewards"]) for s in group.samples] == [1.0, 0.0, 0.0]
    assert (group.policy_version, group.num_tokens, group.loss_tokens) == (3, 4 + 3 + 4, 2 + 1 + 1)


def test_a_rollouts_own_version_comes_before_the_groups() -> None:
    group = make_group([rollout(1.0, policy_version=2), rollout(0.0)], id="p", policy_version=5)
    assert [s.policy_version for s in group.samples] == [2, 5]
    assert group.policy_version == 2


def test_filters_drop_tokens_but_not_what_the_baseline_was_made_of() -> None:
    rows = [rollout(1.0), rollout(0.0, truncated=True), rollout(0.5, length=9), rollout(None, error="boom")]
    group = make_group(rows, id="p", filters=[Errored(), Truncated(), TooLong(8)])
    assert [s.id for s in group.samples] == ["p/0"]
    assert group.dropped == {"errored": 1, "truncated": 1, "too long": 1}
    assert float(group.samples[0]["advantages"]) == 0.5
    assert group.rewards[:3].tolist() == [1.0, 0.0, 0.5] and np.isnan(group.rewards[3])


def test_a_rollout_counts_under_the_first_reason_only() -> None:
    rows = [rollout(1.0, truncated=True, error="boom"), rollout(0.0)]
    assert make_group(rows, id="p", filters=[Truncated(), Errored()]).dropped == {"truncated": 1}


def test_prompt_is_a_column_beside_the_group_and_an_unknown_version_stays_unknown() -> None:
    group = make_group([rollout(1.0), rollout(0.0, policy_version=4)], id="17#a", prompt="17")
    assert {(s.group, s.prompt) for s in group.samples} == {("17#a", "17")}
    assert [s.policy_version for s in group.samples] == [None, 4]
    assert group.policy_version is None


def test_unique_ids_of_one_prompt_differ_and_fit_the_column() -> None:
    assert unique_id("17") != unique_id("17")
    long = "x" * 512
    assert make_group([rollout(1.0)], id=unique_id(long), prompt=long).samples[0].prompt == long


def test_filters_over_the_whole_group_drop_all_or_nothing() -> None:
    flat = make_group([rollout(1.0), rollout(1.0), rollout(None, error="x")], id="p", filters=[ZeroVariance()])
    assert (len(flat), flat.dropped) == (0, {"zero variance": 3})
    assert (flat.num_tokens, flat.policy_version) == (0, None)
    mixed = [rollout(1.0), rollout(0.0), rollout(None, error="x")]
    assert len(make_group(mixed, id="p", filters=[ZeroVariance()])) == 3
    assert make_group(mixed, id="p", filters=[AnyErrored()]).dropped == {"group errored": 3}
    assert len(make_group(mixed[:2], id="p", filters=[AnyErrored()])) == 2


def test_a_failed_rollout_that_is_kept_trains_nothing() -> None:
    group = make_group([rollout(1.0), rollout(0.0), rollout(None, error="x")], id="p")
    failed = group.samples[2]
    assert (failed.loss_tokens, float(failed["advantages"]), "rewards" in failed) == (0, 0.0, False)


def test_advantages_can_be_computed_anew_when_a_group_is_replayed() -> None:
    group = make_group([rollout(1.0), forked(0.0)], id="p")
    again = group.with_advantages(partial(grpo, scale=Std(eps=0.0)))
    assert [float(s["advantages"]) for s in again.samples] == [1.0, -1.0, -1.0]
    assert [float(s["advantages"]) for s in group.samples] == [0.5, -0.5, -0.5]


def test_groups_without_rewards_need_no_advantage() -> None:
    said = Turn([3, 4], sampled=True)
    group = make_group([Trajectory(turns=[Turn([1]), said], mode="sft")], id="p", advantage=None)
    assert "advantages" not in group.samples[0]


def test_advantages_of_turns_are_kept_or_rejected_never_replaced() -> None:
    said = Turn([3, 4], logprobs=[-0.5, -0.5], advantages=[0.25, -4.0])
    own = Trajectory(turns=[Turn([1, 2]), said], reward=1.0)
    for advantage in (grpo, "grpo"):
        with pytest.raises(InvalidInput, match=r"'x' rollout 1 .* its turns have advantages, .* give advantage=None"):
            make_group([rollout(0.0), own], id="x", advantage=advantage)
    kept = make_group([own], id="x", advantage=None).samples[0]
    assert kept["advantages"].tolist()[2:] == [0.25, -4.0]


def test_an_unscored_rollout_is_named() -> None:
    with pytest.raises(InvalidInput, match=r"group 'p' rollout 1 \(trajectory 'r9'\).reward: none"):
        make_group([rollout(1.0), rollout(None, id="r9")], id="p")


@pytest.mark.parametrize(("given", "message"), [({"id": ""}, "group.id"), ({"trajectories": []}, "no rollouts")])
def test_a_group_needs_a_name_and_a_rollout(given: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        make_group(**{"trajectories": [rollout(1.0)], "id": "p", **given})


def test_an_advantage_per_rollout_is_needed() -> None:
    with pytest.raises(InvalidInput, match=r"advantages of shape \(1,\) for 2 rollouts"):
        make_group([rollout(1.0), rollout(0.0)], id="p", advantage=lambda rollouts: np.zeros(1))


def test_two_samples_of_one_name_are_a_conflict() -> None:
    group = make_group([rollout(1.0)], id="p")
    twice = [group.samples[0], group.samples[0]]
    with pytest.raises(Conflict, match="two samples are named 'p/0'"):
        Group(id="p", samples=twice, origins=np.zeros(2, np.int64), rollouts=group.rollouts)
    with pytest.raises(InvalidInput, match="origins: 1 for 2 samples"):
        other = twice[0].replace(id="p/1")
        Group(id="p", samples=[twice[0], other], origins=np.zeros(1, np.int64), rollouts=group.rollouts)


# Attaching by id


def pair() -> list[Sample]:
    return [Sample(id="a", token_ids=[1, 2, 3], loss_mask=[0, 1, 1]), Sample(id="b", token_ids=[4, 5])]


def test_a_column_attaches_by_id_whatever_the_order() -> None:
    values = {"b": [0.0, -1.0], "a": [0.0, -2.0, -3.0]}
    found = attach(pair(), "teacher_logprobs", values)
    assert [s["teacher_logprobs"].tolist() for s in found] == [values["a"], values["b"]]
    assert [float(s["advantages"]) for s in attach(found, "advantages", {"a": 1.0, "b": -1.0})] == [1.0, -1.0]


def test_a_group_attaches_to_its_samples() -> None:
    group = make_group([rollout(1.0), rollout(0.0)], id="p")
    values = {s.id: np.full(s.num_tokens, -1.0) for s in group.samples}
    assert all("teacher_logprobs" in s for s in group.attach("teacher_logprobs", values).samples)
    assert not any("teacher_logprobs" in s for s in group.samples)


@pytest.mark.parametrize(
    ("name", "values", "error", "message"),
    [
        ("teacher_logprobs", {"a": [0, -1, -1], "b": [0, -1], "c": [0]}, UnknownKey, "1 ids of no sample, first 'c'"),
        ("teacher_logprobs", {"a": [0, -1, -1]}, InvalidInput, "no value for 1 of 2 samples, first 'b'"),
        ("teacher_logprobs", {"a": [0, -1], "b": [0, -1]}, InvalidInput, "sample 'a'.teacher_logprobs: 2 values for 3"),
        ("teacher_logprobs", {"a": [0, -1, np.nan], "b": [0, -1]}, InvalidInput, "sample 'a'.teacher_logprobs"),
        ("entropy", {"a": 1.0, "b": 1.0}, UnknownKey, "unknown column 'entropy'"),
        ("token_ids", {"a": [1], "b": [1]}, UnknownKey, "unknown column 'token_ids'"),
    ],
)
def test_a_column_that_does_not_fit_is_refused(name: str, values: Any, error: Any, message: str) -> None:
    samples = pair()
    with pytest.raises(error, match=message):
        attach(samples, name, values)
    assert not any(name in sample for sample in samples if name != "token_ids")


def test_attaching_to_two_samples_of_one_name_is_a_conflict() -> None:
    with pytest.raises(Conflict, match="two samples are named 'a'"):
        attach([pair()[0], pair()[0]], "advantages", {"a": 1.0})
