"""A group's arguments are checked before its rollouts are generated, and no rollout is lost without an error."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Callable
from typing import Any

import pytest

import penstock as ps
from penstock.convert import ZeroVariance, make_group
from penstock.errors import InvalidInput, Overloaded
from tests.support.planes import OpenPlane

ONE: dict[str, Any] = {"ranks": 1, "groups_per_step": 1}


def rollout(reward: float) -> ps.Trajectory:
    return ps.Trajectory(turns=[ps.Turn([1, 2]), ps.Turn([3], logprobs=[-0.5])], reward=reward)


def test_a_rollout_that_is_added_after_the_put_is_an_error(open_plane: OpenPlane) -> None:
    plane = open_plane(**ONE)
    with plane.group("p") as group:
        group.add(rollout(0.0))
        group.add(rollout(1.0))
    with pytest.raises(InvalidInput, match="after the group was put"):
        group.add(rollout(1.0))
    assert plane.ledger.accepted == 2


def test_a_task_that_was_not_awaited_is_told_that_its_rollout_came_too_late(open_plane: OpenPlane) -> None:
    plane = open_plane(**ONE)

    async def late(group: Any, put: asyncio.Event) -> None:
        await put.wait()
        group.add(rollout(1.0))

    async def generate() -> None:
        put = asyncio.Event()
        async with plane.agroup("p") as group:
            group.add(rollout(0.0))
            straggler = asyncio.create_task(late(group, put))
        put.set()
        with pytest.raises(InvalidInput, match="after the group was put"):
            await straggler

    asyncio.run(generate())
    assert plane.ledger.accepted == 1


def test_a_group_without_room_may_grow_and_be_put_again(open_plane: OpenPlane) -> None:
    plane = open_plane(capacity=1, **ONE)
    with plane.group("first") as first:
        first.add(rollout(1.0))
    group = plane.group("second", timeout=0)
    group.add(rollout(0.0))
    with pytest.raises(Overloaded):
        group.put()
    group.add(rollout(1.0))
    assert len(group.rollouts) == 2


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"policy_version": "3"}, "group of 'p': policy_version: '3'"),
        ({"policy_version": -1}, "policy_version: -1"),
        ({"policy_version": 1.5}, "policy_version: 1.5"),
        ({"advantage": "gpro"}, "did you mean 'grpo'"),
        ({"advantage": 3}, "advantage: 3; give a name"),
        ({"filters": ["zero_varience"]}, "did you mean 'zero_variance'"),
        ({"filters": [ZeroVariance]}, "filter <class"),
        ({"filters": [lambda rollouts: rollouts]}, "with a `reason`"),
        ({"filters": [3]}, "filter 3: give a name"),
        ({"priority": "high"}, "priority of 'p': 'high'"),
        ({"id": 3}, "group of 'p': id: 3"),
        ({"id": ""}, "group of 'p': id: ''"),
    ],
)
def test_a_wrong_option_is_named_before_anything_is_generated(
    open_plane: OpenPlane, options: dict[str, Any], text: str
) -> None:
    plane = open_plane(**ONE)
    for opened in (plane.group, plane.agroup):
        with pytest.raises(InvalidInput, match=text):
            opened("p", **options)


def as_list(group: Any) -> Any:
    return [0.5] * len(group)


@pytest.mark.parametrize("wrong", [lambda _: None, lambda _: "x", lambda _: [1.0], lambda _: [object(), 1.0]])
def test_an_advantage_returns_one_number_for_each_rollout(wrong: Callable[[Any], Any]) -> None:
    with pytest.raises(InvalidInput, match="group 'g': advantages"):
        make_group([rollout(0.0), rollout(1.0)], id="g", advantage=wrong)
    kept = make_group([rollout(0.0), rollout(1.0)], id="g", advantage=as_list)
    assert [float(sample["advantages"]) for sample in kept.samples] == [0.5, 0.5]


def test_a_group_that_is_filled_and_never_put_is_warned_of(
    open_plane: OpenPlane, caplog: pytest.LogCaptureFixture
) -> None:
    plane = open_plane(ranks=1, groups_per_step=1)
    rollout = ps.Trajectory(turns=[ps.Turn([1]), ps.Turn([2], logprobs=[-0.5])], reward=1.0)
    for prompt in ("forgotten", "put", "cancelled", "made", "empty"):
        group = plane.group(prompt, advantage=None)
        if prompt != "empty":
            group.add(rollout)
        if prompt == "put":
            group.put()
        if prompt == "made":
            group.make()
        if prompt == "cancelled":
            with pytest.raises(RuntimeError), group:
                raise RuntimeError
        del group
        gc.collect()
    (said,) = [record.getMessage() for record in caplog.records if "never put" in record.getMessage()]
    assert said.startswith("group of 'forgotten': dropped with 1 rollouts that were never put")
