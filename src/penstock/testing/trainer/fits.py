"""Bugs with a free number, for `penstock.testing.trainer`: the number is fitted to what was measured.

A factor on every gradient, a term that was added to the loss, a clip, a cut: for each there is one best value, by least
squares or by trying a few. A bug counts only if it then explains all steps.
"""

# ruff: noqa: ARG005   (functions of one kind have one signature, whether or not they need all of it)
from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from penstock.testing.trainer.bugs_loss import column
from penstock.testing.trainer.reference import Vector
from penstock.testing.trainer.samples import Probe
from penstock.testing.trainer.simulated import Columns, Fix, Hypothesis, Row, Simulator

_LATE = 1000
"""Order of a fit: with equal evidence a bug without a free number comes first."""


@dataclass(slots=True, kw_only=True)
class Measured:
    """What a trainer made of one probe."""

    probe: Probe
    loss: float
    gradient: Vector
    expected: Vector
    scale: float
    """The length a difference is compared with."""

    def gap(self, predicted: Vector) -> float:
        """Return the relative difference to a prediction, NaN to one that is not finite."""
        return float(np.linalg.norm(self.gradient - predicted)) / self.scale

    @property
    def error(self) -> float:
        return self.gap(self.expected)


def fits(simulator: Simulator, measured: Sequence[Measured]) -> list[Hypothesis]:
    """Return the fitted bugs."""
    finite = [
        one
        for one in measured
        if np.isfinite(one.gradient).all() and np.isfinite(one.expected).all() and np.any(one.expected)
    ]
    if not finite:
        return []
    found = [
        *_factors(finite),
        *_terms(simulator, finite),
        *_parts(simulator, finite),
        *_context(simulator, finite),
        *_late_temperatures(simulator),
        *_added(simulator, finite),
        *_parameters(simulator, finite),
        *_norms(finite),
        *_clamps(),
        *_cuts(),
        *_rounded(simulator),
    ]
    return [replace(one, order=_LATE + place) for place, one in enumerate(found)]


def slope(pairs: Sequence[tuple[Vector, Vector, float]]) -> float:
    """Return the k for which k * second is nearest to first, over all (first, second, scale)."""
    above = sum(float(one @ other) / scale**2 for one, other, scale in pairs)
    below = sum(float(other @ other) / scale**2 for _, other, scale in pairs)
    return above / below if below else 0.0


def _factors(measured: Sequence[Measured]) -> Iterator[Hypothesis]:
    factor = slope([(one.gradient, one.expected, one.scale) for one in measured])
    fix = "compare the denominator and every factor of the loss with what the loss is meant to be"
    none = "there is no gradient at all: something is detached or frozen"
    yield Hypothesis(
        name=none if abs(factor) < 1e-9 else f"every gradient is {factor:.3g} times the right one",
        fix=fix,
        weights=lambda place: place.right * factor,
    )
    if abs(factor) < 1e-9:
        return
    tokens = [max(one.probe.step.loss_tokens, 1) for one in measured]
    constant = slope([(one.gradient, one.expected * n, one.scale) for one, n in zip(measured, tokens, strict=True)])
    yield Hypothesis(
        name=f"divided by {1 / (constant or np.inf):.4g} in every step, whatever it trains",
        fix="divide by step.loss_tokens of the step that is trained, not by a constant or by that of another step",
        weights=lambda place: place.right * constant * place.step.loss_tokens,
    )


def _parts(simulator: Simulator, measured: Sequence[Measured]) -> Iterator[Hypothesis]:
    """Tokens of one sign count more or less, or trainer and reference are swapped in the KL."""
    changes: dict[str, tuple[str, str, Callable[[Columns, Vector, Vector], Vector]]] = {
        "negative": (
            "negative advantages count {:.3g} times",
            Fix.ADVANTAGES,
            lambda columns, t, right: right * (columns["advantages"] < 0),
        ),
    }
    if any("teacher_logprobs" in sample.columns for one in measured for sample in one.probe.samples):
        changes["swapped"] = (
            "KL to the reference has the two swapped",
            "the k3 estimate is exp(teacher - trainer) - 1 - (teacher - trainer)",
            lambda columns, t, right: 2 * np.cosh(t - columns["teacher_logprobs"]) - 2,
        )
    for name, fix, change in changes.values():
        unit = Hypothesis(name="", fix="", push=_plus(change, 1.0))
        factor = _strength(simulator, measured, unit)
        if abs(factor) > 1e-6:
            yield Hypothesis(name=name.format(1 + factor), fix=fix, push=_plus(change, factor))


