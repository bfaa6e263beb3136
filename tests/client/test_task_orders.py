"""Curricula as the order of tasks: over a socket, after restarts, in `rerun`, and what is rejected."""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

import penstock as ps
from penstock.client import Task
from penstock.errors import InvalidInput
from penstock.replay import Curriculum, read_curriculum
from penstock.replay.curricula import MAX_PARAMETERS
from penstock.runs import RecordedRun, rerun
from tests.support.planes import FAST, OpenPlane

NAMES = [f"p{number}" for number in range(8)]
SETTINGS: dict[str, Any] = {"ranks": 1, "seq_len": 64, "groups_per_step": 2, "timeouts": FAST, "retain": "all"}
ARMS = {name: f"arm {int(name[1:]) % 3}" for name in NAMES}
ORDERS: dict[str, Any] = {
    "sequential": ps.Sequential,
    "pools": lambda: ps.DifficultyPools({0.2: 1.0, 0.7: 3.0, 1.0: 0.5}, new=2.0),
    "thompson": lambda: ps.Thompson(candidates=3),
    "arms": lambda: ps.Thompson(arms=ARMS, decay=0.9),
}


def work(task: Task, rng: random.Random) -> None:
    with task.group() as group:
        for _ in range(3):
            turns = [ps.Turn([1, 2]), ps.Turn([3, 4], logprobs=[-0.5, -0.5])]
            group.add(ps.Trajectory(turns=turns, reward=rng.choice([0.0, 0.4, 1.0])))


def train(plane: ps.Plane, steps: int) -> None:
    with plane.source(0, prefetch=0) as source:
        for _ in range(steps):
            source.commit(source.step(timeout=60))
        source.flush()


class Reader:
    """Drives a curriculum from the stream of events, as a user would."""

    def __init__(self, order: Curriculum, seed: int) -> None:
        self.order, self.cursor = order, ""
        order.begin(NAMES, seed)

    def next(self, plane: ps.Plane) -> str:
        for event in plane.feedback(after=self.cursor):
            self.order.observe(event)
            self.cursor = event.cursor
        return str(self.order.next())


@pytest.mark.parametrize("name", ORDERS)
def test_the_plane_leases_what_the_curriculum_gives_to_a_reader_of_the_feedback(name: str, tmp_path: Path) -> None:
    """Over a socket, with restarts of the plane, and decided again by `rerun`."""
    rng, reader, seen = random.Random(name), Reader(ORDERS[name](), seed=5), list[str]()
    for start in range(3):
        listen = ["tcp://127.0.0.1:*"]
        with (
            ps.open(tmp_path / "run", listen=listen, **SETTINGS) as served,
            ps.open(served.url, timeouts=FAST) as plane,
        ):
            tasks = iter(plane.tasks(NAMES, epochs=3, seed=5, order=ORDERS[name]()))
            while len(seen) < 3 * len(NAMES):
                expected = reader.next(plane)  # first: reading events also writes those that wait for a transaction
                task = next(tasks)
                assert task.prompt == expected
                seen.append(task.prompt)
                work(task, rng)
                if len(seen) % 4 == 0:
                    train(plane, 2)
                if len(seen) % 10 == 0:
                    break
            assert plane.demand()["prompts"]["order"] == type(ORDERS[name]()).__name__
            assert plane.demand()["prompts"]["ended"] == (start == 2)  # an epoch has as many tasks as the list prompts
    counts = Counter(seen)
    assert (set(counts.values()) == {3}) == (name == "sequential"), counts
    found = rerun(RecordedRun.open(tmp_path / "run"), tmp_path / "again")
    assert found.same and found.steps == 12, found.sentence


def test_groups_that_are_filtered_teach_as_well(tmp_path: Path) -> None:
    from penstock.convert import ZeroVariance

    order = ps.Thompson(candidates=2)
    with ps.open(tmp_path, **SETTINGS) as plane:
        came: Counter[str] = Counter()
        for task in plane.tasks(["solved", "useful"], epochs=40, order=order):
            came[task.prompt] += 1
            with task.group(filters=[ZeroVariance()]) as group:
                for reward in (1.0, 1.0 if task.prompt == "solved" else 0.0):
                    group.add(ps.Trajectory(turns=[ps.Turn([1, 2]), ps.Turn([3], logprobs=[-0.5])], reward=reward))
            if came["useful"] % 2 == 0 and task.prompt == "useful":
                train(plane, 1)
        assert came.total() == 80 and came["useful"] > 60
        assert plane.demand()["prompts"]["dropped"] == {"zero variance": came["solved"]}


