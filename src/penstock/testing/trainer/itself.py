"""Compares a trainer with itself, where model or loss are not known.

experiments   change what must not matter (a later token, a column where nothing is trained) and what must (the token
              itself, the one before it, the temperature, the sign of the advantage)
sums          train every token alone. The gradient of a sample, a row or a step on several ranks has to be the weighted
              mean of these, and the bugs of the catalogue are simulated on them
"""

# ruff: noqa: ARG002   (functions of one kind have one signature, whether or not they need all of it)
from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

import numpy as np

from penstock.arrays import Sample
from penstock.errors import InvalidInput
from penstock.testing.trainer.judge import Finding, Judge
from penstock.testing.trainer.measure import Noise, Run, measure, measure_noise, rerun, wrong_losses
from penstock.testing.trainer.reference import Flat, Sequence1, Vector
from penstock.testing.trainer.samples import Options, Samples, other_id, uniform
from penstock.testing.trainer.simulated import Columns, Fix, Simulator, spans_of


class Units:
    """The gradient of each token of the samples, trained alone. Takes the place of a model."""

    def __init__(self, run: Run, samples: Samples, flat: Flat) -> None:
        self._run, self._samples, self.flat = run, samples, flat
        self._by_key = {_key(sample): sample for sample in samples.made.values()}
        self._units: dict[tuple[str, int], Vector] = {}

    def unit(self, sample: Sample, token: int) -> Vector:
        """Return the gradient of a step in which this token alone is trained."""
        place = (sample.id, token)
        if token == 0:  # nothing predicts it, so it cannot be trained
            return np.full(self.flat.size, np.nan)
        if place not in self._units:
            mask = np.arange(len(sample.loss_mask)) == token
            only = sample.replace(loss_mask=mask, id=f"{sample.id}, token {token} alone")
            self._units[place] = self._run(self._samples.step([only]))[1]
        return self._units[place]

    def pull(self, sequence: Sequence1, coefficients: Vector) -> Vector:
        sample, total = self._by_key.get(sequence.key), np.zeros(self.flat.size)
        if not np.any(coefficients):
            return total
        if sample is None or not np.isfinite(coefficients).all():
            return np.full(self.flat.size, np.nan)  # this was not measured: no statement
        for token in np.flatnonzero(coefficients).tolist():
            total += coefficients[token] * self.unit(sample, token)
        return total

    def push(self, columns: Columns, logprobs: Vector, entropies: Vector) -> tuple[Vector, None]:
        """Return 1 for each token, or the factor on its advantage, or NaN where that is unknown."""
        unknown = np.full(len(logprobs), np.nan)
        sequence = Sequence1(
            token_ids=columns["token_ids"], positions=columns["position_ids"], temperatures=columns["temperatures"]
        )
        sample = self._by_key.get(sequence.key)
        if sample is None:
            return unknown, None
        given = np.broadcast_to(sample["advantages"], logprobs.shape).astype(np.float32).astype(np.float64)
        if not np.array_equal(sample["logprobs"].astype(np.float64), columns["logprobs"]):
            return unknown, None
        with np.errstate(divide="ignore", invalid="ignore"):
            factors = np.where(columns["advantages"] == given, 1.0, columns["advantages"] / given)
        return np.where(np.isfinite(factors), factors, np.nan), None

    def logprobs(self, sequence: Sequence1) -> Vector:
        return np.zeros(len(sequence.token_ids))

    def entropies(self, sequence: Sequence1) -> Vector:
        return np.zeros(len(sequence.token_ids))

    def pull_entropy(self, sequence: Sequence1, coefficients: Vector) -> Vector:
        return np.full(self.flat.size, np.nan)

    def weights(self) -> Vector:
        return np.zeros(self.flat.size)


def _key(sample: Sample) -> bytes:
    count = len(sample.token_ids)
    temperatures = (
        np.broadcast_to(sample["temperatures"], count) if "temperatures" in sample.columns else np.ones(count)
    )
    return Sequence1(
        token_ids=sample.token_ids.astype(np.int64),
        positions=np.arange(count),
        temperatures=temperatures.astype(np.float64),
    ).key