def _plus(
    change: Callable[[Columns, Vector, Vector], Vector], factor: float
) -> Callable[[Columns, Vector, Vector], Vector]:
    return lambda columns, t, right: right + factor * change(columns, t, right)


def _context(simulator: Simulator, measured: Sequence[Measured]) -> Iterator[Hypothesis]:
    """A likelihood of context tokens with a weight of its own: of trained samples, of all, of padding too."""

    def opened(picked: Callable[[Row], Any]) -> Callable[[Row], Row]:
        return lambda row: row.with_columns(
            loss_mask=row.mask | (picked(row) & (row.columns["position_ids"] > 0)), sampled=row.mask
        )

    def pushed(factor: float) -> Callable[[Columns, Vector, Vector], Vector]:
        return lambda columns, t, right: np.where(columns["sampled"], right, -factor)

    kinds: dict[str, Callable[[Row], Any]] = {
        "context": lambda row: _of_samples(row, lambda a, b: bool(row.mask[a:b].any())),
        "all context": lambda row: _of_samples(row, lambda a, b: True),
        "context and padding": lambda row: np.ones(row.size, bool),
    }
    for what, picked in kinds.items():
        factor = _strength(simulator, measured, Hypothesis(name="", fix="", row=opened(picked), push=pushed(1.0)))
        if abs(factor) > 1e-6:
            yield Hypothesis(
                name=f"a term is added to the loss: {factor:.3g} x cross-entropy of {what}",
                fix="train exactly the tokens whose loss_mask is True, and give all others a weight of 0",
                row=opened(picked),
                push=pushed(factor),
            )


def _of_samples(row: Row, keep: Callable[[int, int], bool]) -> Any:
    out = np.zeros(row.size, bool)
    for a, b in row.samples:
        out[a:b] = keep(a, b)
    return out


def _late_temperatures(simulator: Simulator) -> Iterator[Hypothesis]:
    def push(columns: Columns, t: Vector, right: Vector) -> Vector:  # noqa: ARG001
        return simulator.push(columns, t / columns["late"], np.zeros_like(t))[0] / columns["late"]

    yield Hypothesis(
        name="log-probabilities are divided by the temperature, and not logits",
        fix=Fix.TEMPERATURES,
        row=lambda row: row.with_columns(
            temperatures=np.ones(row.size), late=row.columns.get("temperatures", np.ones(row.size))
        ),
        push=push,
    )


def _terms(simulator: Simulator, measured: Sequence[Measured]) -> Iterator[Hypothesis]:
    """A term that was added to the loss, or is missing in it, or has the wrong sign."""
    pushes: dict[str, Callable[[Columns, Vector, Vector], Vector]] = {
        "cross-entropy of the sampled tokens": lambda columns, t, right: -np.ones_like(t),
        "KL to the sampler (k2, squared log-ratio)": lambda columns, t, right: t - columns["logprobs"],
        "KL to the sampler (k3)": lambda columns, t, right: 1 - np.exp(columns["logprobs"] - t),
        "KL to the sampler (ratio - 1 - log-ratio)": lambda columns, t, right: np.exp(t - columns["logprobs"]) - 1,
    }
    if any("teacher_logprobs" in sample.columns for one in measured for sample in one.probe.samples):
        pushes |= {
            "KL to the reference (k1)": lambda columns, t, right: np.ones_like(t),
            "KL to the reference (k2, squared log-ratio)": lambda columns, t, right: t - columns["teacher_logprobs"],
            "KL to the reference (k3)": lambda columns, t, right: 1 - np.exp(columns["teacher_logprobs"] - t),
            "KL to the reference (reversed)": lambda columns, t, right: np.exp(t - columns["teacher_logprobs"]) - 1,
        }
    for what, push in pushes.items():
        factor = _strength(simulator, measured, Hypothesis(name="", fix="", push=_plus(push, 1.0)))
        yield Hypothesis(
            name=f"a term is added to the loss: {factor:.3g} x {what}",
            fix="remove the term, correct its sign or its weight, or declare the loss that has it",
            push=_plus(push, factor),
        )
    factor = _strength(simulator, measured, Hypothesis(name="", fix="", entropy=1.0))
    yield Hypothesis(
        name=f"a term is added to the loss: {factor:.3g} x entropy",
        fix="a bonus for entropy is subtracted from the loss; remove it or declare the loss that has it",
        entropy=factor,
    )


