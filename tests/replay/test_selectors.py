"""Every selector keeps the promises of the protocol, and each chooses what its name says."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from penstock.errors import ConfigError
from penstock.replay import (
    Draw,
    Fifo,
    Freshest,
    Index,
    Lifo,
    MaxPriority,
    MinPriority,
    Prioritized,
    Selector,
    Table,
    Uniform,
)
from penstock.replay.selector import Role, certain
from penstock.testing.checks import check_selector

ALL: list[Selector] = [
    Fifo(),
    Lifo(),
    Uniform(),
    Prioritized(0.0),
    Prioritized(0.6),
    Prioritized(1.0),
    Prioritized(2.0),
    MinPriority(),
    MaxPriority(),
    Freshest(),
    Freshest(window=2),
]


def replay(sampler: Selector, remover: Selector | None = None, capacity: int = 16) -> Table:
    return Table(capacity=capacity, sampler=sampler, remover=remover or Fifo(), max_times_sampled=None)


def fill(table: Table, priorities: Sequence[float]) -> None:
    for number, priority in enumerate(priorities):
        table.insert(number, number, priority=priority)


@pytest.mark.deep
@pytest.mark.parametrize("selector", ALL, ids=repr)
@pytest.mark.parametrize("seed", [0, 1])
def test_built_in_selectors_conform(selector: Selector, seed: int) -> None:
    check_selector(selector, seed=seed)


@dataclass(frozen=True)
class Forgetful:
    """Does not notice removals: the classic mistake."""

    def build(self, capacity: int, role: Role) -> Index:
        return _ForgetfulIndex()


class _ForgetfulIndex:
    def __init__(self) -> None:
        self.slots: list[int] = []

    def insert(self, slot: int, priority: float, version: int) -> None:
        self.slots.append(slot)

    def remove(self, slots: Sequence[int]) -> None:
        pass

    def update(self, slots: NDArray[np.int64], priorities: NDArray[np.float64]) -> None:
        pass

    def draw(self, count: int, rng: np.random.Generator, *, replace: bool) -> Draw:
        return certain(self.slots[:count])

    def victim(self, rng: np.random.Generator) -> int:
        return self.slots[0]

    def state(self) -> dict[str, NDArray[Any]]:
        return {"slots": np.array(self.slots)}

    def restore(self, state: Mapping[str, NDArray[Any]]) -> None:
        self.slots = state["slots"].tolist()


def test_conformance_catches_a_selector_that_forgets_removals() -> None:
    with pytest.raises(AssertionError, match="Forgetful"):
        check_selector(Forgetful())


def test_conformance_catches_a_selector_with_lost_state() -> None:
    class Amnesiac(Fifo):
        def build(self, capacity: int, role: Role) -> Index:
            index = super().build(capacity, role)
            whole = index.state

            def state() -> dict[str, NDArray[Any]]:
                return whole() | {"next": np.array([capacity])}

            index.state = state  # type: ignore[method-assign]
            return index

    with pytest.raises(AssertionError, match="after restore"):
        check_selector(Amnesiac())


def test_fifo_sampler_advances_and_starts_over_only_at_the_end() -> None:
    table = replay(Fifo())
    fill(table, [1.0] * 5)
    assert [table.sample(2).keys.tolist() for _ in range(4)] == [[0, 1], [2, 3], [4, 0], [1, 2]]


def test_fifo_sampler_takes_newcomers_before_it_repeats() -> None:
    table = replay(Fifo())
    fill(table, [1.0] * 3)
    table.sample(3)
    table.insert("new", "new")
    assert table.sample(2).keys.tolist() == ["new", 0]


def test_fifo_sampler_with_fifo_remover_still_moves_on() -> None:
    table = replay(Fifo(), Fifo(), capacity=4)
    seen = []
    for number in range(12):
        table.insert(number, number)
        if number % 2:
            seen += table.sample(2).keys.tolist()
    assert seen == list(range(12))


def test_lifo_sampler_takes_the_newest_first() -> None:
    table = replay(Lifo())
    fill(table, [1.0] * 4)
    assert table.sample(3).keys.tolist() == [3, 2, 1]


@pytest.mark.parametrize(("sampler", "expected"), [(MinPriority(), [2, 1, 3]), (MaxPriority(), [0, 4, 3])], ids=repr)
def test_extremes_come_in_order_of_priority_and_the_older_of_equals_first(
    sampler: Selector, expected: list[int]
) -> None:
    table = replay(sampler)
    fill(table, [9.0, 2.0, 1.0, 2.0, 9.0])
    if isinstance(sampler, MaxPriority):
        table.update_priorities({1: 0.5})
    assert table.sample(3).keys.tolist() == expected


def test_updated_priority_moves_an_item_in_the_heap() -> None:
    table = replay(MaxPriority())
    fill(table, [1.0, 2.0, 3.0])
    table.update_priorities({0: 10.0, 2: 0.0})
    assert table.sample(3).keys.tolist() == [0, 1, 2]


@pytest.mark.deep
@pytest.mark.parametrize("exponent", [1.0, 0.6])
def test_prioritized_remover_keeps_the_valuable(exponent: float) -> None:
    table = replay(Uniform(), Prioritized(exponent), capacity=500)
    for number, priority in enumerate(np.random.default_rng(3).random(8000).tolist()):
        table.insert(number, priority, priority=priority)
    # Uniform arrivals that leave at a rate of p ** -e have density p ** e, hence this mean. Victims drawn
    # like samples would leave a mean of about 0.2, at random 0.5.
    expected = (exponent + 1) / (exponent + 2)
    assert np.mean(table.sample(500).items.astype(float)) == pytest.approx(expected, abs=0.03)


def test_min_priority_remover_keeps_exactly_the_best() -> None:
    table = replay(Uniform(), MinPriority(), capacity=50)
    priorities = np.random.default_rng(3).random(1000)
    fill(table, priorities.tolist())
    last = 999  # the newcomer is never its own victim
    best = set(np.argsort(priorities)[-50:].tolist())
    assert set(table.keys()) - {last} <= best


def test_prioritized_remover_gives_up_worthless_items_first() -> None:
    table = replay(Uniform(), Prioritized(0.6), capacity=8)
    fill(table, [1e-9, 0.0, 1e-9, 0.0, 1e-9, 0.0, 1e-9, 0.0])
    for number in range(4):
        table.insert(f"new-{number}", None, priority=1e-9)
    assert not {1, 3, 5, 7} & set(table.keys())


def test_lifo_and_uniform_removers_never_evict_the_newcomer() -> None:
    for remover in (Lifo(), Uniform(), MinPriority()):
        table = replay(Uniform(), remover, capacity=4)
        for number in range(50):
            table.insert(number, number, priority=1.0 / (number + 1))
            assert number in table


def test_freshest_draws_only_from_the_window_while_it_lasts() -> None:
    table = replay(Freshest(window=1))
    for version in (5, 6, 7, 5, 6, 7):
        table.insert(len(table), version, policy_version=version)
    drawn = table.sample(200, replace=True)
    assert set(drawn.items.tolist()) == {6, 7}
    batch = table.sample(5)
    assert sorted(batch.items.tolist()[:4]) == [6, 6, 7, 7]
    assert batch.items[4] == 5
    assert batch.num_filled == 1


@pytest.mark.parametrize("exponent", [-0.1, 2.1, float("nan")])
def test_impossible_exponents_are_refused(exponent: float) -> None:
    with pytest.raises(ConfigError, match="exponent"):
        Prioritized(exponent)


def test_negative_window_is_refused() -> None:
    with pytest.raises(ConfigError, match="window"):
        Freshest(-1)


def test_fill_with_zero_priorities_is_counted_and_comes_last() -> None:
    table = replay(Prioritized(0.6))
    fill(table, [0.0, 2.0, 0.0, 3.0, 0.0, 1e-300])
    batch = table.sample(5)
    assert set(batch.keys.tolist()[:3]) == {1, 3, 5}
    assert set(batch.keys.tolist()[3:]) < {0, 2, 4}
    assert batch.num_filled == 2
    assert batch.inclusion.tolist() == pytest.approx([1.0, 1.0, 1.0, 2 / 3, 2 / 3])
    assert table.metrics()["train/filled"] == 2


@pytest.mark.parametrize("exponent", [0.0, 0.6, 1.0])
def test_zero_priority_comes_and_goes_with_updates(exponent: float) -> None:
    table = replay(Prioritized(exponent))
    fill(table, [1.0, 0.0, 1.0, 0.0])
    table.update_priorities({0: 0.0, 1: 5.0})
    assert set(table.sample(200, replace=True).keys.tolist()) == {1, 2}
    assert table.sample(3).num_filled == 1
    table.update_priorities(dict.fromkeys(range(4), 0.0))
    batch = table.sample(200, replace=True)
    assert set(batch.keys.tolist()) == {0, 1, 2, 3}
    assert batch.num_filled == 200
    table.remove([1])
    assert set(table.sample(3).keys.tolist()) == {0, 2, 3}
