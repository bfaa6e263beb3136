"""Finds the bugs that explain what a trainer did: simulates each bug of the catalogue and keeps the one that fits.

Steps are explained in order: one sample alone, with padding, in a row, in micro-batches, on ranks. A bug has to predict
every step up to the first one that is wrong, and of those that do, the one that predicts most of the others is named.
What no bug and no pair of bugs explains is described by what was measured.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from penstock.arrays import Sample
from penstock.testing.trainer.bugs import catalogue
from penstock.testing.trainer.fits import Measured, fits
from penstock.testing.trainer.reference import Vector, listed
from penstock.testing.trainer.samples import STAGES, other_id
from penstock.testing.trainer.simulated import Fix, Hypothesis, Simulator

_ROUNDS = 3
_PAIRS = 8
"""Bugs that explain a part, for which a second one is looked for."""
_ROUNDING = 0.03
"""Differences up to this may come from rounding to bfloat16."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    bug: str
    """The likeliest bug, or what is wrong in general where no known bug explains it."""
    found: str
    """The measured effect, with values."""
    fix: str
    known: bool = True
    """Whether simulating the bug gives what was measured."""
    also: tuple[str, ...] = ()
    """Other bugs that would have the same effect on these steps, or nearly."""

    def __str__(self) -> str:
        others = f" (or: {'; or: '.join(self.also)})" if self.also else ""
        return f"{self.bug}{others}. {self.found}. To fix it: {self.fix}"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Candidate:
    bug: Hypothesis
    left: int
    """Steps it does not explain."""
    explained: int
    """Steps that are wrong and that it explains."""


