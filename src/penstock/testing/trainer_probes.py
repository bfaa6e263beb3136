"""The probes of `penstock.testing.trainer`: one for each bug, on samples made so that no other bug triggers it.

Every sample has context before and after its trained tokens, so a shift by one stays inside it. Trained tokens are a
third of each sample, so dividing by all tokens gives the same weights as dividing by the trained ones, and only the
probe with padding detects the difference.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from penstock.arrays import Sample
from penstock.errors import InvalidInput
from penstock.packing import PackedStep, pack

_LONGEST = 64
_LOST = 0.05
"""A sample counts as lost if its weight is below this part of the expected one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trained:
    loss: float
    gradient: NDArray[np.float64]
    """[P] of all parameters in one vector."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Mixture:
    """A step's gradient as a weighted sum of the gradients of its samples, each trained alone."""

    weights: NDArray[np.float64]
    """[samples]"""
    rest: float
    """The part of the gradient that no such sum explains, 0 to 1; NaN if the gradient is not finite."""


class Trial:
    """A trainer under test, and its results for each sample alone."""

    def __init__(
        self,
        train: Callable[[PackedStep], Trained],
        *,
        vocabulary: int,
        per: Literal["token", "sample"],
        tolerance: float,
    ) -> None:
        self._train, self.vocabulary, self.per, self.tolerance = train, vocabulary, per, tolerance
        self._alone: dict[str, Trained] = {}
        self.small, self.large = self.sample("small", 6, 2), self.sample("large", 12, 4)

    def sample(self, name: str, length: int, trained: int) -> Sample:
        """Make a sample: context, trained tokens, context, with log-probabilities a little above those of a uniform
        model.

        So the ratio to a fresh model is below 1 and the advantage is positive: no known loss clips such a token.
        """
        rng = np.random.default_rng([len(name), *name.encode()])
        before = (length - trained) // 2
        mask = (np.arange(length) >= before) & (np.arange(length) < before + trained)
        return Sample(
            id=name,
            group=name,
            token_ids=rng.integers(1, self.vocabulary, length),
            loss_mask=mask,
            logprobs=np.where(mask, rng.uniform(0.05, 0.35, length) - math.log(self.vocabulary), 0.0),
            advantages=float(rng.uniform(0.5, 1.5)),
        )

    def other_id(self, sample: Sample, at: int) -> Sample:
        """Return the sample with another token at one position."""
        ids = sample.token_ids.astype(np.int64)
        ids[at] = 1 + ids[at] % (self.vocabulary - 1)
        return sample.replace(token_ids=ids, id=f"{sample.id} with another token {at}")

    def run(self, samples: Sequence[Sample], *, ranks: int = 1, **packing: Any) -> Trained:
        settings = {"seq_len": _LONGEST, "micro_batch_max_tokens": 2 * _LONGEST, "long_rows": True, **packing}
        return self._train(pack(samples, ranks=ranks, **settings))

    def alone(self, sample: Sample) -> Trained:
        """Train a step of this sample alone, on one rank, without padding. Cached."""
        if sample.id not in self._alone:
            self._alone[sample.id] = self.run([sample])
        return self._alone[sample.id]

    def expected(self, samples: Sequence[Sample]) -> NDArray[np.float64]:
        """Return the correct weight of each sample in a step."""
        counts = np.array([s.loss_tokens if self.per == "token" else 1 for s in samples], np.float64)
        weights: NDArray[np.float64] = counts / counts.sum()
        return weights

    def mixture(self, trained: Trained, samples: Sequence[Sample]) -> Mixture:
        """Explain a gradient by those of the samples alone, with least squares. A sample without gradient gets no
        weight."""
        basis = np.stack([self.alone(sample).gradient for sample in samples])
        if not np.isfinite(trained.gradient).all():
            return Mixture(weights=np.full(len(samples), np.nan), rest=math.nan)
        # Normal equations: a [samples, samples] matrix. One of [parameters, samples] is too large for real models.
        found = np.linalg.lstsq(basis @ basis.T, basis @ trained.gradient, rcond=1e-9)
        weights: NDArray[np.float64] = found[0].astype(np.float64)
        left = float(np.linalg.norm(trained.gradient - weights @ basis))
        return Mixture(weights=weights, rest=left / max(float(np.linalg.norm(trained.gradient)), 1e-300))

    def differ(self, one: Trained, other: Trained) -> float:
        """Return the relative difference of two results, of gradient or loss, whichever is larger. NaN counts as 1."""
        gap = np.linalg.norm(one.gradient - other.gradient)
        largest = max(float(np.linalg.norm(one.gradient)), float(np.linalg.norm(other.gradient)), 1e-300)
        loss = abs(one.loss - other.loss) / max(abs(one.loss), abs(other.loss), 1e-300)
        found = max(float(gap) / largest, loss)
        return found if math.isfinite(found) else 1.0

    def is_pure(self, mixture: Mixture) -> bool:
        return mixture.rest <= self.tolerance

    def is_right(self, mixture: Mixture, expected: NDArray[np.float64]) -> bool:
        return bool((np.abs(mixture.weights - expected) <= 10 * self.tolerance).all())

    def wrong_loss(self, trained: Trained, samples: Sequence[Sample]) -> str | None:
        """Return what is wrong with the loss of a step whose gradient is right, or None."""
        wanted = float(self.expected(samples) @ [self.alone(sample).loss for sample in samples])
        if abs(trained.loss - wanted) <= 10 * self.tolerance * max(abs(wanted), 1e-12):
            return None
        return f"the gradient is right, but the loss that is returned is {trained.loss:.4g}, not {wanted:.4g}"


