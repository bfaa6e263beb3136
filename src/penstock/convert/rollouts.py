"""The numbers of a group's rollouts, one array per number, and their tokens for filters that need them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.capture import Trajectory
from penstock.convert.branches import paths
from penstock.errors import InvalidInput, shown


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RolloutTokens:
    """The tokens of one rollout, turn after turn, each once however many branches share it."""

    token_ids: NDArray[np.uint32]
    """[T]"""
    mask: NDArray[np.bool_]
    """[T] True where the model sampled the token."""
    logprobs: NDArray[np.float32] | None
    """[sampled] of the sampler, for the sampled tokens in order; None when not recorded."""

    @staticmethod
    def of(trajectory: Trajectory) -> RolloutTokens:
        recorded = [turn.logprobs for turn in trajectory.turns if turn.num_sampled]
        known = [values for values in recorded if values is not None]
        return RolloutTokens(
            token_ids=np.concatenate([turn.token_ids for turn in trajectory.turns]),
            mask=np.concatenate([turn.sampled_mask for turn in trajectory.turns]),
            logprobs=np.concatenate([np.zeros(0, np.float32), *known]) if len(known) == len(recorded) else None,
        )

    @property
    def sampled_ids(self) -> NDArray[np.uint32]:
        """[sampled]"""
        return self.token_ids[self.mask]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Rollouts:
    """Rewards and counts of the rollouts of one group, in order.

    >>> Rollouts.of([1.0, 0.0]).rewards.tolist()
    [1.0, 0.0]
    """

    rewards: NDArray[np.float64]
    """[n] NaN = not scored."""
    errored: NDArray[np.bool_]
    """[n]"""
    truncated: NDArray[np.bool_]
    """[n]"""
    output_tokens: NDArray[np.int64]
    """[n] sampled tokens."""
    input_tokens: NDArray[np.int64]
    """[n] all other tokens."""
    env_tokens: NDArray[np.int64]
    """[n] input tokens that came after the model's first turn."""
    turns: NDArray[np.int64]
    """[n] model calls."""
    longest: NDArray[np.int64]
    """[n] tokens of the longest sample."""
    agents: tuple[str, ...]
    """[n] the acting agent."""
    trajectories: tuple[Trajectory, ...] = ()
    """[n] for filters that look at tokens. Empty where only rewards are known, and in a group, which stores no tokens
    twice.
    """

    @staticmethod
    def of(source: Rollouts | Sequence[float] | NDArray[Any] | Iterable[Trajectory]) -> Rollouts:
        """Build from trajectories, or from rewards alone (then every count is 0)."""
        if isinstance(source, Rollouts):
            return source
        if not isinstance(source, Iterable):
            raise InvalidInput(f"rewards: {shown(source)}; must be one finite number per rollout")
        items = list(source)
        if items and isinstance(items[0], Trajectory):
            return _of_trajectories(items)
        try:
            rewards = np.asarray(items, np.float64)
        except (TypeError, ValueError):
            raise InvalidInput(f"rewards: {items!r:.80}; must be one finite number per rollout") from None
        if rewards.ndim != 1 or not np.isfinite(rewards).all():
            raise InvalidInput(f"rewards: {items!r:.80}; must be one finite number per rollout")
        none, no = np.zeros(len(rewards), np.int64), np.zeros(len(rewards), np.bool_)
        return Rollouts(
            rewards=rewards,
            errored=no,
            truncated=no,
            output_tokens=none,
            input_tokens=none,
            env_tokens=none,
            turns=none,
            longest=none,
            agents=("",) * len(rewards),
        )

    @property
    def scored(self) -> NDArray[np.bool_]:
        """[n] rollouts that finished and have a reward: a baseline is computed from these."""
        return ~self.errored & ~np.isnan(self.rewards)

    def take(self, rows: NDArray[Any]) -> Rollouts:
        """Return the chosen rollouts (indices or a mask), in that order."""
        chosen = np.arange(len(self))[rows]

        def of(values: Any) -> Any:
            return tuple(values[i] for i in chosen.tolist() if values) if isinstance(values, tuple) else values[chosen]

        return Rollouts(**{f.name: of(getattr(self, f.name)) for f in fields(self)})

    def tokens(self, i: int) -> RolloutTokens:
        """Return the tokens of rollout `i`, gathered on demand."""
        if not self.trajectories:
            raise InvalidInput("rollouts: made of rewards, without tokens; give trajectories to filters of tokens")
        return RolloutTokens.of(self.trajectories[i])

    def __len__(self) -> int:
        return len(self.rewards)


def _of_trajectories(items: Sequence[Any]) -> Rollouts:
    def each(number: Any, dtype: Any = np.int64) -> NDArray[Any]:
        return np.array([number(t) for t in items], dtype)

    return Rollouts(
        rewards=each(lambda t: np.nan if t.reward is None else t.reward, np.float64),
        errored=each(lambda t: t.error is not None, np.bool_),
        truncated=each(lambda t: t.truncated, np.bool_),
        output_tokens=each(lambda t: t.num_output_tokens),
        input_tokens=each(lambda t: t.num_input_tokens),
        env_tokens=each(lambda t: t.num_env_tokens),
        turns=each(lambda t: t.num_turns),
        longest=each(lambda t: max(sum(keep for _, keep in path) for path in paths(t))),
        agents=tuple(t.agent for t in items),
        trajectories=tuple(items),
    )
