"""Prompts come back as often as they are sampled; a group's id is its own, and recognised when it is put again."""

from __future__ import annotations

from pathlib import Path

import pytest

import penstock as ps
from penstock.errors import InvalidInput
from tests.support.planes import OpenPlane


def collect(plane: ps.Plane, prompt: str, **settings: str) -> str:
    with plane.group(prompt, **settings) as group:  # type: ignore[arg-type]
        for reward in (0.0, 1.0):
            turns = [ps.Turn([1, 2]), ps.Turn([3], logprobs=[-0.5])]
            group.add(ps.Trajectory(turns=turns, reward=reward))
    return group.id


def test_a_prompt_sampled_twice_is_two_groups_of_one_prompt(open_plane: OpenPlane, tmp_path: Path) -> None:
    plane = open_plane(tmp_path / "run", ranks=1, groups_per_step=2)
    names = {collect(plane, "17"), collect(plane, "17")}
    assert len(names) == 2 and all(name.startswith("17#") for name in names)
    with plane.source(rank=0, world=1, resume_step=1) as source:
        batches = list(source.step(timeout=120))
    assert {name for batch in batches for name in batch.segments.groups} == names
    assert {name for batch in batches for name in batch.segments.prompts} == {"17"}
    assert {int(v) for batch in batches for v in batch.segments.policy_versions} == {-1}  # nobody gave one


def test_a_group_put_again_under_its_id_is_recognised(open_plane: OpenPlane, tmp_path: Path) -> None:
    plane = open_plane(tmp_path / "run", ranks=1, groups_per_step=2)
    assert collect(plane, "17", id="17/step-3") == collect(plane, "17", id="17/step-3") == "17/step-3"
    assert plane.status()["held_groups"] == 1


def test_a_policy_version_beyond_the_limit_is_refused_where_it_enters(open_plane: OpenPlane, tmp_path: Path) -> None:
    plane = open_plane(tmp_path / "run", ranks=1, groups_per_step=2)
    with pytest.raises(InvalidInput, match=r"policy_version: .*must be a whole number from 0 to 2\*\*53"):
        plane.group("17", policy_version=2**53 + 1)
    assert plane.status()["held_groups"] == 0
