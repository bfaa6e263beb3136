"""Tasks and `WindowedFifo`: trained in the order in which prompts were handed out, and no slow one stops a run."""

from __future__ import annotations

from pathlib import Path

import pytest

import penstock as ps
from penstock.client import Task
from penstock.errors import WaitTimeout
from tests.support.pace import eventually

PROMPTS = ["a", "b", "c", "d", "e", "f"]


def work(task: Task) -> None:
    with task.group() as group:
        for reward in (0.0, 1.0):
            turns = [ps.Turn([1, 2]), ps.Turn([3, 4], logprobs=[-0.5, -0.5])]
            group.add(ps.Trajectory(turns=turns, reward=reward))


def trained(plane: ps.Plane) -> list[tuple[int | None, str]]:
    return [(event.step, event.prompt) for event in plane.feedback() if event.outcome == "trained"]


def test_a_step_waits_for_the_oldest_lease_and_takes_groups_in_order_of_dispatch(tmp_path: Path) -> None:
    sampler = ps.WindowedFifo(target_offpolicy=2, window=0)
    with ps.open(tmp_path, ranks=1, seq_len=64, groups_per_step=2, sampler=sampler) as plane:
        tasks = iter(plane.tasks(PROMPTS, order=ps.Sequential(shuffle=False), batch=len(PROMPTS)))
        a, b, c, d, e, f = [next(tasks) for _ in PROMPTS]
        for task in (d, c, b):
            work(task)
        with plane.source(0, prefetch=0) as source:
            with pytest.raises(WaitTimeout):
                source.step(timeout=0.2)
            eventually(lambda: "has not arrived" in plane.status()["waiting_for"])
            work(a)
            for _ in range(2):
                source.commit(source.step(timeout=60))
            e.give_back()  # nothing waits for it any longer; it is handed out again, behind f
            work(f)
            work(next(tasks))
            source.commit(source.step(timeout=60))
            source.flush()
        assert trained(plane) == [(1, "a"), (1, "b"), (2, "c"), (2, "d"), (3, "f"), (3, "e")]
