"""The form of a seeded bug, and a small right trainer to put bugs into.

HOW TO WRITE BUGS FOR THE TRAINER CHECK. A catalogue is a module with one list, `BUGS: list[Seeded]`. Each entry is a
trainer with exactly one bug: a function of one rank's step that returns the loss and the gradients.

    from tests.train.seeded import Seeded, train

    def eos_dropped(columns, batch):                   # a hook: change one thing, return the rest as it is
        mask = columns["loss_mask"].clone()
        mask[batch.sequence_lengths.cumsum() - 1] = False
        return {**columns, "loss_mask": mask}

    BUGS = [
        Seeded("last token of a sample never trained", lambda step, world: train(step, world, columns=eos_dropped)),
        Seeded("half of the gradient", my_own_function),      # or write the function from scratch: see `train`
    ]

- `run(step, world)` gets one rank's step (`Step`: iterate over it for micro-batches) and the number of ranks, and
  returns `(loss, {parameter name: gradient})`. Ranks are run in turn and their gradients are averaged, as DDP does.
  With `exchange="sum"` they are added up. With `whole=True`, `run(step)` gets the step of all ranks (`Step`, with
  `step.ranks`) and returns what the optimizer would get.
- What is right: PPO's clipped loss (0.2 on both sides), summed over the trained tokens of all ranks and divided by
  their number, `step.loss_tokens`, from the weights of `Tiny()`. `loss=` and `per=` declare something else, `model=` a
  function that makes another model with `forward(token_ids, position_ids, sequence_lengths)`.
- A bug that keeps state between steps, or is random, is fine. One that raises is not a bug that a check has to find.
- `about` is one sentence on what is wrong, written before the report is read. The judge of a report compares it with
  the finding's name: *named* (the finding says this), *roughly* (right part, another cause), *misnamed*, *ok*.
- `effect(bug)` is how much a bug changes the gradient of a step that is not one of the check's: 1 % or more has to be
  found, unless docs/integrations/check-your-trainer.md lists the class of bug as out of reach.

`tests/train/seeded_bugs.py` is the first catalogue, `test_seeded_bugs.py` runs all that are in its list CATALOGUES.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import torch

from penstock.arrays import Sample
from penstock.client import Step
from penstock.packing import MicroBatch, PackedStep, pack
from penstock.testing.trainer import each_rank
from penstock.train import to_torch
from penstock.train.loss import Grpo, Loss

VOCABULARY, WIDTH, LONGEST = 32, 8, 256
Tensors = dict[str, torch.Tensor]
Result = tuple[Any, dict[str, torch.Tensor]]


class Tiny(torch.nn.Module):  # type: ignore[misc]
    """One attention layer over the samples of a row, absolute positions, a small MLP. Always the same weights."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)

        def weight(*shape: int) -> torch.nn.Parameter:
            return torch.nn.Parameter(torch.randn(*shape, generator=generator) * 2 / WIDTH)

        self.embed, self.place = weight(VOCABULARY, WIDTH), weight(LONGEST, WIDTH)
        self.query, self.key, self.value = weight(WIDTH, WIDTH), weight(WIDTH, WIDTH), weight(WIDTH, WIDTH)
        self.up, self.down = weight(WIDTH, 2 * WIDTH), weight(2 * WIDTH, WIDTH)
        self.head, self.bias = weight(WIDTH, VOCABULARY), weight(VOCABULARY)
        self.dropout = torch.nn.Dropout(dropout)

    def forward(self, ids: torch.Tensor, positions: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        """Return logits [T, V] of a row: row t predicts token t + 1. A token sees itself and those before it in its own
        sample; `lengths` are those of the samples."""
        hidden = self.dropout(self.embed[ids] + self.place[positions])
        segment = torch.repeat_interleave(torch.arange(len(lengths)), lengths.long())
        visible = (segment[:, None] == segment[None, :]) & torch.ones(len(ids), len(ids), dtype=torch.bool).tril()
        scores = (hidden @ self.query) @ (hidden @ self.key).T
        hidden = hidden + scores.masked_fill(~visible, -torch.inf).softmax(-1) @ (hidden @ self.value)
        hidden = hidden + torch.relu(hidden @ self.up) @ self.down
        return hidden @ self.head + self.bias


def logits_of(model: Any, columns: Tensors) -> torch.Tensor:
    found: torch.Tensor = model(columns["token_ids"], columns["position_ids"], columns["sequence_lengths"])
    return found


def logprobs_of(logits: torch.Tensor, columns: Tensors) -> torch.Tensor:
    """Return the log-probability of every token at its temperature: row t - 1 of the logits predicts token t. The first
    token of each sample is never trained, whatever is predicted for it."""
    temperatures = columns.get("temperatures", torch.ones(len(logits)))
    logprobs = (logits[:-1] / temperatures[1:, None]).log_softmax(-1).gather(1, columns["token_ids"][1:, None])[:, 0]
    return torch.cat([logprobs.new_zeros(1), logprobs])


def ppo(columns: Tensors, logprobs: torch.Tensor, low: float = 0.2, high: float = 0.2) -> torch.Tensor:
    """Return the loss of every token, 0 where nothing is trained."""
    mask, advantages = columns["loss_mask"], columns["advantages"]
    ratio = torch.where(mask, logprobs - columns["logprobs"], 0.0).exp()
    loss = -torch.minimum(ratio * advantages, ratio.clamp(1 - low, 1 + high) * advantages)
    return torch.where(mask, loss, 0.0)


def summed(loss: torch.Tensor, columns: Tensors, batch: MicroBatch) -> torch.Tensor:
    return loss.sum()


def gradients_of(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: torch.zeros_like(p) if p.grad is None else p.grad for name, p in model.named_parameters()}


def train(
    step: Step,
    world: int,
    *,
    make: Callable[[], Any] = Tiny,
    batches: Callable[[Step], Iterable[MicroBatch]] = iter,
    columns: Callable[[Tensors, MicroBatch], Tensors] = lambda columns, batch: columns,
    logits: Callable[[Any, Tensors], torch.Tensor] = logits_of,
    logprobs: Callable[[torch.Tensor, Tensors], torch.Tensor] = logprobs_of,
    token_loss: Callable[[Tensors, torch.Tensor], torch.Tensor] = ppo,
    reduce: Callable[[torch.Tensor, Tensors, MicroBatch], torch.Tensor] = summed,
    scale: Callable[[Step, MicroBatch, int], float] = lambda step, batch, world: world / step.loss_tokens,
) -> Result:
    """Train one rank's step right, up to the optimizer. Every argument is a hook with which to do one thing wrong."""
    model, total = make(), 0.0
    for batch in batches(step):
        own = columns(to_torch(batch), batch)  # [T] each: token_ids, loss_mask, logprobs, advantages, position_ids, ...
        loss = reduce(token_loss(own, logprobs(logits(model, own), own)), own, batch) * scale(step, batch, world)
        loss.backward()
        total += loss.item()
    return total, gradients_of(model)


@dataclass(frozen=True, kw_only=True)
class _Options:
    about: str = ""
    """What is wrong, in one sentence."""
    exchange: Literal["mean", "sum"] = "mean"
    whole: bool = False
    loss: Loss = field(default_factory=Grpo)
    per: Literal["token", "sample"] = "token"
    model: Callable[[], Any] = Tiny
    columns: tuple[str, ...] = ("temperatures",)
    """Columns the right trainer reads beside ids, mask, log-probabilities and advantages."""


@dataclass(frozen=True)
class Seeded(_Options):
    """A trainer with one bug."""

    name: str
    run: Callable[..., Any]

    def step_fn(self) -> Callable[[PackedStep], Any]:
        return self.run if self.whole else each_rank(self.run, exchange=self.exchange)


def realistic(seed: int = 0, ranks: int = 2, count: int = 12, **packing: Any) -> PackedStep:
    """Make a step of chats with tool output: several turns, an EOS (id 2) at the end of each, one advantage per sample,
    log-probabilities near those of the model."""
    rng = np.random.default_rng(seed)
    samples = []
    for i in range(count):
        mask, turns = [False] * int(rng.integers(2, 8)), int(rng.integers(1, 4))
        for turn in range(turns):
            mask += [True] * int(rng.integers(2, 9)) + [False] * (int(rng.integers(2, 9)) if turn < turns - 1 else 0)
        trained = np.array(mask)
        ids = rng.integers(3, VOCABULARY, len(mask))
        ids[trained & ~np.append(trained[1:], False)] = 2
        samples.append(
            Sample(
                id=f"sample-{i}",
                group=f"group-{i // 4}",
                token_ids=ids,
                loss_mask=trained,
                logprobs=np.where(trained, rng.normal(-np.log(VOCABULARY), 0.3, len(mask)), 0.0),
                advantages=float(rng.normal()),
                temperatures=float(rng.choice([0.7, 1.0, 1.3])),
                policy_version=int(rng.integers(3, 6)),
            )
        )
    settings = {"seq_len": 64, "micro_batch_max_tokens": 96, "long_rows": True, "pad_to_multiple_of": 8, **packing}
    return pack(samples, ranks=ranks, **settings)


def effect(bug: Seeded, steps: int = 3) -> float:
    """Return by how much a bug changes the gradient, relative to the right one: the largest of some steps."""
    if bug.loss != Grpo() or bug.per != "token" or bug.model is not Tiny:
        return float("nan")  # compare with another right trainer than `train`
    right, wrong = each_rank(train), bug.step_fn()
    found = []
    for seed in range(steps):
        step = realistic(seed)
        one, other = (np.concatenate([np.ravel(g) for g in dict(fn(step)[1]).values()]) for fn in (right, wrong))
        found.append(np.linalg.norm(one - other) / np.linalg.norm(one))
    return float(np.nanmax(found)) if np.isfinite(found).all() else float("inf")
