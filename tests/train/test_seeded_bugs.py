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
from tests.train import strangers_bugs
from tests.train.seeded import VOCABULARY, Seeded, effect

pytestmark = pytest.mark.deep

torch.set_num_threads(1)
CATALOGUES = ("tests.train.seeded_bugs", "tests.train.strangers_bugs")
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
STRANGERS_NAMED = {
    "last segment is taken for padding": "the last sequence of a row is not trained, padding or not",
    "drop_last": "the last micro-batch is not trained",
    "peeked micro-batch runs twice": "the first micro-batch is trained twice",
    "every rank reads rank 0": "only one rank is trained, not averaged",
    "only good samples": "negative advantages are clamped to 0",
    "labels cut at 24 tokens": "a sample is cut after 24 tokens",
    "first token of a turn not trained": "the first trained token of every turn is not trained",
    "token after a turn trained": "the token after every turn is trained as well",
    "only the last turn": "only the last turn is trained",
    "pad id is the EOS id": "the id 2 is never trained",
    "mask rolled by one": "mask one token early",
    "boundaries one token late": "boundaries of attention are one token late",
    "positions start at 1": "positions begin at 1",
    "positions start at 0 at each turn": "positions begin at 0 again after every turn",
    "a little dropout": "the gradient is random",
    "one temperature per row": "temperature of the first token of the row",
    "temperature after the softmax": "log-probabilities are divided by the temperature, and not logits",
    "temperature multiplied": "logits are multiplied by the temperature",
    "shifted twice": "token t is predicted from t - 2 (shifted twice)",
    "sampler's log-probabilities one late": "logprobs of the token before",
    "sampler's log-probabilities in base 2": "logprobs are in another base",
    "whitened per micro-batch": "advantages are normalized over the row",
    "advantages clamped": "advantages are clamped to 1",
    "bad samples count half": "negative advantages count 0.5 times",
    "advantage of the first token": "advantage of the sample's first token for all its tokens",
    "upper clip of 0.28": "ratios are clipped at 0.8 and 1.28",
    "ratio of the sequence": "ratio of the sample's mean log-ratio",
    "clipped weights on the likelihood": "the ratio counts as a constant and is clipped",
    "clamped without minimum": "ratios are clipped on both sides whatever the advantage",
    "clip ignores the sign": "ratios are clipped from above for both signs",
    "penalty towards the sampler": "a term is added to the loss: 0.04 x KL to the sampler (k2, squared log-ratio)",
    "likelihood of the context": "a term is added to the loss: 0.01 x cross-entropy of context and padding",
    "far ratios masked": "ratios above 2 or below 0.5 are left out",
    "SFT weighs by advantage": "the loss is multiplied by the advantages once more, or though it has none",
    "SFT trains the context": "a term is added to the loss: 0.1 x cross-entropy of context and padding",
    "KL towards the sampler": "the sampler's logprobs are read in place of teacher_logprobs",
    "KL the wrong way": "KL to the reference has the two swapped",
    "one token too many per sample": "divided by trained tokens + samples",
    "denominator per rank": "divided by trained tokens of the rank, averaged over ranks",
    "padding in the denominator": "scaled by the share of each micro-batch that is not padding",
    "denominator of the first step": "divided by 9 in every step, whatever it trains",
    "sample mean over the whole length": "mean over samples of the mean over all their tokens",
    "gradients added up by the exchange": "ranks are counted twice: the step is larger with every rank",
    "only the last micro-batch exchanged": "only the last micro-batch is exchanged between ranks",
    "bias frozen": "parameters without a gradient: bias",
    "head learns slower": "gradients of some parameters: head x 0.9",
    "gradient elements clamped": "values of the gradient are clipped to 0.03 on each rank",
    "clipped per micro-batch": "the gradient is clipped to the norm 0.2 in each micro-batch",
}
"""The same for `strangers_bugs`."""
STRANGERS_ROUGHLY = {
    "overlong filter left on": "samples longer than 19 tokens are left out",
    "running scale of advantages": "the gradient depends on earlier steps, or on chance",
    "mean over unclipped tokens": "the gradient of one sample alone is wrong",
    "rows of ids 0 to 2 frozen": "the loss is right, its gradient is not: something is detached or frozen",
    "gradient not cleared": "the gradient depends on earlier steps, or on chance",
}
STRANGERS_IN_THE_TABLE = {
    "logits in half precision": "rounding, as large as bfloat16 makes it",
    "gradient through scores cut": "the loss is right, its gradient is not: something is detached or frozen",
    "prefetched step is one behind": "the gradient depends on earlier steps, or on chance",
    "every second boundary missed": "samples of one row change each other's gradient",
    "sliding window": "the forward pass is not the model's",
    "causal mask off by one": "the forward pass is not the model's",
    "position table of 20": "the forward pass is not the model's",
    "context from a cache": "the loss is right, its gradient is not: something is detached or frozen",
    "tied embedding cut": "the loss is right, its gradient is not: something is detached or frozen",
    "padded vocabulary": "the gradient of one sample alone is wrong",
    "logits capped": "the gradient of one sample alone is wrong",
    "last id missing from the softmax": "the gradient of one sample alone is wrong",
    "label smoothing left on": "the gradient of one sample alone is wrong",
    "sampler's log-probabilities rounded": "the gradient of one sample alone is wrong",
    "advantages of the neighbour": (
        "advantage of the sample's last token for all its tokens; padding changes the gradient"
    ),
    "discount left on": "the gradient of one sample alone is wrong",
    "root of the length": "the gradient of one sample alone is wrong",
    "mean of turns": "the gradient of one sample alone is wrong",
    "optimizer steps per micro-batch": "the gradient depends on how a step is cut into micro-batches",
}
"""Named (the first) or roughly named, and not in the test: where no bug explains a gradient, the check tries all pairs,
for 4 s each."""
EXPECTED = {**NAMED, **ROUGHLY, **STRANGERS_NAMED, **STRANGERS_ROUGHLY, **STRANGERS_IN_THE_TABLE}


