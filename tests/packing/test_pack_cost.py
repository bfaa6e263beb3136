"""Costs: given, from a model's shape, or fitted to what steps really took."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.arrays import Sample
from penstock.errors import ConfigError, InvalidInput
from penstock.packing import Cost, Observation, pack
from tests.packing.small_samples import sample


@pytest.mark.parametrize("field", ["overhead", "per_token", "per_token_squared", "per_patch"])
@pytest.mark.parametrize("value", [math.nan, math.inf, -1.0])
def test_coefficients_must_be_finite_and_not_negative(field: str, value: float) -> None:
    with pytest.raises(ConfigError, match=f"cost.{field}"):
        Cost(**{field: value})


def test_a_cost_of_nothing_is_refused() -> None:
    with pytest.raises(ConfigError, match="every sample would be free"):
        Cost(per_token=0.0, per_token_squared=0.0, per_patch=3.0)


@given(
    st.floats(0, 5),
    st.floats(1e-3, 1),
    st.one_of(st.just(0.0), st.floats(1e-4, 1e-2)),
    st.floats(0, 2),
    st.integers(0, 2**32 - 1),
)
def test_fitting_recovers_the_coefficients_of_exact_times(
    overhead: float, per_token: float, per_token_squared: float, per_patch: float, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    seen = []
    for _ in range(40):
        batches, tokens, patches = int(rng.integers(1, 9)), int(rng.integers(100, 5000)), int(rng.integers(0, 500))
        squares = int(tokens * rng.integers(1, 300))
        seconds = overhead * batches + per_token * tokens + per_token_squared * squares + per_patch * patches
        seen.append(
            Observation(seconds=seconds, tokens=tokens, squares=squares, patches=patches, micro_batches=batches)
        )
    found = Cost.fit(seen)
    scale = max(o.seconds for o in seen)
    for o in seen:
        again = (
            found.overhead * o.micro_batches
            + found.per_token * o.tokens
            + found.per_token_squared * o.squares
            + found.per_patch * o.patches
        )
        assert again == pytest.approx(o.seconds, rel=1e-6, abs=1e-6 * scale)
    assert found.per_token == pytest.approx(per_token, rel=1e-3, abs=1e-5)


def test_costs_fitted_to_the_times_of_packed_steps_are_the_costs_that_made_them() -> None:
    rng = np.random.default_rng(0)
    truth = Cost(overhead=0.2, per_token=2e-4, per_token_squared=3e-8)
    seen = []
    for count in (30, 60, 90, 200, 300):
        samples = [Sample(token_ids=np.ones(n, np.uint32)) for n in rng.integers(10, 2000, count)]
        accounts = pack(samples, ranks=4, seq_len=2048, pad_to_multiple_of=64, cost=truth).accounting
        seen.append(accounts.observed(seconds=accounts.step_cost))
    found = Cost.fit(seen)
    assert found.overhead == pytest.approx(truth.overhead, rel=1e-6)
    assert found.per_token == pytest.approx(truth.per_token, rel=1e-6)
    assert found.per_token_squared == pytest.approx(truth.per_token_squared, rel=1e-6)


def test_a_fit_has_no_negative_coefficient_even_when_noise_asks_for_one() -> None:
    rng = np.random.default_rng(0)
    seen = [
        Observation(seconds=max(1e-3 * n + rng.normal(0, 0.2), 1e-3), tokens=n, squares=n * n)
        for n in rng.integers(100, 3000, 30).tolist()
    ]
    found = Cost.fit(seen)
    assert min(found.overhead, found.per_token, found.per_token_squared, found.per_patch) >= 0
    assert found.per_token * 1000 + found.per_token_squared * 1e6 == pytest.approx(1.0, rel=0.3)


@pytest.mark.parametrize("seconds", [[], [0.0], [math.nan], [-1.0]])
def test_times_that_cannot_be_fitted_are_refused(seconds: list[float]) -> None:
    with pytest.raises(InvalidInput, match="observations"):
        Cost.fit([Observation(seconds=s, tokens=10, squares=100) for s in seconds])


def test_times_that_do_not_grow_with_tokens_are_refused() -> None:
    seen = [Observation(seconds=1.0, tokens=0, squares=0, micro_batches=1) for _ in range(3)]
    with pytest.raises(InvalidInput, match="do not grow with tokens"):
        Cost.fit(seen)


def test_a_mixture_of_experts_weighs_attention_more_than_a_dense_model() -> None:
    dense = Cost.from_model(hidden=2048, layers=48)
    sparse = Cost.from_model(hidden=2048, layers=48, active_parameters=1e9)
    assert dense.per_token / dense.per_token_squared == pytest.approx(6 * 2048)
    assert sparse.per_token / sparse.per_token_squared < dense.per_token / dense.per_token_squared


def test_the_costliest_micro_batch_of_a_row_goes_to_the_rank_with_the_least_so_far() -> None:
    # Two rows of bins that cannot be split: 9, 8 and 7, 5.
    step = pack([sample(n) for n in (9, 8, 7, 5)], ranks=2, seq_len=9)
    assert sorted(sorted(b.num_tokens for b in rank) for rank in step.ranks) == [[5, 9], [7, 8]]


def test_the_cost_decides_what_is_balanced() -> None:
    samples = [sample(40, "long"), *[sample(10, f"s{i}") for i in range(8)]]
    by_tokens = pack(samples, ranks=2, seq_len=100, cost=Cost(per_token=1.0, per_token_squared=0.0))
    assert sorted(rank[0].sample_tokens for rank in by_tokens.ranks) == [60, 60]
    by_squares = pack(samples, ranks=2, seq_len=100, cost=Cost(per_token=0.0, per_token_squared=1.0))
    assert sorted(rank[0].sample_tokens for rank in by_squares.ranks) == [40, 80]
