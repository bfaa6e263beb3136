"""Advantages: the value of each rollout of a group, compared with the others.

An advantage function takes the rollouts of one group and returns one number each. A rollout that failed is not part of
any baseline and gets 0; so does the only rollout of a group. The functions compose with small option objects:

    grpo(rollouts)                               r - mean(r)
    grpo(rollouts, scale=Std())                  (r - mean(r)) / (std(r) + 1e-8), population std
    grpo(rollouts, shape=Efficiency())           correct and shorter than the average correct one counts for more
    grpo(rollouts, shape=LengthPenalty(output=0.1))   longer counts for less
    partial(grpo, scale=Std())                   the same, as a function to pass on

Some have a name as well (`ADVANTAGES`). A function cannot be written to the log, a name can: the plane computes an
advantage given by name when late rewards arrive, also after a restart.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from penstock.capture import Trajectory
from penstock.config import unknown
from penstock.convert.rollouts import Rollouts
from penstock.errors import InvalidInput

Floats: TypeAlias = NDArray[np.float64]
Rewards: TypeAlias = Rollouts | Sequence[float] | NDArray[Any] | Iterable[Trajectory]
Advantage: TypeAlias = Callable[[Rollouts], Floats]
"""[n] advantages of n rollouts."""
Shape: TypeAlias = Callable[[Rollouts], Floats]
"""[n] rewards, changed by what the rollouts cost; sees scored rollouts only."""
Scale: TypeAlias = Callable[[Floats], float]
"""The number to divide the differences by."""


def mean(rewards: Floats) -> Floats:
    """Return the group's mean, as the baseline of every rollout."""
    return np.full(len(rewards), rewards.mean())


def mean_of_others(rewards: Floats) -> Floats:
    """Return for each rollout the mean of the others."""
    others: Floats = (rewards.sum() - rewards) / (len(rewards) - 1)
    return others


@dataclass(frozen=True, slots=True, kw_only=True)
class Std:
    """Divide by the population standard deviation plus `eps`."""

    eps: float = 1e-8

    def __call__(self, rewards: Floats) -> float:
        return float(rewards.std()) + self.eps


def grpo(
    rollouts: Rewards,
    *,
    shape: Shape | None = None,
    baseline: Callable[[Floats], Floats] = mean,
    scale: Scale | None = None,
) -> Floats:
    """Group-relative advantages: each reward against the group's mean.

    Takes rewards, trajectories, or `Rollouts`.

    >>> grpo([1.0, 0.0, 0.0, 1.0]).tolist()
    [0.5, -0.5, -0.5, 0.5]
    >>> grpo([1.0, 0.0], scale=Std()).round(6).tolist()
    [1.0, -1.0]
    """

    def against_group(scored: Rollouts) -> Floats:
        rewards = scored.rewards if shape is None else shape(scored)
        differences = rewards - baseline(rewards)
        return differences if scale is None else differences / scale(rewards)

    return _over_scored(rollouts, against_group)


def leave_one_out(rollouts: Rewards, *, shape: Shape | None = None) -> Floats:
    """Each reward against the mean of the other rollouts: an unbiased baseline.

    >>> leave_one_out([1.0, 0.0, 0.0]).tolist()
    [1.0, -0.5, -0.5]
    """
    return grpo(rollouts, shape=shape, baseline=mean_of_others)


def max_rl(rollouts: Rewards) -> Floats:
    """`(r - mean) / mean`: rare successes weigh more. Zeros when the mean is not positive.

    >>> max_rl([1.0, 0.0, 0.0, 0.0]).tolist()
    [3.0, -1.0, -1.0, -1.0]
    """

    def over_mean(scored: Rollouts) -> Floats:
        center = scored.rewards.mean()
        return (scored.rewards - center) / center if center > 0 else np.zeros(len(scored))

    return _over_scored(rollouts, over_mean)


def raw_rewards(rollouts: Rewards) -> Floats:
    """Return the rewards themselves, without a baseline; 0 for a rollout that failed."""
    group = Rollouts.of(rollouts)
    return np.where(group.scored, np.nan_to_num(group.rewards), 0.0)


def by_agent(advantage: Advantage) -> Advantage:
    """Apply an advantage to each agent's rollouts separately."""

    def split(rollouts: Rollouts) -> Floats:
        names = np.array(rollouts.agents, object)
        out = np.zeros(len(rollouts))
        for name in sorted(set(rollouts.agents)):
            rows = np.flatnonzero(names == name)
            out[rows] = advantage(rollouts.take(rows))
        return out

    return split


