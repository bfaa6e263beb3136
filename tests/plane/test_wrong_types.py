"""A value of a wrong type is rejected with its name. The plane drops a message that it cannot read, so a client that
sends one waits for ever."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import penstock as ps
from penstock.convert import make_group
from penstock.errors import InvalidInput
from tests.support.groups import named_group
from tests.support.planes import OpenPlane

CALLS: list[tuple[str, Callable[[Any], Any]]] = [
    ("priority of 'a': True", lambda plane: plane.put(named_group("a"), priority=True)),
    ("priority of 'a': None", lambda plane: plane.put(named_group("a"), priority=None)),
    ("priority of 'a': '3'", lambda plane: plane.put(named_group("a"), priority="3")),
    ("evaluation: 3; must be True or False", lambda plane: plane.put(named_group("a"), evaluation=3)),
    ("evaluation: None; must be True or False", lambda plane: plane.group("p", evaluation=None)),
    ("lease_s: True; expected `float`, got `bool`", lambda plane: next(plane.lacking("rewards", lease_s=True))),
    ("groups: None; expected `int`, got `None`", lambda plane: next(plane.lacking("rewards", groups=None))),
    ("column: 3; expected `str`, got `int`", lambda plane: next(plane.lacking(3))),
    ("weight: True; expected `float`, got `bool`", lambda plane: plane.share("a", True)),
    ("weight: None; expected `float`, got `None`", lambda plane: plane.share("a", None)),
    ("tenant: 3; expected `str`, got `int`", lambda plane: plane.evict(3, "why")),
    ("reason: None; expected `str`, got `None`", lambda plane: plane.discard(None, 1)),
    ("reason: None; expected `str`, got `None`", lambda plane: asyncio.run(plane.adiscard(None, 1))),
    ("key: <object", lambda plane: plane.discard("x", 1, key=object())),
    ("drop: None; expected `bool`, got `None`", lambda plane: plane.settle("g", drop=None)),
    ("has: None; give a list of ids", lambda plane: plane.has(None)),
    ("has: 3; give a list of ids", lambda plane: plane.has(3)),
    ("put_many: None; give the groups as a list", lambda plane: plane.put_many(None)),
    ("prompt: 3; give the prompt's name", lambda plane: plane.group(3)),
    ("rank: None, and world is 2", lambda plane: plane.source(None)),
    ("replica: None, and replicas is 1", lambda plane: plane.source(0, replica=None)),
    ("rank: 1.0, and world is 2", lambda plane: plane.source(1.0)),
    ("has: ids[0] is '[]'", lambda plane: plane.has([[]])),
    ("resume_step: '3'; must be one above", lambda plane: plane.source(0, resume_step="3")),
    ("resume_step: 2.5; must be one above", lambda plane: plane.source(0, resume_step=2.5)),
    ("tasks: batch: None; give 1 to", lambda plane: plane.tasks([], batch=None)),
    ("timeout: 'x'; give seconds", lambda plane: plane.put(named_group("a"), timeout="x")),
    ("timeout: nan; give seconds", lambda plane: plane.put(named_group("a"), timeout=float("nan"))),
    ("timeout: True; give seconds", lambda plane: plane.put_many([named_group("a")], timeout=True)),
    ("timeout: 'x'; give seconds", lambda plane: asyncio.run(plane.aput(named_group("a"), timeout="x"))),
    ("timeout: 'x'; give seconds", lambda plane: asyncio.run(plane.aput_many([named_group("a")], timeout="x"))),
    ("timeout: 'x'; give seconds", lambda plane: plane.group("p", timeout="x")),
    ("timeout: 'x'; give seconds", lambda plane: next(plane.lacking("rewards", timeout="x"))),
    ("timeout: 'x'; give seconds", lambda plane: plane.source(0).step(timeout="x")),
    ("timeout: 'x'; give seconds", lambda plane: plane.source(0).flush(timeout="x")),
    ("discard: rewards: 3; give a list of numbers", lambda plane: plane.discard("why", 1, rewards=3)),
    ("discard: rewards: '12'; give a list of numbers", lambda plane: plane.discard("why", 1, rewards="12")),
    ("discard: rewards: [[]]; give a list of numbers", lambda plane: plane.discard("why", 1, rewards=[[]])),
    ("discard: lengths: 3; give a list of numbers", lambda plane: plane.discard("why", 1, lengths=3)),
    ("discard: lengths: ['x']; give a list of numbers", lambda plane: plane.discard("why", 1, lengths=["x"])),
    ("discard: lengths: [inf]; give a list of numbers", lambda plane: plane.discard("why", 1, lengths=[float("inf")])),
    ("group of 'p': filters: 3; give a list", lambda plane: plane.group("p", filters=3)),
    ("group of 'p': filters: 'x'; give a list", lambda plane: plane.agroup("p", filters="x")),
    ("prompts: 3; give a list of prompts, or a file", lambda plane: next(iter(plane.tasks(3)))),
    ("xxx' is no file", lambda plane: next(iter(plane.tasks("x" * 10**6)))),
    ("tasks: again: None; pass a list of reasons", lambda plane: plane.tasks(["a"], again=None)),
]


@pytest.mark.parametrize(("words", "call"), CALLS, ids=[words[:60] for words, _ in CALLS])
def test_a_value_of_a_wrong_type_is_named(open_plane: OpenPlane, words: str, call: Callable[[ps.Plane], Any]) -> None:
    plane = open_plane(ranks=2)
    with pytest.raises(InvalidInput) as caught:
        call(plane)
    assert words in str(caught.value)
    assert len(str(caught.value)) < 400
    assert plane.status()["counts"]["messages_corrupt"] == 0


@pytest.mark.parametrize("timeout", [2**70, float("inf"), np.float32(60), np.int64(60)])
def test_a_timeout_may_be_any_number(open_plane: OpenPlane, timeout: Any) -> None:
    plane = open_plane(ranks=1, groups_per_step=1)
    assert plane.put(named_group("a"), timeout=timeout)
    source = plane.source(0)
    source.commit(source.step(timeout=timeout))
    source.flush(timeout)
    source.close()


def test_a_priority_may_be_a_large_whole_number(open_plane: OpenPlane) -> None:
    assert open_plane().put(named_group("a"), priority=2**64)


def test_an_advantage_that_is_no_function_is_named() -> None:
    rollout = ps.Trajectory(turns=[ps.Turn([1]), ps.Turn([2], logprobs=[-0.5])], reward=1.0)
    with pytest.raises(InvalidInput, match=r"group 'a'.advantage: 3; give a name"):
        make_group([rollout], id="a", advantage=3)  # type: ignore[arg-type]