def check_itself(run: Run, flat: Callable[[], Flat], options: Options) -> tuple[list[Finding], Noise]:
    """Return what is wrong. `flat` returns how the runner writes gradients, once it has run."""
    vocabulary, tolerance, per = options.vocabulary, options.tolerance, options.per
    samples = Samples(uniform(vocabulary), options)
    _avoid_clips(run, samples, vocabulary)
    probes = samples.probes()
    noise = measure_noise(run, next(probe for probe in probes if "turns" in probe.what), tolerance)
    if not np.any(noise.first) or not np.isfinite(noise.first).all():
        what = "zero" if not np.any(noise.first) else "not finite"
        raise InvalidInput(
            f"step_fn: the gradient of one sample with 9 trained tokens is {what}; the loss masks or clips it (is "
            f"vocabulary={vocabulary} the model's count of ids?), or nothing is trained"
        )
    if noise.findings:  # single runs are compared from here on
        return list(noise.findings), noise
    units = Units(run, samples, flat())
    simulator = Simulator(reference=units, push=units.push, per=per)
    measured = measure(run, simulator, probes, noise)

    def train(sample: Sample) -> Vector:
        return run(samples.step([sample]))[1]

    judged = Judge(simulator, measured, train, tolerance=tolerance, special_ids=samples.special).findings()
    if not judged or not judged[0].known:
        # Sums cannot tell what is wrong with every token alone, and are confused by it.
        judged = next(([one] for one in _experiments(run, samples, units, tolerance, options.columns)), judged)
    later = noise.later(run, tolerance, rerun(measured))
    return judged or later or wrong_losses(measured, per, 10 * tolerance), noise


def _avoid_clips(run: Run, samples: Samples, vocabulary: int) -> None:
    """Choose log-probabilities that no usual loss clips: ratios below 1 for positive advantages, above 1 for others.

    Ratios are not known without the model. So begin near 1, and go further for tokens that have no gradient.
    """
    for name, sample in list(samples.made.items()):
        if name.startswith("clipped") or not sample.loss_mask.any():
            continue
        mask, logprobs = sample.loss_mask, sample["logprobs"].astype(np.float64)
        signs = np.where(np.broadcast_to(sample["advantages"], mask.shape) < 0, -1.0, 1.0)
        todo = np.flatnonzero(mask).tolist()
        for away in (0.3, 0.8, 1.6, 2.4):
            logprobs[todo] = np.minimum(signs[todo] * away - math.log(vocabulary), -0.01)
            made = sample.replace(logprobs=logprobs)
            samples.made[name] = made
            # The log-probability of one token does not matter for another: look at each alone.
            todo = [
                token
                for token in todo
                if not np.any(run(samples.step([made.replace(loss_mask=np.arange(len(mask)) == token)]))[1])
            ]
            if not todo or name == "zero":
                break


# ------------------------------------------------------------------ experiments


def _experiments(
    run: Run, samples: Samples, units: Units, tolerance: float, columns: Collection[str]
) -> Iterator[Finding]:
    """Yield what is wrong, most basic first."""
    lab = _Lab(run, samples, tolerance)
    yield from _untrained(lab, units)
    yield from _tokens(lab)
    yield from _columns(lab, columns)
    yield from _signs(lab)


class _Lab:
    def __init__(self, run: Run, samples: Samples, tolerance: float) -> None:
        self._run, self._samples, self.tolerance = run, samples, tolerance
        self.made: Mapping[str, Sample] = samples.made

    def gradient(self, sample: Sample) -> Vector:
        return self._run(self._samples.step([sample]))[1]

    def differ(self, one: Vector, other: Vector) -> float:
        largest = max(float(np.linalg.norm(one)), float(np.linalg.norm(other)), 1e-300)
        gap = float(np.linalg.norm(one - other)) / largest
        return gap if math.isfinite(gap) else 1.0

    def change(self, sample: Sample, **columns: object) -> float:
        """Return by how much the gradient changes with these columns."""
        return self.effect(sample, sample.replace(**columns, id=f"{sample.id} changed"))

    def effect(self, sample: Sample, other: Sample) -> float:
        """Return by how much the gradients of two samples differ."""
        return self.differ(self.gradient(sample), self.gradient(other))


def _tokens(lab: _Lab) -> Iterator[Finding]:
    for name in ("plain", "tools"):  # ..##..   ..##.###...
        sample = lab.made[name]
        last = int(np.flatnonzero(sample.loss_mask)[-1])
        after = lab.effect(sample, other_id(sample, last + 1))
        end = lab.effect(sample, other_id(sample, len(sample.loss_mask) - 1))
        if after > lab.tolerance or end > lab.tolerance:
            bug = "mask one token late" if end <= lab.tolerance else "a token sees later ones, or context is trained"
            yield Finding(
                bug=bug,
                found=f"another token right after the last trained one changes the gradient by {after:.1%}, another "
                f"last token by {end:.1%}",
                fix=Fix.MASK,
            )
        if lab.effect(sample, other_id(sample, last)) <= lab.tolerance:
            yield Finding(
                bug="mask one token early",
                found="another token in place of the last trained one changes nothing: it is not trained",
                fix=Fix.MASK,
            )
    sample = lab.made["plain"]
    only = sample.replace(loss_mask=np.arange(6) == 2, id="plain, first token alone")
    if lab.effect(only, other_id(only, 1)) <= lab.tolerance:
        yield Finding(
            bug="token t is not predicted from token t - 1 (shifted twice)",
            found="another token before the trained one changes nothing",
            fix=Fix.SHIFT,
        )


