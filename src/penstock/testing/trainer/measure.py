"""Trains the probes of `penstock.testing.trainer` and sets what comes out beside what should."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from penstock.testing.trainer.fits import Measured
from penstock.testing.trainer.judge import Finding
from penstock.testing.trainer.noise import Noise, Run
from penstock.testing.trainer.reference import Vector
from penstock.testing.trainer.samples import Probe
from penstock.testing.trainer.simulated import Per, Simulator


def measure(runner: Run, simulator: Simulator, probes: Sequence[Probe], noise: Noise) -> list[Measured]:
    found = []
    expected = [simulator.gradient(probe.step) for probe in probes]
    lengths = [float(np.linalg.norm(one)) for one in expected if np.isfinite(one).all() and np.any(one)]
    typical = float(np.median(lengths)) if lengths else 1.0
    for probe, right in zip(probes, expected, strict=True):
        results = [runner(probe.step) for _ in range(noise.repeats)]
        gradient = np.mean([one for _, one in results], axis=0)
        length = float(np.linalg.norm(gradient))
        scale = max(float(np.linalg.norm(np.nan_to_num(right))), length if np.isfinite(length) else 0.0, 0.05 * typical)
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