class Judge:
    def __init__(
        self,
        simulator: Simulator,
        measured: Sequence[Measured],
        train: Callable[[Sample], Vector],
        *,
        tolerance: float,
        special_ids: Sequence[int],
        loss: object,
    ) -> None:
        """`train` returns the gradient of one more sample alone, for experiments."""
        self._simulator, self._measured, self._train = simulator, list(measured), train
        self._tolerance, self._special_ids, self._loss = tolerance, special_ids, loss

    def findings(self) -> list[Finding]:
        """Return the bugs that explain the measured gradients, at most a few."""
        found = [_not_finite(one) for one in self._broken()[:1]]
        bugs: list[Hypothesis] = []
        known: list[Hypothesis] | None = None
        for _ in range(_ROUNDS):
            wrong = [one for one in self._measured if self._explains(one, bugs) is False]
            if not wrong:
                break
            if known is None:
                known = self._known()
            chosen, also = self._search(known, bugs, wrong)
            if not chosen:
                found.append(self._roughly(known, bugs, wrong) or self._unexplained(wrong, bugs))
                break
            found += [self._finding(bug, also if bug is chosen[-1] else (), wrong) for bug in chosen]
            bugs += chosen
        return found

    def _known(self) -> list[Hypothesis]:
        low, high = getattr(self._loss, "low", 0.2), getattr(self._loss, "high", 0.2)
        known = catalogue(low=low, high=high, special_ids=self._special_ids)
        return [*known, *fits(self._simulator, self._measured)]

    def _broken(self) -> list[Measured]:
        """Remove the steps whose gradient is not finite, and return them."""
        broken = [one for one in self._measured if not np.isfinite(one.gradient).all()]
        self._measured = [one for one in self._measured if np.isfinite(one.gradient).all()]
        return broken

    def _gap(self, one: Measured, bugs: Sequence[Hypothesis]) -> float:
        return one.gap(self._simulator.gradient(one.probe.step, bugs)) if bugs else one.error

    def _explains(self, one: Measured, bugs: Sequence[Hypothesis]) -> bool | None:
        """Return whether bugs predict what was measured, None if they predict nothing for this step."""
        gap = self._gap(one, bugs)
        return None if np.isnan(gap) else gap <= self._tolerance

    def _search(
        self, known: Sequence[Hypothesis], bugs: Sequence[Hypothesis], wrong: Sequence[Measured]
    ) -> tuple[list[Hypothesis], tuple[str, ...]]:
        """Return the bugs to add, one or a pair, and the names of others that explain as much."""
        stages = list(STAGES)[: list(STAGES).index(wrong[0].probe.stage) + 1]
        own = [one for one in self._measured if one.probe.stage in stages]
        focus = sorted(own, key=lambda one: -one.error)
        singles = self._explaining(known, bugs, focus, wrong)
        if singles:
            return [singles[0].bug], _others(singles)
        for first in self._partial(known, bugs, focus[:_PAIRS]):
            seconds = [bug for bug in known if bug.name != first.name]
            pairs = self._explaining(seconds, [*bugs, first], focus, wrong)
            if pairs:
                return [first, pairs[0].bug], _others(pairs)
        return [], ()

    def _explaining(
        self,
        known: Iterable[Hypothesis],
        bugs: Sequence[Hypothesis],
        focus: Sequence[Measured],
        wrong: Sequence[Measured],
    ) -> list[_Candidate]:
        """Return the bugs that explain all of `focus`, best first: those that leave the fewest other steps wrong."""
        found = []
        inside, needed = {id(one) for one in focus}, {id(one) for one in wrong}
        for bug in known:
            # Stop at the first step that speaks against a bug: there are hundreds of them.
            seen = {}
            for one in focus:
                seen[id(one)] = self._explains(one, [*bugs, bug])
                if seen[id(one)] is False:
                    break
            else:
                rest = (one for one in self._measured if id(one) not in inside)
                seen |= {id(one): self._explains(one, [*bugs, bug]) for one in rest}
                left = sum(value is False for value in seen.values())
                explained = sum(seen[key] is True for key in needed)
                if explained >= min(2, len(wrong)):
                    found.append(_Candidate(bug=bug, left=left, explained=explained))
        return sorted(found, key=lambda one: (one.left, -one.explained, one.bug.order))

    def _partial(
        self, known: Sequence[Hypothesis], bugs: Sequence[Hypothesis], focus: Sequence[Measured]
    ) -> list[Hypothesis]:
        """Return the bugs that explain the largest part of the difference, best first."""
        before = float(np.mean([min(self._gap(one, bugs), 10.0) for one in focus]))
        scored: dict[str, tuple[float, Hypothesis]] = {}
        for bug in known:
            gaps = [min(self._gap(one, [*bugs, bug]), 10.0) for one in focus]
            left = float(np.mean(gaps))
            if left < 0.9 * before and left < scored.get(bug.name, (np.inf, bug))[0]:
                scored[bug.name] = (left, bug)
        return [bug for _, bug in sorted(scored.values(), key=lambda pair: pair[0])[:_PAIRS]]

    def _roughly(
        self, known: Sequence[Hypothesis], bugs: Sequence[Hypothesis], wrong: Sequence[Measured]
    ) -> Finding | None:
        """Return the bug that explains most of the wrong steps, if it explains more than half and breaks few."""
        best, most = None, 0.5 * len(wrong)
        needed = {id(one) for one in wrong}
        for bug in known:
            possible = float(len(wrong))
            for one in (*wrong, *self._measured):
                explained = self._explains(one, [*bugs, bug])
                possible -= explained is not True if id(one) in needed else explained is False
                if possible <= most:
                    break
            else:
                best, most = bug, possible
        if best is None:
            return None
        finding = self._finding(best, (), wrong)
        return replace(finding, found=f"explains most of {len(wrong)} wrong steps, not all; {finding.found}")

    def _finding(self, bug: Hypothesis, also: tuple[str, ...], wrong: Sequence[Measured]) -> Finding:
        # The simplest steps that show it: later ones may show another bug as well.
        worst = max((one for one in wrong if one.probe.stage == wrong[0].probe.stage), key=lambda one: one.error)
        stages = ", ".join(dict.fromkeys(one.probe.stage for one in wrong))
        found = (
            f"changes the gradient in {len(wrong)} of {len(self._measured)} steps ({stages}), most in "
            f"{worst.probe.what}: {described(worst)}"
        )
        return Finding(bug=bug.name, found=found, fix=bug.fix, also=also)

    def _unexplained(self, wrong: Sequence[Measured], bugs: Sequence[Hypothesis]) -> Finding:
        stage = wrong[0].probe.stage
        own = [one for one in wrong if one.probe.stage == stage]
        worst = max(own, key=lambda one: self._gap(one, bugs))
        rounding = self._rounding(wrong) if not bugs else None
        if rounding is not None:
            return rounding
        bug, fix = _GENERAL[stage]
        detail, other = self._tokens(worst) if stage == "alone" else (self._shares(worst), False)
        if stage == "alone":
            general = (bug, fix) if not other else _CUT if self._right_losses(own) else _OTHER_PASS
            bug, fix = self._experiment(other) or general
        names = ", ".join(one.probe.what for one in own[:3])
        return Finding(
            bug=bug,
            found=f"no known bug explains it; wrong in {len(own)} steps ({names}); {described(worst)}; {detail}",
            fix=fix,
            known=False,
        )

    def _right_losses(self, wrong: Sequence[Measured]) -> bool:
        """Return whether the losses of steps of one sample are right, though their gradients are not."""
        pairs = [(one.loss, self._simulator.loss_of(one.probe.step, self._loss)) for one in wrong]
        return all(abs(found - right) <= self._tolerance * max(abs(right), 1e-3) for found, right in pairs)

    def _experiment(self, other: bool) -> tuple[str, str] | None:
        """Change tokens that must not matter, and tokens that must. `other` tells that the forward pass is not the
        model's. If it is, a later token matters only because it is trained."""
        one = next(one for one in self._measured if one.probe.samples[0].id == "plain")  # ..##..
        sample, length = one.probe.samples[0], max(float(np.linalg.norm(one.gradient)), 1e-300)
        later = float(np.linalg.norm(self._train(other_id(sample, -1)) - one.gradient)) / length
        if later > self._tolerance and other:
            return "a token sees later ones", "use causal attention"
        before = float(np.linalg.norm(self._train(other_id(sample, 1)) - one.gradient)) / length
        if before <= self._tolerance:
            return "the token before does not matter", Fix.SHIFT
        return None

    def _rounding(self, wrong: Sequence[Measured]) -> Finding | None:
        """Compare small differences with those that weights rounded to bfloat16 would give."""
        largest = max(one.error for one in wrong)
        if largest > _ROUNDING:
            return None
        rounded = replace(self._simulator, reference=self._simulator.reference.rounded())
        level = max(one.gap(rounded.gradient(one.probe.step)) for one in wrong[:6])
        if largest > 4 * level:
            return None
        return Finding(
            bug="rounding, as large as bfloat16 makes it",
            found=f"gradients differ by up to {largest:.2%} and by another part in every step; rounding weights to "
            f"bfloat16 gives up to {level:.2%}",
            fix="compute in float32 for the check, or pass tolerance=3e-2 to accept it",
            known=False,
        )

    def _tokens(self, one: Measured) -> tuple[str, bool]:
        """Describe which tokens of one sample have a wrong part in the gradient. Returns True as well if none has."""
        row = self._simulator.rows(one.probe.step)[0][0]
        units = np.stack([self._simulator.unit(row, token) for token in range(1, row.size)])
        expected = np.where(row.mask, 1.0, 0.0)[1:]
        right = self._simulator.coefficients_of(row)[1:]
        found = np.linalg.lstsq(units.T, one.gradient - one.expected, rcond=1e-8)[0]
        rest = float(np.linalg.norm(one.gradient - one.expected - found @ units)) / one.scale
        if rest > min(0.05, 0.3 * one.error):
            return f"{rest:.1%} of it belongs to no token of the sample", True
        with np.errstate(divide="ignore", invalid="ignore"):
            factors = np.where(expected > 0, 1 + found / right, found)
        shown = [
            f"{'trained' if row.mask[t + 1] else 'context'} token {t + 1}: "
            + (f"{factors[t]:.2g} times its part" if row.mask[t + 1] and right[t] else f"a part of {found[t]:.2g}")
            for t in range(len(found))
            if abs(found[t]) > 0.02 * max(np.abs(right).max(), 1e-12)
        ]
        return "; ".join(shown[:6]) or "no single token stands out", False

    def _shares(self, one: Measured) -> str:
        """Describe the weights of samples in a step, by least squares."""
        simulator = self._simulator
        parts = np.stack([simulator.share(one.probe.step, sample.id) for sample in one.probe.samples])
        used = [i for i in range(len(parts)) if np.any(parts[i])]
        found: Vector = np.linalg.lstsq(parts[used].T, one.gradient, rcond=1e-8)[0].astype(np.float64)
        rest = float(np.linalg.norm(one.gradient - found @ parts[used])) / one.scale
        names = [one.probe.samples[i].id for i in used]
        text = f"{', '.join(names)} have {listed(found)} times the weight they should have"
        return text + (f", and {rest:.1%} of the gradient is none of theirs" if rest > 2 * self._tolerance else "")


