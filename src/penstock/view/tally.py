"""Sums over the trained tokens of a step: what the curves are drawn from, and what `penstock tokens` prints."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Annotated, Any

import msgspec
import numpy as np

from penstock.arrays.columns import Array
from penstock.view.record import Record

MEASURED = ("mismatch_kl", "entropy", "loss")
MASKS = ("is_masked", "is_masked_high", "is_masked_low")
OF_SAMPLES = ("reward", "length", "staleness")


_Count = Annotated[int, msgspec.Meta(ge=0, le=2**62)]


class _Spread(msgspec.Struct):
    count: Annotated[int, msgspec.Meta(gt=0, le=2**62)]
    mean: float
    min: float
    max: float


_Summary = msgspec.defstruct(
    "_Summary",
    [
        *((name, _Count) for name in ("records", "tokens", "loss_tokens", "compared_tokens")),
        ("masked", dict[str, _Count]),
        *((name, _Spread | None, None) for name in (*MEASURED, *OF_SAMPLES)),
    ],
)


def is_summary(found: dict[str, Any]) -> bool:
    """Whether this is what `Tally.as_dict` gives; a marker on disk may hold anything."""
    try:
        summary: Any = msgspec.convert(found, _Summary)
    except msgspec.ValidationError:
        return False
    return all(name in summary.masked for name in MASKS)


@dataclass(slots=True)
class Spread:
    """Count, sum and extremes of finite numbers."""

    count: int = 0
    total: float = 0.0
    low: float = np.inf
    high: float = -np.inf

    def add(self, values: Array) -> None:
        total = float(values.sum(dtype=np.float64))
        if not np.isfinite(total):  # something in it is not: rare, and only then worth a second look
            values = values[np.isfinite(values)]
            total = float(values.sum(dtype=np.float64))
        if len(values):
            self.count += len(values)
            self.total += total
            self.low = min(self.low, float(values.min()))
            self.high = max(self.high, float(values.max()))

    def merge(self, other: dict[str, Any]) -> None:
        """Add what `as_dict` gave for other values."""
        self.count += other["count"]
        self.total += other["mean"] * other["count"]
        self.low, self.high = min(self.low, other["min"]), max(self.high, other["max"])

    def as_dict(self) -> dict[str, Any] | None:
        """Count, mean, min and max; None where nothing was counted."""
        if not self.count:
            return None
        return {"count": self.count, "mean": self.total / self.count, "min": self.low, "max": self.high}


@dataclass(slots=True)
class Tally:
    """Adds up records, or the tallies of ranks."""

    records: int = 0
    tokens: int = 0
    loss_tokens: int = 0
    masked: dict[str, int] = field(default_factory=lambda: dict.fromkeys(MASKS, 0))
    compared_tokens: int = 0
    """Trained tokens of records whose masks are known: what masked fractions are of."""
    spreads: dict[str, Spread] = field(default_factory=lambda: {name: Spread() for name in (*MEASURED, *OF_SAMPLES)})

    def add(self, record: Record) -> None:
        columns, mask = record.columns, record.columns["loss_mask"]
        trained = int(np.count_nonzero(mask))
        self.records += 1
        self.tokens += len(mask)
        self.loss_tokens += trained
        for name in MEASURED:
            if name in columns:
                self.spreads[name].add(columns[name][mask])
        if all(name in columns for name in MASKS):
            self.compared_tokens += trained
            for name in MASKS:
                self.masked[name] += int(np.count_nonzero(columns[name]))
        self._add_sample(record)

    def _add_sample(self, record: Record) -> None:
        reward, staleness = reward_of(record), record.facts.get("staleness")
        self.spreads["length"].add(np.array([record.num_tokens]))
        if reward is not None:
            self.spreads["reward"].add(np.array([reward]))
        if staleness is not None:
            self.spreads["staleness"].add(np.array([staleness]))

    def merge(self, summary: dict[str, Any]) -> None:
        """Add another tally, as `as_dict` gave it."""
        for name in ("records", "tokens", "loss_tokens", "compared_tokens"):
            setattr(self, name, getattr(self, name) + summary[name])
        for name in MASKS:
            self.masked[name] += summary["masked"][name]
        for name, spread in self.spreads.items():
            if summary.get(name) is not None:
                spread.merge(summary[name])

    def as_dict(self) -> dict[str, Any]:
        """Plain data, as markers, `penstock tokens --json` and the viewer have it."""
        fractions = {name: self.masked[name] / self.compared_tokens for name in MASKS if self.compared_tokens}
        return {
            "records": self.records,
            "tokens": self.tokens,
            "loss_tokens": self.loss_tokens,
            "compared_tokens": self.compared_tokens,
            "masked": dict(self.masked),
            "masked_fraction": fractions,
            **{name: spread.as_dict() for name, spread in self.spreads.items()},
        }


def tally(records: Iterable[Record]) -> Tally:
    """The tally of records."""
    out = Tally()
    for record in records:
        out.add(record)
    return out


def reward_of(record: Record) -> float | None:
    """The sample's reward: the sum of per-token rewards, or the one number that stands on every token."""
    rewards = record.columns.get("rewards")
    if rewards is None:
        return None
    finite = rewards[np.isfinite(rewards)]
    if not len(finite):
        return None
    return float(finite[0]) if (finite == finite[0]).all() else float(finite.sum(dtype=np.float64))
