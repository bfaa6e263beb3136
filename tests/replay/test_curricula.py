"""Curricula are functions of the calls before: the same events give the same prompts, and every prompt can come."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.errors import ConfigError, CorruptFile, InvalidInput
from penstock.replay import Curriculum, DifficultyPools, Sequential, Thompson

NAMES = [f"p{i}" for i in range(6)]
POOLS = {0.2: 1.0, 0.8: 2.0, 1.0: 0.5}
MADE: dict[str, Callable[[], Curriculum]] = {
    "sequential": Sequential,
    "pools": lambda: DifficultyPools(POOLS, new=1.5),
    "thompson": lambda: Thompson(candidates=3),
    "arms": lambda: Thompson(arms={name: f"arm{i % 2}" for i, name in enumerate(NAMES)}),
}


@dataclass(frozen=True)
class Event:
    outcome: str = "trained"
    prompt: str = "p0"
    rewards: tuple[float | None, ...] = (1.0, 0.0)
    step: int | None = 1


EVENTS = st.builds(
    Event,
    outcome=st.sampled_from(["trained", "filtered", "dropped", "rewound", "quarantined", "evaluation"]),
    prompt=st.sampled_from([*NAMES, "", "another"]),
    rewards=st.lists(st.sampled_from([0.0, 0.5, 1.0, 7.0, -1.0, None]), max_size=4).map(tuple),
    step=st.none() | st.integers(1, 9),
)
CALLS = st.lists(st.none() | EVENTS, max_size=40)
"""None: ask for the next prompt."""


def started(name: str, seed: int = 0) -> Curriculum:
    made = MADE[name]()
    made.begin(NAMES, seed)
    return made


def play(order: Curriculum, calls: list[Event | None]) -> list[str | None]:
    drawn = []
    for call in calls:
        if call is None:
            drawn.append(order.next())
        else:
            order.observe(call)
    return drawn


@pytest.mark.parametrize("name", MADE)
@settings(max_examples=40)
@given(calls=CALLS, cut=st.integers(0, 40), seed=st.integers(0, 5))
def test_the_same_calls_give_the_same_prompts_also_from_a_saved_state(
    name: str, calls: list[Event | None], cut: int, seed: int
) -> None:
    whole = play(started(name, seed), calls)
    assert set(whole) <= set(NAMES)
    first = started(name, seed)
    before = play(first, calls[:cut])
    again = started(name, seed)
    again.restore(json.loads(json.dumps(first.state())))  # plain data
    assert before + play(again, calls[cut:]) == whole


@pytest.mark.parametrize("name", MADE)
@settings(max_examples=15)
@given(events=st.lists(EVENTS, max_size=30))
def test_every_prompt_can_come_whatever_was_observed(name: str, events: list[Event]) -> None:
    order = started(name)
    play(order, list(events))
    assert {order.next() for _ in range(600)} == set(NAMES)


def test_every_epoch_has_every_prompt_once_in_another_order() -> None:
    order = Sequential()
    order.begin(NAMES, seed=1)
    drawn = [order.next() for _ in range(3 * len(NAMES))]
    epochs = [drawn[i : i + len(NAMES)] for i in range(0, len(drawn), len(NAMES))]
    assert all(sorted(map(str, epoch)) == NAMES for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 3


def test_pools_are_drawn_by_their_weights() -> None:
    order = DifficultyPools({0.5: 1.0, 1.0: 3.0}, new=2.0)
    order.begin(NAMES, seed=3)
    for prompt, reward in (("p0", 0.1), ("p1", 0.2), ("p2", 0.9), ("p3", 5.0)):
        order.observe(Event(prompt=prompt, rewards=(reward,)))
    drawn = Counter(order.next() for _ in range(6000))
    pools = [drawn["p0"] + drawn["p1"], drawn["p2"] + drawn["p3"], drawn["p4"] + drawn["p5"]]
    assert [count / 6000 for count in pools] == pytest.approx([1 / 6, 1 / 2, 1 / 3], abs=0.03)
    assert abs(drawn["p0"] - drawn["p1"]) <= 1  # in a pool they take turns
    order.observe(Event(outcome="filtered", prompt="p0", rewards=(1.0, 1.0)))  # solved: it moves up
    again = Counter(order.next() for _ in range(3000))
    # Half of the draws are of the larger pool, which three prompts share now; the smaller one has a prompt alone.
    assert [again[name] / 3000 for name in ("p0", "p1", "p2")] == pytest.approx([1 / 6] * 3, abs=0.03)


def test_thompson_prefers_prompts_whose_rewards_differ() -> None:
    order = Thompson()
    order.begin(NAMES, seed=0)
    for step in range(1, 60):
        for prompt in NAMES:
            rewards = (1.0, 0.0) if prompt == "p3" else (1.0, 1.0)
            order.observe(Event(prompt=prompt, rewards=rewards, step=step))
    drawn = Counter(order.next() for _ in range(300))
    assert drawn["p3"] > 280


def test_steps_that_are_trained_again_do_not_count_twice() -> None:
    for name in ("pools", "thompson"):
        calm, rewound = started(name), started(name)
        steps = [Event(prompt=f"p{step}", rewards=(0.1 * step, 0.0), step=step) for step in range(1, 5)]
        play(calm, [*steps])
        play(rewound, [*steps[:3], Event(outcome="rewound", prompt="", rewards=(), step=2), *steps[1:]])
        assert [calm.next() for _ in range(50)] == [rewound.next() for _ in range(50)]


def test_what_cannot_be_is_rejected_with_the_value() -> None:
    for pools in ({}, {float("nan"): 1.0}, {0.5: 0.0}, {0.5: -1.0}, {0.5: float("inf")}):
        with pytest.raises(ConfigError, match="DifficultyPools"):
            DifficultyPools(pools)
    for wrong in ({"decay": 0.0}, {"decay": 1.5}, {"candidates": 0}):
        with pytest.raises(ConfigError, match="Thompson"):
            Thompson(**wrong)
    for name in MADE:
        with pytest.raises(InvalidInput, match="no prompts"):
            MADE[name]().begin([], 0)
        with pytest.raises(InvalidInput, match="'p0' is given twice"):
            MADE[name]().begin(["p0", "p1", "p0"], 0)
        with pytest.raises(CorruptFile):
            started(name).restore({**started(name).state(), "drawn": -1})
    other = DifficultyPools(POOLS, new=1.5)
    other.begin(["x"], 0)
    with pytest.raises(CorruptFile, match="the state has 2 pools, not 4"):
        other.restore(DifficultyPools({1.0: 1.0}).state() | {"pools": [[], []]})
    with pytest.raises(InvalidInput, match="seed -1; give 0 or more"):
        other.begin(["x"], -1)
    with pytest.raises(InvalidInput, match="prompt 'p9' has no arm"):
        Thompson(arms={"p1": "a"}).begin(["p9"], 0)
