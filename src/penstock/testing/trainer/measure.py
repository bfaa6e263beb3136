"""Trains the probes of `penstock.testing.trainer` and compares the gradients with the expected ones.

The same step is trained several times first, to tell what is random from what is wrong:

1, 2, 3 times the first gradient        gradients are not cleared
every time further away                 weights move, or something remembers earlier steps
scattered around a mean                 noise: dropout, a random factor. The mean of several runs is then judged,
                                        with a tolerance that is wider than the noise
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

from penstock.packing import PackedStep
from penstock.testing.trainer.fits import Measured
from penstock.testing.trainer.judge import Finding
from penstock.testing.trainer.reference import Vector, listed
from penstock.testing.trainer.samples import Probe
from penstock.testing.trainer.simulated import Per, Simulator

Run: TypeAlias = Callable[[PackedStep], tuple[float, Vector]]
_REPEATS = 4
_TOO_MUCH = 0.05
"""Noise above which nothing else is judged."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Noise:
    first: Vector
    probe: Probe
    level: float = 0.0
    """Relative deviation of the mean of `repeats` runs."""
    findings: tuple[Finding, ...] = ()
    repeats: int = 1
    """How often every step is trained from here on."""
    blocks: bool = False
    """Whether nothing else can be judged."""

    def later(self, run: Run, tolerance: float, before: Sequence[tuple[Probe, Vector]]) -> list[Finding]:
        """Train the first step and some others again: state that outlives a step shows, and what is random at times."""
        if self.findings:
            return []
        for probe, earlier in ((self.probe, self.first), *before):
            gap = _length(run(probe.step)[1] - earlier) / max(_length(earlier), 1e-300)
            if gap > tolerance:
                return [_remembers(f"{probe.what}, trained again after all others, differs by {gap:.1%}")]
        return []


def measure_noise(run: Run, probe: Probe, tolerance: float, expected: Vector) -> Noise:
    """Train one step several times. `expected` is its right gradient."""
    runs = [run(probe.step)[1] for _ in range(_REPEATS)]
    first, size = runs[0], max(_length(runs[0]), 1e-300)
    if not all(np.isfinite(one).all() for one in runs):
        return Noise(first=first, probe=probe)
    gaps = [_length(one - first) / size for one in runs[1:]]
    if max(gaps) <= min(1e-5, tolerance / 10):
        return Noise(first=first, probe=probe)
    runs += [run(probe.step)[1] for _ in range(_REPEATS)]
    finding, blocks = _classified(runs, expected)
    spread = float(np.sqrt(np.mean([_length(one - np.mean(runs, axis=0)) ** 2 for one in runs]) * 8 / 7)) / size
    if not blocks and spread <= tolerance / 5:  # the order of additions on a GPU
        return Noise(first=first, probe=probe, level=spread)
    blocks = blocks or spread > _TOO_MUCH
    repeats = 1 if blocks else 8
    level = spread / repeats**0.5
    return Noise(first=first, probe=probe, level=level, findings=(finding,), repeats=repeats, blocks=blocks)


