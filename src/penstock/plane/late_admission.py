"""Decides about a group whose late columns have arrived or are overdue: advantages, filters, samples to leave out.

Computed once, from metadata and the attached values. The result is written to the log with the decision, so a restart
does not compute it again.
"""

from __future__ import annotations

import logging
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from penstock.arrays import ALL_OR_NONE, TERM_OF_MODE
from penstock.convert import Rollouts, advantage_named, filter_named
from penstock.errors import InvalidInput
from penstock.frames import LATE_COLUMNS, GroupMetadata, LateColumns, with_late
from penstock.plane.late_groups import WaitingGroup

logger = logging.getLogger("penstock.plane")
ERROR = "scored as error"
"""Why samples that could not be scored are not trained."""
MISSING = "columns missing"
"""Why groups are dropped at the deadline."""
_FAILED = "late columns cannot be used"


@dataclass(frozen=True, slots=True)
class Verdict:
    """The decision about a group."""

    metadata: GroupMetadata
    """With its late values."""
    reason: str = ""
    """Why it is dropped; empty: it is trained."""
    left_out: Counter[str] = field(default_factory=Counter)
    """Count of samples that no step takes although their group is trained, by reason."""


def admit(metadata: GroupMetadata, group: WaitingGroup, *, overdue: bool = False, drops: bool = True) -> Verdict:
    """Decide about a group that has its columns, or that waited too long (`overdue`): with `drops` it is dropped."""
    if overdue and drops:
        return Verdict(metadata, MISSING)
    try:
        return _admit(metadata, group)
    except InvalidInput as error:  # an advantage that is not finite
        logger.warning("group %r: dropped: %s", metadata.group, error)
        return Verdict(metadata, _FAILED)


def _admit(metadata: GroupMetadata, group: WaitingGroup) -> Verdict:
    count = metadata.num_samples
    given = {name: np.full(count, np.nan) for name in group.awaited.columns}
    errors = np.zeros(count, np.bool_)
    for name, values in group.given.items():
        for row, value in values.items():
            errors[row] |= value is None
            given[name][row] = np.nan if value is None or isinstance(value, bytes) else value
    late = {name: _narrow(name, values) for name, values in given.items()}
    out, reasons = errors.copy(), Counter({ERROR: int(errors.sum())} if errors.any() else {})
    lacking = _lacking(metadata, group) & ~out
    if lacking.any():
        reasons[MISSING] += int(lacking.sum())
        out |= lacking
    origins = origins_of(metadata)
    rollouts = _rollouts(metadata, given.get("rewards"), errors, origins)
    if group.awaited.advantage:
        advantages = np.asarray(advantage_named(group.awaited.advantage)(rollouts), np.float64)
        late["advantages"] = _narrow("advantages", advantages[origins])
    for name in group.awaited.filters:
        one = filter_named(name)
        drops = one(rollouts)[origins] & ~out
        if drops.any():
            reasons[one.reason] += int(drops.sum())
            out |= drops
    made = with_late(
        metadata,
        LateColumns(
            values=_packed(late),
            left_out=out.tobytes() if out.any() else b"",
            digests=group.digests(count),
        ),
    )
    if out.any() and not any(made.kept_loss_tokens):
        return Verdict(made, reasons.most_common(1)[0][0])
    return Verdict(made, left_out=reasons)


def _lacking(metadata: GroupMetadata, group: WaitingGroup) -> NDArray[np.bool_]:
    """Return [samples], True where a sample lacks a column that its mode or weights need and that frames store.
    Distillation would silently train such a sample towards zeros."""
    count = metadata.num_samples
    modes = metadata.modes if len(metadata.modes) > 1 else metadata.modes * count
    terms, found = np.frombuffer(metadata.term_tokens, "<i8").reshape(-1, 3), np.zeros(count, np.bool_)
    for name in group.awaited.columns:
        if name not in LATE_COLUMNS:
            needed = ALL_OR_NONE.get(name, ())
            places = [TERM_OF_MODE[mode] for mode in needed]
            found[[row for row in group.lacks(name) if modes[row] in needed or terms[row, places].any()]] = True
    return found


def _rollouts(
    metadata: GroupMetadata, late: NDArray[np.float64] | None, errors: NDArray[np.bool_], origins: NDArray[np.intp]
) -> Rollouts:
    """Return the numbers of a group's rollouts. Samples of one rollout have one reward. One that failed, in the
    producer or at the judge, is part of no baseline."""
    count = int(origins.max()) + 1
    rewards, errored, truncated = np.full(count, np.nan), np.zeros(count, np.bool_), np.zeros(count, np.bool_)
    stored = np.frombuffer(metadata.rewards, "<f4").astype(np.float64) if metadata.rewards else None
    cut, failed = (np.frombuffer(flags, np.bool_) for flags in (metadata.truncated, metadata.errored))
    for row, at in enumerate(origins.tolist()):
        values = [late[row] if late is not None else np.nan, stored[row] if stored is not None else np.nan]
        rewards[at] = next((value for value in (rewards[at], *values) if not np.isnan(value)), np.nan)
        errored[at] |= errors[row] or bool(len(failed) and failed[row])
        truncated[at] |= bool(len(cut) and cut[row])
    if stored is not None:
        # Rewards of the put are known as float32. In float64 a judge's 0.3 would differ from theirs: a group of equal
        # rewards would pass the filter for zero variance, and grpo_std would make 0.37 of the difference.
        rewards = _narrow("rewards", rewards).astype(np.float64)
    none = np.zeros(count, np.int64)
    return Rollouts(
        rewards=rewards,
        errored=errored,
        truncated=truncated,
        output_tokens=none,
        input_tokens=none,
        env_tokens=none,
        turns=none,
        longest=none,
        agents=("",) * count,
    )


def origins_of(metadata: GroupMetadata) -> NDArray[np.intp]:
    """Return [samples], the rollout of each sample. `g/3` and `g/3.1` are branches of one rollout, as `make_group`
    names them; a sample with any other name is a rollout of its own."""
    branch = re.compile(re.escape(metadata.group) + r"/(\d+)(\.\d+)?")
    names = [found[1] if (found := branch.fullmatch(name)) else f"sample {name}" for name in metadata.ids]
    places = {name: i for i, name in enumerate(dict.fromkeys(names))}
    return np.array([places[name] for name in names], np.intp)


def _narrow(name: str, values: NDArray[np.float64]) -> NDArray[np.float32]:
    """Return values as samples have them. Raises InvalidInput if one is too large."""
    with np.errstate(over="ignore"):
        found = values.astype("<f4")
    if np.isinf(found).any():
        raise InvalidInput(f"{name}: {values[np.isinf(found)][0]:g}; must be finite in float32")
    return found


def _packed(late: Mapping[str, NDArray[np.float32]]) -> dict[str, bytes]:
    return {name: values.astype("<f4").tobytes() for name, values in late.items() if not np.isnan(values).all()}
