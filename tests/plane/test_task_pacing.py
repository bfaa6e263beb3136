"""A limiter that bounds leases holds tasks back, says so, and lets them go as training goes on."""

from __future__ import annotations

import random
from dataclasses import dataclass

from penstock.plane.settings import Replay, Target
from penstock.protocol import LeaseTasks, TasksLeased
from penstock.replay import MinSize
from tests.support.planes import OpenEngine
from tests.support.task_model import STALENESS, TaskRun


@dataclass(frozen=True, slots=True)
class Ahead(MinSize):
    """At most one step of groups more than was trained, counted as `Paced` counts."""

    def lease_room(self, *, version: int, groups_per_step: float, accepted: int, running: int) -> int | None:
        return int((version + 1) * groups_per_step) - accepted - running


def test_leases_are_held_back_until_training_goes_on(open_engine: OpenEngine) -> None:
    replay = Replay(max_staleness=STALENESS, capacity=100, limiter=Ahead())
    engine = open_engine(target=Target(groups=2), ranks=1, replay=replay)
    run = TaskRun(engine, random.Random(0))
    run.open([f"n{number}" for number in range(6)], epochs=1)

    def ask() -> TasksLeased:
        answer = run._ask(LeaseTasks(ticket=run.rng.randrange(1 << 60), list="p", count=5, worker="w", lease_s=10.0))
        assert isinstance(answer, TasksLeased)
        return answer

    assert (run.service.room(), run.service.status()["p"]["wanted"]) == (2, 2)
    run.lease(1)
    run.lease(1)
    waits = ask()
    assert (waits.tasks, waits.ended) == ((), False)
    assert waits.waiting_for == "training: Ahead(min_size=1) has no room"
    assert run.service.status()["p"]["wanted"] == 0
    while run.leased:
        run.put()
    assert not ask().tasks  # put, and not trained: they still count
    engine.plan_step(1)
    engine.commit(1, 1)
    assert len(ask().tasks) == 2
