"""Every seeded bug is found, and how it is named. `python -m tests.train.test_seeded_bugs` prints the table.

A catalogue by another author is one more line in CATALOGUES.
"""

from __future__ import annotations

import importlib
import sys
from typing import Any

import pytest
import torch

from penstock.testing.trainer import Report, check
from tests.train.seeded import VOCABULARY, Seeded, effect

pytestmark = pytest.mark.deep

torch.set_num_threads(1)
CATALOGUES = ("tests.train.seeded_bugs",)
SMALL = 0.01
"""A change of the gradient that need not be found."""


def forward(model: Any, token_ids: torch.Tensor, position_ids: torch.Tensor) -> torch.Tensor:
    logits: torch.Tensor = model(token_ids, position_ids, torch.tensor([len(token_ids)]))
    return logits


def report_of(bug: Seeded) -> Report:
    return check(
        bug.step_fn(),
        vocabulary=VOCABULARY,
        model=bug.model,
        loss=bug.loss,
        forward=forward,
        per=bug.per,
        columns=bug.columns,
    )


def all_bugs() -> list[Seeded]:
    return [bug for name in CATALOGUES for bug in importlib.import_module(name).BUGS]


NAMED = {
    "last token never trained": "the last token of a sample is never trained",
    "only the last turn trained": "only the last turn is trained",
    "only the first turn trained": "only the first turn is trained",
    "tool output trained": "tool output between turns is trained",
    "first token of every turn dropped": "the first trained token of every turn is not trained",
    "mask late": "mask one token late",
    "mask early": "mask one token early",
    "prompt trained too": "the prompt is trained as well, untrained samples too",
    "pad id 0 never trained": "the id 0 is never trained",
    "eos id never trained": "the id 2 is never trained",
    "cut at the first eos": "nothing is trained after the first id 2",
    "one-token completions dropped": "samples with one trained token are left out",
    "row cut at 48 tokens": "a row is cut after 48 tokens",
    "samples cut at 32 tokens": "a sample is cut after 32 tokens",
    "only the first sample of a row": "only the first sample of a row is trained",
    "double shift": "token t is predicted from t - 2 (shifted twice)",
    "no shift": "token t is predicted from token t (not shifted)",
    "attention over the row": "attention sees the other samples of a row",
    "positions of the row": "positions run on through a row",
    "attention and positions of the row": "positions and attention run on through a row",
    "positions from one": "positions begin at 1",
    "boundaries from positions": "boundaries are taken from falls of position_ids",
    "attention sees later tokens": "a token sees later ones",
    "embedding frozen": "parameters without a gradient: embed",
    "temperature ignored": "temperature ignored",
    "temperature multiplied": "logits are multiplied by the temperature",
    "temperature of the row's first token": "temperature of the first token of the row",
    "temperature of the token before": "temperature of the token before",
    "negative advantages clamped": "negative advantages are clamped to 0",
    "negative advantages made positive": "negative advantages are trained as positive ones",
    "sign of the loss": "sign of the loss is wrong",
    "advantages clamped to 5": "advantages are clamped to 5",
    "advantages of the token before": "advantages of the token before",
    "advantage of the row's first trained token": "advantage of the row's first trained token for the row",
    "advantages divided by their deviation": "advantages are divided by their deviation over the row",
    "advantages normalized per row": "advantages are normalized over the row",
    "advantage of the sample's first token": "advantage of the sample's first token for all its tokens",
    "no clip": "ratios are not clipped",
    "clip of both sides": "ratios are clipped on both sides whatever the advantage",
    "clip from the wrong side": "ratios are clipped from the wrong side",
    "clip at 0.8 and 1.28": "ratios are clipped at 0.8 and 1.28",
    "ratio inverted": "the ratio is inverted",
    "ratio ignored": "the ratio is ignored",
    "ratio detached": "there is no gradient at all: something is detached or frozen",
    "ratio truncated at 2": "ratios above 2 are cut to it as constants",
    "ratio averaged over the row": "ratio of the row's mean log-ratio",
    "ratio in bfloat16": "rounding, as large as bfloat16 makes it",
    "logprobs of the token before": "logprobs of the token before",
    "kl added": "a term is added to the loss: 0.05 x KL to the sampler (k3)",
    "cross-entropy added": "a term is added to the loss: 0.05 x cross-entropy of the sampled tokens",
    "entropy with the wrong sign": "a term is added to the loss: 0.05 x entropy",
    "mean of micro-batches": "denominator per micro-batch, averaged",
    "sum of means": "denominator per micro-batch, summed",
    "no denominator": "not divided by anything, averaged over ranks",
    "divided by all tokens": "divided by all tokens of samples of the step",
    "divided by padded tokens": "divided by all tokens with padding of the step",
    "divided by trained samples of the row": "divided by trained tokens and by trained samples of the micro-batch",
    "divided by segments of the row": "divided by trained tokens and by sequences with padding of the micro-batch",
    "mean of ranks": "divided by trained tokens of the rank, averaged over ranks",
    "ranks forgotten": "ranks are forgotten: the step is smaller with every rank",
    "ranks twice": "ranks are counted twice: the step is larger with every rank",
    "accumulation divided again": "divided by the number of micro-batches again",
    "dummies counted": "dummy micro-batches are counted",
    "factor 2": "every gradient is 2 times the right one",
    "divided by the root of the length": "divided by the root of each sample's length",
    "mean over samples": "mean over samples of the mean over their tokens",
    "nan for dummies": "the loss that is returned is wrong",
    "last micro-batch dropped": "the last micro-batch is not trained",
    "only the first micro-batch": "only the first micro-batch is trained",
    "weight decay in the gradient": "weight decay in the gradient: 0.01 x weights",
    "head without gradient": "parameters without a gradient: head",
    "values clipped": "values of the gradient are clipped to 0.05 on each rank",
    "gradient clipped to norm 1": "the gradient is clipped to the norm 1",
    "gradients not cleared": "gradients are not cleared between steps",
    "optimizer step inside": "the gradient depends on earlier steps, or on chance",
    "noise of 1 %": "the gradient is random",
    "dropout": "the gradient is random",
    "loss of the last micro-batch": "the loss that is returned is wrong",
}
"""Seeded bug -> the finding that names it."""
ROUGHLY = {"other weights than the sampler's": "the forward pass is not the model's"}
"""Seeded bug -> a finding that has the right part of the trainer, and not the cause."""


@pytest.mark.parametrize("bug", all_bugs(), ids=lambda bug: bug.name)
def test_a_seeded_bug_is_found_and_named(bug: Seeded) -> None:
    report = report_of(bug)
    wanted = NAMED.get(bug.name) or ROUGHLY.get(bug.name)
    if wanted is None:
        assert report.findings or effect(bug) < SMALL, report
    else:
        assert report.bugs == (wanted,), report


def test_the_first_catalogue_has_a_judgement_for_every_bug() -> None:
    names = [bug.name for bug in importlib.import_module(CATALOGUES[0]).BUGS]
    assert len(names) == len(set(names)) and set(names) == {*NAMED, *ROUGHLY}


if __name__ == "__main__":
    for one in all_bugs():
        if len(sys.argv) < 2 or sys.argv[1] in one.name:
            changed = effect(one)
            print(f"{one.name:44} {changed:8.1%}  {'; '.join(report_of(one).bugs) or 'ok'}")