def _strength(simulator: Simulator, measured: Sequence[Measured], unit: Hypothesis) -> float:
    few = [one for one in measured if one.probe.stage == "alone"][:8]
    predicted = [simulator.gradient(one.probe.step, [unit]) - one.expected for one in few]
    return slope([(one.gradient - one.expected, other, one.scale) for one, other in zip(few, predicted, strict=True)])


def _added(simulator: Simulator, measured: Sequence[Measured]) -> Iterator[Hypothesis]:
    weights = simulator.reference.weights()
    factor = slope([(one.gradient - one.expected, weights, one.scale) for one in measured])
    yield Hypothesis(
        name=f"weight decay in the gradient: {factor:.3g} x weights",
        fix="leave weight decay to the optimizer",
        after=lambda gradient: gradient + factor * weights,
    )
    typical = [(one.gradient - one.expected) / one.scale**2 for one in measured]
    constant = sum(typical[1:], start=typical[0]) / sum(one.scale**-2 for one in measured)
    yield Hypothesis(
        name="the same is added to every gradient, whatever the samples are",
        fix="look for an auxiliary loss, or gradients that were there before the step",
        after=lambda gradient: gradient + constant,
    )


def _parameters(simulator: Simulator, measured: Sequence[Measured]) -> Iterator[Hypothesis]:
    flat = simulator.reference.flat
    factors = {
        name: slope([(one.gradient[at], one.expected[at], one.scale) for one in measured])
        for name, at in flat.slices.items()
    }
    wrong = {name: factor for name, factor in factors.items() if abs(factor - 1) > 1e-3}
    if not wrong or len(wrong) == len(factors) > 1:
        return
    shown = ", ".join(f"{name} x {factor:.3g}" for name, factor in list(wrong.items())[:4])
    none = all(abs(factor) < 1e-6 for factor in wrong.values())

    def after(gradient: Vector) -> Vector:
        out = gradient.copy()
        for name, factor in wrong.items():
            out[flat.slices[name]] *= factor
        return out

    yield Hypothesis(
        name=f"parameters without a gradient: {', '.join(wrong)}" if none else f"gradients of some parameters: {shown}",
        fix="train all parameters alike; a frozen one must not require a gradient in the model that is passed",
        after=after,
    )


def _norms(measured: Sequence[Measured]) -> Iterator[Hypothesis]:
    loud = max(measured, key=lambda one: float(np.linalg.norm(one.expected)))
    norm, largest = float(np.linalg.norm(loud.gradient)), float(np.abs(loud.gradient).max())
    if norm < 1e-9 * float(np.linalg.norm(loud.expected)):
        return  # nothing is clipped to 0: it is not trained

    def clipped(gradient: Vector) -> Vector:
        length = float(np.linalg.norm(gradient))
        return gradient * min(1.0, norm / max(length, 1e-300))

    def cut(gradient: Vector) -> Vector:
        return np.clip(gradient, -largest, largest)

    fix = "return the gradients before clipping, and clip once for the whole step"
    for name, change in (
        (f"the gradient is clipped to the norm {norm:.3g}", clipped),
        (f"values of the gradient are clipped to {largest:.3g}", cut),
    ):
        yield Hypothesis(name=name, fix=fix, after=change)
        yield Hypothesis(name=f"{name} on each rank", fix=fix, after_rank=change)
        yield Hypothesis(name=f"{name} in each micro-batch", fix=fix, after_batch=change)
    yield Hypothesis(
        name=f"the gradient is scaled to the norm {norm:.3g}",
        fix=fix,
        after=lambda gradient: gradient * (norm / max(float(np.linalg.norm(gradient)), 1e-300)),
    )