def quick_bugs() -> list[Any]:
    """Every tenth of both catalogues for each run of the suite, the others for a release: each takes a second."""
    quick = [bug for bug in all_bugs() if bug.name not in STRANGERS_IN_THE_TABLE]
    marks = [() if i % 10 == 5 else (pytest.mark.release,) for i in range(len(quick))]
    return [pytest.param(bug, marks=own, id=bug.name) for bug, own in zip(quick, marks, strict=True)]


@pytest.mark.parametrize("bug", quick_bugs())
def test_a_seeded_bug_is_found_and_named(bug: Seeded) -> None:
    report = report_of(bug)
    wanted = EXPECTED.get(bug.name)
    if wanted is None:
        assert report.findings or effect(bug) < SMALL, report
    else:
        assert report.bugs == (wanted,), report


def test_the_first_catalogue_has_a_judgement_for_every_bug() -> None:
    names = [bug.name for bug in importlib.import_module(CATALOGUES[0]).BUGS]
    assert len(names) == len(set(names)) and set(names) == {*NAMED, *ROUGHLY}


def test_the_second_catalogue_has_a_judgement_for_every_bug() -> None:
    names = [bug.name for bug in strangers_bugs.BUGS]
    assert len(names) == len(set(names))
    assert set(names) == {*STRANGERS_NAMED, *STRANGERS_ROUGHLY, *STRANGERS_IN_THE_TABLE}
    both = set(STRANGERS_NAMED) & set(NAMED)
    assert {name: NAMED[name] for name in both} == {name: STRANGERS_NAMED[name] for name in both}


if __name__ == "__main__":
    for one in all_bugs():
        if len(sys.argv) < 2 or sys.argv[1] in one.name:
            found = "; ".join(report_of(one).bugs) or "ok"  # first: some bugs remember what they trained
            changed = strangers_bugs.effect_of(one) if one.name in strangers_bugs.RIGHT else effect(one)
            as_written = "" if found == EXPECTED.get(one.name) else "  (not what the test expects)"
            print(f"{one.name:44} {changed:8.1%}  {found}{as_written}")
