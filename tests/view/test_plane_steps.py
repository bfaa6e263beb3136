"""The viewer shows a run that exported nothing: its plane's steps, groups and tokens."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
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


def train(plane: ps.Plane, steps: int, *, ranks: int = 2, resume_step: int | None = None) -> None:
    """Ranks that take and commit each step together."""

    def rank(number: int) -> None:
        with plane.source(number, world=ranks, resume_step=resume_step) as source:
            for _ in range(steps):
                source.commit(source.step(timeout=60))
            source.flush(60)

    with ThreadPoolExecutor(ranks) as threads:
        list(threads.map(rank, range(ranks)))


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


def taken(plane: ps.Plane, *, version: int | None = None) -> dict[str, dict[str, list[Any]]]:
    """Train a step of one rank. Returns what the rank got: sample -> column -> values."""
    found = {}
    with plane.source(0) as source:
        step = source.step(timeout=60)
        for batch in step:
            ends = np.cumsum(batch.sequence_lengths)
            for name, first, end in zip(batch.segments.ids, [0, *ends], ends, strict=False):
                found[name] = {column: values[first:end].tolist() for column, values in batch.columns.items()}
        source.commit(step, policy_version=version)
        source.flush(60)
    return found


def assert_shown(folder: Path, step: int, got: dict[str, dict[str, list[Any]]]) -> None:
    """Compare what the viewer shows of a step with what its rank got."""
    library = Library(exports={"run": Export(folder)})
    shown = library.step("run", "", step)
    assert {row["sample_id"] for row in shown["samples"]} == got.keys()
    for at in range(len(got)):
        record = json.loads(bytes(library.sample("run", "", step, at)["record"]))
        columns = got[record["sample_id"]]
        assert record["token_ids"] == columns["token_ids"]
        assert record["loss_mask"] == columns["loss_mask"]
    assert shown["summary"]["loss_tokens"] == sum(sum(columns["loss_mask"]) for columns in got.values())


def test_samples_that_got_an_error_as_late_reward_are_in_no_step(tmp_path: Path) -> None:
    late = {"needs": ("rewards",), "needs_deadline_s": 600.0, "groups_per_step": 1, "ranks": 1}
    with ps.open(tmp_path, **{**SETTINGS, **late}) as plane:
        with plane.group("p", id="g", advantage="grpo") as group:
            for _ in range(3):
                group.add(ps.Trajectory(turns=[ps.Turn([1, 2]), ps.Turn([3, 4, 5], logprobs=[-0.1, -0.2, -0.3])]))
        plane.attach("rewards", {"g": {"g/0": 1.0, "g/2": 0.0}}, errors={"g": {"g/1": "timed out"}})
        got = taken(plane)
    assert got.keys() == {"g/0", "g/2"}
    assert_shown(tmp_path, 1, got)


@pytest.mark.parametrize("over_length", ["truncate", "drop"])
def test_samples_that_were_too_long_are_shown_as_trained(tmp_path: Path, over_length: str) -> None:
    more = {"groups_per_step": 1, "ranks": 1, "over_length": over_length}
    with ps.open(tmp_path, **{**SETTINGS, **more}) as plane:
        with plane.group("p", id="g") as group:
            for reward, count in enumerate((3, 20)):
                answer = ps.Turn(range(count), logprobs=[-0.5] * count)
                group.add(ps.Trajectory(turns=[ps.Turn([1, 2]), answer], reward=float(reward)))
        got = taken(plane)
    assert sorted(len(columns["token_ids"]) for columns in got.values()) == (
        [5, 16] if over_length == "truncate" else [5]
    )
    assert_shown(tmp_path, 1, got)


def test_tokens_that_were_too_old_are_shown_as_not_trained(tmp_path: Path) -> None:
    with ps.open(
        tmp_path,
        **{**SETTINGS, "groups_per_step": 1, "ranks": 1, "max_token_staleness": 1, "untrained_groups": "accept"},
    ) as plane:
        mixed = ps.Sample(
            id="mixed",
            group="old",
            token_ids=[1, 2, 3, 4],
            loss_mask=[False, True, True, True],
            weight_versions=[0, 0, 1, 2],
        )
        whole = ps.Sample(id="whole", group="old", token_ids=[1, 2], loss_mask=[False, True], policy_version=0)
        new = ps.Sample(id="new", group="new", token_ids=[1, 2], loss_mask=[False, True], policy_version=2)
        plane.put([new])
        taken(plane, version=2)
        plane.put([mixed, whole])  # a step that is drawn before version 2 is committed would train them
        got = taken(plane)
    assert [sum(got[name]["loss_mask"]) for name in ("mixed", "whole")] == [2, 0]
    assert_shown(tmp_path, 2, got)


def test_a_step_that_was_planned_again_for_another_number_of_ranks_is_shown_so(folder: Path) -> None:
    library = Library(exports={"run": Export(folder)})
    assert {row["rank"] for row in library.step("run", "", 6)["samples"]} == {0, 1}
    with ps.open(folder, **{**SETTINGS, "ranks": 1}, retain_steps=1) as plane:
        train(plane, 1, ranks=1, resume_step=6)
    assert {row["rank"] for row in library.step("run", "", 6)["samples"]} == {0}


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
