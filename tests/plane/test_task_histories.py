"""Random histories of tasks against a plain model: leases, deaths, puts, drops, restarts, lists that change."""

from __future__ import annotations

import random
from typing import Any

import pytest

from penstock.plane.settings import Replay, Target
from penstock.replay import DifficultyPools, Fifo, Thompson, WindowedFifo
from tests.support.planes import OpenEngine
from tests.support.task_model import STALENESS, MakeOrder, TaskRun

ACTIONS = {
    TaskRun.run_out: 1,
    TaskRun.give_back: 2,
    TaskRun.put: 8,
    TaskRun.train: 3,
    TaskRun.lose: 1,
    TaskRun.undo: 1,
    TaskRun.settle: 1,
    TaskRun.restart: 1,
}

SAMPLERS = (Fifo(), WindowedFifo(target_offpolicy=1, window=0.3))


ORDERS: dict[str, MakeOrder] = {
    "pools": lambda _names: DifficultyPools({0.2: 1.0, 0.6: 3.0, 1.0: 0.5}, new=2.0),
    "thompson": lambda _names: Thompson(candidates=4, decay=0.9),
    "arms": lambda names: Thompson(arms={name: f"arm {int(name[1:]) % 3}" for name in names}),
}


def seeds(first: int, end: int) -> list[Any]:
    """All are run by `make test`, the first quarter by `make test-fast`."""
    few = first + (end - first) // 4
    return [*range(first, few), *(pytest.param(seed, marks=pytest.mark.deep) for seed in range(few, end))]


def live(open_engine: OpenEngine, seed: int, *, changes: bool, order: MakeOrder | None = None) -> TaskRun:
    rng = random.Random(seed)
    engine = open_engine(
        target=Target(groups=2),
        ranks=1,
        replay=Replay(sampler=SAMPLERS[seed % 2], max_staleness=STALENESS, capacity=1000),
        snapshot_every=rng.choice([5, 1 << 30]),
    )
    run = TaskRun(engine, rng, make_order=order, max_expiries=rng.choice([None, 1, 2, 3]))
    names = [f"n{number}" for number in range(rng.randrange(1, 9))]
    run.open(names, epochs=2, attempts=rng.randrange(1, 5), seed=seed)
    for _ in range(60):
        if rng.random() < 0.4:
            run.lease(rng.randrange(1, 4))
        elif changes and rng.random() < 0.05:
            pool = [f"n{number}" for number in range(12)]
            run.open(rng.sample(pool, rng.randrange(1, 12)), epochs=2, attempts=run.attempts, seed=seed)
        else:
            rng.choices(list(ACTIONS), list(ACTIONS.values()))[0](run)
        run.check()
    return run


@pytest.mark.parametrize("seed", seeds(0, 25))
def test_every_history_agrees_with_the_model_and_every_prompt_is_trained_once_per_epoch(
    open_engine: OpenEngine, seed: int
) -> None:
    finish(live(open_engine, seed, changes=False))


def finish(run: TaskRun) -> None:
    for _ in range(400):  # honest workers from here on: the rest is trained
        run.lease(4)
        run.put()
        run.train()
        run.restart() if run.rng.random() < 0.05 else None
        if run.service.is_over(run.engine.state.tasks.lists["p"]):
            break
        if run.rng.random() < 0.2:
            run.run_out()
    run.check()
    places = {one[0] for one in run.state.values()}
    assert places <= {"trained", "dropped", "held", "aside"}  # too few are left for a step, at the end
    assert sum(one[0] == "held" for one in run.state.values()) < 2


@pytest.mark.parametrize("seed", seeds(1000, 1025))
def test_a_list_that_changes_loses_nothing_and_repeats_nothing(open_engine: OpenEngine, seed: int) -> None:
    run = live(open_engine, seed, changes=True)
    run.restart()
    run.check()
    run.check_events()


@pytest.mark.parametrize("name", ORDERS)
@pytest.mark.parametrize("seed", seeds(2000, 2008))
def test_a_curriculum_draws_from_the_log_what_it_draws_from_the_stream_of_events(
    open_engine: OpenEngine, name: str, seed: int
) -> None:
    run = live(open_engine, seed, changes=seed % 2 == 0, order=ORDERS[name])
    finish(run)
    run.check_events()
