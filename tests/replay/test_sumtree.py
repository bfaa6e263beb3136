"""The tree of sums: equal to cumsum and searchsorted on the same numbers, and free of drift."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from penstock.replay.sumtree import MAX_PENDING, TOP, SumTree

CAPACITIES = [1, 2, 3, 1000, TOP, TOP + 1, 3 * TOP, 100_000]


def mixed_weights(rng: np.random.Generator, count: int) -> NDArray[np.float64]:
    """Twelve orders of magnitude, a fifth of them zero."""
    weights = 10.0 ** rng.uniform(-6, 6, count)
    weights[rng.random(count) < 0.2] = 0.0
    return weights


def check_against_cumsum(tree: SumTree, leaves: NDArray[np.float64], uniforms: NDArray[np.float64]) -> None:
    """The same uniforms must find the same slots, but for those within rounding of a boundary."""
    cumulative = np.cumsum(leaves)
    total = cumulative[-1]
    assert tree.total() == pytest.approx(total, rel=1e-12)
    found = tree.find(uniforms * tree.total())
    expected = cumulative.searchsorted(uniforms * total, side="right")
    wrong = np.flatnonzero(found != expected)
    distance = np.abs(cumulative[:, None] - uniforms[None, wrong] * total).min(axis=0)
    assert (distance <= 1e-12 * total).all(), f"{len(wrong)} draws differ, by up to {distance.max()}"


@pytest.mark.parametrize("capacity", CAPACITIES)
def test_finds_what_cumsum_and_searchsorted_find(capacity: int) -> None:
    rng = np.random.default_rng(capacity)
    for _ in range(5):
        leaves = mixed_weights(rng, capacity)
        leaves[rng.integers(0, capacity)] = 1.0
        tree = SumTree(capacity)
        tree.set_many(np.arange(capacity), leaves)
        check_against_cumsum(tree, leaves, rng.random(512))


@given(st.integers(0, 2**32 - 1), st.sampled_from([1, 5, TOP - 1, TOP + 7, 5 * TOP]))
def test_stays_equal_to_cumsum_through_any_mix_of_writes(seed: int, capacity: int) -> None:
    rng = np.random.default_rng(seed)
    leaves = np.zeros(capacity)
    tree = SumTree(capacity)
    for _ in range(12):
        kind = rng.integers(0, 4)
        if kind == 0:
            slot, weight = int(rng.integers(0, capacity)), float(mixed_weights(rng, 1)[0])
            tree.set(slot, weight)
            leaves[slot] = weight
        elif kind == 1:
            slots = rng.integers(0, capacity, int(rng.integers(1, 3000)))  # repeats: the last one counts
            weights = mixed_weights(rng, len(slots))
            tree.set_many(slots, weights)
            for slot, weight in zip(slots.tolist(), weights.tolist(), strict=True):
                leaves[slot] = weight
        elif kind == 2:
            emptied = rng.integers(0, capacity, 3).tolist()
            tree.clear(emptied)
            leaves[emptied] = 0.0
        elif leaves.any():
            check_against_cumsum(tree, leaves, rng.random(64))
    tree.total()
    assert np.array_equal(tree.weights[:capacity], leaves)


def test_does_not_drift_over_a_million_updates_of_mixed_magnitude() -> None:
    capacity = 20_000
    rng = np.random.default_rng(0)
    tree = SumTree(capacity)
    for _ in range(1000):
        tree.set_many(rng.integers(0, capacity, 1000), rng.choice([0.0, 1e-3, 1.0, 1e9], 1000))
        if rng.random() < 0.1:
            tree.total()
    tree.set_many(np.arange(capacity), np.where(np.arange(capacity) % 2, 1e-3, 0.0))
    exact = math.fsum(tree.weights.tolist())
    assert abs(tree.total() - exact) / exact < 1e-12  # sums kept by differences are off by 1e-2 here
    drawn = tree.find(rng.random(100_000) * tree.total())
    assert (drawn % 2 == 1).all(), "an item of weight zero was drawn"


def test_the_sum_is_a_function_of_the_leaves_alone() -> None:
    capacity = 50_000
    rng = np.random.default_rng(1)
    worn, fresh = SumTree(capacity), SumTree(capacity)
    for _ in range(200):
        worn.set_many(rng.integers(0, capacity, 300), mixed_weights(rng, 300))
        worn.total()
    worn.total()
    fresh.set_many(np.arange(capacity), worn.weights[:capacity])
    uniforms = rng.random(4096)
    assert worn.total() == fresh.total()
    assert np.array_equal(worn.find(uniforms * worn.total()), fresh.find(uniforms * fresh.total()))


def test_total_is_zero_exactly_when_all_weights_are() -> None:
    tree = SumTree(10_000)
    assert tree.total() == 0.0
    tree.set(9_999, 1e-300)
    assert tree.total() > 0.0
    tree.set(9_999, 0.0)
    assert tree.total() == 0.0


def test_every_target_below_the_total_finds_a_slot() -> None:
    """The total and the bounds are sums of the same numbers in another order, so they differ in the last bits."""
    rng = np.random.default_rng(2)
    for capacity in (3, TOP, 2 * TOP):
        for _ in range(50):
            tree = SumTree(capacity)
            tree.set_many(np.arange(capacity), mixed_weights(rng, capacity))
            found = tree.find(np.array([0.0, np.nextafter(tree.total(), 0.0)]))
            assert ((found >= 0) & (found < len(tree.weights))).all()


def test_more_writes_than_are_ever_deferred_are_all_seen() -> None:
    capacity = 4 * MAX_PENDING
    tree = SumTree(capacity)
    for start in range(0, capacity, MAX_PENDING // 2):
        tree.set_many(np.arange(start, start + MAX_PENDING // 2), np.ones(MAX_PENDING // 2))
    for slot in range(0, capacity, 2):
        tree.set(slot, 0.0)
    assert tree.total() == capacity / 2


def test_the_ceiling_is_never_below_a_weight_and_comes_down_when_asked() -> None:
    tree = SumTree(10)
    tree.set(3, 100.0)
    tree.set(3, 1.0)
    tree.set_many(np.array([4, 5]), np.array([7.0, 2.0]))
    assert tree.ceiling == 100.0
    tree.lower_ceiling()
    assert tree.ceiling == 7.0
    tree.set_many(np.array([1, 2]), np.array([3.0, 9.0]))
    assert tree.ceiling == 9.0
