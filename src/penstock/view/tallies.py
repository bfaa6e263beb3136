"""Sums over the trained tokens of a step, for the viewer's curves and `penstock tokens`."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Annotated, Any, TypeAlias

import msgspec
import numpy as np

from penstock.arrays import Array
from penstock.view.record import Record

MEASURED = ("mismatch_kl", "entropy", "loss")
MASKS = ("is_masked", "is_masked_high", "is_masked_low")
OF_SAMPLES = ("reward", "length", "staleness")


Count: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=2**62)]
"""Bounded, because a marker on disk may contain anything and sums of counts are written again."""


class Moments(msgspec.Struct, frozen=True, kw_only=True):
    """Count, mean and extremes of finite numbers."""

    count: Annotated[int, msgspec.Meta(gt=0, le=2**62)]
    mean: float
    min: float
    max: float

    @staticmethod
    def of(values: Array) -> Moments | None:
        """Return the moments of the finite values, None if there are none."""
        total = float(values.sum(dtype=np.float64))
        if not np.isfinite(total):  # some value is NaN or infinite: rare, so filter only then
            values = values[np.isfinite(values)]
            total = float(values.sum(dtype=np.float64))
        if not len(values):
            return None
        return Moments(count=len(values), mean=total / len(values), min=float(values.min()), max=float(values.max()))

    def plus(self, other: Moments) -> Moments:
        """Return the moments of both sets of numbers."""
        count = self.count + other.count
        mean = (self.mean * self.count + other.mean * other.count) / count
        return Moments(count=count, mean=mean, min=min(self.min, other.min), max=max(self.max, other.max))


class Summary(msgspec.Struct, frozen=True, kw_only=True):
    """A tally as in markers, `penstock tokens --json` and the viewer. None where nothing was counted."""

    records: Count
    tokens: Count
    loss_tokens: Count
    compared_tokens: Count
    masked: dict[str, Count]
    masked_fraction: dict[str, float]
    """Fractions of the compared tokens."""
    mismatch_kl: Moments | None = None
    entropy: Moments | None = None
    loss: Moments | None = None
    reward: Moments | None = None
    length: Moments | None = None
    staleness: Moments | None = None
    idle: Count | None = None
    """Records that train nothing; None in markers of earlier versions."""


@dataclass(slots=True)
class Tally:
    """Sums over records, or over the tallies of ranks."""

    records: int = 0
    tokens: int = 0
    loss_tokens: int = 0
    masked: dict[str, int] = field(default_factory=lambda: dict.fromkeys(MASKS, 0))
    compared_tokens: int = 0
    """Trained tokens of records with known masks: the denominator of masked fractions."""
    idle: int | None = 0
    """Records that train nothing; None if that is not known of some."""
    moments: dict[str, Moments] = field(default_factory=dict)
    """By name, of MEASURED over trained tokens and of OF_SAMPLES over records. Absent if nothing was counted."""

    def add(self, record: Record) -> None:
        columns, mask = record.columns, record.columns["loss_mask"]
        trained = int(np.count_nonzero(mask))
        self.records += 1
        self.idle = None if self.idle is None else self.idle + (not trains(record))
        self.tokens += len(mask)
        self.loss_tokens += trained
        for name in MEASURED:
            if name in columns:
                self._count(name, Moments.of(columns[name][mask]))
        if all(name in columns for name in MASKS):
            self.compared_tokens += trained
            for name in MASKS:
                self.masked[name] += int(np.count_nonzero(columns[name]))
        self._add_sample(record)

    def _add_sample(self, record: Record) -> None:
        of_sample = (reward_of(record), record.num_tokens, record.fields.get("staleness"))
        for name, value in zip(OF_SAMPLES, of_sample, strict=True):
            if value is not None:
                self._count(name, Moments.of(np.array([value])))

    def _count(self, name: str, more: Moments | None) -> None:
        if more is not None:
            self.moments[name] = self.moments[name].plus(more) if name in self.moments else more

    def merge(self, summary: Summary) -> None:
        """Add another tally."""
        for name in ("records", "tokens", "loss_tokens", "compared_tokens"):
            setattr(self, name, getattr(self, name) + getattr(summary, name))
        self.idle = None if self.idle is None or summary.idle is None else self.idle + summary.idle
        for name in MASKS:
            self.masked[name] += summary.masked.get(name, 0)
        for name in (*MEASURED, *OF_SAMPLES):
            self._count(name, getattr(summary, name))

    def summary(self) -> Summary:
        """Return the sums and fractions."""
        return Summary(
            records=self.records,
            tokens=self.tokens,
            loss_tokens=self.loss_tokens,
            compared_tokens=self.compared_tokens,
            masked=dict(self.masked),
            masked_fraction={name: n / self.compared_tokens for name, n in self.masked.items() if self.compared_tokens},
            **self.moments,
            idle=self.idle,
        )

    def as_dict(self) -> dict[str, Any]:
        """Return the summary as plain data."""
        found: dict[str, Any] = msgspec.to_builtins(self.summary())
        return found


def tally(records: Iterable[Record]) -> Tally:
    """Add up records."""
    out = Tally()
    for record in records:
        out.add(record)
    return out


def moments_of(values: Iterable[float | None]) -> dict[str, float] | None:
    """Return count, mean and extremes of the known numbers as plain data."""
    found = Moments.of(np.array([value for value in values if value is not None]))
    return None if found is None else msgspec.structs.asdict(found)


def trains(record: Record) -> bool:
    """Return whether a record contributes a gradient. An RL sample without an advantage does not."""
    advantages, mask = record.columns.get("advantages"), record.columns["loss_mask"]
    if not mask.any():
        return False
    if record.fields.get("training_mode") != "rl" or advantages is None:
        return True
    return bool(np.any(advantages[mask] != 0))


def reward_of(record: Record) -> float | None:
    """Return a sample's reward: the sum of per-token rewards, or the number itself if all tokens have the same."""
    rewards = record.columns.get("rewards")
    if rewards is None:
        return None
    finite = rewards[np.isfinite(rewards)]
    if not len(finite):
        return None
    return float(finite[0]) if (finite == finite[0]).all() else float(finite.sum(dtype=np.float64))
