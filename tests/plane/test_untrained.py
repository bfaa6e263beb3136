"""A group in which nothing is trained does not pass for training data."""

from __future__ import annotations

import logging
from typing import Any

import pytest

import penstock as ps
from penstock.capture import from_choices
from penstock.errors import InvalidInput
from tests.support.planes import OpenPlane


def rollout(**fields: Any) -> ps.Trajectory:
    """What a producer makes that forgot `logprobs=`."""
    return ps.Trajectory(turns=[ps.Turn([1, 2]), ps.Turn([3, 4])], **fields)


def fill(plane: ps.Plane, *rollouts: ps.Trajectory, evaluation: bool = False) -> None:
    with plane.group("17", id="17#a", policy_version=0, evaluation=evaluation) as group:
        for one in rollouts:
            group.add(one)


def test_a_group_without_log_probabilities_is_rejected(open_plane: OpenPlane) -> None:
    plane = open_plane(untrained_groups="reject")
    with pytest.raises(InvalidInput, match=r"group '17#a': no token of its 2 samples is trained.*give the logprobs="):
        fill(plane, rollout(reward=1.0), rollout(reward=0.0))
    counts = plane.status()["counts"]
    assert plane.ledger.accepted == 0 and (counts["puts_refused"], counts["groups_untrained"]) == (1, 0)
    fill(plane, rollout(reward=1.0), evaluation=True)


def test_replies_without_log_probabilities_are_rejected(open_plane: OpenPlane) -> None:
    plane = open_plane(untrained_groups="reject")
    reply = {"prompt_token_ids": [1, 2], "choices": [{"token_ids": [3]}, {"token_ids": [4, 5]}]}
    with pytest.raises(InvalidInput, match="group '17#a': its trained tokens have no logprobs"):
        fill(plane, *from_choices(reply, rewards=[1.0, 0.0]))


def test_a_group_whose_trained_tokens_are_all_truncated_is_rejected(open_plane: OpenPlane) -> None:
    plane = open_plane(seq_len=16, over_length="truncate", untrained_groups="reject")
    long = ps.Sample(group="g", token_ids=[1] * 100, loss_mask=[False] * 50 + [True] * 50, logprobs=[-0.5] * 100)
    with pytest.raises(InvalidInput, match="group 'g': every trained token lies beyond seq_len 16"):
        plane.put([long.replace(advantages=1.0)])


def test_where_the_user_says_so_it_is_accepted_with_one_warning_and_counted(
    open_plane: OpenPlane, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "penstock.plane")
    plane = open_plane(ranks=1, groups_per_step=3, untrained_groups="accept")
    for i in range(3):
        plane.put([ps.Sample(group=f"g{i}", token_ids=[1, 2], loss_mask=[0, 0])])
    assert plane.status()["counts"]["groups_untrained"] == 3
    with plane.source(0) as source:
        source.commit(source.step(timeout=60))
    assert sum("was accepted in which no token is trained" in record.getMessage() for record in caplog.records) == 1


def test_a_group_of_which_every_rollout_failed_is_counted_and_not_put(open_plane: OpenPlane) -> None:
    plane = open_plane(untrained_groups="reject")
    fill(plane, rollout(error="timeout"), rollout(error="timeout"))
    assert plane.ledger.discarded == {"rollout failed": 2} and plane.ledger.accepted == 0
