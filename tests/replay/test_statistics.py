"""Statistical tests of prioritized sampling: fixed seeds, and bounds that wrong samplers were seen to fail."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy import stats

from penstock.replay import Freshest, Prioritized, Selector, Table, Uniform, prioritized
from penstock.replay.batch import importance_weights
from penstock.replay.sumtree import SumTree

pytestmark = pytest.mark.deep

TAIL = 1e-4
"""Both tails of a chi-square test are checked: too close to expectation is as wrong as too far."""


@pytest.fixture(params=["tree", "either"])
def path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Draw by the tree alone, or by proposing wherever the index prefers to: the law must be the same."""
    if request.param == "tree":
        monkeypatch.setattr(prioritized, "_MAX_PROPOSALS", 0.0)
    return str(request.param)


def table_of(priorities: NDArray[np.float64], sampler: Selector | None = None, seed: int = 0) -> Table:
    table = Table(
        capacity=len(priorities),
        sampler=sampler or Prioritized(1.0),
        remover=Uniform(),
        max_times_sampled=None,
        seed=seed,
    )
    for number, priority in enumerate(priorities.tolist()):
        table.insert(number, number, priority=priority)
    return table


def draw_many(table: Table, total: int, batch: int) -> NDArray[np.int64]:
    batches = [table.sample(batch, replace=True).keys for _ in range(total // batch)]
    return np.concatenate(batches).astype(np.int64)


def chi_square_p(counts: NDArray[np.int64], expected: NDArray[np.float64]) -> float:
    """Cells expecting fewer than five are pooled, smallest first."""
    order = np.argsort(expected)
    counts, expected = counts[order], expected[order]
    small = int(np.searchsorted(np.cumsum(expected) >= 5, True)) + 1
    small = max(small, int(np.searchsorted(expected, 5)))
    pooled_counts = np.concatenate([[counts[:small].sum()], counts[small:]])
    pooled_expected = np.concatenate([[expected[:small].sum()], expected[small:]])
    return float(stats.chisquare(pooled_counts, pooled_expected).pvalue)


@pytest.mark.parametrize("size", [5, 1000, 1023, 5000])
@pytest.mark.parametrize("exponent", [0.0, 0.6, 1.0])
@pytest.mark.usefixtures("path")
def test_draws_follow_the_priorities(size: int, exponent: float) -> None:
    priorities = np.random.default_rng(size).lognormal(0.0, 0.5, size)
    priorities[::7] = 0.0
    table = table_of(priorities, Prioritized(exponent), seed=size)
    weights = np.where(priorities > 0, np.maximum(priorities, 1e-300) ** exponent, 0.0)
    drawn = draw_many(table, 100_000, 500)
    counts = np.bincount(drawn, minlength=size)
    assert counts[priorities == 0.0].sum() == 0
    live = priorities > 0
    p = chi_square_p(counts[live], len(drawn) * weights[live] / weights.sum())
    assert TAIL < p < 1 - TAIL


@pytest.mark.usefixtures("path")
def test_draws_follow_the_priorities_after_churn() -> None:
    rng = np.random.default_rng(5)
    table = table_of(rng.random(600))
    for number in range(600, 1500):
        table.insert(number, number, priority=float(rng.choice([0.0, 1e-6, 1.0, 1e6])))
        table.update_priorities({int(key): float(rng.choice([0.0, 0.1, 2.0])) for key in rng.integers(0, number, 5)})
    keys = np.array(table.keys())
    priorities = rng.choice([0.0, 1.0, 2.0, 5.0], len(keys))
    table.update_priorities(dict(zip(keys.tolist(), priorities.tolist(), strict=True)))
    drawn = draw_many(table, 100_000, 500)
    counts = np.array([np.count_nonzero(drawn == key) for key in keys])
    assert counts[priorities == 0.0].sum() == 0
    live = priorities > 0
    p = chi_square_p(counts[live], len(drawn) * priorities[live] / priorities.sum())
    assert TAIL < p < 1 - TAIL


@pytest.mark.usefixtures("path")
def test_draws_follow_priorities_that_updates_raised() -> None:
    """All come in alike, then some are raised above anything seen before, as the first losses do."""
    table = table_of(np.ones(400), seed=6)
    priorities = np.random.default_rng(6).choice([0.0, 1.0, 2.0, 4.0], 400)
    handles = np.sort(table.sample(400).handles)
    table.update_handles(handles, priorities)
    counts = np.bincount(draw_many(table, 100_000, 500), minlength=400)
    assert counts[priorities == 0.0].sum() == 0
    live = priorities > 0
    p = chi_square_p(counts[live], 100_000 * priorities[live] / priorities.sum())
    assert TAIL < p < 1 - TAIL


@pytest.mark.usefixtures("path")
def test_zero_priority_items_are_never_drawn() -> None:
    rng = np.random.default_rng(2)
    priorities = 10.0 ** rng.uniform(-9, 9, 20_000)
    priorities[rng.random(20_000) < 0.5] = 0.0
    table = table_of(priorities)
    assert (priorities[draw_many(table, 500_000, 5000)] > 0).all()
    for _ in range(20):
        assert (priorities[table.sample(2000).keys.astype(int)] > 0).all()


TOLERANCE = 0.02
"""Of the dispersion; its standard error with this many items is 0.003."""


def dispersion_of_tiny_weights(draw: Callable[[NDArray[np.float64]], NDArray[np.int64]], size: int) -> float:
    """Variance over mean of the counts of equal, tiny weights; 1.0 if chance alone decides (Poisson)."""
    rng = np.random.default_rng(9)
    counts = np.zeros(size, dtype=np.int64)
    for _ in range(30):
        counts += np.bincount(draw(rng.random(200_000)), minlength=size)
    small = np.delete(counts, [size // 3, size // 2])
    assert small.mean() == pytest.approx(6e6 * 1e-6 / (16 + 1e-6 * (size - 2)), rel=0.02)
    return float(small.var() / small.mean())


def tiny_weights(size: int) -> NDArray[np.float64]:
    """Two items weigh eight million times as much as each of the others."""
    weights = np.full(size, 1e-6)
    weights[[size // 3, size // 2]] = 8.0
    return weights


def test_weights_millions_of_times_smaller_are_drawn_by_chance_alone() -> None:
    weights = tiny_weights(200_000)
    tree = SumTree(len(weights))
    tree.set_many(np.arange(len(weights)), weights)
    total = tree.total()
    spread = dispersion_of_tiny_weights(lambda u: tree.find(u * total), len(weights))
    assert spread == pytest.approx(1.0, abs=TOLERANCE)


def test_single_precision_would_not_pass_for_chance() -> None:
    """The test above can fail: the same sampler in float32 draws some items and never their neighbours."""
    weights = tiny_weights(200_000)
    cumulative = np.cumsum(weights).astype(np.float32)
    top = float(cumulative[-1])
    spread = dispersion_of_tiny_weights(
        lambda u: cumulative.searchsorted((u * top).astype(np.float32), side="right").clip(max=199_999), 200_000
    )
    assert spread > 1.0 + 5 * TOLERANCE


@pytest.mark.usefixtures("path")
def test_draws_within_and_across_batches_are_independent() -> None:
    priorities = np.array([1.0, 2.0, 3.0, 4.0])
    drawn = draw_many(table_of(priorities, seed=11), 200_000, 50)
    p = priorities / priorities.sum()
    pairs = np.bincount(drawn[:-1:2] * 4 + drawn[1::2], minlength=16)
    assert TAIL < chi_square_p(pairs, pairs.sum() * np.outer(p, p).ravel()) < 1 - TAIL
    across = np.bincount(drawn[49:-1:50] * 4 + drawn[50::50], minlength=16)
    assert TAIL < chi_square_p(across, across.sum() * np.outer(p, p).ravel()) < 1 - TAIL


def tuple_probabilities(weights: NDArray[np.float64], count: int) -> dict[tuple[int, ...], float]:
    """Exact probability of each ordered tuple, drawing one by one without replacement."""
    found = {}
    for chosen in itertools.permutations(range(len(weights)), count):
        probability, left = 1.0, float(weights.sum())
        for item in chosen:
            probability *= weights[item] / left
            left -= weights[item]
        found[chosen] = probability
    return found


@pytest.mark.parametrize(
    "weights", [[1.0, 2.0, 3.0, 4.0, 5.0], [100.0, 1.0, 1.0, 1.0, 0.1], [1e6, 1.0, 1.0, 1e-3]], ids=str
)
@pytest.mark.parametrize("count", [2, 3])
@pytest.mark.usefixtures("path")
def test_ordered_tuples_without_replacement_have_their_exact_probabilities(weights: list[float], count: int) -> None:
    # Several streams pooled: of one stream alone, seed 2 with ten thousand draws, p was 8e-6 by chance (none
    # of 600 other seeds came below 1e-3).
    seen: Counter[tuple[int, ...]] = Counter()
    num_draws = 6_000
    for seed in range(4):
        table = table_of(np.array(weights), seed=seed)
        seen.update(tuple(table.sample(count).keys.tolist()) for _ in range(num_draws // 4))
    exact = tuple_probabilities(np.array(weights), count)
    counts = np.array([seen[chosen] for chosen in exact])
    p = chi_square_p(counts, num_draws * np.array(list(exact.values())))
    assert TAIL < p < 1 - TAIL


@pytest.mark.parametrize("replace", [True, False])
@pytest.mark.parametrize("count", [2, 4])
@pytest.mark.usefixtures("path")
def test_dividing_by_inclusion_is_unbiased(replace: bool, count: int) -> None:
    priorities = np.array([8.0, 4.0, 2.0, 1.0, 1.0, 0.5])
    values = np.array([3.0, -1.0, 4.0, 1.0, 5.0, 9.0])
    table = table_of(priorities, seed=21)
    num_batches = 8_000
    estimates = np.empty(num_batches)
    for i in range(num_batches):
        batch = table.sample(count, replace=replace)
        estimates[i] = (values[batch.keys.astype(int)] / batch.inclusion).sum() / len(values)
    error = estimates.std() / np.sqrt(num_batches)
    assert abs(estimates.mean() - values.mean()) < 4 * error
    assert error < 0.1  # or the line above could not fail


def test_dividing_by_n_times_p_without_replacement_is_biased() -> None:
    """Why inclusion is computed at all: the formula for replacement is off by far more than its error."""
    priorities = np.array([8.0, 4.0, 2.0, 1.0, 1.0, 0.5])
    values = np.array([3.0, -1.0, 4.0, 1.0, 5.0, 9.0])
    table = table_of(priorities, seed=21)
    estimates = []
    for _ in range(5000):
        batch = table.sample(4)
        estimates.append((values[batch.keys.astype(int)] / (4 * batch.probabilities)).sum() / len(values))
    assert abs(np.mean(estimates) / values.mean() - 1) > 0.3


@pytest.mark.usefixtures("path")
def test_unbiased_when_the_batch_needs_items_of_priority_zero() -> None:
    values = np.array([3.0, -1.0, 4.0, 1.0, 5.0])
    table = table_of(np.array([2.0, 1.0, 0.0, 0.0, 0.0]), seed=2)
    estimates = []
    for _ in range(3000):
        batch = table.sample(3)
        estimates.append((values[batch.keys.astype(int)] / batch.inclusion).sum() / 5)
    assert np.mean(estimates) == pytest.approx(values.mean(), abs=4 * np.std(estimates) / np.sqrt(3000))


@pytest.mark.parametrize("sampler", [Uniform(), Prioritized(0.0), Freshest()], ids=repr)
@pytest.mark.parametrize("replace", [True, False])
def test_uniform_draws_are_uniform(sampler: Selector, replace: bool) -> None:
    table = table_of(np.ones(50), sampler, seed=3)
    drawn = np.concatenate([table.sample(5, replace=replace).keys for _ in range(10_000)]).astype(int)
    counts = np.bincount(drawn, minlength=50)
    # Without replacement a batch spreads a little more evenly, which scales chi-square by (N - n) / (N - 1).
    statistic = stats.chisquare(counts).statistic / (1.0 if replace else 45 / 49)
    assert TAIL < stats.chi2.sf(statistic, 49) < 1 - TAIL
    batch = table.sample(5, replace=replace)
    assert batch.probabilities.tolist() == pytest.approx([1 / 50] * 5)


def test_weights_are_normalised_by_the_batch_and_follow_beta() -> None:
    priorities = np.concatenate([np.full(99, 1.0), [1e-30]])
    batch = table_of(priorities).sample(10, replace=True)
    assert batch.weights.tolist() == pytest.approx([1.0] * 10)  # a rare item elsewhere shrinks nothing
    inclusion = np.array([0.1, 0.4, 0.2])
    assert importance_weights(inclusion).tolist() == pytest.approx([1.0, 0.25, 0.5])
    assert importance_weights(inclusion, 0.5).tolist() == pytest.approx([1.0, 0.5, 0.5**0.5])
    assert importance_weights(inclusion, 0.0).tolist() == [1.0, 1.0, 1.0]
