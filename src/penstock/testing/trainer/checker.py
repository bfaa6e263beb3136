"""Runs the check: trains the probes with a step function, compares, and reports.

The check knows what every gradient should be: each sample goes through the model alone, in float64, and the loss is
computed token by token. Tiny steps are trained, from one sample alone to several ranks, and compared. Where they
differ, the check simulates a catalogue of bugs and names the one that predicts what was measured.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from penstock.client import Step
from penstock.errors import InvalidInput
from penstock.packing import PackedStep
from penstock.testing.trainer.judge import Finding, Judge
from penstock.testing.trainer.measure import Noise, measure, measure_noise, rerun, wrong_losses
from penstock.testing.trainer.reference import Forward, Reference, Sequence1, Vector, matched
from penstock.testing.trainer.samples import Options, Samples
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
