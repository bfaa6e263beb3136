"""The planner's parts against plain Python, and the whole against the best possible."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.packing.bins import Caps, Items, best_fit, halve_costliest, polish_row, spread
from penstock.packing.row_targets import forced_costs, level_rows, lower_bound
from penstock.packing.rows import rows_of
from penstock.packing.settings import UNLIMITED
from tests.support import reference_step as reference

CAP = 100


def items_of(lengths: list[int], cap: int = CAP, *, samples: int = UNLIMITED, per_token: float = 50.0) -> Items:
    sizes = np.array(lengths, np.int64)
    return Items.of(
        sizes, per_token * sizes + sizes.astype(np.float64) ** 2, Caps(tokens=cap, samples=samples, patches=UNLIMITED)
    )


def everything(items: Items) -> np.ndarray[tuple[int], np.dtype[np.intp]]:
    return np.arange(len(items.lengths))


lengths_lists = st.lists(st.integers(1, CAP), min_size=1, max_size=40)


@given(lengths_lists)
def test_best_fit_equals_the_plain_scan(lengths: list[int]) -> None:
    items = items_of(lengths)
    assert best_fit(items, items.longest_first(everything(items))) == reference.best_fit(lengths, CAP)


@given(lengths_lists, st.lists(st.integers(0, 20_000), min_size=1, max_size=20))
def test_spread_equals_the_plain_scan(lengths: list[int], targets: list[int]) -> None:
    items = items_of(lengths)
    made = spread(items, items.costliest_first(everything(items)), list(map(float, targets)))
    assert made == reference.spread(lengths, items.costs, list(map(float, targets)), CAP)


@given(st.lists(st.integers(1, 30), min_size=1, max_size=6), st.integers(1, 3), st.integers(30, 60))
def test_the_lower_bound_is_below_the_best_possible_and_the_plan_above_it(
    lengths: list[int], ranks: int, cap: int
) -> None:
    items = items_of(lengths, cap)
    ideal = reference.cheapest_step(lengths, items.costs, ranks, cap)
    rows = rows_of(items, [everything(items)], ranks, overhead=1e-9)
    ours = sum(max(items.cost_of(b) for b in row) for row in rows)
    bound = lower_bound(items, everything(items), ranks)
    assert bound.cost <= ideal * (1 + 1e-9)
    assert ideal <= ours * (1 + 1e-9)
    assert bound.rows <= len(rows)


def test_small_steps_are_planned_close_to_the_best_possible() -> None:
    rng = np.random.default_rng(3)
    excess = []
    for _ in range(60):
        lengths = rng.integers(5, 60, 7).tolist()
        items = items_of(lengths)
        rows = rows_of(items, [everything(items)], 2, overhead=1e-9)
        ours = sum(max(items.cost_of(b) for b in row) for row in rows)
        excess.append(ours / reference.cheapest_step(lengths, items.costs, 2, CAP) - 1)
    assert np.mean(excess) < 0.03


@given(lengths_lists, st.integers(1, 60))
def test_halving_keeps_every_sample_and_reaches_the_count_unless_bins_hold_one_sample(
    lengths: list[int], count: int
) -> None:
    items = items_of(lengths)
    bins = best_fit(items, items.longest_first(everything(items)))
    halved = halve_costliest(items, bins, count)
    assert sorted(i for b in halved for i in b) == list(range(len(lengths)))
    assert len(halved) == max(len(bins), min(count, len(lengths)))
    assert all(halved)


@given(lengths_lists, st.integers(1, 50))
def test_forced_costs_never_rise_and_are_met_by_any_packing(lengths: list[int], count: int) -> None:
    items = items_of(lengths)
    longest_first = items.longest_first(everything(items))
    forced = forced_costs(items, longest_first, count)
    assert (np.diff(forced) <= 0).all()
    actual = sorted((items.cost_of(b) for b in best_fit(items, longest_first)), reverse=True)
    padded = np.array([*actual, *[0.0] * count])[:count]
    assert (forced <= padded + 1e-9).all()


@given(st.lists(st.floats(0, 100), min_size=1, max_size=8), st.floats(0.1, 1000))
def test_levels_reach_the_total_and_never_fall_below_what_is_forced(forced: list[float], total: float) -> None:
    forced.sort(reverse=True)
    levels = level_rows(forced, total)
    assert all(level >= cost - 1e-9 for level, cost in zip(levels, forced, strict=True))
    assert sum(levels) == pytest.approx(max(total, sum(forced)))


@given(st.lists(st.lists(st.integers(1, 20), min_size=1, max_size=8), min_size=2, max_size=6))
def test_polishing_a_row_never_raises_its_maximum_nor_breaks_the_cap(bins: list[list[int]]) -> None:
    lengths = [n for b in bins for n in b]
    items = items_of(lengths, cap=max(sum(b) for b in bins) + 3)
    numbers = iter(range(len(lengths)))
    row = [[next(numbers) for _ in b] for b in bins]
    before = max(items.cost_of(b) for b in row)
    polish_row(items, row, [k % 2 for k in range(len(row))])
    assert max(items.cost_of(b) for b in row) <= before * (1 + 1e-9)
    assert sorted(i for b in row for i in b) == list(range(len(lengths)))
    assert all(sum(lengths[i] for i in b) <= items.caps.tokens for b in row)


def test_polishing_leaves_a_full_bin_alone() -> None:
    lengths = [60, 12, *[10] * 10]
    items = items_of(lengths, cap=100, per_token=0.0)
    row = [[0, 1], list(range(2, 12))]
    polish_row(items, row, [0, 0])
    # 12 against 10 would lower the maximum, but the second bin has no room for two tokens more.
    assert row == [[0, 1], list(range(2, 12))]


def test_polishing_halves_what_two_bins_differ_by() -> None:
    items = items_of([30, 20, 10, 10], cap=100, per_token=0.0)
    row = [[0, 1], [2, 3]]
    polish_row(items, row, [0, 0])
    assert sorted(map(sorted, row)) == [[0, 2], [1, 3]]
    apart = [[0, 1], [2, 3]]
    polish_row(items, apart, [0, 1])
    assert apart == [[0, 1], [2, 3]]


def test_more_rows_are_used_when_the_fewest_leave_no_room_to_balance() -> None:
    rng = np.random.default_rng(0)
    lengths = rng.integers(20, 60, 400).tolist()
    items = items_of(lengths, cap=CAP, per_token=1.0)
    free = rows_of(items, [everything(items)], 4, overhead=1e-9)
    costly = rows_of(items, [everything(items)], 4, overhead=1e9)
    assert len(costly) == -(-len(best_fit(items, items.longest_first(everything(items)))) // 4)
    assert len(free) >= len(costly)
    assert sum(items.cost_of(row[0]) for row in free) <= sum(items.cost_of(row[0]) for row in costly)


def test_rows_come_costliest_first_and_each_holds_the_next_costliest_bins() -> None:
    rng = np.random.default_rng(1)
    items = items_of(rng.integers(1, 80, 200).tolist())
    rows = rows_of(items, [everything(items)], 8, overhead=0.0)
    costs = [items.cost_of(b) for row in rows for b in row]
    assert costs == sorted(costs, reverse=True)