def _classified(runs: Sequence[Vector], expected: Vector) -> tuple[Finding, bool]:
    first = runs[0]
    size = float(first @ first) or 1e-300
    factors = np.array([float(one @ first) / size for one in runs])
    parallel = all(
        _length(one - factor * first) < 1e-3 * _length(one) for one, factor in zip(runs, factors, strict=True)
    )
    steps = [runs[i + 1] - runs[i] for i in range(len(runs) - 1)]
    same = all(_length(one - steps[0]) < 1e-2 * _length(steps[0]) for one in steps)
    if same and (_cosine(steps[0], expected) > 0.99):
        return (
            Finding(
                bug="gradients are not cleared between steps",
                found=f"the same step gives {listed(factors[:4])} times the first gradient",
                fix="clear gradients before each step",
            ),
            True,
        )
    spread = max(_length(one - first) for one in runs) / max(_length(first), 1e-300)
    # Independent runs are as far from the first as from each other. What moves on is further away every time.
    away = [_length(one - first) for one in runs[1:]]
    if all(later > earlier for earlier, later in itertools.pairwise(away)):
        return _remembers(
            f"the same step in turn gives gradients that move on, by {spread:.1%} in {len(runs)} runs"
        ), True
    settled = max(_length(one - runs[1]) for one in runs[1:]) / max(_length(runs[1]), 1e-300)
    if settled < 1e-5:  # random runs do not repeat themselves
        return _remembers(f"a step differs by {spread:.1%} from the same step again, and then stays the same"), True
    what = "one random factor for all parameters" if parallel else "dropout, or another random part of the model"
    return (
        Finding(
            bug="the gradient is random",
            found=f"the same step gives gradients that differ by up to {spread:.1%} without a direction: {what}. "
            f"Biases are judged on means of several runs{'' if spread < _TOO_MUCH else ' once this is gone'}",
            fix="switch dropout off (model.eval()), seed what is drawn, start from the same weights",
        ),
        False,
    )


def _remembers(found: str) -> Finding:
    return Finding(
        bug="the gradient depends on earlier steps, or on chance",
        found=found,
        fix="start every step from the same weights, without an optimizer step, momentum or running means, and train "
        "the data of this step",
    )


def measure(run: Run, simulator: Simulator, probes: Sequence[Probe], noise: Noise) -> list[Measured]:
    found = []
    expected = [simulator.gradient(probe.step) for probe in probes]
    lengths = [_length(one) for one in expected if np.isfinite(one).all() and np.any(one)]
    typical = float(np.median(lengths)) if lengths else 1.0
    for probe, right in zip(probes, expected, strict=True):
        results = [run(probe.step) for _ in range(noise.repeats)]
        gradient = np.mean([one for _, one in results], axis=0)
        length = _length(gradient)
        scale = max(_length(np.nan_to_num(right)), length if np.isfinite(length) else 0.0, 0.05 * typical)
        loss = float(np.mean([loss for loss, _ in results]))
        found.append(Measured(probe=probe, loss=loss, gradient=gradient, expected=right, scale=scale))
    return found


def rerun(measured: Sequence[Measured]) -> list[tuple[Probe, Vector]]:
    """Return the steps to train once more, with their gradients: those of several micro-batches."""
    stages = ("micro-batches", "ranks")
    return [(m.probe, m.gradient) for m in measured if m.probe.stage in stages and np.isfinite(m.gradient).all()]


def wrong_losses(measured: Sequence[Measured], per: Per, tolerance: float) -> list[Finding]:
    """Compare the loss of every step with those of its samples alone."""
    alone = {one.probe.samples[0].id: one.loss for one in measured if one.probe.stage == "alone"}
    for one in measured:
        samples = one.probe.samples
        counts = np.array([sample.loss_tokens if per == "token" else 1 for sample in samples], np.float64)
        losses = np.array([alone.get(sample.id.split(" again")[0], 0.0) for sample in samples])
        wanted = float(counts @ losses / max(counts.sum(), 1))
        size = float(counts @ np.abs(losses) / max(counts.sum(), 1))
        if not abs(one.loss - wanted) <= tolerance * max(size, 1e-9):
            return [
                Finding(
                    bug="the loss that is returned is wrong",
                    found=f"gradients are right, but the loss of {one.probe.what} is {one.loss:.4g}, not {wanted:.4g}, "
                    "as the losses of its samples alone give",
                    fix="add up the losses that backward was called on, over micro-batches, and average over ranks",
                )
            ]
    return []


def _length(values: Vector) -> float:
    return float(np.linalg.norm(values))


def _cosine(one: Vector, other: Vector) -> float:
    return float(one @ other) / max(_length(one) * _length(other), 1e-300)