@dataclass(frozen=True, slots=True, kw_only=True)
class Efficiency:
    """Raise the reward of correct rollouts that cost less than the average correct one.

    Correct means the group's best reward. `s = r (1 + clamp(1 - cost / mean cost of correct, 0, 1))` for those, `s = r`
    for the rest; unchanged when the best reward is not positive or correct rollouts cost nothing.
    """

    output: float = 1.0
    """Cost of a sampled token."""
    env: float = 1.0
    """Cost of a token of the environment's answers."""
    turns: float = 0.0
    """Cost of a model call."""

    def __call__(self, rollouts: Rollouts) -> Floats:
        rewards = rollouts.rewards
        cost = self.output * rollouts.output_tokens + self.env * rollouts.env_tokens + self.turns * rollouts.turns
        correct = rewards >= rewards.max()
        typical = cost[correct].mean()
        if rewards.max() <= 0 or typical <= 0:
            return rewards
        bonus = np.clip(1 - cost / typical, 0.0, 1.0)
        shaped: Floats = rewards * (1 + bonus * correct)
        return shaped


@dataclass(frozen=True, slots=True, kw_only=True)
class LengthPenalty:
    """Lower every reward by its share of the group's longest, in units of the mean reward.

    `s = r - mean(r) (output * out / max(out) + input * in / max(in) + turns * t / max(t))`, maxima at least 1.
    """

    output: float = 0.0
    input: float = 0.0
    turns: float = 0.0

    def __call__(self, rollouts: Rollouts) -> Floats:
        share = np.zeros(len(rollouts))
        for weight, counts in (
            (self.output, rollouts.output_tokens),
            (self.input, rollouts.input_tokens),
            (self.turns, rollouts.turns),
        ):
            share += weight * counts / max(int(counts.max()), 1)
        shaped: Floats = rollouts.rewards - rollouts.rewards.mean() * share
        return shaped


@dataclass(slots=True, kw_only=True)
class RunningBaseline:
    """`r - b`, where `b` is each agent's decaying average over all groups so far. Works for groups of one.

    Rollout by rollout: advantage `r - b`, then `b <- decay b + (1 - decay) r`. The only advantage with state: save
    `averages` with your checkpoint.
    """

    decay: float = 0.95
    averages: dict[str, float] = field(default_factory=dict)
    """Baseline by agent; starts at 0."""

    def __call__(self, rollouts: Rollouts) -> Floats:
        out = np.zeros(len(rollouts))
        for i in np.flatnonzero(rollouts.scored).tolist():
            agent, reward = rollouts.agents[i], float(rollouts.rewards[i])
            average = self.averages.get(agent, 0.0)
            out[i] = reward - average
            self.averages[agent] = self.decay * average + (1 - self.decay) * reward
        return out


def _over_scored(source: Rewards, advantage: Callable[[Rollouts], Floats]) -> Floats:
    """Apply to the scored rollouts; 0 for the others, and for the only one of its group."""
    rollouts = Rollouts.of(source)
    rows = np.flatnonzero(rollouts.scored)
    out = np.zeros(len(rollouts))
    # A single rollout is its own baseline: the difference is 0, and leave-one-out would divide by 0.
    if len(rows) > 1:
        out[rows] = advantage(rollouts.take(rows))
    if not np.isfinite(out).all():
        raise InvalidInput(f"advantages: {out.tolist()!r:.80}; the shape or scale gave something not finite")
    return out


ADVANTAGES: dict[str, Advantage] = {
    "grpo": grpo,
    "grpo_std": partial(grpo, scale=Std()),
    "leave_one_out": leave_one_out,
    "max_rl": max_rl,
    "raw_rewards": raw_rewards,
}


def advantage_of(given: Advantage | str | None, where: str) -> Advantage | None:
    """Return the advantage that is meant by a name, a function or None. Raises InvalidInput."""
    if isinstance(given, str):
        return advantage_named(given)
    if given is not None and not callable(given):
        raise InvalidInput(f"{where}.advantage: {given!r:.60}; give a name, such as 'grpo', a function, or None")
    return given


def advantage_named(name: str) -> Advantage:
    """Return an advantage by name. Raises InvalidInput.

    >>> advantage_named("grpo")([1.0, 0.0]).tolist()
    [0.5, -0.5]
    """
    if name not in ADVANTAGES:
        raise InvalidInput(f"advantage {name!r:.60}: {unknown(name, ADVANTAGES, 'advantage')}")
    return ADVANTAGES[name]