def _untrained(lab: _Lab, units: Units) -> Iterator[Finding]:
    """Look for tokens that have no gradient when they alone are trained."""
    zero, trained = [], 0
    ids = (name for name in lab.made if name.startswith("id "))
    for name in ("down", "turns", "single", "short", "tools", "long", *ids):
        sample = lab.made[name]
        advantages = np.broadcast_to(sample["advantages"], sample.loss_mask.shape)
        for token in np.flatnonzero(sample.loss_mask & (advantages != 0)).tolist():
            trained += 1
            if not np.any(units.unit(sample, token)):
                zero.append((sample, token, float(advantages[token])))
    if not zero:
        return
    every = len(zero) == trained
    yield Finding(
        bug="samples with one trained token are left out" if every else _common(zero, units, lab.made["long"]),
        found=f"{len(zero)} of {trained} tokens have no gradient when they alone are trained, such as token "
        f"{zero[0][1]} of {len(zero[0][0].loss_mask)}",
        fix=Fix.MASK,
    )


def _common(zero: Sequence[tuple[Sample, int, float]], units: Units, long: Sample) -> str:
    """Describe what tokens without a gradient have in common."""
    first = min(token for _, token, _ in zero)
    before = [token for token in np.flatnonzero(long.loss_mask).tolist() if token < first]
    if all(sample is long for sample, _, _ in zero) and all(np.any(units.unit(long, token)) for token in before):
        return f"a sample is cut after about {first} tokens"
    if all(token == len(sample.loss_mask) - 1 for sample, token, _ in zero):
        return "the last token of a sample is never trained"
    ids = {int(sample.token_ids[token]) for sample, token, _ in zero}
    if len(ids) == 1:
        return f"the id {ids.pop()} is never trained"
    if all(advantage < 0 for _, _, advantage in zero):
        return "negative advantages are clamped to 0"
    if all(advantage > 0 for _, _, advantage in zero):
        return "positive advantages are clamped to 0"
    if all(any(b - 1 == token for _, b in spans_of(sample.loss_mask)) for sample, token, _ in zero):
        return "the last trained token of every turn is not trained"
    return "some trained tokens have no gradient: masked, clipped or cut"


def _columns(lab: _Lab, columns: Collection[str]) -> Iterator[Finding]:
    sample, mask = lab.made["tools"], lab.made["tools"].loss_mask
    base = {"logprobs": sample["logprobs"], "advantages": np.broadcast_to(sample["advantages"], mask.shape)}
    if "temperatures" in columns:
        base["temperatures"] = np.ones(len(mask))
    values = {"logprobs": (-1.0, -9.0), "advantages": (3.0, -3.0), "temperatures": (3.0,)}
    for name, given in base.items():
        own = sample.replace(**{name: given}, id="tools with its own")
        for value in values[name]:
            gap = lab.change(own, **{name: np.where(mask, given, value)})
            if gap > lab.tolerance:
                yield Finding(
                    bug=f"{name} of another token",
                    found=f"other {name} where nothing is trained change the gradient by {gap:.1%}",
                    fix=f"{name}[t] belongs to token t, and only trained tokens count",
                )
    if "temperatures" in columns and lab.change(sample, temperatures=2.0) <= lab.tolerance:
        yield Finding(
            bug="temperature ignored",
            found="tokens sampled at temperature 2 give the gradient of temperature 1",
            fix=Fix.TEMPERATURES,
        )


def _signs(lab: _Lab) -> Iterator[Finding]:
    """Compare gradients of an advantage, of its negative and of multiples of it. A supervised loss uses none."""
    sample = lab.made["plain"]
    names = (0.5, 1.0, 40.0, -0.5)
    one, twice, large, minus = (lab.gradient(sample.replace(advantages=a, id=f"plain, {a}")) for a in names)
    if lab.differ(one, minus) <= lab.tolerance and lab.differ(one, twice) <= lab.tolerance:
        return  # advantages are not used at all
    if np.any(minus) and float(minus @ one) > 0:
        yield Finding(
            bug="negative advantages are trained as positive ones",
            found="the gradient has the same direction for advantages of 0.5 and -0.5",
            fix=Fix.ADVANTAGES,
        )
    for times, other in ((2.0, twice), (80.0, large)):
        gap = lab.differ(times * one, other)
        if np.any(one) and gap > max(lab.tolerance, 1e-2):
            factor = float(other @ one) / max(float(one @ one), 1e-300)
            yield Finding(
                bug="the gradient does not grow with the advantages",
                found=f"{times:g} times the advantage gives {factor:.3g} times the gradient",
                fix="look for advantages that are normalized or clamped, a clipped gradient, a term without advantages",
            )
