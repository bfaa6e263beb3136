"""A group that waits for late columns holds its place in the order of dispatch, as an open lease does."""

from __future__ import annotations

import random
from typing import Any

import pytest
import xxhash

from penstock.frames import encode
from penstock.plane.settings import Replay, Target
from penstock.protocol import AttachValues, GiveBack
from penstock.replay import WindowedFifo
from tests.replay.test_windowed_fifo import plainly_allowed
from tests.support.engines import DirectEngine, train_next
from tests.support.groups import named_group
from tests.support.planes import OpenEngine
from tests.support.task_model import TaskRun

GROUPS = 2


def opened(open_engine: OpenEngine, window: float, target: int = 2, **settings: Any) -> DirectEngine:
    return open_engine(
        ranks=1,
        target=Target(groups=GROUPS),
        replay=Replay(sampler=WindowedFifo(target, window), capacity=1000),
        needs=("rewards",),
        needs_deadline_s=3600.0,
        **settings,
    )


def put(engine: DirectEngine, name: str, *, late: bool, env: str = "") -> int:
    """Returns the op."""
    samples = named_group(name, env=env)
    if late:
        samples = [sample.replace(rewards=None, advantages=None) for sample in samples]
    frame = encode(samples)
    advantage = "grpo" if late else ""
    assert engine.pipeline.put(name, name, xxhash.xxh3_128_digest(frame), frame, advantage=advantage) is None
    engine.pipeline.begin()
    engine._workers.finish()
    assert [outcome.error for outcome in engine.flush()] == [None]
    return engine.state.by_id[name]


def score(engine: DirectEngine, name: str, *, fails: bool = False) -> None:
    names = [f"{name}/{i}" for i in range(2)]
    values = {} if fails else {name: {names[0]: 0.0, names[1]: 1.0}}
    errors = {name: dict.fromkeys(names, "broken")} if fails else {}
    engine.late.offer("t", AttachValues(ticket=1, column="rewards", values=values, errors=errors))
    engine.late.flush()


def test_training_waits_for_a_reward_in_order_of_dispatch_and_goes_on_when_it_is_there(open_engine: OpenEngine) -> None:
    engine = opened(open_engine, window=0.0)
    first = put(engine, "slow", late=True)
    for name in "ab":
        put(engine, name, late=False)
    assert f"dispatch {first} has not arrived" in str(train_next(engine))
    engine.recorder.rebuild()
    assert isinstance(train_next(engine), str)
    score(engine, "slow")
    assert train_next(engine) == ["slow", "a"]


def test_a_group_that_is_dropped_while_it_waits_holds_nothing_back(open_engine: OpenEngine) -> None:
    engine = opened(open_engine, window=0.0)
    put(engine, "slow", late=True)
    for name in "ab":
        put(engine, name, late=False)
    score(engine, "slow", fails=True)
    assert train_next(engine) == ["a", "b"]


def test_a_put_without_rewards_opens_no_second_window_for_younger_groups(open_engine: OpenEngine) -> None:
    engine = opened(open_engine, window=0.5)  # 6 in flight: two may overtake, and 3 that wait are enough
    tasks = TaskRun(engine, random.Random(0))
    tasks.open(["slow"], epochs=1)
    tasks.lease(1)
    ((number, task),) = tasks.leased.items()
    for name in "ab":
        put(engine, name, late=False)
    assert train_next(engine) == ["a", "b"]
    put(engine, task.group, late=True)
    for name in "cd":
        put(engine, name, late=False)
    assert f"dispatch {number} has not arrived, and 2 of at most 2" in str(train_next(engine))
    score(engine, task.group)
    assert train_next(engine) == [task.group, "c"]


def test_an_environment_waits_for_its_own_rewards_only(open_engine: OpenEngine) -> None:
    engine = opened(open_engine, window=0.0, env_weights={"math": 1.0, "code": 1.0})
    put(engine, "slow", late=True, env="math")
    for name, env in (("a", "code"), ("b", "math"), ("c", "code")):
        put(engine, name, late=False, env=env)
    assert not engine.tenant_tables.table("math").may_sample(1)
    assert engine.tenant_tables.table("code").may_sample(2)
    score(engine, "slow")
    assert sorted(train_next(engine)) == ["a", "slow"]


class Model:
    """Every dispatch with what became of it, beside an engine with tasks and late rewards."""

    def __init__(self, engine: DirectEngine, rng: random.Random) -> None:
        self.engine, self.rng = engine, rng
        self.tasks = TaskRun(engine, rng)
        self.tasks.open([f"n{number}" for number in range(200)], epochs=1)
        self.places: dict[int, str] = {}
        self.names: dict[int, str] = {}
        self.late: set[int] = set()
        self._seen: set[int] = set()

    def lease(self) -> None:
        self.tasks.lease(self.rng.randrange(1, 4))
        for number in self.tasks.leased.keys() - self._seen:
            self._seen.add(number)
            self.places[number], self.names[number] = "expected", self.tasks.leased[number].group

    def put(self) -> None:
        leased = [number for number in self._seen if self.places.get(number) == "expected" and number not in self.late]
        is_late = self.rng.random() < 0.6
        if leased and self.rng.random() < 0.8:
            number = self.rng.choice(sorted(leased))
            put(self.engine, self.names[number], late=is_late)
        else:
            name = f"other-{len(self.names)}"
            number = put(self.engine, name, late=is_late)
            self.names[number] = name
        self.places[number] = "expected" if is_late else "held"
        if is_late:
            self.late.add(number)

    def score(self) -> None:
        if self.late:
            number = self.rng.choice(sorted(self.late))
            self.late.discard(number)
            fails = self.rng.random() < 0.2
            score(self.engine, self.names[number], fails=fails)
            if fails:
                del self.places[number]
            else:
                self.places[number] = "held"

    def give_back(self) -> None:
        leased = [number for number in self._seen if self.places.get(number) == "expected" and number not in self.late]
        if leased:
            number = self.rng.choice(sorted(leased))
            self.tasks._ask(GiveBack(ticket=1, leases=(number,), reason="too hard"))
            del self.places[number]

    def restart(self) -> None:
        self.engine.recorder.rebuild()

    def train_next(self, window: int, enough: int) -> None:
        allowed = plainly_allowed(dict(self.places), window, enough)
        found = train_next(self.engine)
        if len(allowed) < GROUPS:
            assert isinstance(found, str), (found, allowed, self.places)
            return
        assert found == [self.names[number] for number in allowed[:GROUPS]]
        self.places |= dict.fromkeys(allowed[:GROUPS], "taken")


@pytest.mark.parametrize("seed", range(12))
def test_every_history_agrees_with_a_plain_list(open_engine: OpenEngine, seed: int) -> None:
    rng = random.Random(seed)
    fraction, target = rng.choice([0.0, 0.3, 0.7]), rng.randrange(1, 4)
    flight = (target + 1) * GROUPS
    window = max(1, int(fraction * flight))
    model = Model(opened(open_engine, fraction, target), rng)
    acts = [model.lease, model.put, model.put, model.put, model.score, model.score, model.give_back, model.restart]
    for _ in range(80):
        rng.choice(acts)()
        model.train_next(window, max(GROUPS, flight - window))
    assert sum(place == "taken" for place in model.places.values()) > 4
