"""The check of trainers: right ones pass, whatever they look like, and what cannot be judged says so."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from penstock.client import Step
from penstock.errors import InvalidInput
from penstock.packing import MicroBatch, PackedStep
from penstock.testing.trainer import Report, check, each_rank
from penstock.train import Terms, to_torch, token_logprobs
from penstock.train.loss import ByMode, Dppo, Grpo, Ipo, Loss, Sft
from tests.train.seeded import (
    VOCABULARY,
    Result,
    Tensors,
    Tiny,
    gradients_of,
    logits_of,
    logprobs_of,
    ppo,
    realistic,
    train,
)
from tests.train.seeded_bugs import parts, per_sample
from tests.train.test_seeded_bugs import forward

pytestmark = pytest.mark.deep

torch.set_num_threads(1)


def checked(run: Callable[..., Any], loss: Any = None, exchange: Any = "mean", **options: Any) -> Report:
    return check(
        each_rank(run, exchange=exchange),
        vocabulary=VOCABULARY,
        model=Tiny,
        loss=loss or Grpo(),
        forward=forward,
        **options,
    )


# ------------------------------------------------------------------ right trainers


def with_loss(loss: Loss, chunk: int = 1024) -> Callable[..., Result]:
    """A trainer with one of our losses and the chunked log-probabilities."""

    def run(step: Step, world: int) -> Result:
        model, total = Tiny(), 0.0
        for batch in step:
            columns = to_torch(batch)
            logprobs, entropy = token_logprobs(
                logits_of(model, columns),
                columns["token_ids"],
                columns["sequence_lengths"],
                columns.get("temperatures"),
                chunk=chunk,
            )
            value = loss(columns, logprobs, entropy).mean(step.denominators) * world
            value.backward()
            total += value.item()
        return total, gradients_of(model)

    return run


def padded_rows(step: Step, world: int) -> Result:
    """Unpacks every row into a padded batch of samples, as trainers without packing do."""
    model, total = Tiny(), 0.0
    for batch in step:
        columns, loss = to_torch(batch), torch.zeros(())
        longest = max((at.stop - at.start for at in parts(batch)), default=0)
        for at in parts(batch):
            short = longest - (at.stop - at.start)
            own = {
                n: torch.nn.functional.pad(v[at], (0, short))
                for n, v in columns.items()
                if len(v) == len(columns["token_ids"])
            }
            own["position_ids"] = torch.arange(longest)
            own["temperatures"] = own.get("temperatures", torch.ones(longest)).clamp_min(0.1)
            own["sequence_lengths"] = torch.tensor([longest])
            loss = loss + ppo(own, logprobs_of(logits_of(model, own), own)).sum()
        loss = loss * world / step.loss_tokens
        if loss.requires_grad:
            loss.backward()
        total += loss.item()
    return total, gradients_of(model)


def one_backward(step: Step, world: int) -> Result:
    """Adds the losses of all micro-batches up before one backward pass."""
    model = Tiny()
    columns = [to_torch(batch) for batch in step]
    loss = sum(ppo(c, logprobs_of(logits_of(model, c), c)).sum() for c in columns) * world / step.loss_tokens
    loss.backward()
    return loss, gradients_of(model)


def skips_nothing_to_train(step: Step, world: int) -> Result:
    """Leaves out micro-batches without trained tokens, and gradients of parameters that are not touched."""
    loss, gradients = train(step, world, batches=lambda step: [batch for batch in step if batch.loss_tokens])
    return loss, {name: g for name, g in gradients.items() if g.any()}


def in_order(step: Step, world: int) -> Any:
    loss, gradients = train(step, world)
    return loss, [*gradients.values()]


def wrapped(step: Step, world: int) -> Any:
    loss, gradients = train(step, world)
    return loss, {f"module._orig_mod.{name}": gradient for name, gradient in gradients.items()}


RIGHT = {
    "plain": train,
    "padded rows": padded_rows,
    "one backward pass": one_backward,
    "chunked log-probabilities": with_loss(Grpo(), chunk=5),
    "skips what trains nothing": skips_nothing_to_train,
    "gradients in order": in_order,
    "names of wrappers": wrapped,
}


@pytest.mark.parametrize("name", RIGHT)
def test_a_right_trainer_passes(name: str) -> None:
    report = checked(RIGHT[name])
    assert report.ok, report


@pytest.mark.parametrize("loss", [Grpo(), Grpo(high=0.28), Dppo(), Ipo(), Sft(), ByMode()], ids=repr)
def test_a_right_trainer_passes_with_any_loss(loss: Loss) -> None:
    report = checked(with_loss(loss), loss)
    assert report.ok, report


def test_a_loss_with_a_reference_model_passes() -> None:
    columns = ("temperatures", "teacher_logprobs")
    report = checked(with_loss(Grpo(beta=0.1)), Grpo(beta=0.1), columns=columns)
    assert report.ok, report


def test_a_loss_of_ones_own_passes() -> None:
    def own(columns: Tensors, logprobs: torch.Tensor, entropy: torch.Tensor) -> Terms:
        loss = -columns["advantages"].tanh() * logprobs - 0.01 * entropy
        return Terms(loss=torch.where(columns["loss_mask"], loss, 0.0), trainer_logprobs=logprobs)

    report = checked(with_loss(own), own)  # type: ignore[arg-type]
    assert report.ok, report


def test_a_mean_over_samples_is_right_where_it_is_declared() -> None:
    def run(step: Step, world: int) -> Result:
        return train(
            step,
            world,
            reduce=per_sample(lambda trained, length: 1 / max(trained, 1)),
            scale=lambda step, batch, world: world / step.denominators.samples,
        )

    assert checked(run, per="sample").ok
    assert checked(run).bugs == ("mean over samples of the mean over their tokens",)


def test_gradients_that_are_added_up_over_ranks_are_right_where_it_is_declared() -> None:
    def run(step: Step, world: int) -> Result:
        return train(step, world, scale=lambda step, batch, world: 1 / step.loss_tokens)

    assert checked(run, exchange="sum").ok


def test_bfloat16_passes_with_its_tolerance_and_is_named_without() -> None:
    class Half(Tiny):
        def forward(self, ids: torch.Tensor, positions: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
            with torch.autocast("cpu", torch.bfloat16):
                return super().forward(ids, positions, lengths).float()

    def run(step: Step, world: int) -> Result:
        return train(step, world, make=Half)

    assert checked(run).bugs == ("rounding, as large as bfloat16 makes it",)
    assert checked(run, tolerance=3e-2).ok


def test_noise_as_small_as_the_order_of_additions_is_accepted() -> None:
    generator = torch.Generator().manual_seed(0)

    def run(step: Step, world: int) -> Result:
        loss, gradients = train(step, world)
        return loss, {n: g * (1 + 1e-5 * torch.randn(g.shape, generator=generator)) for n, g in gradients.items()}

    report = checked(run)
    assert report.ok and 0 < report.noise < 1e-3, report


def test_what_is_left_from_the_step_before_is_not_called_chance() -> None:
    steps = [realistic()]

    def one_behind(step: PackedStep) -> Any:
        steps.append(step)
        return each_rank(train)(steps[-2])

    report = check(one_behind, vocabulary=VOCABULARY, model=Tiny, loss=Grpo(), forward=forward)
    assert report.bugs == ("the gradient depends on earlier steps, or on chance",), report


# ------------------------------------------------------------------ two bugs, and bias behind noise


def test_a_trainer_with_two_bugs_is_told_both() -> None:
    def run(step: Step, world: int) -> Result:
        return train(
            step,
            world,
            columns=lambda columns, batch: {n: v for n, v in columns.items() if n != "temperatures"},
            scale=lambda step, batch, world: 1 / max(batch.loss_tokens, 1) / len(step),
        )

    report = checked(run)
    assert report.bugs == ("temperature ignored", "denominator per micro-batch, averaged"), report


def test_two_bugs_in_one_sample_are_told_apart() -> None:
    def run(step: Step, world: int) -> Result:
        return train(
            step,
            world,
            columns=lambda columns, batch: {
                **{n: v for n, v in columns.items() if n != "temperatures"},
                "advantages": columns["advantages"].abs(),
            },
        )

    report = checked(run)
    assert set(report.bugs) == {"temperature ignored", "negative advantages are trained as positive ones"}, report


def test_a_bias_is_found_behind_noise() -> None:
    generator = torch.Generator().manual_seed(0)

    def run(step: Step, world: int) -> Result:
        factor = 1 + 0.01 * float(torch.randn((), generator=generator))
        loss, found = train(step, world, columns=lambda c, b: {**c, "advantages": c["advantages"].abs()})
        return loss, {n: g * factor for n, g in found.items()}

    assert checked(run).bugs == ("the gradient is random", "negative advantages are trained as positive ones")


def test_a_finding_says_how_large_the_effect_is_and_what_cannot_be_seen() -> None:
    def run(step: Step, world: int) -> Result:
        return train(step, world, scale=lambda step, batch, world: 2 * world / step.loss_tokens)

    text = str(checked(run))
    assert "2 times as long, cosine 1.000" in text and "in 36 of" not in text
    assert "not seen  what happens after the gradients" in text


def test_columns_that_are_not_used_are_not_in_the_steps() -> None:
    def plain(columns: Tensors, batch: MicroBatch) -> Tensors:
        assert "temperatures" not in columns
        return columns

    assert checked(lambda step, world: train(step, world, columns=plain), columns=()).ok


# ------------------------------------------------------------------ what cannot be judged


@pytest.mark.parametrize(
    ("step_fn", "said"),
    [
        (lambda step: 0.0, r"gave float; return \(loss, gradients\)"),
        (lambda step: (0.0, []), "there are no gradients"),
    ],
)
def test_what_cannot_be_judged_says_what_to_return(step_fn: Any, said: str) -> None:
    with pytest.raises(InvalidInput, match=said):
        check(step_fn, vocabulary=VOCABULARY, model=Tiny, loss=Grpo(), forward=forward)


def test_arguments_that_do_not_fit_are_rejected() -> None:
    with pytest.raises(InvalidInput, match="vocabulary: 4; "):
        check(each_rank(train), vocabulary=4, model=Tiny, loss=Grpo())
    with pytest.raises(InvalidInput, match="gradient of 'other', but the model has"):
        checked(lambda step, world: (0.0, {"other": torch.zeros(2)}))
    with pytest.raises(InvalidInput, match=r"gradient of 'head' has the shape \[2\]"):
        checked(lambda step, world: (0.0, {"head": torch.zeros(2)}))
