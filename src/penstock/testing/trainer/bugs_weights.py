"""The simulated bugs of `penstock.testing.trainer` in denominators, ranks and micro-batches."""

# ruff: noqa: ARG005   (functions of one kind have one signature, whether or not they need all of it)
from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from penstock.testing.trainer.reference import Vector
from penstock.testing.trainer.simulated import Hypothesis, Place, Row, spans_of

_COUNT = "divide the summed loss of every micro-batch by step.loss_tokens, the count of trained tokens of all ranks"


def _counts(place: Place, count: Callable[[Row], float]) -> tuple[float, float, float]:
    """Return a count of this row, of this rank and of the step."""
    own = sum(count(row) for row in place.own)
    return count(place.row), own, sum(count(row) for rank in place.rows for row in rank)


def _trained(row: Row) -> float:
    return float(row.mask.sum())


def weight_bugs() -> list[Hypothesis]:
    def tokens(row: Row) -> float:
        return float(sum(b - a for a, b in row.samples))

    def padded(row: Row) -> float:
        return float(row.size)

    def samples(row: Row) -> float:
        return float(len(row.samples))

    def trained_samples(row: Row) -> float:
        return float(sum(bool(row.mask[a:b].any()) for a, b in row.samples))

    def pushed(row: Row) -> float:
        return float((row.mask & (row.columns.get("advantages", np.ones(row.size)) != 0)).sum())

    def absolute(row: Row) -> float:
        return float(np.abs(row.columns["advantages"][row.mask]).sum())

    whats: list[tuple[str, Callable[[Row], float]]] = [
        ("trained tokens", _trained),
        ("all tokens of samples", tokens),
        ("all tokens with padding", padded),
        ("all tokens with padding", lambda row: 0.0 if row.dummy else padded(row)),
        ("samples", samples),
        ("trained samples", trained_samples),
        ("sequences with padding", lambda row: float(len(row.bounds))),
        ("tokens with an advantage", pushed),
        ("summed absolute advantages", absolute),
        ("turns", lambda row: float(len(spans_of(row.mask)))),
        (
            "tokens after the prompt",
            lambda row: float(sum((np.cumsum(row.mask[a:b]) > 0).sum() for a, b in row.samples)),
        ),
    ]
    found: list[Hypothesis] = []
    for what, count in whats:
        found += _denominators(what, count)
    return found + _near_counts() + _other_weights() + _micro_batches()


def _denominators(what: str, count: Callable[[Row], float]) -> list[Hypothesis]:
    def safe(value: float) -> float:
        return max(value, 1e-9)

    def counted(place: Place, which: int) -> float:
        return safe(_counts(place, count)[which])

    def busy(place: Place) -> int:
        return max(sum(_trained(row) > 0 for row in place.own), 1)

    trained = what == "trained tokens"
    name = "denominator per micro-batch" if trained else f"divided by {what} of the micro-batch"
    forms: list[tuple[str, Callable[[Place], Vector | float]]] = [
        (f"{name}, summed", lambda p: 1 / counted(p, 0)),
        (f"{name}, summed", lambda p: 1 / counted(p, 0) / p.world),
        (f"{name}, averaged", lambda p: 1 / counted(p, 0) / len(p.own)),
        (f"{name}, averaged", lambda p: 1 / counted(p, 0) / len(p.own) / p.world),
        (f"{name}, averaged", lambda p: 1 / counted(p, 0) / busy(p) / p.world),
        (f"divided by {what} of the rank", lambda p: 1 / counted(p, 1)),
        (f"divided by {what} of the rank, averaged over ranks", lambda p: 1 / counted(p, 1) / p.world),
        (f"divided by {what} of the rank and of the micro-batches", lambda p: 1 / counted(p, 1) / len(p.own)),
    ]
    if not trained:
        forms += [
            (f"divided by {what} of the step", lambda p: 1 / counted(p, 2)),
            (f"divided by {what} of the step, not times the ranks", lambda p: 1 / counted(p, 2) / p.world),
            (f"divided by trained tokens and by {what} of the micro-batch", lambda p: p.right / counted(p, 0)),
            (f"divided by trained tokens and by {what} of the step", lambda p: p.right / counted(p, 2)),
        ]
    return [Hypothesis(name=name, fix=_COUNT, weights=weights) for name, weights in forms]


def _near_counts() -> list[Hypothesis]:
    """Counts that are nearly right."""
    forms: dict[str, Callable[[Place], Vector | float]] = {
        "divided by trained tokens + 1": lambda p: 1 / (p.step.loss_tokens + 1),
        "divided by trained tokens - 1": lambda p: 1 / max(p.step.loss_tokens - 1, 1),
        "divided by trained tokens + samples": lambda p: 1 / max(p.step.loss_tokens + p.step.denominators.samples, 1),
        "divided by trained tokens - samples": lambda p: 1 / max(p.step.loss_tokens - p.step.denominators.samples, 1),
        "scaled by the share of each micro-batch that is not padding": lambda p: (
            p.right * sum(b - a for a, b in p.row.samples) / p.row.size
        ),
    }
    return [Hypothesis(name=name, fix=_COUNT, weights=weights) for name, weights in forms.items()]


