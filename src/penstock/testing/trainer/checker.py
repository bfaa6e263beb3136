"""Runs the check: trains the probes with a step function, compares, and reports.

The check knows what every gradient should be: each sample goes through the model alone, in float64, and the loss is
computed token by token. Tiny steps are trained, from one sample alone to several ranks, and compared. Where they
differ, the check simulates a catalogue of bugs and names the one that predicts what was measured.

The same step is trained several times first, to tell what is random from what is wrong:

1, 2, 3 times the first gradient        gradients are not cleared
every time further away                 weights move, or something remembers earlier steps
scattered around a mean                 noise: dropout, a random factor. The mean of several runs is then judged,
                                        with a tolerance that is wider than the noise
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from penstock.client import Step
from penstock.errors import InvalidInput
from penstock.packing import PackedStep
from penstock.testing.trainer.fits import Measured
from penstock.testing.trainer.judge import Finding, Judge
from penstock.testing.trainer.reference import Forward, Reference, Sequence1, Vector, listed, matched
from penstock.testing.trainer.samples import Options, Probe, Samples
from penstock.testing.trainer.simulated import Per, Simulator, push_of

Gradients: TypeAlias = Mapping[str, Any] | Sequence[Any]
"""Arrays or tensors, by parameter or in one order."""
StepFunction: TypeAlias = Callable[[PackedStep], tuple[Any, Gradients]]
"""Trains on a step of all ranks. Returns the loss and the gradients as the optimizer would get them."""
RankFunction: TypeAlias = Callable[[Step, int], tuple[Any, Gradients]]
"""Trains on one rank's part of a step. The second argument is the number of ranks. Returns the value that backward was
called on, and its gradients."""

NOT_SEEN = (
    "what happens after the gradients: clipping, the optimizer, its schedule, saving and publishing weights",
    "whether advantages, log-probabilities and masks are right when they reach the trainer",
    "what the probes do not have: images, routed experts, more than 64 tokens in a sample or 4 ranks",
    "differences below the tolerance, and clips that no probe reaches",
)
"""Classes of bugs that are out of reach."""


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Report:
    findings: tuple[Finding, ...]
    steps: int
    """Steps that were trained."""
    noise: float
    """Relative difference between repetitions of one step. 0 for a deterministic trainer."""
    not_seen: tuple[str, ...] = NOT_SEEN
    """Classes of bugs that the check cannot see."""

    @property
    def ok(self) -> bool:
        return not self.findings

    @property
    def bugs(self) -> tuple[str, ...]:
        """The names of the bugs found."""
        return tuple(finding.bug for finding in self.findings)

    def __str__(self) -> str:
        verdict = f"{len(self.findings)} findings" if self.findings else "ok"
        lines = [f"{verdict}: {self.steps} steps, compared with the reference, noise {self.noise:.2g}"]
        lines += [f"  FOUND     {finding}" for finding in self.findings]
        lines += [f"  not seen  {what}" for what in self.not_seen]
        return "\n".join(lines)

    __repr__ = __str__


def check(
    step_fn: StepFunction,
    *,
    vocabulary: int,
    model: Any,
    loss: Any,
    forward: Forward | None = None,
    per: Per = "token",
    tolerance: float = 1e-3,
    columns: Collection[str] = ("temperatures",),
    special_ids: Sequence[int] = (),
    ranks: Collection[int] = (2, 3, 4),
) -> Report:
    """Train some sixty tiny steps with `step_fn`, each from the same weights, and report what is wrong with them.

    `vocabulary` is the model's number of token ids. `model` is the model as the step function begins with it, or a
    function that makes it; `forward(model, token_ids, position_ids)` returns the logits [T, V] of one sequence, if
    calling the model does not. `loss` is what the trainer is meant to compute: a loss of `penstock.train`, or a
    function `(columns, logprobs, entropy)` that returns the loss of each token of one sample.

    `per` is what the loss is a mean over: the trained tokens of the step (`step.loss_tokens`), or its samples
    (`step.denominators.samples`), each a mean over its own tokens. `tolerance` is the relative difference that is
    accepted: 1e-3 suits float32, bfloat16 needs about 3e-2. `columns` are the optional columns that the trainer uses:
    temperatures, teacher_logprobs, rl_weights. `special_ids` (EOS, padding) appear among the trained tokens.
    `ranks` are the numbers of ranks that the step function can train, beside one.

    The trainer must compute what it computes in training, except for what is random or clips gradients: no dropout, no
    clipping, no optimizer step. Auxiliary losses over a batch (load balancing of experts) must be off.
    """
    if vocabulary < 8:
        raise InvalidInput(f"vocabulary: {vocabulary}; the samples of the check need at least 8 ids")
    options = Options(
        vocabulary=vocabulary,
        per=per,
        tolerance=tolerance,
        columns=columns,
        special_ids=tuple(special_ids),
        ranks=ranks,
    )
    return _checked(step_fn, Reference(model, forward), loss, options)


def _checked(step_fn: StepFunction, reference: Reference, loss: Any, options: Options) -> Report:
    runner = Runner(step_fn, reference)
    simulator = Simulator(reference=reference, push=push_of(loss), per=options.per)

    def logprobs(ids: NDArray[np.int64], temperatures: Vector) -> Vector:
        return reference.logprobs(Sequence1(token_ids=ids, positions=np.arange(len(ids)), temperatures=temperatures))

    samples = Samples(logprobs, options)
    probes = samples.probes()
    first = next(probe for probe in probes if "turns" in probe.what)
    noise = measure_noise(runner, first, options.tolerance, simulator.gradient(first.step))
    if noise.blocks:
        return _report(runner, noise.findings, noise)
    measured = measure(runner, simulator, probes, noise)
    allowed = max(options.tolerance, 5 * noise.level)
    judge = Judge(
        simulator,
        measured,
        lambda sample: runner(samples.step([sample]))[1],
        tolerance=allowed,
        special_ids=samples.special,
        loss=loss,
    )
    # Findings about randomness come first: the others may follow from it.
    later = noise.later(runner, allowed, rerun(measured))
    findings = [*noise.findings, *later, *(one for one in judge.findings() if one.known or not later)]
    if not findings:
        findings = wrong_losses(measured, options.per, 10 * options.tolerance)
    return _report(runner, findings, noise)


def each_rank(rank_fn: RankFunction, *, exchange: Literal["mean", "sum"] = "mean") -> StepFunction:
    """Make a step function from a rank function: run every rank in turn, then exchange gradients as DDP and FSDP do.

    They take the mean over ranks; for a trainer that sums gradients pass `exchange="sum"`. The loss is exchanged in the
    same manner: return the value that backward was called on.
    """

    def step_fn(step: PackedStep) -> tuple[float, Gradients]:
        world = len(step.ranks)
        scale = 1.0 / world if exchange == "mean" else 1.0
        loss, total = 0.0, dict[Any, NDArray[np.float64]]()
        for rank in step.ranks:
            own, gradients = read(rank_fn(Step(1, "", rank.rank_plan, list(rank)), world))
            loss += own * scale
            for name, gradient in gradients.items():
                total[name] = total.get(name, 0.0) + gradient * scale
        return loss, total

    return step_fn


class Runner:
    """Calls a step function and returns all gradients in one vector, always of the same parameters."""

    def __init__(self, step_fn: StepFunction, reference: Reference) -> None:
        self._step_fn, self._reference, self.steps = step_fn, reference, 0
        self._names: dict[Any, str] = {}

    def __call__(self, step: PackedStep) -> tuple[float, Vector]:
        loss, gradients = read(self._step_fn(step))
        self.steps += 1
        if not gradients and not self._names:
            raise InvalidInput("step_fn: there are no gradients; return all that are trained, zeros where nothing is")
        self._match(gradients)
        return loss, self._reference.flat({self._names[name]: values for name, values in gradients.items()})

    def _match(self, gradients: Mapping[Any, Vector]) -> None:
        """Find the model's names for the gradients, and compare shapes."""
        new = {name: values for name, values in gradients.items() if name not in self._names}
        if new:
            ordered = all(isinstance(name, int) for name in gradients)
            self._names |= matched({**gradients}, self._reference.shapes, ordered)
        for name, values in gradients.items():
            shape = self._reference.shapes[self._names[name]]
            if values.shape != shape:
                raise InvalidInput(
                    f"step_fn: gradient of {name!r} has the shape {list(values.shape)}, the model's parameter "
                    f"{list(shape)}; return the gradients of the model that is passed"
                )


def _report(runner: Runner, findings: Sequence[Finding], noise: Noise) -> Report:
    return Report(findings=tuple(findings), steps=runner.steps, noise=noise.level)


def read(given: tuple[Any, Gradients]) -> tuple[float, dict[Any, Vector]]:
    """Convert the result of a step function to numpy. Tensors are recognised by their methods: no torch needed."""
    try:
        loss, gradients = given
    except (TypeError, ValueError):
        raise InvalidInput(f"step_fn: gave {type(given).__name__}; return (loss, gradients)") from None
    named = gradients.items() if isinstance(gradients, Mapping) else enumerate(gradients)
    return _array(loss).item(), {name: _array(value) for name, value in named if value is not None}


def _array(value: Any) -> Vector:
    if hasattr(value, "detach"):
        value = value.detach().cpu().double().numpy()
    return np.array(value, np.float64)  # a copy: trainers clear their gradients in place


# ------------------------------------------------------------------ measured gradients


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
