"""From trajectories to samples: branches, advantages, filters, groups, and columns that come later."""

from penstock.convert.advantages import (
    Advantage,
    Efficiency,
    LengthPenalty,
    RunningBaseline,
    Std,
    by_agent,
    grpo,
    leave_one_out,
    max_rl,
    raw_rewards,
)
from penstock.convert.attach import attach
from penstock.convert.branches import to_samples
from penstock.convert.filters import (
    AnyErrored,
    Errored,
    Filter,
    Gibberish,
    Repetition,
    TooLong,
    Truncated,
    ZeroVariance,
    apply_filters,
)
from penstock.convert.forks import fork_causes
from penstock.convert.groups import Group, make_group, unique_id
from penstock.convert.rollouts import Rollouts, RolloutTokens

__all__ = [
    "Advantage",
    "AnyErrored",
    "Efficiency",
    "Errored",
    "Filter",
    "Gibberish",
    "Group",
    "LengthPenalty",
    "Repetition",
    "RolloutTokens",
    "Rollouts",
    "RunningBaseline",
    "Std",
    "TooLong",
    "Truncated",
    "ZeroVariance",
    "apply_filters",
    "attach",
    "by_agent",
    "fork_causes",
    "grpo",
    "leave_one_out",
    "make_group",
    "max_rl",
    "raw_rewards",
    "to_samples",
    "unique_id",
]