# ------------------------------------------------------------------ one probe per bug


def not_repeatable(trial: Trial) -> str | None:
    first, second = trial.run([trial.small]), trial.run([trial.small])
    if not np.any(first.gradient) or not np.isfinite(first.gradient).all():
        what = "zero" if not np.any(first.gradient) else "not finite"
        raise InvalidInput(
            f"step_fn: the gradient of one sample with {trial.small.loss_tokens} trained tokens is {what}; the loss "
            f"masks or clips it (pass vocabulary=, the model's count of ids; it is {trial.vocabulary}), or nothing is "
            "trained"
        )
    gap = trial.differ(first, second)
    if gap <= trial.tolerance:
        return None
    ratio = float(second.gradient @ first.gradient / (first.gradient @ first.gradient))
    return f"the same step twice gives gradients that differ by {gap:.1%}, the second {ratio:.3g} times the first"


def off_by_one_mask(trial: Trial) -> str | None:
    sample = trial.large
    last = int(np.flatnonzero(sample.loss_mask)[-1])
    after = trial.differ(trial.alone(sample), trial.alone(trial.other_id(sample, last + 1)))
    if after > trial.tolerance:
        return (
            f"another token right after the last trained one changes the gradient by {after:.1%}: a token that the "
            "mask leaves out is trained"
        )
    if trial.differ(trial.alone(sample), trial.alone(trial.other_id(sample, last))) <= trial.tolerance:
        return "another token in place of the last trained one changes nothing: it is not trained"
    return None


def shifted(trial: Trial, column: str, values: Sequence[float]) -> str | None:
    """Probe whether a column is read at tokens that are not trained."""
    sample, mask = trial.large, trial.large.loss_mask
    if column == "temperatures":
        sample = sample.replace(temperatures=np.ones(len(mask)), id="at temperature 1")
    for value in values:
        other = np.where(mask, sample[column], value)
        gap = trial.differ(trial.alone(sample), trial.run([sample.replace(**{column: other})]))
        if gap > trial.tolerance:
            return f"other {column} where nothing is trained change the gradient by {gap:.1%}"
    return None


