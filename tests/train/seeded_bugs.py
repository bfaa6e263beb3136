"""The first catalogue of seeded bugs: see `seeded.py` for the form.

`expected` has the names of findings that count as naming the bug.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import torch

from penstock.client import Step
from penstock.packing import MicroBatch, PackedStep
from penstock.train import to_torch
from tests.train.seeded import Result, Seeded, Tensors, Tiny, gradients_of, logits_of, logprobs_of, ppo, train

BUGS: list[Seeded] = []


def bug(name: str, about: str = "", **hooks: Any) -> None:
    """Add the right trainer with some hooks replaced."""
    BUGS.append(Seeded(name, lambda step, world: train(step, world, **hooks), about=about or name))


def column(
    name: str, change: Callable[[Tensors, MicroBatch], torch.Tensor]
) -> Callable[[Tensors, MicroBatch], Tensors]:
    return lambda columns, batch: {**columns, name: change(columns, batch)} if name in columns else columns


def parts(batch: MicroBatch) -> list[slice]:
    """The samples of a row, without padding."""
    ends = batch.sequence_lengths.cumsum().tolist()
    starts = [0, *ends[:-1]]
    return [slice(a, b) for a, b in zip(starts, ends, strict=True)][: 0 if batch.is_dummy else batch.sample_count]


def spans(mask: torch.Tensor) -> list[tuple[int, int]]:
    found, start = [], None
    for t, on in enumerate([*mask.tolist(), False]):
        if on and start is None:
            start = t
        if not on and start is not None:
            found.append((start, t))
            start = None
    return found


def masked(change: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> Callable[[Tensors, MicroBatch], Tensors]:
    """Change the mask of every sample: (mask, ids) -> mask."""

    def hook(columns: Tensors, batch: MicroBatch) -> Tensors:
        mask = columns["loss_mask"].clone()
        for at in parts(batch):
            mask[at] = change(mask[at].clone(), columns["token_ids"][at])
        return {**columns, "loss_mask": mask}

    return hook


def without(*places: int) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    def change(mask: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        for place in places:
            if len(mask) > 1:
                mask[place] = False
        return mask

    return change


# ------------------------------------------------------------------ masks


def only_turn(which: int) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    def change(mask: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        out = torch.zeros_like(mask)
        for a, b in spans(mask)[which:][:1]:
            out[a:b] = True
        return out

    return change


def tools_trained(mask: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    found = spans(mask)
    if found:
        mask[found[0][0] : found[-1][1]] = True
    return mask


def first_of_turns(mask: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    for a, _ in spans(mask):
        mask[a] = False
    return mask


bug("last token never trained", "the last token of every sample (EOS) is left out", columns=masked(without(-1)))
bug("only the last turn trained", columns=masked(only_turn(-1)))
bug("only the first turn trained", columns=masked(only_turn(0)))
bug("tool output trained", "tokens between two turns are trained", columns=masked(tools_trained))
bug("first token of every turn dropped", columns=masked(first_of_turns))
bug("mask late", columns=column("loss_mask", lambda c, b: c["loss_mask"].roll(1)))
bug("mask early", columns=column("loss_mask", lambda c, b: c["loss_mask"].roll(-1)))
bug("prompt trained too", columns=masked(lambda m, ids: torch.arange(len(m)) > 0))
bug(
    "pad id 0 never trained",
    "a sampled token with the id of padding is masked",
    columns=masked(lambda m, ids: m & (ids != 0)),
)
bug("eos id never trained", "id 2 is masked", columns=masked(lambda m, ids: m & (ids != 2)))
bug(
    "cut at the first eos",
    "everything after the first id 2 is masked",
    columns=masked(lambda m, ids: m & ((ids == 2).cumsum(0) - (ids == 2).long() == 0)),
)
bug("one-token completions dropped", columns=masked(lambda m, ids: m & (m.sum() > 1)))
bug(
    "row cut at 48 tokens", columns=column("loss_mask", lambda c, b: c["loss_mask"] & (torch.arange(b.num_tokens) < 48))
)
bug("samples cut at 32 tokens", columns=column("loss_mask", lambda c, b: c["loss_mask"] & (c["position_ids"] < 32)))


def first_sample(columns: Tensors, batch: MicroBatch) -> Tensors:
    mask = columns["loss_mask"].clone()
    mask[int(batch.sequence_lengths[0]) :] = False
    return {**columns, "loss_mask": mask}


bug("only the first sample of a row", columns=first_sample)


# ------------------------------------------------------------------ what the model sees


bug(
    "double shift",
    "token t is predicted from t - 2",
    logprobs=lambda logits, columns: torch.cat([logits.new_zeros(1), logprobs_of(logits.roll(1, 0), columns)[1:]]),
)
bug(
    "no shift",
    "token t is predicted from token t itself",
    logprobs=lambda logits, columns: (
        (logits / columns.get("temperatures", torch.ones(len(logits)))[:, None])
        .log_softmax(-1)
        .gather(1, columns["token_ids"][:, None])[:, 0]
    ),
)
bug(
    "attention over the row",
    logits=lambda model, c: model(c["token_ids"], c["position_ids"], torch.tensor([len(c["token_ids"])])),
)
bug(
    "positions of the row",
    logits=lambda model, c: model(c["token_ids"], torch.arange(len(c["token_ids"])), c["sequence_lengths"]),
)
bug(
    "attention and positions of the row",
    logits=lambda model, c: model(
        c["token_ids"], torch.arange(len(c["token_ids"])), torch.tensor([len(c["token_ids"])])
    ),
)
bug("positions from one", columns=column("position_ids", lambda c, b: c["position_ids"] + 1))


def from_falls(columns: Tensors, batch: MicroBatch) -> Tensors:
    falls = torch.nonzero(columns["position_ids"].diff() < 0)[:, 0] + 1
    edges = torch.cat([torch.zeros(1, dtype=torch.long), falls, torch.tensor([batch.num_tokens])])
    return {**columns, "sequence_lengths": edges.diff()}


bug("boundaries from positions", "a sample of one token has no boundary", columns=from_falls)


class NotCausal(Tiny):
    def forward(self, ids: torch.Tensor, positions: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        hidden = self.embed[ids] + self.place[positions]
        segment = torch.repeat_interleave(torch.arange(len(lengths)), lengths.long())
        scores = (hidden @ self.query) @ (hidden @ self.key).T
        visible = segment[:, None] == segment[None, :]
        hidden = hidden + scores.masked_fill(~visible, -torch.inf).softmax(-1) @ (hidden @ self.value)
        hidden = hidden + torch.relu(hidden @ self.up) @ self.down
        return hidden @ self.head + self.bias


bug("attention sees later tokens", make=NotCausal)


class Frozen(Tiny):
    def __init__(self) -> None:
        super().__init__()
        self.embed.requires_grad_(False)


bug("embedding frozen", make=Frozen)


def other_weights() -> Tiny:
    model = Tiny()
    with torch.no_grad():
        model.head *= 1.2
    return model


bug("other weights than the sampler's", "head scaled by 1.2", make=other_weights)


# ------------------------------------------------------------------ temperatures

bug("temperature ignored", columns=lambda c, b: {n: v for n, v in c.items() if n != "temperatures"})
bug("temperature multiplied", columns=column("temperatures", lambda c, b: 1 / c["temperatures"]))
bug(
    "temperature of the row's first token",
    columns=column("temperatures", lambda c, b: c["temperatures"][:1].expand(b.num_tokens)),
)
bug("temperature of the token before", columns=column("temperatures", lambda c, b: c["temperatures"].roll(1)))


# ------------------------------------------------------------------ advantages


def advantage(change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Tensors, MicroBatch], Tensors]:
    return column("advantages", lambda c, b: change(c["advantages"]))


def over_row(change: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> Callable[[Tensors, MicroBatch], Tensors]:
    """(advantages, those of trained tokens) -> advantages, over a row."""

    def hook(columns: Tensors, batch: MicroBatch) -> Tensors:
        a, m = columns["advantages"], columns["loss_mask"]
        return {**columns, "advantages": change(a, a[m]).expand_as(a)} if m.any() else columns

    return hook


bug("negative advantages clamped", columns=advantage(lambda a: a.clamp_min(0)))
bug("negative advantages made positive", columns=advantage(torch.abs))
bug("sign of the loss", columns=advantage(torch.neg))
bug("advantages clamped to 5", columns=advantage(lambda a: a.clamp(-5, 5)))
bug("advantages of the token before", columns=advantage(lambda a: a.roll(1)))
bug("advantage of the row's first trained token", columns=over_row(lambda a, own: own[0]))
bug("advantages divided by their deviation", columns=over_row(lambda a, own: a / (own.std(unbiased=False) + 1e-6)))
bug(
    "advantages normalized per row",
    columns=over_row(lambda a, own: (a - own.mean()) / (own.std(unbiased=False) + 1e-6)),
)


def first_advantage(columns: Tensors, batch: MicroBatch) -> Tensors:
    advantages = columns["advantages"].clone()
    for at in parts(batch):
        advantages[at] = advantages[at][0].clone()
    return {**columns, "advantages": advantages}


bug("advantage of the sample's first token", "per-token advantages become one", columns=first_advantage)


# ------------------------------------------------------------------ ratios, clips, terms


def loss_of(change: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]) -> Callable[..., torch.Tensor]:
    """(ratio, advantage, log-probability) -> loss of a token."""

    def hook(columns: Tensors, logprobs: torch.Tensor) -> torch.Tensor:
        mask = columns["loss_mask"]
        ratio = torch.where(mask, logprobs - columns["logprobs"], 0.0).exp()
        return torch.where(mask, change(ratio, columns["advantages"], logprobs), 0.0)

    return hook


def with_term(term: Callable[[Tensors, torch.Tensor], torch.Tensor]) -> Callable[..., torch.Tensor]:
    return lambda c, logprobs: ppo(c, logprobs) + torch.where(c["loss_mask"], term(c, logprobs), 0.0)


bug("no clip", token_loss=loss_of(lambda r, a, t: -r * a))
bug("clip of both sides", "clamped without the minimum", token_loss=loss_of(lambda r, a, t: -r.clamp(0.8, 1.2) * a))
bug(
    "clip from the wrong side",
    "maximum in place of minimum",
    token_loss=loss_of(lambda r, a, t: -torch.maximum(r * a, r.clamp(0.8, 1.2) * a)),
)
bug("clip at 0.8 and 1.28", token_loss=lambda c, t: ppo(c, t, high=0.28))
bug("ratio inverted", token_loss=loss_of(lambda r, a, t: -torch.minimum(a / r, (1 / r).clamp(0.8, 1.2) * a)))
bug("ratio ignored", "plain policy gradient", token_loss=loss_of(lambda r, a, t: -a * t))
bug("ratio detached", "no gradient flows", token_loss=loss_of(lambda r, a, t: -r.detach() * a + 0 * t))
bug("ratio truncated at 2", token_loss=loss_of(lambda r, a, t: -r.detach().clamp(max=2) * a * t))
bug("logprobs of the token before", columns=column("logprobs", lambda c, b: c["logprobs"].roll(1)))
bug(
    "kl added",
    "a KL to the sampler",
    token_loss=with_term(lambda c, t: 0.05 * ((c["logprobs"] - t).expm1() - (c["logprobs"] - t))),
)
bug("cross-entropy added", token_loss=with_term(lambda c, t: -0.05 * t))


def sequence_ratio(columns: Tensors, logprobs: torch.Tensor) -> torch.Tensor:
    mask, a = columns["loss_mask"], columns["advantages"]
    gap = torch.where(mask, logprobs - columns["logprobs"], 0.0)
    ratio = (gap.sum() / mask.sum().clamp_min(1)).exp()
    return torch.where(mask, -torch.minimum(ratio * a, ratio.clamp(0.8, 1.2) * a), 0.0)


bug("ratio averaged over the row", token_loss=sequence_ratio)


def in_bfloat16(columns: Tensors, logprobs: torch.Tensor) -> torch.Tensor:
    mask, a = columns["loss_mask"], columns["advantages"]
    ratio = torch.where(mask, (logprobs - columns["logprobs"]).bfloat16(), 0.0).exp().float()
    return torch.where(mask, -torch.minimum(ratio * a, ratio.clamp(0.8, 1.2) * a), 0.0)


bug("ratio in bfloat16", token_loss=in_bfloat16)


def entropy_added(step: Step, world: int) -> Result:
    model, total = Tiny(), 0.0
    for batch in step:
        c = to_torch(batch)
        logits = logits_of(model, c)
        p = (logits / c.get("temperatures", torch.ones(len(logits))).roll(-1)[:, None]).log_softmax(-1)
        entropy = -(p.exp() * p).sum(-1).roll(1)
        loss = (ppo(c, logprobs_of(logits, c)) + torch.where(c["loss_mask"], 0.05 * entropy, 0.0)).sum()
        loss = loss * world / step.loss_tokens
        loss.backward()
        total += loss.item()
    return total, gradients_of(model)


BUGS.append(Seeded("entropy with the wrong sign", entropy_added, about="entropy is punished"))


# ------------------------------------------------------------------ denominators


def divided(by: Callable[[Step, MicroBatch, int], float]) -> Callable[[Step, MicroBatch, int], float]:
    return lambda step, batch, world: world / max(by(step, batch, world), 1e-9)


def rank_tokens(step: Step) -> int:
    return sum(batch.loss_tokens for batch in step)


def trained_samples(batch: MicroBatch) -> int:
    return sum(bool(batch["loss_mask"][at].any()) for at in parts(batch))


bug("mean of micro-batches", scale=lambda step, b, world: 1 / max(b.loss_tokens, 1) / len(step))
bug("sum of means", scale=lambda step, b, world: 1 / max(b.loss_tokens, 1))
bug("no denominator", scale=lambda step, b, world: 1.0)
bug("divided by all tokens", scale=divided(lambda step, b, world: step.accounting.total.tokens))
bug(
    "divided by padded tokens",
    scale=divided(lambda step, b, world: step.accounting.total.tokens + step.accounting.total.padding_tokens),
)
bug(
    "divided by trained samples of the row",
    scale=lambda step, b, world: world / step.loss_tokens / max(trained_samples(b), 1),
)
bug("divided by segments of the row", scale=lambda step, b, world: world / step.loss_tokens / len(b.sequence_lengths))
bug("mean of ranks", scale=lambda step, b, world: 1 / max(rank_tokens(step), 1))
bug("ranks forgotten", scale=lambda step, b, world: 1 / step.loss_tokens)
bug("ranks twice", scale=lambda step, b, world: world**2 / step.loss_tokens)
bug("accumulation divided again", scale=lambda step, b, world: world / step.loss_tokens / len(step))
bug("dummies counted", scale=divided(lambda step, b, world: step.loss_tokens + step.accounting.total.dummy_tokens))
bug("factor 2", scale=lambda step, b, world: 2 * world / step.loss_tokens)


def per_sample(weight: Callable[[int, int], float]) -> Callable[..., torch.Tensor]:
    def reduce(loss: torch.Tensor, columns: Tensors, batch: MicroBatch) -> torch.Tensor:
        total = loss.sum() * 0
        for at in parts(batch):
            total = total + loss[at].sum() * weight(int(columns["loss_mask"][at].sum()), at.stop - at.start)
        return total

    return reduce


bug("divided by the root of the length", reduce=per_sample(lambda n, length: length**-0.5))
bug(
    "mean over samples",
    "every sample counts the same",
    reduce=per_sample(lambda n, length: 1 / max(n, 1)),
    scale=lambda step, b, world: world / step.denominators.samples,
)
bug("nan for dummies", reduce=lambda loss, c, b: loss.sum() / c["loss_mask"].sum() * c["loss_mask"].sum())


# ------------------------------------------------------------------ steps and gradients


def dropped(step: Step) -> Iterator[MicroBatch]:
    return iter(list(step)[: max(len(step) - 1, 1)])


bug("last micro-batch dropped", batches=dropped)
bug("only the first micro-batch", batches=lambda step: list(step)[:1])


def finished(change: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]) -> Callable[..., Result]:
    def run(step: Step, world: int) -> Result:
        loss, gradients = train(step, world)
        return loss, change(gradients)

    return run


def clipped(gradients: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    norm = math.sqrt(sum(float(g.square().sum()) for g in gradients.values()))
    return {name: g * min(1.0, 1.0 / max(norm, 1e-12)) for name, g in gradients.items()}


def decayed(gradients: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    weights = dict(Tiny().named_parameters())
    return {name: g + 0.01 * weights[name].detach() for name, g in gradients.items()}


BUGS += [
    Seeded("weight decay in the gradient", finished(decayed), about="0.01 x weights is added"),
    Seeded("head without gradient", finished(lambda g: {**g, "head": g["head"] * 0}), about="head is not trained"),
    Seeded("values clipped", finished(lambda g: {n: v.clamp(-0.05, 0.05) for n, v in g.items()})),
]


def clipped_whole(step: PackedStep) -> Any:
    from penstock.testing.trainer import each_rank

    loss, gradients = each_rank(train)(step)
    return loss, clipped({n: torch.as_tensor(g) for n, g in dict(gradients).items()})


BUGS.append(Seeded("gradient clipped to norm 1", clipped_whole, whole=True))


class Kept:
    """Gradients of earlier steps stay."""

    def __init__(self) -> None:
        self.kept: dict[str, torch.Tensor] = {}

    def __call__(self, step: Step, world: int) -> Result:
        loss, found = train(step, world)
        self.kept = {name: self.kept.get(name, 0.0) + gradient for name, gradient in found.items()}
        return loss, self.kept


class Moves:
    """Takes an optimizer step."""

    def __init__(self) -> None:
        self.model = Tiny()

    def __call__(self, step: Step, world: int) -> Result:
        self.model.zero_grad()
        found = train(step, world, make=lambda: self.model)
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter -= 0.05 * parameter.grad
        return found[0], {n: g.clone() for n, g in found[1].items()}


class Noisy:
    def __init__(self) -> None:
        self.generator = torch.Generator().manual_seed(0)

    def __call__(self, step: Step, world: int) -> Result:
        factor = 1 + 0.01 * float(torch.randn((), generator=self.generator))
        loss, found = train(step, world)
        return loss * factor, {n: g * factor for n, g in found.items()}


BUGS += [
    Seeded("gradients not cleared", Kept(), about="gradients add up over steps"),
    Seeded("optimizer step inside", Moves(), about="weights move between steps"),
    Seeded("noise of 1 %", Noisy(), about="the loss has a random factor"),
    Seeded("dropout", lambda step, world: train(step, world, make=lambda: Tiny(0.1)), about="dropout is on"),
    Seeded(
        "loss of the last micro-batch",
        lambda step, world: (train(step, world)[0] / len(step), train(step, world)[1]),
        about="the loss that is returned is wrong, gradients are right",
    ),
]
