"""The columns that `Turn` and `Sample` take as keyword arguments, for type checkers: a misspelt one is an error there.

`columns.py` says what each one is. A test compares the names.
"""

from __future__ import annotations

from typing import TypedDict

from penstock.arrays.coercion import Values


class TurnColumns(TypedDict, total=False):
    """Columns of a turn beside its tokens, mask and log-probabilities."""

    temperatures: Values | None
    advantages: Values | None
    teacher_logprobs: Values | None
    rl_weights: Values | None
    ce_weights: Values | None
    ref_kl_weights: Values | None
    routed_experts: Values | None
    mm_token_type_ids: Values | None
    weight_versions: Values | None
    sampling_mask: Values | None
    teacher_topk_ids: Values | None
    teacher_topk_logprobs: Values | None


class SampleColumns(TurnColumns, total=False):
    """Columns of a sample beside its tokens and mask."""

    logprobs: Values | None
    rewards: Values | None
