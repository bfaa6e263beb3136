"""Numbers over the trained tokens of a step: sums for curves and `penstock tokens`, and what other rules would mask.

Each rule returns two masks: tokens beyond its upper threshold and beyond its lower one. The page applies rules to one
sample in JavaScript while thresholds are typed. This module has the same arithmetic for steps, lists, sorting and
tests. `StepTokens` keeps the trained tokens as flat arrays with a step's index, so that a colour scale, a histogram or
a what-if mask over all tokens of a step is one pass over them and reads no file.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import reduce
from typing import Annotated, Any, TypeAlias

import msgspec
import numpy as np
from numpy.typing import NDArray

from penstock.arrays import Array, Ragged
from penstock.errors import InvalidInput
from penstock.view.record import COLUMNS, Record

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
    """Sums over records, as in markers, `penstock tokens --json` and the viewer. None where nothing was counted."""

    records: Count
    tokens: Count
    loss_tokens: Count
    compared_tokens: Count
    """Trained tokens of records with known masks: the denominator of masked fractions."""
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

    @staticmethod
    def of(record: Record) -> Summary:
        """Summarize one record."""
        columns, mask = record.columns, record.loss_mask
        values = {name: columns[name][mask] for name in MEASURED if name in columns}
        of_sample = (reward_of(record), record.num_tokens, record.fields.get("staleness"))
        of_samples = zip(OF_SAMPLES, of_sample, strict=True)
        values |= {name: np.array([value]) for name, value in of_samples if value is not None}
        trained = _n(mask)
        compared = trained if all(name in columns for name in MASKS) else 0
        masked = {name: _n(columns[name]) if compared else 0 for name in MASKS}
        return Summary(
            records=1,
            tokens=len(mask),
            loss_tokens=trained,
            compared_tokens=compared,
            masked=masked,
            masked_fraction=_fractions(masked, compared),
            idle=int(not trains(record)),
            **{name: Moments.of(found) for name, found in values.items()},
        )

    def plus(self, other: Summary) -> Summary:
        """Return the sums over both."""
        compared = self.compared_tokens + other.compared_tokens
        masked = {name: self.masked.get(name, 0) + other.masked.get(name, 0) for name in MASKS}
        pairs = {name: (getattr(self, name), getattr(other, name)) for name in (*MEASURED, *OF_SAMPLES)}
        return Summary(
            records=self.records + other.records,
            tokens=self.tokens + other.tokens,
            loss_tokens=self.loss_tokens + other.loss_tokens,
            compared_tokens=compared,
            masked=masked,
            masked_fraction=_fractions(masked, compared),
            idle=None if self.idle is None or other.idle is None else self.idle + other.idle,
            **{name: one.plus(two) if one and two else one or two for name, (one, two) in pairs.items()},
        )

    def as_dict(self) -> dict[str, Any]:
        """Return the summary as plain data."""
        found: dict[str, Any] = msgspec.to_builtins(self)
        return found


def _fractions(masked: Mapping[str, int], compared: int) -> dict[str, float]:
    return {name: count / compared for name, count in masked.items() if compared}


NOTHING = Summary(
    records=0, tokens=0, loss_tokens=0, compared_tokens=0, masked=dict.fromkeys(MASKS, 0), masked_fraction={}, idle=0
)


def tally(records: Iterable[Record]) -> Summary:
    """Add up records."""
    return reduce(Summary.plus, map(Summary.of, records), NOTHING)


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


# ------------------------------------------------------------------ rules


Mask: TypeAlias = NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Rule:
    needs: tuple[str, ...]
    """Columns it uses."""
    thresholds: Mapping[str, float]
    """Defaults by name."""
    sides: Callable[..., tuple[Mask, Mask]]
    """Record and thresholds -> [T] beyond the upper, [T] beyond the lower one; trained tokens only."""


def _dppo(record: Record, *, high: float, low: float) -> tuple[Mask, Mask]:
    """Mask by the difference of probabilities. An advantage of 0 or NaN uses the lower threshold."""
    columns, mask = record.columns, record.loss_mask
    delta, up = columns["prob_delta"], columns["advantages"] > 0
    return mask & up & (delta > high), mask & ~up & (delta < -low)


def _icepop(record: Record, *, low: float, high: float) -> tuple[Mask, Mask]:
    """Mask by the ratio, whatever the advantage."""
    ratio, mask = record.columns["importance_ratio"], record.loss_mask
    return mask & (ratio > high), mask & (ratio < low)


def _ppo(record: Record, *, low: float, high: float) -> tuple[Mask, Mask]:
    """Mask the tokens whose gradient PPO's clip stops."""
    columns, mask = record.columns, record.loss_mask
    ratio, advantages = columns["importance_ratio"], columns["advantages"]
    return mask & (advantages > 0) & (ratio > 1 + high), mask & (advantages < 0) & (ratio < 1 - low)


def _ipo(record: Record, *, threshold: float) -> tuple[Mask, Mask]:
    """Mask by the difference of probabilities in either direction."""
    delta, mask = record.columns["prob_delta"], record.loss_mask
    return mask & (delta > threshold), mask & (delta < -threshold)


RULES = {
    "dppo": Rule(("prob_delta", "advantages"), {"high": 0.2, "low": 0.2}, _dppo),
    "icepop": Rule(("importance_ratio",), {"low": 0.2, "high": 5.0}, _icepop),
    "ppo": Rule(("importance_ratio", "advantages"), {"low": 0.2, "high": 0.2}, _ppo),
    "ipo": Rule(("prob_delta",), {"threshold": 0.1}, _ipo),
}


