"""A lease costs the same with a hundred prompts and with a hundred thousand; a large list does not stop the loop."""

from __future__ import annotations

import random
import time

import pytest

from penstock.plane.settings import Replay, Target
from penstock.replay import DifficultyPools, Thompson
from tests.support.planes import OpenEngine
from tests.support.task_model import MakeOrder, TaskRun

ORDERS: dict[str, MakeOrder | None] = {
    "sequential": None,
    "pools": lambda _names: DifficultyPools({0.2: 1.0, 0.6: 3.0, 1.0: 0.5}),
    "thompson": lambda _names: Thompson(),
    "arms": lambda names: Thompson(arms={name: name[-1] for name in names}),
}


def opened(open_engine: OpenEngine, order: MakeOrder | None, count: int) -> TaskRun:
    engine = open_engine(target=Target(groups=2), ranks=1, replay=Replay(capacity=1000), snapshot_every=1 << 30)
    run = TaskRun(engine, random.Random(0), make_order=order)
    run.open([f"n{number}" for number in range(count)], epochs=1)
    return run


def cost_s(run: TaskRun) -> float:
    """Processor time of a lease and its put: the median of several, so that a pause of the machine does not count."""
    took = []
    for _ in range(30):
        began = time.process_time()
        run.lease(1)
        run.put()
        took.append(time.process_time() - began)
    return sorted(took)[len(took) // 2]


@pytest.mark.deep
@pytest.mark.parametrize("name", ORDERS)
def test_a_lease_costs_the_same_with_few_and_with_many_prompts(open_engine: OpenEngine, name: str) -> None:
    few = opened(open_engine, ORDERS[name], 100)
    many = opened(open_engine, ORDERS[name], 100_000)
    small, large = zip(*((cost_s(few), cost_s(many)) for _ in range(3)), strict=True)
    # A thousand times as many: whatever looks at each of them takes more than five times as long. Twice as long is what
    # a processor's caches cost beside eight busy processes.
    assert min(large) < 5 * min(small) + 0.001


def test_a_changed_list_of_many_prompts_is_taken_in_short_turns(open_engine: OpenEngine) -> None:
    run = opened(open_engine, None, 60_000)
    run.lease(1)
    turns, turn = list[float](), run.turn

    def timed() -> None:
        began = time.process_time()
        turn()
        turns.append(time.process_time() - began)

    run.turn = timed  # type: ignore[method-assign]
    run.open([f"n{number}" for number in range(1000, 70_000)], epochs=1)
    assert len(turns) > 30  # 60,000 and 69,000 names in pieces of 4,096, and the chunks that were sent
    assert sorted(turns)[-3] < sum(turns) / 4, sorted(turns)[-5:]
    assert run.engine.state.tasks.lists["p"].num_live == 69_000
    run.restart()