def _clamps() -> Iterator[Hypothesis]:
    def clamped(bound: float) -> Callable[[Row], Row]:
        return column("advantages", lambda a, row: np.clip(a, -bound, bound))

    for bound in (0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 5.0, 8.0, 10.0, 20.0, 50.0, 100.0, 1000.0):
        yield Hypothesis(name=f"advantages are clamped to {bound:g}", fix=Fix.ADVANTAGES, row=clamped(bound))


def _cuts() -> Iterator[Hypothesis]:
    fix = "cut nothing: micro-batches are within their limits as they are"

    def masked(keep: Callable[[Row, int], Any], at: int) -> Callable[[Row], Row]:
        return lambda row: row.with_columns(loss_mask=row.mask & keep(row, at))

    def of_samples(row: Row, longest: int, least: int) -> Any:
        return _of_samples(row, lambda a, b: least <= b - a <= longest)

    kinds: dict[str, tuple[range, Callable[[Row, int], Any]]] = {
        "a row is cut after {} tokens": (range(4, 129), lambda row, n: np.arange(row.size) < n),
        "samples longer than {} tokens are left out": (range(2, 64), lambda row, n: of_samples(row, n, 0)),
        "a sample is cut after {} tokens": (range(2, 64), lambda row, n: row.columns["position_ids"] < n),
        "samples shorter than {} tokens are left out": (range(2, 64), lambda row, n: of_samples(row, 10**9, n)),
        "the first {} tokens of a sample are not trained": (
            range(2, 64),
            lambda row, n: row.columns["position_ids"] >= n,
        ),
    }
    for name, (places, keep) in kinds.items():
        for at in places:
            yield Hypothesis(name=name.format(at), fix=fix, row=masked(keep, at))


def bfloat16(values: Vector) -> Vector:
    """Round to 8 bits of mantissa, to even."""
    bits = np.asarray(values, np.float32).view(np.uint32).astype(np.uint64)
    rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16 << 16).astype(np.uint32)
    return rounded.view(np.float32).astype(np.float64)


def _rounded(simulator: Simulator) -> Iterator[Hypothesis]:
    def half(values: Vector) -> Vector:
        with np.errstate(over="ignore"):
            return values.astype(np.float16).astype(np.float64)

    for name, rounded in (("bfloat16", bfloat16), ("float16", half)):
        yield from _rounded_to(simulator, name, rounded)


def _rounded_to(simulator: Simulator, name: str, rounded: Callable[[Vector], Vector]) -> Iterator[Hypothesis]:
    def pushed(columns: Columns, logprobs: Vector) -> Vector:
        return simulator.push(columns, logprobs, np.zeros_like(logprobs))[0]

    pushes: dict[str, Callable[[Columns, Vector, Vector], Vector]] = {
        "log-probabilities of the model are": lambda c, t, right: pushed(c, rounded(t)),
        "log-probabilities are": lambda c, t, right: pushed({**c, "logprobs": rounded(c["logprobs"])}, rounded(t)),
        "log-ratios are": lambda c, t, right: pushed(c, c["logprobs"] + rounded(t - c["logprobs"])),
        "ratios are": lambda c, t, right: pushed(c, c["logprobs"] + np.log(rounded(np.exp(t - c["logprobs"])))),
        "log-ratios and ratios are": lambda c, t, right: pushed(
            c, c["logprobs"] + np.log(rounded(np.exp(rounded(t - c["logprobs"]))))
        ),
        "losses are": lambda c, t, right: rounded(right),
    }
    fix = "compute log-probabilities, ratios and the loss in float32"
    for what, push in pushes.items():
        yield Hypothesis(name=f"{what} rounded to {name}", fix=fix, push=push)
    for what in ("advantages", "logprobs"):
        yield Hypothesis(
            name=f"{what} of the batch are rounded to {name}",
            fix=fix,
            row=column(what, lambda values, row: rounded(values)),
        )