def _other_weights() -> list[Hypothesis]:
    def by_sample(weight: Callable[[float, float], float], denominator: Callable[[Place], float]) -> Any:
        """Weights from the trained tokens and the length of each sample."""

        def weights(place: Place) -> Vector:
            out = np.zeros(place.row.size)
            for a, b in place.row.samples:
                out[a:b] = weight(float(place.row.mask[a:b].sum()), float(b - a)) / max(denominator(place), 1e-9)
            return out

        return weights

    def step_tokens(p: Place) -> float:
        return float(p.step.loss_tokens)

    def trained_samples(p: Place) -> float:
        return float(sum(row.mask[a:b].any() for rank in p.rows for row in rank for a, b in row.samples))

    def in_row(p: Place) -> float:
        return float(len(p.row.samples))

    forms: list[tuple[str, Any]] = [
        ("ranks are forgotten: the step is smaller with every rank", lambda p: p.right / p.world),
        ("ranks are counted twice: the step is larger with every rank", lambda p: p.right * p.world),
        ("not divided by anything", lambda p: 1.0),
        ("not divided by anything, averaged over ranks", lambda p: 1.0 / p.world),
        ("divided by the number of micro-batches again", lambda p: p.right / len(p.own)),
        ("multiplied by the number of micro-batches", lambda p: p.right * len(p.own)),
        ("divided by the groups of the step", lambda p: 1 / max(p.step.denominators.groups, 1)),
        ("dummy micro-batches are counted", _with_dummies),
        ("mean over samples of the mean over their tokens", by_sample(lambda n, t: 1 / max(n, 1), trained_samples)),
        (
            "mean over samples of the mean over their tokens",
            by_sample(lambda n, t: 1 / max(n, 1), lambda p: p.step.denominators.samples),
        ),
        ("mean over a row's samples of the mean over their tokens", by_sample(lambda n, t: 1 / max(n, 1), in_row)),
        (
            "mean over samples of the mean over all their tokens",
            by_sample(lambda n, t: 1 / t, lambda p: p.step.denominators.samples),
        ),
        ("divided by each sample's trained tokens too", by_sample(lambda n, t: 1 / max(n, 1), step_tokens)),
        ("divided by each sample's length too", by_sample(lambda n, t: 1 / t, step_tokens)),
        ("divided by the root of each sample's length", by_sample(lambda n, t: t**-0.5, step_tokens)),
        ("divided by the root of each sample's trained tokens", by_sample(lambda n, t: max(n, 1) ** -0.5, step_tokens)),
        ("weighted by each sample's trained tokens", by_sample(lambda n, t: n, step_tokens)),
        ("weighted by each sample's length", by_sample(lambda n, t: t, step_tokens)),
        ("divided by the root of the trained tokens", lambda p: max(p.step.loss_tokens, 1) ** -0.5),
        ("divided by the longest sample", lambda p: 1 / max((b - a for a, b in p.row.samples), default=1)),
        ("largest count of a rank as the denominator", lambda p: 1 / max(max(map(_of_rank, p.rows)) * p.world, 1)),
    ]
    return [Hypothesis(name=name, fix=_COUNT, weights=weights) for name, weights in forms]


def _of_rank(rows: Sequence[Row]) -> float:
    return sum(map(_trained, rows))


def _with_dummies(place: Place) -> float:
    dummies = sum(row.size for rank in place.rows for row in rank if row.dummy)
    return 1 / (place.step.loss_tokens + dummies)


def _micro_batches() -> list[Hypothesis]:
    fix = "train every micro-batch of every rank once"
    kept: dict[str, Callable[[Place], float]] = {
        "only the first micro-batch is trained": lambda p: p.index == 0,
        "only the last micro-batch is trained": lambda p: p.index == len(p.own) - 1,
        "the last micro-batch is not trained": lambda p: p.index < len(p.own) - 1 or len(p.own) == 1,
        "the first micro-batch is not trained": lambda p: p.index > 0 or len(p.own) == 1,
        "only one rank is trained": lambda p: p.rank == 0,
        "only one rank is trained, not averaged": lambda p: (p.rank == 0) * p.world,
        "only the last rank is trained": lambda p: p.rank == p.world - 1,
        "the last rank is not trained": lambda p: p.rank < p.world - 1 or p.world == 1,
        "the first micro-batch is trained twice": lambda p: 1 + (p.index == 0),
        "the first of several micro-batches is trained twice": lambda p: 1 + (p.index == 0 and len(p.own) > 1),
        "the last of several micro-batches is trained twice": lambda p: (
            1 + (p.index == len(p.own) - 1 and len(p.own) > 1)
        ),
        "micro-batches are weighted by their place": lambda p: p.index + 1,
        "every other micro-batch is trained": lambda p: p.index % 2 == 0,
        "only the last micro-batch is exchanged between ranks": lambda p: (
            1 if p.index == len(p.own) - 1 else p.world * (p.rank == 0)
        ),
    }
    found = [Hypothesis(name=name, fix=fix, weights=_picked(pick)) for name, pick in kept.items()]
    return found + [Hypothesis(name=name, fix=fix, weights=_picked_alone(kept[name])) for name in list(kept)[:8]]


def _picked(pick: Callable[[Place], float]) -> Callable[[Place], Vector | float]:
    return lambda place: place.right * float(pick(place))


def _picked_alone(pick: Callable[[Place], float]) -> Callable[[Place], Vector | float]:
    """Divided by the tokens that are picked."""
    return lambda place: float(pick(place)) / max(_kept_tokens(place, pick), 1)


def _kept_tokens(place: Place, pick: Callable[[Place], float]) -> float:
    places = (
        (replace(place, rank=rank, index=index, row=row))
        for rank, rows in enumerate(place.rows)
        for index, row in enumerate(rows)
    )
    return sum(_trained(p.row) * float(pick(p)) for p in places)