def judge(record: Record, name: str, thresholds: Mapping[str, float]) -> tuple[Mask, Mask] | None:
    """Return what a rule masks, above and below. None if the record lacks a column it uses."""
    if name not in RULES:
        raise InvalidInput(f"rule {name[:40]!r}: unknown; there are {', '.join(RULES)}")
    rule = RULES[name]
    if not set(rule.needs) <= set(record.columns):
        return None
    bad = {key: value for key, value in thresholds.items() if key not in rule.thresholds or not value >= 0}
    if bad:
        raise InvalidInput(f"thresholds of {name}: {', '.join(bad)}; give {', '.join(rule.thresholds)}, each 0 or more")
    with np.errstate(invalid="ignore"):
        return rule.sides(record, **{**rule.thresholds, **thresholds})


def disagreement(record: Record) -> int | None:
    """Count trained tokens masked by exactly one of DPPO and IcePop at their defaults. None without ratios."""
    dppo, icepop = judge(record, "dppo", {}), judge(record, "icepop", {})
    if dppo is None or icepop is None:
        return None
    return int(np.count_nonzero((dppo[0] | dppo[1]) ^ (icepop[0] | icepop[1])))


# ------------------------------------------------------------------ the tokens of a step

CENTRES = {"importance_ratio": 1.0}
"""The value without colour, if that is not 0."""
_RATIO, _KL = (-2.0, 2.0), (-9.0, 2.0)
"""Powers of ten between which tokens are counted. Values beyond count at the edge."""
_BINS = 88


class StepTokens:
    """Collects the trained tokens of records, for columns with one number per token."""

    def __init__(self) -> None:
        self._parts: dict[str, list[tuple[int, Array]]] = {}
        self._counts: list[int] = []

    def add(self, record: Record) -> None:
        mask = record.loss_mask
        for name, values in record.columns.items():
            if _is_plain(name, values):
                self._parts.setdefault(name, []).append((len(self._counts), values[mask]))
        self._counts.append(int(np.count_nonzero(mask)))

    @property
    def count(self) -> int:
        """Trained tokens."""
        return sum(self._counts)

    def column(self, name: str) -> Array | None:
        """Return a column as [trained tokens], NaN (False in masks) where a sample lacks it. None if all do."""
        parts = self._parts.get(name)
        if parts is None:
            return None
        if len(parts) == len(self._counts):
            return np.concatenate([values for _, values in parts])
        starts = np.concatenate([[0], np.cumsum(self._counts)])
        is_mask = parts[0][1].dtype == np.bool_
        out = np.zeros(self.count, np.bool_) if is_mask else np.full(self.count, np.nan, np.float32)
        for sample, values in parts:
            out[starts[sample] : starts[sample + 1]] = values
        return out

    def scales(self) -> dict[str, dict[str, float]]:
        """Return by column the distance from its centre within which 50, 95, 99 and 100 % of trained tokens lie."""
        found = {}
        for name in self._parts:
            values = self.column(name)
            assert values is not None
            if values.dtype.kind != "f":
                continue
            sizes = np.abs(values.astype(np.float64) - CENTRES.get(name, 0.0))
            sizes = sizes[np.isfinite(sizes) & (sizes > 0)]
            if len(sizes):
                marks = np.percentile(sizes, [50, 95, 99, 100]).tolist()
                found[name] = dict(zip(("p50", "p95", "p99", "max"), marks, strict=True))
        return found

    def histograms(self) -> dict[str, dict[str, Any]]:
        """Return histograms of ratio and mismatch KL of the trained tokens, by powers of ten."""
        wanted = {"importance_ratio": _RATIO, "mismatch_kl": _KL}
        found = ((name, self.column(name), limits) for name, limits in wanted.items())
        return {name: _counted(values, limits) for name, values, limits in found if values is not None}

    def masked(self) -> dict[str, int]:
        """Count the trained tokens that the loss masked, by threshold."""
        found = {name: self.column(name) for name in MASKS}
        return {name: int(np.count_nonzero(values)) for name, values in found.items() if values is not None}

    def what_if(self, rule: str, thresholds: Mapping[str, float]) -> dict[str, Any] | None:
        """Compare what a rule would have masked with what was masked. None if no sample has the columns it uses."""
        names = [name for name in ("prob_delta", "advantages", "importance_ratio") if name in self._parts]
        columns: dict[str, Any] = {name: self.column(name) for name in names}
        columns["loss_mask"] = np.ones(self.count, np.bool_)
        sides = judge(Record(fields={}, columns=columns), rule, thresholds)
        if sides is None:
            return None
        now, trained = sides[0] | sides[1], self.column("is_masked")
        counts = {"trained": self.count, "masked": _n(now), "high": _n(sides[0]), "low": _n(sides[1])}
        counts["samples"] = len(np.unique(np.repeat(np.arange(len(self._counts)), self._counts)[now]))
        if trained is None:
            return counts
        both = now & trained
        return {
            **counts,
            "in_training": _n(trained),
            "both": _n(both),
            "now_only": _n(now & ~trained),
            "training_only": _n(trained & ~now),
        }


def _is_plain(name: str, values: Any) -> bool:
    """Return whether a column is kept: a number or a mask per token, not ids."""
    if isinstance(values, Ragged) or values.ndim != 1:
        return False
    return name in MASKS or values.dtype.kind == "f" or name not in COLUMNS


def _counted(values: Array, limits: tuple[float, float]) -> dict[str, Any]:
    low, high = limits
    with np.errstate(divide="ignore", invalid="ignore"):
        powers = np.log10(values.astype(np.float64))
    known = ~np.isnan(powers)  # a KL of exactly 0 counts at the lower edge
    counts, _ = np.histogram(np.clip(powers[known], low, high), bins=_BINS, range=limits)
    return {"low": low, "high": high, "counts": counts.tolist(), "values": int(known.sum())}


def _n(mask: NDArray[np.bool_]) -> int:
    return int(np.count_nonzero(mask))