def temperature_ignored(trial: Trial) -> str | None:
    warm = trial.large.replace(temperatures=2.0, id="warm")
    if trial.differ(trial.alone(trial.large), trial.alone(warm)) <= trial.tolerance:
        return "tokens sampled at temperature 2 give the gradient of temperature 1"
    misplaced = shifted(trial, "temperatures", (3.0,))
    if misplaced is not None:
        return misplaced
    plain = trial.small.replace(temperatures=1.0, id="plain")
    together = trial.mixture(trial.run([plain, warm], max_samples=2), [plain, warm])
    if trial.is_pure(trial.mixture(trial.run([trial.small, trial.large]), [trial.small, trial.large])) and not (
        trial.is_pure(together)
    ):
        return f"of two samples in one row, at temperatures 1 and 2, {together.rest:.1%} of the gradient is neither's"
    return None


def lost_one_token_samples(trial: Trial) -> str | None:
    single = trial.sample("single", 5, 1)
    if not np.any(trial.alone(single).gradient):
        return "a sample with one trained token has no gradient"
    pair = [single, trial.large]
    mixture = trial.mixture(trial.run(pair, max_samples=1), pair)
    if abs(mixture.weights[0]) < _LOST * trial.expected(pair)[0]:
        return f"a sample with one trained token, in a step with another, has the weight {mixture.weights[0]:.3g}"
    length_one = Sample(id="one", group="one", token_ids=[1], loss_mask=[False], logprobs=[0.0], advantages=[0.0])
    around = [trial.small, trial.large]
    without = trial.mixture(trial.run(around), around)
    mixture = trial.mixture(trial.run([trial.small, length_one, trial.large]), around)
    if trial.is_pure(without) and not trial.is_pure(mixture):
        return f"a sample of one token between two others changes {mixture.rest:.1%} of their gradient"
    return None


def packing_dependent_loss(trial: Trial) -> str | None:
    samples = [trial.small, trial.large, trial.sample("third", 9, 3)]
    mixture = trial.mixture(trial.run(samples), samples)
    if trial.is_pure(mixture):
        return None
    return f"of three samples in one row, {mixture.rest:.1%} of the gradient is none of theirs alone"


def cap_dependent_gradient(trial: Trial) -> str | None:
    gap = trial.differ(trial.alone(trial.small), trial.run([trial.small], pad_to_multiple_of=32))
    if gap > trial.tolerance:
        return f"padding a row of 6 tokens to 32 changes loss or gradient by {gap:.1%}"
    many = [trial.sample(f"long row {i}", 12, 4) for i in range(8)]
    mixture = trial.mixture(trial.run(many), many)
    spread = float(np.ptp(mixture.weights) / np.abs(mixture.weights).max())
    if not trial.is_pure(mixture) or not spread <= 10 * trial.tolerance:
        return f"of 8 equal samples in a row of 96 tokens, weights go from {_range(mixture.weights)}"
    long = trial.sample("long", 60, 20)
    late = int(np.flatnonzero(long.loss_mask)[-2])
    if trial.differ(trial.alone(long), trial.run([trial.other_id(long, late)])) <= trial.tolerance:
        return "a sample of 60 tokens is cut: its last trained tokens change nothing"
    over = trial.run([long], micro_batch_max_tokens=16)
    gap = trial.differ(trial.alone(long), over)
    if gap > trial.tolerance:
        return f"a sample longer than micro_batch_max_tokens changes loss or gradient by {gap:.1%}"
    return None


def denominator_per_micro_batch(trial: Trial) -> str | None:
    counts = f"{trial.small.loss_tokens} and {trial.large.loss_tokens}"
    return _wrong_weights(trial, f"two micro-batches, with {counts} trained tokens, have", max_samples=1)


def rank_dependent_scale(trial: Trial) -> str | None:
    return _wrong_weights(trial, "one sample on each of two ranks: they have", ranks=2, max_samples=1)


def _wrong_weights(trial: Trial, what: str, **packing: int) -> str | None:
    samples = [trial.small, trial.large]
    trained, expected = trial.run(samples, **packing), trial.expected(samples)
    mixture = trial.mixture(trained, samples)
    if not trial.is_right(mixture, expected):
        return f"{what} the weights {_listed(mixture.weights)} in the gradient, not {_listed(expected)}"
    return trial.wrong_loss(trained, samples)


