from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.capture import Trajectory, Turn
from penstock.convert import (
    Efficiency,
    LengthPenalty,
    Rollouts,
    RunningBaseline,
    Std,
    by_agent,
    grpo,
    leave_one_out,
    max_rl,
    raw_rewards,
)
from penstock.errors import InvalidInput
from tests.support import reference as plain

rewards_lists = st.lists(st.floats(-4, 4, width=32), min_size=1, max_size=9)
counts = st.integers(0, 1000)


def close(found: Any, expected: list[float]) -> bool:
    return bool(np.allclose(found, expected, rtol=1e-12, atol=1e-12))


@given(rewards_lists)
def test_advantages_equal_their_formulas(rewards: list[float]) -> None:
    assert close(grpo(rewards), plain.grpo(rewards))
    assert close(leave_one_out(rewards), plain.leave_one_out(rewards))
    assert np.allclose(max_rl(rewards), plain.max_rl(rewards), rtol=1e-6, atol=1e-9)
    if len(rewards) > 1:
        eps = 0.01
        assert np.allclose(grpo(rewards, scale=Std(eps=eps)), plain.standardized(rewards, eps), rtol=1e-9, atol=1e-9)


@given(st.lists(st.tuples(st.sampled_from([-1.0, 0.0, 0.5, 1.0]), counts, counts, counts), min_size=1, max_size=8))
def test_shaped_rewards_equal_their_formulas(rows: list[tuple[float, int, int, int]]) -> None:
    rewards, out, env, turns = (list(column) for column in zip(*rows, strict=True))
    group = rollouts(rewards, output_tokens=out, env_tokens=env, input_tokens=env, turns=turns)
    cost = [2 * o + 0.5 * e + 3 * t for o, e, t in zip(out, env, turns, strict=True)]
    assert close(Efficiency(output=2, env=0.5, turns=3)(group), plain.efficiency(rewards, cost))
    weighted = [(0.1, out), (0.2, env), (0.3, turns)]
    penalty = LengthPenalty(output=0.1, input=0.2, turns=0.3)
    assert close(penalty(group), plain.length_penalty(rewards, weighted))
    assert close(grpo(group, shape=penalty), plain.grpo(plain.length_penalty(rewards, weighted)))


def rollouts(rewards: list[float], **columns: Any) -> Rollouts:
    base = Rollouts.of(rewards)
    given = {name: np.asarray(values) if name != "agents" else values for name, values in columns.items()}
    fields = {name: getattr(base, name) for name in Rollouts.__dataclass_fields__}
    return Rollouts(**{**fields, **given})


def test_efficiency_by_hand() -> None:
    # Two correct rollouts of 100 and 300 tokens: the average is 200, so the short one gains 1 - 100/200 = a half.
    group = rollouts([1.0, 1.0, 0.0], output_tokens=[100, 300, 50])
    assert Efficiency()(group).tolist() == [1.5, 1.0, 0.0]


@pytest.mark.parametrize("advantage", [grpo, leave_one_out, max_rl, partial(grpo, scale=Std())])
def test_the_only_rollout_of_a_group_gets_zero(advantage: Any) -> None:
    assert advantage([3.0]).tolist() == [0.0]


@pytest.mark.parametrize("advantage", [grpo, leave_one_out, max_rl, raw_rewards, RunningBaseline()])
def test_a_failed_rollout_is_in_no_baseline_and_gets_zero(advantage: Any) -> None:
    group = rollouts([1.0, 0.0, 100.0], errored=[False, False, True])
    found = advantage(group)
    assert found[2] == 0.0
    again = RunningBaseline() if isinstance(advantage, RunningBaseline) else advantage
    assert found[:2].tolist() == again(Rollouts.of([1.0, 0.0])).tolist()


def test_a_flat_group_divides_by_nothing() -> None:
    assert grpo([1.0, 1.0], scale=Std()).tolist() == [0.0, 0.0]
    assert max_rl([0.0, 0.0]).tolist() == [0.0, 0.0]
    with pytest.raises(InvalidInput, match="not finite"), np.errstate(all="ignore"):
        grpo([1.0, 1.0], scale=lambda rewards: 0.0)


def test_running_baseline_by_hand() -> None:
    running = RunningBaseline(decay=0.5)
    assert running(rollouts([1.0, 1.0], agents=("a", "b"))).tolist() == [1.0, 1.0]
    assert running(rollouts([1.0, 1.0], agents=("a", "a"))).tolist() == [0.5, 0.25]
    assert running.averages == {"a": 0.875, "b": 0.5}


def test_by_agent_compares_an_agent_with_itself() -> None:
    group = rollouts([1.0, 0.0, 5.0, 7.0], agents=("solver", "solver", "judge", "judge"))
    assert by_agent(grpo)(group).tolist() == [0.5, -0.5, -1.0, 1.0]


def test_rollouts_count_what_the_trajectories_hold() -> None:
    first = Trajectory(
        turns=[Turn([1, 2]), Turn([3], logprobs=[-1]), Turn([4, 5]), Turn([6], logprobs=[-1]), Turn([9])],
        parents=[-1, 0, 1, 2, 1],
        reward=1.0,
        truncated=True,
    )
    second = Trajectory(turns=[Turn([1])], error="boom", agent="judge")
    group = Rollouts.of([first, second])
    assert group.output_tokens.tolist() == [2, 0]
    assert group.input_tokens.tolist() == [5, 1]
    assert group.env_tokens.tolist() == [3, 0]
    assert group.turns.tolist() == [2, 0]
    assert group.longest.tolist() == [6, 1]
    assert group.scored.tolist() == [True, False]
    assert (group.truncated.tolist(), group.errored.tolist(), group.agents) == (
        [True, False],
        [False, True],
        ("", "judge"),
    )


@pytest.mark.parametrize("bad", [[1.0, float("nan")], [[1.0]], ["x"], [None]])
def test_rewards_that_are_not_numbers_are_refused(bad: Any) -> None:
    with pytest.raises(InvalidInput, match="rewards"):
        grpo(bad)
