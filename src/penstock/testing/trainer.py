"""A conformance test for trainers: which of the field's published bugs does this one have?

    from penstock.testing.trainer import check, each_rank

    def step_fn(step, world):                  # one rank's step, as `source.step()` gives it
        ...                                    # forward and backward of all micro-batches
        return loss, gradients                 # before clipping and before the optimizer
    report = check(each_rank(step_fn), vocabulary=len(tokenizer))
    assert report.ok, report

Nothing has to be known of the model or of the loss. Where samples are trained token by token and divided by a count of
the step, the gradient of a step is the weighted mean of the gradients of its samples. So every sample is trained alone
first. Then the same samples are trained together: in one row, in several, with padding, on two ranks. What the weights
came to, and what is left beside the weighted mean, tells the bugs apart. Where a token's value must not matter, it is
changed and nothing may change with it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from penstock.client import SourceStep
from penstock.errors import InvalidInput
from penstock.packing import Step
from penstock.testing.trainer_probes import PROBES, Trained, Trial

Gradients: TypeAlias = Mapping[str, Any] | Sequence[Any]
"""Arrays or tensors, by parameter or in one order."""
StepFunction: TypeAlias = Callable[[Step], tuple[Any, Gradients]]
"""Trains on a step of all ranks; gives the loss and the gradients as the optimizer would get them."""
RankFunction: TypeAlias = Callable[[SourceStep, int], tuple[Any, Gradients]]
"""Trains on one rank's part of a step, of so many ranks; gives what backward was called on, and its gradients."""

BUGS = tuple(probe.bug for probe in PROBES)
"""What a report may name."""


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
    """Bug -> the bug that is in its way; judged once that one is gone."""
    judged: tuple[str, ...]

    @property
    def ok(self) -> bool:
        return not self.findings

    @property
    def bugs(self) -> tuple[str, ...]:
        """The names of what was found."""
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
    """Train some forty tiny steps with `step_fn`, each from the same weights, and say which bugs it has.

    `vocabulary` is the model's count of token ids. `per` says what the loss is a mean over: the trained tokens of the
    step (`step.loss_tokens`), or its samples (`step.denominators.samples`), each a mean over its own tokens. A
    `tolerance` of 1e-3 suits float32; bfloat16 needs about 3e-2. Bugs in `without` are not looked for: a trainer that
    only does supervised training has no use for temperatures.

    The trainer must compute what it computes in training, except for what is random or clips gradients: no dropout, no
    clipping, no optimizer step. Auxiliary losses over a whole batch (load balancing of experts) must be off.
    """
    unknown = [bug for bug in without if bug not in BUGS]
    if unknown:
        raise InvalidInput(f"without: {unknown[0]!r} is no bug that is looked for; those are {', '.join(BUGS)}")
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
    """A step function from that of one rank: every rank in turn, then gradients are exchanged as DDP and FSDP do.

    They take the mean over ranks; a trainer that adds gradients up says `exchange="sum"`. The loss is exchanged in the
    same way: return what backward was called on.
    """

    def step_fn(step: Step) -> tuple[float, Gradients]:
        world = len(step.ranks)
        scale = 1.0 / world if exchange == "mean" else 1.0
        loss, total = 0.0, dict[str, NDArray[np.float64]]()
        for rank in step.ranks:
            own, gradients = _read(rank_fn(SourceStep(1, "", rank.rank_plan, list(rank)), world))
            loss += own * scale
            for name, gradient in gradients.items():
                total[name] = total.get(name, 0.0) + gradient * scale
        return loss, total

    return step_fn


class _Flattened:
    """A step function that gives its gradients end to end, always of the same parameters."""

    def __init__(self, step_fn: StepFunction) -> None:
        self._step_fn, self._names = step_fn, set[str]()

    def __call__(self, step: Step) -> Trained:
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
    """What a step function gave, as numpy; tensors are recognised by their methods, so torch is not needed here."""
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
