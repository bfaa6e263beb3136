"""A conformance test for selectors: run it on your own before you use it in a table.

    from penstock.testing import check_selector
    def test_my_selector(): check_selector(MySelector())

It drives the selector's indexes through thousands of random inserts, removals, updates, draws and evictions, compares
them with a plain set, and raises AssertionError with the operation that went wrong.
"""

from __future__ import annotations

from typing import get_args

import numpy as np

from penstock.replay import Draw, Index, Role, Selector

_CAPACITIES = (1, 2, 7, 33)


def check_selector(selector: Selector, *, seed: int = 0, num_operations: int = 300) -> None:
    """Raise AssertionError unless the selector keeps every promise of `penstock.replay.selector`."""
    assert isinstance(selector, Selector), f"{selector!r} has no method build(capacity, role)"
    roles: tuple[Role, ...] = get_args(Role)
    for role in roles:
        for capacity in _CAPACITIES:
            _Trial(selector, capacity, role, seed).run(num_operations)
    _check_independence(selector)


class _Trial:
    """One index, the set of slots it must hold, and sometimes a twin restored from its state."""

    def __init__(self, selector: Selector, capacity: int, role: Role, seed: int) -> None:
        self.selector, self.capacity, self.role = selector, capacity, role
        self.index = selector.build(capacity, role)
        self.live: set[int] = set()
        self.version = 0
        self.choices = np.random.default_rng([seed, capacity])
        self.rng = np.random.default_rng([seed, capacity, 1])

    def run(self, num_operations: int) -> None:
        operations = (self.insert, self.remove, self.update, self.draw, self.victim, self.continue_from_state)
        for number in range(num_operations):
            operation = operations[self.choices.integers(0, len(operations))]
            try:
                operation()
            except AssertionError as error:
                where = f"{self.selector!r} as {self.role}r, capacity {self.capacity}, operation {number}"
                raise AssertionError(f"{where} ({operation.__name__}): {error}") from error

    def insert(self) -> None:
        dead = sorted(set(range(self.capacity)) - self.live)
        if dead:
            slot = int(self.choices.choice(dead))
            self.version += int(self.choices.integers(0, 2))
            self.index.insert(slot, self._priority(), self.version)
            self.live.add(slot)

    def remove(self) -> None:
        slots = self._some_live()
        self.index.remove(slots)
        self.live -= set(slots)

    def update(self) -> None:
        slots = np.array(self._some_live(), dtype=np.int64)
        priorities = np.array([self._priority() for _ in slots], dtype=np.float64)
        before = slots.copy(), priorities.copy()
        if len(slots):
            self.index.update(slots, priorities)
        same = np.array_equal(slots, before[0]) and np.array_equal(priorities, before[1])
        assert same, "update changed the arrays it was given"

    def draw(self) -> None:
        if not self.live:
            return
        replace = bool(self.choices.integers(0, 2))
        most = 2 * len(self.live) if replace else len(self.live)
        count = int(self.choices.integers(1, most + 1))
        drawn = self.index.draw(count, self.rng, replace=replace)
        _check_draw(drawn, count, self.live, replace=replace)

    def victim(self) -> None:
        if self.live:
            slot = self.index.victim(self.rng)
            assert isinstance(slot, int), f"victim is a {type(slot).__name__}, not an int"
            assert slot in self.live, f"victim {slot} is not live"

    def continue_from_state(self) -> None:
        """Check that a restored index continues exactly as the original, given the same random numbers."""
        twin = self.selector.build(self.capacity, self.role)
        twin.restore(self.index.state())
        if self.live:
            first, second = (_play(index, len(self.live), seed=7) for index in (self.index, twin))
            assert first == second, f"after restore: {second}, the original goes on with {first}"
        self.index = twin

    def _some_live(self) -> list[int]:
        if not self.live:
            return []
        count = int(self.choices.integers(0, min(4, len(self.live)) + 1))
        return [int(slot) for slot in self.choices.choice(sorted(self.live), count, replace=False)]

    def _priority(self) -> float:
        return float(self.choices.choice([0.0, 1e-6, 0.5, 1.0, 1.0, 1e6]))


def _check_draw(drawn: Draw, count: int, live: set[int], *, replace: bool) -> None:
    slots = drawn.slots.tolist()
    assert len(slots) == count, f"{len(slots)} slots drawn, {count} asked for"
    assert set(slots) <= live, f"drew {sorted(set(slots) - live)}, which are not live"
    assert replace or len(set(slots)) == count, f"repeats without replacement: {slots}"
    for name, values, most in (
        ("probabilities", drawn.probabilities, 1.0),
        ("inclusion", drawn.inclusion, float(count) if replace else 1.0),
    ):
        assert values.shape == (count,), f"{name} has shape {values.shape}"
        assert ((values > 0.0) & (values <= most * (1 + 1e-9))).all(), f"{name} outside (0, {most}]: {values}"
    assert 0 <= drawn.num_filled <= count, f"num_filled {drawn.num_filled}"


def _play(index: Index, num_live: int, seed: int) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    draws = [index.draw(1 + i % num_live, rng, replace=False).slots.tolist() for i in range(5)]
    return [*draws, [index.victim(rng)]]


def _check_independence(selector: Selector) -> None:
    """Check that two indexes of one selector share nothing."""
    one, other = selector.build(4, "sample"), selector.build(4, "sample")
    one.insert(0, 1.0, 0)
    other.insert(3, 1.0, 0)
    rng = np.random.default_rng(0)
    drawn = one.draw(1, rng, replace=False).slots.tolist(), other.draw(1, rng, replace=False).slots.tolist()
    assert drawn == ([0], [3]), f"{selector!r}: two indexes share state, drew {drawn}"
