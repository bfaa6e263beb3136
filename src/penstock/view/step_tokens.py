"""What another masking rule or threshold would have masked, and the trained tokens of a step as flat arrays.

Each rule returns two masks: tokens beyond its upper threshold and beyond its lower one. The page applies rules to one
sample in JavaScript while thresholds are typed. This module has the same arithmetic for steps, lists, sorting and
tests. The arrays are kept with a step's index, so that a colour scale, a histogram or a what-if mask over all tokens of
a step is one pass over them and reads no file.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from penstock.arrays import Array, Ragged
from penstock.errors import InvalidInput
from penstock.view.record import COLUMNS, Record
from penstock.view.tallies import MASKS

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
