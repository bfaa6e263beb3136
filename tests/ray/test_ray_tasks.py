"""Tasks of a plane on Ray: prompts of a killed actor are leased again, a judge and a teacher attach late columns."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import penstock as ps
from penstock.client import Task
from tests.support.pace import eventually
from tests.support.ray_run import RayRun

NAMES = [f"p{number}" for number in range(6)]


class Sampler:
    """An actor that leases prompts. Its groups have no rewards."""

    def __init__(self, address: str) -> None:
        self._plane = ps.open(address)
        self._tasks: Iterator[Task] = iter(self._plane.tasks(NAMES, lease_s=1.0, order=ps.Thompson()))
        self._held: list[Task] = []

    def hold(self) -> str:
        """Lease a task and keep it."""
        self._held.append(next(self._tasks))
        return self._held[0].prompt

    def finish(self) -> list[str]:
        """Work on everything that is left."""
        done = []
        for task in self._tasks:
            with task.group(advantage="grpo") as group:
                for _ in range(2):
                    group.add(ps.Trajectory(turns=[ps.Turn([1, 2]), ps.Turn([3, 4], logprobs=[-0.1, -0.2])]))
            done.append(task.prompt)
        return done


class Judge:
    """An actor that gives every group its rewards."""

    def __init__(self, address: str) -> None:
        self._plane = ps.open(address)

    def score(self, groups: int) -> int:
        new = 0
        for lease in self._plane.lacking("rewards", groups=4):
            ids = [sample.id for sample in lease.samples]
            new += lease.attach({name: float(number % 2) for number, name in enumerate(ids)}).new
            if new >= 2 * groups:
                break
        return new

    def teach(self, groups: int) -> int:
        """Give every group its values per token."""
        new = 0
        for lease in self._plane.lacking("teacher_logprobs", groups=4):
            new += lease.attach({sample.id: [-0.5] * sample.num_tokens for sample in lease.samples}).new
            if new >= 2 * groups:
                break
        return new


def test_actors_lease_prompts_of_one_that_is_killed_again_and_late_columns_attached(
    new_run: Callable[..., RayRun],
) -> None:
    import ray

    run = new_run(needs=("rewards", "teacher_logprobs"), needs_deadline_s=600)
    samplers = ray.remote(Sampler).options(num_cpus=0)
    victim: Any = samplers.remote(run.address)
    held = ray.get(victim.hold.remote())
    judges = ray.remote(Judge).options(num_cpus=0)
    worker, judge, teacher = samplers.remote(run.address), judges.remote(run.address), judges.remote(run.address)
    ray.kill(victim)
    work = [worker.finish.remote(), judge.score.remote(len(NAMES)), teacher.teach.remote(len(NAMES))]
    done, new, taught = ray.get(work)
    assert held in done and len(done) == len(NAMES)
    assert new == taught == 2 * len(NAMES)
    eventually(lambda: run.plane.status()["held_groups"] == len(NAMES))
    run.join()
    for _ in range(len(NAMES) // 2):
        run.take()
    run.flush()
    trained = [event for event in run.plane.feedback() if event.outcome == "trained"]
    assert sorted(event.prompt for event in trained) == sorted(done)
    assert {event.rewards for event in trained} == {(0.0, 1.0)}
    assert run.plane.demand()["prompts"]["trained"] == len(NAMES)
    assert run.plane.status()["counts"]["leases_expired"] >= 1
    for actor in (worker, judge, teacher):
        ray.kill(actor)
