"""Filters that look at tokens: hits are counted over sampled tokens only, and what they drop has a reason."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import penstock as ps
from penstock.capture import Trajectory, Turn, from_arrays
from penstock.convert import Filter, Gibberish, Repetition, Rollouts, RolloutTokens, ZeroVariance, make_group
from penstock.errors import InvalidInput
from tests.support import reference as plain

tokens = st.lists(
    st.tuples(st.integers(0, 9), st.sampled_from([-0.001, -0.02, -1.0, -3.0, -9.0]), st.booleans()),
    min_size=1,
    max_size=30,
)


def rollout(rows: list[tuple[int, float, bool]], reward: float = 0.0) -> Trajectory:
    ids, logprobs, sampled = (list(column) for column in zip(*rows, strict=True))
    return from_arrays(ids, sampled, logprobs=[p if s else 0.0 for p, s in zip(logprobs, sampled, strict=True)]
                       if any(sampled) else None, reward=reward)  # fmt: skip


@settings(max_examples=200)
@given(tokens, st.integers(0, 9), st.sampled_from([0.0, 1.0, 6.5]))
def test_gibberish_finds_the_token_that_the_plain_rule_finds(rows: Any, rare_above: int, offset: float) -> None:
    found = Gibberish(vocabulary=10, rare_above=rare_above, offset=offset).first_hit(RolloutTokens.of(rollout(rows)))
    columns = (list(column) for column in zip(*rows, strict=True))
    assert found == plain.gibberish(*columns, rare_above=rare_above, below=-math.log(10) - offset)


@settings(max_examples=200)
@given(tokens, st.integers(1, 6), st.sampled_from([0.5, 0.99]))
def test_repetition_finds_the_run_that_the_plain_rule_finds(rows: Any, window: int, certain: float) -> None:
    found = Repetition(window=window, certain=certain).first_hit(RolloutTokens.of(rollout(rows)))
    _, logprobs, sampled = (list(column) for column in zip(*rows, strict=True))
    assert found == plain.repetition(logprobs, sampled, window=window, above=math.log(certain))


def test_a_hit_is_numbered_over_sampled_tokens_only() -> None:
    turns = [Turn([1, 2, 3]), Turn([4, 5], logprobs=[-0.1, -0.1]), Turn([90, 91]), Turn([6, 95], logprobs=[-0.1, -9.0])]
    seen = RolloutTokens.of(Trajectory(turns=turns, reward=1.0))
    assert Gibberish(vocabulary=100, rare_above=50, offset=2.0).first_hit(seen) == 3
    assert Repetition(window=3, certain=0.9).first_hit(seen) == 2
    assert seen.sampled_ids.tolist() == [4, 5, 6, 95]
    assert seen.mask.tolist() == [False] * 3 + [True] * 2 + [False] * 2 + [True] * 2


def test_what_token_filters_drop_is_counted_by_reason_and_still_in_the_baseline() -> None:
    odd = [(1, 0.0, False), (9, -9.0, True)]
    loop = [(1, 0.0, False), *[(2, -0.001, True)] * 5]
    fine = [(1, 0.0, False), (2, -1.0, True), (3, -1.0, True)]
    rows = [rollout(odd, 1.0), rollout(loop, 1.0), rollout(fine, 0.5), rollout(fine, 1.0)]
    filters: list[Filter] = [Gibberish(vocabulary=10, rare_above=5), Repetition(window=5)]
    group = make_group(rows, id="p", filters=filters)
    assert group.dropped == {"gibberish": 1, "repetition": 1}
    assert [s.id for s in group.samples] == ["p/2", "p/3"] and float(group.samples[1]["advantages"]) == 0.125
    assert group.rollouts.trajectories == ()  # tokens are in the samples, and only there


def test_a_plane_counts_them_in_its_ledger() -> None:
    odd = rollout([(1, 0.0, False), (9, -9.0, True)], 1.0)
    with ps.open("memory:", ranks=1, seq_len=64, groups_per_step=1) as plane:
        with plane.group("17", filters=[Gibberish(vocabulary=10, rare_above=5)]) as group:
            group.add(odd)
            group.add(rollout([(1, 0.0, False), (2, -1.0, True)], 0.0))
        assert plane.ledger.discarded == {"gibberish": 1} and plane.ledger.accepted == 1


def test_a_filter_of_your_own_sees_ids_masks_and_logprobs() -> None:
    class EndsWith:
        reason = "no end"

        def __call__(self, rollouts: Rollouts) -> Any:
            return np.array([rollouts.tokens(i).sampled_ids[-1:].tolist() != [2] for i in range(len(rollouts))])

    rows = [rollout([(1, 0.0, False), (2, -1.0, True)], 1.0), rollout([(1, 0.0, False), (3, -1.0, True)], 0.0)]
    assert make_group(rows, id="p", filters=[ZeroVariance(), EndsWith()]).dropped == {"no end": 1}
    assert Rollouts.of(rows).take(np.array([1])).tokens(0).sampled_ids.tolist() == [3]


def test_tokens_that_are_not_there_are_an_error() -> None:
    with pytest.raises(InvalidInput, match="made of rewards, without tokens"):
        Rollouts.of([1.0, 0.0]).tokens(0)
    with pytest.raises(InvalidInput, match="filter 'repetition': a rollout without log-probabilities"):
        silent = Trajectory(turns=[Turn([1]), Turn([2], sampled=True)], reward=1.0)
        make_group([silent], id="p", filters=[Repetition()])
    assert Repetition(window=1).first_hit(RolloutTokens.of(Trajectory(turns=[Turn([1])], reward=0.0))) is None
    with pytest.raises(InvalidInput, match="window 0, certain"):
        Repetition(window=0)