def _others(candidates: Sequence[_Candidate]) -> tuple[str, ...]:
    best = candidates[0]
    names = [one.bug.name for one in candidates if one.left == best.left and one.bug.order < 1000]
    return tuple(name for name in dict.fromkeys(names) if name != best.bug.name)[:2]


def described(one: Measured) -> str:
    """Describe how far a gradient is from the right one, and in which respect."""
    length, right = float(np.linalg.norm(one.gradient)), float(np.linalg.norm(one.expected))
    if not right:
        return f"it should be 0 and has the length {length:.3g}"
    cosine = float(one.gradient @ one.expected) / max(length * right, 1e-300)
    return f"{one.error:.1%} off, {length / right:.3g} times as long, cosine {cosine:.3f}"


def _not_finite(one: Measured) -> Finding:
    return Finding(
        bug="the gradient is not finite",
        found=f"in the step of {one.probe.what}",
        fix="divide by no count of a micro-batch's own, which may be 0, and mask before exp, not after",
    )


_OTHER_PASS = (
    "the forward pass is not the model's",
    "compare weights, attention, positions, dropout and precision with those of the model that is passed",
)
_CUT = (
    "the loss is right, its gradient is not: something is detached or frozen",
    "look for detach, no_grad, caches and frozen parameters or rows of them between the inputs and the loss",
)
_GENERAL = {
    "alone": (
        "the gradient of one sample alone is wrong",
        "compare log-probabilities, mask and loss of one sample with the model's, token by token",
    ),
    "padded": (
        "padding changes the gradient",
        "count trained tokens, not tokens of a row, and let nothing of the padding into model or loss",
    ),
    "row": (
        "samples of one row change each other's gradient",
        "cut attention, positions, the shift by one and every mean at sequence_lengths",
    ),
    "micro-batches": (
        "the gradient depends on how a step is cut into micro-batches",
        "divide the summed loss of every micro-batch by step.loss_tokens and add gradients up",
    ),
    "ranks": (
        "the gradient depends on the number of ranks",
        "divide by step.loss_tokens, times the number of ranks where gradients are averaged over them",
    ),
}
