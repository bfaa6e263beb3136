"""A group as JSON is the group that the same trajectories make."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import penstock as ps
from penstock.convert import ADVANTAGES, make_group
from penstock.convert.json_group import JsonGroup, JsonRollout, JsonTurn, read_json_group
from penstock.errors import InvalidInput

LOGPROBS = st.floats(-20, 0, width=32)


@st.composite
def turns(draw: st.DrawFn) -> dict[str, Any]:
    ids = draw(st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=12))
    turn: dict[str, Any] = {"token_ids": ids, "role": draw(st.sampled_from(["", "user", "tool"]))}
    if draw(st.booleans()):
        marks = draw(st.lists(st.booleans(), min_size=len(ids), max_size=len(ids)))
        turn["mask"] = draw(st.sampled_from([marks, [int(mark) for mark in marks]]))
        turn["sampled"] = True
        count = sum(marks)
    else:
        count = len(ids)
    turn["logprobs"] = draw(st.lists(LOGPROBS, min_size=count, max_size=count))
    if draw(st.booleans()):
        turn["columns"] = {"temperatures": 0.5, "weight_versions": [3] * len(ids)}
    return turn


ROLLOUTS = st.fixed_dictionaries(
    {"turns": st.lists(turns(), min_size=1, max_size=4), "reward": st.floats(-5, 5), "env": st.just("math")},
    optional={"error": st.just("boom"), "truncated": st.booleans(), "metrics": st.just({"steps": 3.0})},
)


@given(st.lists(ROLLOUTS, min_size=1, max_size=4), st.sampled_from(["grpo", "leave_one_out", None]))
def test_a_json_group_is_the_group_of_the_same_trajectories(rollouts: list[Any], advantage: str | None) -> None:
    record = {"prompt": "17", "id": "17#a", "advantage": advantage, "policy_version": 2, "rollouts": rollouts}
    group, evaluation = read_json_group(json.dumps(record).encode())
    rows = []
    for rollout in rollouts:
        own = [ps.Turn(**{**turn, **turn.get("columns", {}), "columns": {}}) for turn in rollout["turns"]]
        rows.append(ps.Trajectory(**{**rollout, "turns": own}))
    rule = None if advantage is None else ADVANTAGES[advantage]
    plain = make_group(rows, id="17#a", prompt="17", policy_version=2, advantage=rule)
    assert not evaluation and list(group.samples) == list(plain.samples)


def test_branches_are_read_as_they_are_given() -> None:
    turn = {"token_ids": [1, 2], "logprobs": [-1.0, -1.0]}
    rollout = {"turns": [turn, turn, turn], "parents": [-1, 0, 0], "keeps": [None, None, 1], "reward": 1.0}
    group, _ = read_json_group(json.dumps({"prompt": "p", "rollouts": [rollout]}).encode())
    assert sorted(sample.token_ids.tolist() for sample in group.samples) == [[1, 1, 2], [1, 2, 1, 2]]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"rollouts": []}, "rollouts: expected 'array' of length >= 1"),
        ({"rollouts": [None] * 65_537}, "rollouts: expected 'array' of length <= 65536"),
        ({"rollouts": [{"turns": [0] * 200_000}] * 2}, "rollouts: 400000 turns; at most 262144 in a group"),
        ({"prompt": 17}, "prompt: int; must be str"),
        ({"promt": "a"}, "group: unknown field 'promt'"),
        ({"advantage": "gae"}, "advantage: invalid enum value 'gae'"),
        ({"rollouts": [{"turns": []}]}, "turns without a token"),
        ({"rollouts": [{"turns": [{"token_ids": [-1]}]}]}, "rollouts[0].turns[0].token_ids[0]: -1; must be from 0"),
        ({"rollouts": [{"turns": [{"token_ids": [1.5]}]}]}, "rollouts[0].turns[0].token_ids[0]: float; must be int"),
        ({"rollouts": [{"turns": [{"token_ids": [2**70]}]}]}, "rollouts[0].turns[0].token_ids"),
        ({"rollouts": [{"turns": [{"token_ids": [1]}], "rewrad": 1}]}, "rollouts[0]: unknown field 'rewrad'"),
    ],
)
def test_what_is_wrong_is_named_by_its_place(change: dict[str, Any], said: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        read_json_group(json.dumps({"prompt": "p", "rollouts": [{"turns": [{"token_ids": [1]}]}], **change}).encode())
    assert said in str(caught.value)


@given(st.binary(max_size=60) | st.recursive(st.none() | st.text(max_size=4), st.lists).map(json.dumps).map(str.encode))
def test_bytes_that_are_no_group_give_our_error_and_no_other(text: bytes) -> None:
    with pytest.raises(InvalidInput):
        read_json_group(text)


def test_fields_are_those_of_trajectories_and_turns() -> None:
    trajectory = set(ps.Trajectory.__dataclass_fields__) - {"routing_gaps"}
    assert set(JsonRollout.__struct_fields__) == trajectory
    assert set(JsonTurn.__struct_fields__) == set(ps.Turn.__dataclass_fields__) - {"own", "images"}
    assert {"prompt", "id", "rollouts"} <= set(JsonGroup.__struct_fields__)


def test_own_columns_are_those_the_plane_was_told_of() -> None:
    column = ps.Column("turn_weights", dtype="float32", per="token")
    turn = {"token_ids": [1], "logprobs": [-1.0], "columns": {"turn_weights": [2.0]}}
    text = json.dumps({"prompt": "p", "rollouts": [{"turns": [turn], "reward": 1}]}).encode()
    group, _ = read_json_group(text, lambda: {"turn_weights": column})
    assert group.samples[0]["turn_weights"].tolist() == [2.0]


def test_a_group_without_rewards_leaves_its_advantage_to_the_plane() -> None:
    group, _ = read_json_group(b'{"prompt": "p", "rollouts": [{"turns": [{"token_ids": [1]}]}]}')
    assert (group.late_advantage, "advantages" in group.samples[0]) == ("grpo", False)