def dummy_in_the_loss(trial: Trial) -> str | None:
    trained = trial.run([trial.large], ranks=2)
    mixture = trial.mixture(trained, [trial.large])
    if math.isnan(mixture.rest):
        return "with a dummy micro-batch on one rank the gradient is not finite: something is divided by its 0 tokens"
    if not trial.is_pure(mixture):
        return f"with a dummy micro-batch on one rank, {mixture.rest:.1%} of the gradient is not the sample's"
    if not trial.is_right(mixture, np.ones(1)):
        return f"with a dummy micro-batch on one rank, the sample has the weight {mixture.weights[0]:.3g}, not 1"
    return trial.wrong_loss(trained, [trial.large])


def _listed(values: NDArray[np.float64]) -> str:
    return " and ".join(f"{value:.3g}" for value in values)


def _range(values: NDArray[np.float64]) -> str:
    return f"{values.min():.3g} to {values.max():.3g}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    bug: str
    look: Callable[[Trial], str | None]
    """Returns what was found, or None if the trainer does not have the bug."""
    fix: str
    needs: tuple[str, ...] = ()
    """Bugs that would trigger this probe as well."""


_ALWAYS = ("not repeatable",)
_DENOMINATOR = "divide the summed loss of every micro-batch by step.loss_tokens, the count over all ranks"

PROBES = (
    Probe(
        bug="not repeatable",
        look=not_repeatable,
        fix="start every step from the same weights, clear gradients, switch dropout off",
    ),
    Probe(
        bug="off-by-one mask",
        look=off_by_one_mask,
        fix="loss_mask[t] is about token t, whose prediction stands at t - 1: shift logits, not the mask",
        needs=_ALWAYS,
    ),
    Probe(
        bug="shifted logprobs",
        look=partial(shifted, column="logprobs", values=(-4.0, -15.0)),
        fix="logprobs[t] is that of token t: compare it with the trainer's log-probability of token t",
        needs=(*_ALWAYS, "off-by-one mask"),
    ),
    Probe(
        bug="shifted advantages",
        look=partial(shifted, column="advantages", values=(3.0, -3.0)),
        fix="advantages[t] is that of token t",
        needs=(*_ALWAYS, "off-by-one mask"),
    ),
    Probe(
        bug="temperature ignored",
        look=temperature_ignored,
        fix="divide the logits that predict token t by temperatures[t] before the softmax",
        needs=(*_ALWAYS, "off-by-one mask"),
    ),
    Probe(
        bug="packing-dependent loss",
        look=packing_dependent_loss,
        fix="cut attention, positions and the shift by one at sequence_lengths",
        needs=_ALWAYS,
    ),
    Probe(
        bug="lost one-token samples",
        look=lost_one_token_samples,
        fix="take boundaries from sequence_lengths, and leave no sample out for its length",
        needs=_ALWAYS,
    ),
    Probe(
        bug="cap-dependent gradient",
        look=cap_dependent_gradient,
        fix="count trained tokens, not tokens of a row, and cut no row: micro-batches are within their cap as they are",
        needs=(*_ALWAYS, "packing-dependent loss"),
    ),
    Probe(
        bug="denominator per micro-batch",
        look=denominator_per_micro_batch,
        fix=_DENOMINATOR,
        needs=_ALWAYS,
    ),
    Probe(
        bug="rank-dependent scale",
        look=rank_dependent_scale,
        fix=f"{_DENOMINATOR}, and multiply by the number of ranks where gradients are averaged over them",
        needs=(*_ALWAYS, "denominator per micro-batch"),
    ),
    Probe(
        bug="dummy micro-batch in the loss",
        look=dummy_in_the_loss,
        fix="a micro-batch without trained tokens adds 0 to the loss and to every count; divide by no count of its own",
        needs=(*_ALWAYS, "rank-dependent scale", "denominator per micro-batch"),
    ),
)
"""In order: a probe comes after those it needs."""
