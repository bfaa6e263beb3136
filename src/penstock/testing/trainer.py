"""A conformance test for trainers: which of the field's published bugs does yours have?

    from penstock.testing.trainer import check, each_rank

    def step_fn(step, world):                  # one rank's step, as `source.step()` returns it
        ...                                    # forward and backward of all micro-batches
        return loss, gradients                 # before clipping and before the optimizer
    report = check(each_rank(step_fn), vocabulary=len(tokenizer))
    assert report.ok, report

The check needs to know nothing about the model or the loss. If a loss is summed over tokens and divided by a count of
the step, the gradient of a step is the weighted mean of the gradients of its samples. So every sample is first trained
alone. Then the same samples are trained together: in one row, in several, with padding, on two ranks. The weights that
result, and the part of the gradient that is no weighted mean, tell the bugs apart. For a value that must not matter,
the check changes it and expects the same gradient:

    alone      small (2 trained tokens) -> gradient g1        large (4 trained tokens) -> gradient g2
    together   expected 1/3 g1 + 2/3 g2. A trainer that averages per micro-batch gives 1/2 g1 + 1/2 g2; attention across
               the boundary leaves a rest that is neither.
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
from penstock.testing.trainer_probes import PROBES, Trained, Trial

Gradients: TypeAlias = Mapping[str, Any] | Sequence[Any]
"""Arrays or tensors, by parameter or in one order."""
StepFunction: TypeAlias = Callable[[PackedStep], tuple[Any, Gradients]]
"""Trains on a step of all ranks. Returns the loss and the gradients as the optimizer would get them."""
RankFunction: TypeAlias = Callable[[Step, int], tuple[Any, Gradients]]
"""Trains on one rank's part of a step; the second argument is the number of ranks. Returns the value that backward was
called on, and its gradients."""

BUGS = tuple(probe.bug for probe in PROBES)
"""The bugs a report may name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    bug: str
    """One of BUGS."""
    found: str
    """What the trainer did, with the values."""
    fix: str

    def __str__(self) -> str:
        return f"{self.bug}: {self.found}; {self.fix}"


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Report:
    findings: tuple[Finding, ...]
    not_judged: dict[str, str]
    """Bug -> the bug that hides it. It can be judged once that one is fixed."""
    judged: tuple[str, ...]

    @property
    def ok(self) -> bool:
        return not self.findings

    @property
    def bugs(self) -> tuple[str, ...]:
        """The names of the bugs found."""
        return tuple(finding.bug for finding in self.findings)

    def __str__(self) -> str:
        lines = [f"{len(self.findings)} of {len(self.judged)} judged bugs found"]
        lines += [f"  FOUND       {finding}" for finding in self.findings]
        lines += [f"  not judged  {bug}: first remove {other!r}" for bug, other in self.not_judged.items()]
        lines += [f"  free of     {bug}" for bug in self.judged if bug not in self.bugs]
        return "\n".join(lines)

    __repr__ = __str__


def check(
    step_fn: StepFunction,
    *,
    vocabulary: int = 8,
    per: Literal["token", "sample"] = "token",
    tolerance: float = 1e-3,
    without: Collection[str] = (),
) -> Report:
    """Train about forty tiny steps with `step_fn`, each from the same weights, and report its bugs.

    `vocabulary` is the model's number of token ids. `per` is what the loss is a mean over: the trained tokens of the
    step (`step.loss_tokens`), or its samples (`step.denominators.samples`), each a mean over its own tokens. A
    `tolerance` of 1e-3 suits float32; bfloat16 needs about 3e-2. Bugs in `without` are not looked for: a trainer that
    only does supervised training has no use for temperatures.

    The trainer must compute what it computes in training, except for what is random or clips gradients: no dropout, no
    clipping, no optimizer step. Auxiliary losses over a batch (load balancing of experts) must be off.
    """
    unknown = [bug for bug in without if bug not in BUGS]
    if unknown:
        raise InvalidInput(f"without: {unknown[0]!r} is not a bug of this check; known are {', '.join(BUGS)}")
    if vocabulary < 8:
        raise InvalidInput(f"vocabulary: {vocabulary}; the samples of the check need at least 8 ids")
    trial = Trial(_Flattened(step_fn), vocabulary=vocabulary, per=per, tolerance=tolerance)
    findings: dict[str, Finding] = {}
    not_judged: dict[str, str] = {}
    for probe in PROBES:
        blocked = next((bug for bug in probe.needs if bug in findings or bug in not_judged), None)
        if probe.bug in without:
            continue
        if blocked is not None:
            not_judged[probe.bug] = blocked
            continue
        found = probe.look(trial)
        if found is not None:
            findings[probe.bug] = Finding(bug=probe.bug, found=found, fix=probe.fix)
    judged = tuple(bug for bug in BUGS if bug not in without and bug not in not_judged)
    return Report(findings=tuple(findings.values()), not_judged=not_judged, judged=judged)


def each_rank(rank_fn: RankFunction, *, exchange: Literal["mean", "sum"] = "mean") -> StepFunction:
    """Make a step function from a rank function: run every rank in turn, then exchange gradients as DDP and FSDP do.

    They take the mean over ranks; for a trainer that sums gradients pass `exchange="sum"`. The loss is exchanged in the
    same manner: return the value that backward was called on.
    """

    def step_fn(step: PackedStep) -> tuple[float, Gradients]:
        world = len(step.ranks)
        scale = 1.0 / world if exchange == "mean" else 1.0
        loss, total = 0.0, dict[str, NDArray[np.float64]]()
        for rank in step.ranks:
            own, gradients = _read(rank_fn(Step(1, "", rank.rank_plan, list(rank)), world))
            loss += own * scale
            for name, gradient in gradients.items():
                total[name] = total.get(name, 0.0) + gradient * scale
        return loss, total

    return step_fn


class _Flattened:
    """Calls a step function and returns all gradients in one vector, always of the same parameters."""

    def __init__(self, step_fn: StepFunction) -> None:
        self._step_fn, self._names = step_fn, set[str]()

    def __call__(self, step: PackedStep) -> Trained:
        loss, gradients = _read(self._step_fn(step))
        self._names = self._names or set(gradients)
        changed = sorted(self._names ^ set(gradients))
        if changed or not gradients:
            which = f"that of {changed[0]} comes and goes" if changed else "there are none"
            raise InvalidInput(
                f"step_fn: gradients: {which}; return all that are trained, zeros where there is nothing"
            )
        return Trained(loss=loss, gradient=np.concatenate([gradients[n].reshape(-1) for n in sorted(gradients)]))


def _read(given: tuple[Any, Gradients]) -> tuple[float, dict[str, NDArray[np.float64]]]:
    """Convert the result of a step function to numpy. Tensors are recognised by their methods: no torch needed."""
    try:
        loss, gradients = given
    except (TypeError, ValueError):
        raise InvalidInput(f"step_fn: gave {type(given).__name__}; return (loss, gradients)") from None
    named = gradients.items() if isinstance(gradients, Mapping) else enumerate(gradients)
    return _array(loss).item(), {f"{name!r}": _array(value) for name, value in named if value is not None}


def _array(value: Any) -> NDArray[np.float64]:
    if hasattr(value, "detach"):
        value = value.detach().cpu().double().numpy()
    return np.array(value, np.float64)  # a copy: trainers clear their gradients in place
