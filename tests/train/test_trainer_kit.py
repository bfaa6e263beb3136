"""The conformance kit for trainers: right ones pass, every published bug is found and called by its name."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from penstock.client import Step
from penstock.errors import InvalidInput
from penstock.testing.trainer import BUGS, check, each_rank
from penstock.train.loss import Dppo, Grpo, Ipo, Loss, Sft
from penstock.train.modes import ByMode
from tests.train.trainer_mutants import VOCABULARY, ForgetsRanks, MeanOfMicroBatches, PerSample, Right, mutants

torch.set_num_threads(1)
PUBLISHED = {
    "denominator per micro-batch",
    "packing-dependent loss",
    "off-by-one mask",
    "lost one-token samples",
    "dummy micro-batch in the loss",
    "temperature ignored",
    "shifted logprobs",
    "cap-dependent gradient",
    "rank-dependent scale",
}


@pytest.mark.parametrize("loss", [Grpo(), Dppo(), Ipo(), Sft(), ByMode()], ids=lambda loss: type(loss).__name__)
def test_a_right_trainer_passes_with_any_loss(loss: Loss) -> None:
    report = check(each_rank(Right(loss)), vocabulary=VOCABULARY, tolerance=1e-9)
    assert report.ok, report
    assert report.judged == BUGS and not report.not_judged


@pytest.mark.parametrize("mutant", mutants(), ids=lambda kind: kind.__name__)
def test_every_bug_is_found_and_no_other_is_named(mutant: type[Right]) -> None:
    report = check(each_rank(mutant()), vocabulary=VOCABULARY)
    assert report.bugs == (mutant.bug,), report


def test_every_published_bug_has_mutants() -> None:
    covered = {kind.bug for kind in mutants()}
    assert covered >= PUBLISHED and covered == set(BUGS)


def test_the_page_lists_every_bug_and_counts_the_mutants() -> None:
    page = (Path(__file__).parents[2] / "docs" / "integrations" / "check-your-trainer.md").read_text()
    assert all(re.search(rf"^\| .*{bug}.* \|", page, re.MULTILINE) for bug in BUGS)
    assert f"a right trainer and {len(mutants())} wrong ones" in page


def test_a_mean_over_samples_is_right_where_it_is_declared() -> None:
    assert check(each_rank(PerSample()), vocabulary=VOCABULARY, per="sample").ok
    undeclared = check(each_rank(PerSample()), vocabulary=VOCABULARY)
    assert undeclared.bugs == ("denominator per micro-batch",)


def test_gradients_that_are_added_up_over_ranks_are_right_where_it_is_declared() -> None:
    report = check(each_rank(ForgetsRanks(), exchange="sum"), vocabulary=VOCABULARY)
    assert report.ok, report


def test_a_trainer_with_two_bugs_is_told_both() -> None:
    class Both(MeanOfMicroBatches):
        def columns(self, batch: Any) -> dict[str, torch.Tensor]:
            return {name: values for name, values in super().columns(batch).items() if name != "temperatures"}

    report = check(each_rank(Both()), vocabulary=VOCABULARY)
    assert report.bugs == ("temperature ignored", "denominator per micro-batch")
    assert report.not_judged == {
        "rank-dependent scale": "denominator per micro-batch",
        "dummy micro-batch in the loss": "rank-dependent scale",
    }
    assert "with 2 and 4 trained tokens, have the weights 0.5 and 0.5 in the gradient, not 0.333 and 0.667" in str(
        report
    )


def test_what_is_left_out_is_not_looked_for() -> None:
    class Plain(Right):
        def columns(self, batch: Any) -> dict[str, torch.Tensor]:
            return {name: values for name, values in super().columns(batch).items() if name != "temperatures"}

    report = check(each_rank(Plain(Sft())), vocabulary=VOCABULARY, without=["temperature ignored"])
    assert report.ok and "temperature ignored" not in report.judged
    with pytest.raises(InvalidInput, match="without: 'typo' is not a bug"):
        check(each_rank(Plain()), without=["typo"])


def test_single_precision_passes_with_the_default_tolerance() -> None:
    class Single(Right):
        def __call__(self, step: Step, world: int) -> tuple[float, dict[str, torch.Tensor]]:
            loss, gradients = super().__call__(step, world)
            return loss, {name: gradient.float() for name, gradient in gradients.items()}

    assert check(each_rank(Single()), vocabulary=VOCABULARY).ok


@pytest.mark.parametrize(
    ("step_fn", "said"),
    [
        (lambda step: (0.0, [torch.zeros(3)]), "the gradient of one sample with 2 trained tokens is zero"),
        (lambda step: (0.0, [torch.full((3,), torch.nan)]), "the gradient of one sample .* is not finite"),
        (lambda step: 0.0, r"gave float; return \(loss, gradients\)"),
        (lambda step: (0.0, []), "gradients: there are none"),
    ],
)
def test_what_cannot_be_judged_says_what_to_return(step_fn: Any, said: str) -> None:
    with pytest.raises(InvalidInput, match=said):
        check(step_fn)


def test_a_vocabulary_that_is_too_small_is_refused() -> None:
    with pytest.raises(InvalidInput, match="vocabulary: 4; "):
        check(each_rank(Right()), vocabulary=4)


def test_a_parameter_that_one_rank_does_not_train_counts_as_zero_there() -> None:
    class Sparse(Right):
        def __call__(self, step: Step, world: int) -> Any:
            loss, gradients = super().__call__(step, world)
            return loss, {name: gradient if gradient.any() else None for name, gradient in gradients.items()}

    assert check(each_rank(Sparse()), vocabulary=VOCABULARY).ok


def test_a_gradient_that_comes_and_goes_is_named() -> None:
    calls = []

    def step_fn(step: Any) -> Any:
        calls.append(step)
        return 1.0, {"a": torch.ones(2), "b": None if len(calls) > 1 else torch.ones(2)}

    with pytest.raises(InvalidInput, match="that of 'b' comes and goes"):
        check(step_fn)
