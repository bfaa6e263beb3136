"""Masking rules applied to exported values: what another rule, or another threshold, would have masked.

The viewer recomputes these in the browser as thresholds are edited; here is the same arithmetic for lists, sorting
and tests.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from penstock.view.record import Record

ICEPOP_LOW, ICEPOP_HIGH = 0.2, 5.0


def dppo(record: Record, *, high: float = 0.2, low: float = 0.2) -> NDArray[np.bool_]:
    """DPPO by the difference of probabilities; an advantage of 0 or none takes the lower side."""
    columns = record.columns
    delta, advantages = columns["prob_delta"], columns["advantages"]
    with np.errstate(invalid="ignore"):
        masked: NDArray[np.bool_] = np.where(advantages > 0, delta > high, delta < -low)
    return record.loss_mask & masked


def icepop(record: Record, *, low: float = ICEPOP_LOW, high: float = ICEPOP_HIGH) -> NDArray[np.bool_]:
    """IcePop by the ratio, whatever the advantage."""
    ratio = record.columns["importance_ratio"]
    with np.errstate(invalid="ignore"):
        masked: NDArray[np.bool_] = (ratio < low) | (ratio > high)
    return record.loss_mask & masked


def ppo_clip(record: Record, *, low: float = 0.2, high: float = 0.2) -> NDArray[np.bool_]:
    """PPO's clip: tokens whose gradient it stops."""
    columns = record.columns
    ratio, advantages = columns["importance_ratio"], columns["advantages"]
    with np.errstate(invalid="ignore"):
        stopped: NDArray[np.bool_] = ((advantages > 0) & (ratio > 1 + high)) | ((advantages < 0) & (ratio < 1 - low))
    return record.loss_mask & stopped


def disagreement(record: Record) -> int | None:
    """Trained tokens that exactly one of DPPO and IcePop masks, at their defaults; None without ratios."""
    if not {"prob_delta", "importance_ratio", "advantages"} <= set(record.columns):
        return None
    return int(np.count_nonzero(dppo(record) ^ icepop(record)))
