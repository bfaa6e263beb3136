"""The viewer shows a run that exported nothing: its plane's steps, groups and tokens."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

import penstock as ps
from penstock.errors import InvalidInput, UnknownKey
from penstock.runs import logged_steps
from penstock.view import Export, Library

SETTINGS: Any = {"ranks": 2, "seq_len": 16, "groups_per_step": 2, "max_staleness": None}


def put(plane: ps.Plane, name: str, *, rewards: tuple[float, ...] = (0.0, 1.0), env: str = "math") -> None:
    with plane.group(name.partition("-")[0], id=name, policy_version=0) as group:
        for reward in rewards:
            turns = [ps.Turn([1, 2]), ps.Turn([3, 4, 5], logprobs=[-0.1, -0.2, -0.3])]
            group.add(ps.Trajectory(turns=turns, reward=reward, env=env))


def train(plane: ps.Plane, steps: int) -> None:
    """Two ranks that take and commit each step together."""

    def rank(number: int) -> None:
        with plane.source(number, world=2) as source:
            for _ in range(steps):
                source.commit(source.step(timeout=60))
            source.flush(60)

    with ThreadPoolExecutor(2) as threads:
        list(threads.map(rank, range(2)))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A run of six steps. The frames of the first ones are freed."""
    with ps.open(tmp_path / "run", **SETTINGS, retain_steps=1) as plane:
        for i in range(12):
            put(plane, f"p{i % 3}-{i}", rewards=(0.0, i / 12), env="math" if i % 2 else "code")
        train(plane, 6)
    return tmp_path / "run"


def test_tokens_of_kept_steps_are_shown(folder: Path) -> None:
    library = Library(exports={"run": Export(folder)})
    (run,) = library.overview()["exports"][0]["runs"]
    assert run["source"] == "plane" and run["steps"] and run["steps"][-1] == 6
    step = library.step("run", "", 6)
    assert {row["group_id"] for row in step["samples"]} == {"p1-10", "p2-11"}
    assert {row["rank"] for row in step["samples"]} == {0, 1}
    assert step["summary"]["loss_tokens"] == 12
    assert library.sample("run", "", 6, 0)["record"]


def test_curves_have_every_step_for_good(folder: Path) -> None:
    library = Library(exports={"run": Export(folder)})
    points = library.run("run", "")["steps"]
    assert [point["step"] for point in points] == [1, 2, 3, 4, 5, 6]
    assert points[0]["reward"]["mean"] == pytest.approx((0 + 1 / 12) / 2 / 2)
    assert points[-1]["length"] == {"count": 2, "mean": 5.0, "min": 5.0, "max": 5.0}
    opened = library.overview()["exports"][0]["runs"][0]["steps"]
    assert 1 not in opened, "its frames are freed"
    with pytest.raises(UnknownKey, match="no finished step 1"):
        library.step("run", "", 1)


def test_environments_and_prompts_are_known_after_their_frames_are_freed(folder: Path) -> None:
    found = Library(exports={"run": Export(folder)}).history("run", "")
    assert (found["steps"], found["groups"], found["num_prompts"]) == (6, 12, 3)
    assert {one["env"]: one["groups"] for one in found["envs"]} == {"code": 6, "math": 6}
    first = next(one for one in found["prompts"] if one["prompt"] == "p0")
    assert first["curve"] == pytest.approx([0, 3 / 24, 6 / 24, 9 / 24])
    assert (first["first"], first["last"]) == pytest.approx((0, 9 / 24))


def test_steps_are_read_once_and_again_after_they_are_made_again(folder: Path) -> None:
    before = logged_steps(folder)
    again = logged_steps(folder, before)
    assert again == before and all(a is b for a, b in zip(again, before, strict=True) if not a.is_kept)
    with ps.open(folder, **SETTINGS, retain_steps=1) as plane:
        for i in range(4):
            put(plane, f"more-{i}")
        train(plane, 2)
    later = logged_steps(folder, before)
    assert [step.number for step in later] == list(range(1, 9)) and later == logged_steps(folder)


def test_evaluation_groups_beside_it_leave_the_trained_run_the_chosen_one(folder: Path) -> None:
    with (
        ps.open(folder, **SETTINGS, retain_steps=1) as plane,
        plane.group("e", policy_version=1, evaluation=True) as group,
    ):
        group.add(ps.Trajectory(turns=[ps.Turn([1]), ps.Turn([2], logprobs=[-0.1])], reward=1.0))
    export = Export(folder)
    assert export.runs == ["", "(evaluation)"] and [step.number for step in export.steps()][-1] == 6


def test_a_folder_without_steps_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="no token_exports in it, and no plane with a step"):
        Export(tmp_path)
    assert Library(exports={"x": Export(tmp_path, awaited=True)}).history("x", "") == {"envs": None, "prompts": None}