def test_another_order_than_that_of_the_list_is_rejected_with_both(open_plane: OpenPlane) -> None:
    plane = open_plane(ranks=1, groups_per_step=2)
    next(iter(plane.tasks(NAMES, order=ps.Thompson(decay=0.9)))).give_back()
    for other in (None, ps.Sequential(shuffle=False), ps.Thompson(), ps.DifficultyPools({1.0: 1.0})):
        with pytest.raises(InvalidInput, match=r"is in the order Thompson .*0\.9.* give the same order="):
            next(iter(plane.tasks(NAMES, order=other)))
    with pytest.raises(
        InvalidInput, match=r"is in the order Sequential\(shuffle=True\), and is asked for in the order"
    ):
        next(iter(plane.tasks(NAMES, name="other"))).give_back()
        next(iter(plane.tasks(NAMES, name="other", order=ps.Sequential(shuffle=False))))


def test_a_list_with_arms_may_change(open_plane: OpenPlane) -> None:
    plane = open_plane(ranks=1, groups_per_step=2)
    rng, more = random.Random(1), {**ARMS, "new": "arm 9"}
    first = next(iter(plane.tasks(NAMES, order=ps.Thompson(arms=ARMS))))
    work(first, rng)
    came = set()
    for task in plane.tasks([*NAMES, "new"], epochs=5, order=ps.Thompson(arms=more)):
        came.add(task.prompt)
        work(task, rng)
    assert "new" in came
    assert plane.demand()["prompts"]["held"] == 5 * 9


def test_an_order_that_the_plane_cannot_run_says_why(open_plane: OpenPlane) -> None:
    class Mine:
        pass

    plane = open_plane(ranks=1, groups_per_step=2)
    mine: Any = Mine()
    with pytest.raises(InvalidInput, match=r"order: Mine; give ps\.Sequential"):
        next(iter(plane.tasks(NAMES, order=mine)))
    with pytest.raises(InvalidInput, match="prompt 'p7' has no arm"):
        next(iter(plane.tasks(NAMES, order=ps.Thompson(arms=dict.fromkeys(NAMES[:-1], "a")))))
    many = [f"m{number}" for number in range(4097)]
    with pytest.raises(InvalidInput, match="4,097 arms; give at most 4,096"):
        next(iter(plane.tasks(many, order=ps.Thompson(arms={name: name for name in many}))))
    with pytest.raises(InvalidInput, match="max_expiries: 0; give from 1"):
        next(iter(plane.tasks(NAMES, max_expiries=0)))


@pytest.mark.parametrize(
    ("name", "parameters", "words"),
    [
        ("Nope", b"{}", "order 'Nope': not known here; give Sequential, DifficultyPools or Thompson"),
        ("Thompson", b"", "order 'Thompson': Input data was truncated"),
        ("Thompson", b'{"decay": 2.0, "candidates": 8}', "decay 2.0"),
        ("Thompson", b'{"decay": 0.9, "candidates": 1000000}', "candidates 1000000; must be from 1 to 4,096"),
        ("Thompson", b'{"decay": 0.9, "candidates": 8, "code": "x"}', "unknown field `code`"),
        ("DifficultyPools", b'{"pools": [], "new": 1.0}', "give 1 to 256 finite bounds"),
        ("DifficultyPools", b'{"pools": [[1.0]], "new": 1.0}', "of length 2"),
        ("DifficultyPools", b" " * (MAX_PARAMETERS + 1), "65,537 bytes of parameters; give at most 65,536"),
    ],
)
def test_parameters_from_a_wire_are_checked(name: str, parameters: bytes, words: str) -> None:
    with pytest.raises(InvalidInput, match=words):
        read_curriculum(name, parameters, None)
