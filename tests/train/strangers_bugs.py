"""A second catalogue of seeded bugs, written from `seeded.py` alone, before its author had read the check.

It was committed before the check ran on it. The order is that of a training loop: data, mask, model, log-probabilities,
advantages, ratio, loss, denominators, ranks, parameters, state. `RIGHT` has the right trainers of the bugs that declare
another loss or model than `train` has; what each bug changes was measured against these.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch

from penstock.arrays import Sample
from penstock.client import Step
from penstock.packing import MicroBatch, PackedStep, pack
from penstock.testing.trainer import each_rank
from penstock.train.loss import Grpo, Sft
from tests.train.seeded import VOCABULARY, Result, Seeded, Tensors, Tiny, logits_of, logprobs_of, ppo, train

Run = Callable[[Step, int], Result]


def bug(name: str, about: str, **hooks: Any) -> Seeded:
    return Seeded(name, lambda step, world: train(step, world, **hooks), about=about)


def changed(**change: Callable[[Tensors], torch.Tensor]) -> Callable[[Tensors, MicroBatch], Tensors]:
    """Make a hook that replaces columns, where a micro-batch has them."""
    return lambda columns, batch: {
        **columns,
        **{name: make(columns) for name, make in change.items() if name in columns},
    }


def segments(columns: Tensors) -> torch.Tensor:
    """[T] the number of each token's sample."""
    lengths = columns["sequence_lengths"].long()
    return torch.repeat_interleave(torch.arange(len(lengths)), lengths)


def before(values: torch.Tensor) -> torch.Tensor:
    """The value of the token before; that of the first token is 0."""
    return torch.cat([values.new_zeros(1), values[:-1]])


def turn_ends(columns: Tensors) -> torch.Tensor:
    mask = columns["loss_mask"]
    return mask & ~torch.cat([mask[1:], mask.new_zeros(1)])


def per_segment(columns: Tensors, values: torch.Tensor) -> torch.Tensor:
    """[T] the sum of `values` over each token's sample."""
    of = segments(columns)
    return torch.zeros(int(of.max()) + 1, dtype=values.dtype).index_add(0, of, values)[of]


# Data.


def without_last_segment(columns: Tensors) -> torch.Tensor:
    mask = columns["loss_mask"].clone()
    mask[len(mask) - int(columns["sequence_lengths"][-1]) :] = False
    return mask


def all_but_last(step: Step) -> Iterator[MicroBatch]:
    found = list(step)
    yield from found[:-1] or found


def first_twice(step: Step) -> Iterator[MicroBatch]:
    yield next(iter(step))
    yield from step


def ranks_of(step: PackedStep) -> list[Any]:
    return list(step.ranks)


def first_rank_everywhere(step: PackedStep) -> Result:
    ranks = len(step.ranks)
    results = [train(ranks_of(step)[0], ranks) for _ in range(ranks)]
    return averaged(results)


def averaged(results: list[Result]) -> Result:
    count = len(results)
    return sum(r[0] for r in results) / count, {n: sum(r[1][n] for r in results) / count for n in results[0][1]}


def previous_step() -> Callable[[PackedStep], Result]:
    kept: list[PackedStep] = []

    def run(step: PackedStep) -> Result:
        kept.append(step)
        used = kept[max(len(kept) - 2, 0)]
        return averaged([train(rank, len(used.ranks)) for rank in ranks_of(used)])

    return run


# Masks.


def last_turn_only(columns: Tensors) -> torch.Tensor:
    of = segments(columns)
    mask, ends = columns["loss_mask"], turn_ends(columns).long()
    done = ends.cumsum(0) - ends  # turns that ended before this token
    last = torch.zeros(int(of.max()) + 1, dtype=torch.long).scatter_reduce(0, of, done * mask, "amax")
    return mask & (done == last[of])


# The model.


def shifted_boundaries(columns: Tensors) -> torch.Tensor:
    lengths = columns["sequence_lengths"].clone()
    if len(lengths) > 1 and lengths[-1] > 1:
        lengths[0], lengths[-1] = lengths[0] + 1, lengths[-1] - 1
    return lengths


def pairs_of_samples(columns: Tensors) -> torch.Tensor:
    lengths = columns["sequence_lengths"]
    return torch.stack([pair.sum() for pair in lengths.split(2)])


def since_turn_start(columns: Tensors) -> torch.Tensor:
    positions, starts = (
        columns["position_ids"],
        before(turn_ends(columns).long()).bool() | (columns["position_ids"] == 0),
    )
    at = torch.arange(len(positions))
    return at - torch.where(starts, at, 0).cummax(0).values


class Variant(Tiny):
    """`Tiny` with its forward pass open: attention and what it sees can be changed."""

    def forward(self, ids: torch.Tensor, positions: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        hidden = self.embedded(ids, positions)
        segment = torch.repeat_interleave(torch.arange(len(lengths)), lengths.long())
        ago = torch.arange(len(ids))[:, None] - torch.arange(len(ids))[None, :]
        visible = (segment[:, None] == segment[None, :]) & self.seen(ago)
        hidden = hidden + self.attended(hidden, visible)
        return self.after(hidden)

    def embedded(self, ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        return self.embed[ids] + self.place[positions]

    def seen(self, ago: torch.Tensor) -> torch.Tensor:
        return ago >= 0

    def attended(self, hidden: torch.Tensor, visible: torch.Tensor) -> torch.Tensor:
        scores = (hidden @ self.query) @ (hidden @ self.key).T
        return scores.masked_fill(~visible, -torch.inf).softmax(-1) @ (hidden @ self.value)

    def after(self, hidden: torch.Tensor) -> torch.Tensor:
        hidden = hidden + torch.relu(hidden @ self.up) @ self.down
        return hidden @ self.head + self.bias


class Window(Variant):
    def seen(self, ago: torch.Tensor) -> torch.Tensor:
        return (ago >= 0) & (ago < 16)


class OneAhead(Variant):
    def seen(self, ago: torch.Tensor) -> torch.Tensor:
        return ago >= -1


class NoScoreGradient(Variant):
    def attended(self, hidden: torch.Tensor, visible: torch.Tensor) -> torch.Tensor:
        scores = ((hidden @ self.query) @ (hidden @ self.key).T).detach()
        return scores.masked_fill(~visible, -torch.inf).softmax(-1) @ (hidden @ self.value)


class CachedContext(Variant):
    """Keys and values of earlier tokens come from a cache without gradient; a token's own are not cached."""

    def attended(self, hidden: torch.Tensor, visible: torch.Tensor) -> torch.Tensor:
        keys, values, queries = hidden @ self.key, hidden @ self.value, hidden @ self.query
        own = torch.eye(len(hidden), dtype=torch.bool)
        scores = torch.where(own, queries @ keys.T, queries @ keys.detach().T)
        weights = scores.masked_fill(~visible, -torch.inf).softmax(-1)
        return weights.diagonal()[:, None] * values + (weights * ~own) @ values.detach()


class Tied(Variant):
    def after(self, hidden: torch.Tensor) -> torch.Tensor:
        hidden = hidden + torch.relu(hidden @ self.up) @ self.down
        return hidden @ self.embed.T + self.bias


class TiedCut(Tied):
    def embedded(self, ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        return self.embed[ids].detach() + self.place[positions]


# Log-probabilities.


def on_logits(change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Any, Tensors], torch.Tensor]:
    return lambda model, columns: change(logits_of(model, columns))


def temperature_after(logits: torch.Tensor, columns: Tensors) -> torch.Tensor:
    ones = torch.ones(len(logits))
    return logprobs_of(logits, {**columns, "temperatures": ones}) / columns.get("temperatures", ones)


def shifted_twice(logits: torch.Tensor, columns: Tensors) -> torch.Tensor:
    return logprobs_of(torch.cat([logits[:1], logits[:-1]]), columns)


def smoothed(logits: torch.Tensor, columns: Tensors) -> torch.Tensor:
    temperatures = columns.get("temperatures", torch.ones(len(logits)))
    mean = (logits[:-1] / temperatures[1:, None]).log_softmax(-1).mean(-1)
    return 0.95 * logprobs_of(logits, columns) + 0.05 * torch.cat([mean.new_zeros(1), mean])


# Advantages.


def whitened(columns: Tensors) -> torch.Tensor:
    mask, advantages = columns["loss_mask"], columns["advantages"]
    own = advantages[mask]
    return advantages if len(own) < 2 else (advantages - own.mean()) / (own.std() + 1e-6)


def of_previous_sample(columns: Tensors) -> torch.Tensor:
    parts = columns["advantages"].split(columns["sequence_lengths"].tolist())
    firsts = [part[-1:] for part in parts]  # one advantage per sample; the padding's is among them
    return torch.cat([first.expand(len(part)) for part, first in zip(parts, firsts[-1:] + firsts[:-1], strict=True)])


def discounted(columns: Tensors) -> torch.Tensor:
    lengths = per_segment(columns, torch.ones(len(columns["token_ids"])))
    return columns["advantages"] * 0.99 ** (lengths - 1 - columns["position_ids"])


def running_scale() -> Callable[[Tensors, MicroBatch], Tensors]:
    seen: list[torch.Tensor] = []

    def hook(columns: Tensors, batch: MicroBatch) -> Tensors:
        seen.append(columns["advantages"][columns["loss_mask"]])
        known = torch.cat(seen)
        spread = known.std() if len(known) > 1 else torch.tensor(1.0)
        return {**columns, "advantages": columns["advantages"] / (spread + 1e-6)}

    return hook


# Ratio and loss.


def ratio_of(columns: Tensors, logprobs: torch.Tensor) -> torch.Tensor:
    return torch.where(columns["loss_mask"], logprobs - columns["logprobs"], 0.0).exp()


def sequence_ratio(columns: Tensors, logprobs: torch.Tensor) -> torch.Tensor:
    mask = columns["loss_mask"].float()
    gap = torch.where(columns["loss_mask"], logprobs - columns["logprobs"], 0.0)
    mean = per_segment(columns, gap) / per_segment(columns, mask).clamp_min(1)
    return ppo({**columns, "logprobs": torch.zeros_like(mean)}, mean)


def weighted_likelihood(columns: Tensors, logprobs: torch.Tensor) -> torch.Tensor:
    weight = ratio_of(columns, logprobs).clamp(0.8, 1.2).detach()
    return -torch.where(columns["loss_mask"], weight * columns["advantages"] * logprobs, 0.0)


def always_clamped(columns: Tensors, logprobs: torch.Tensor) -> torch.Tensor:
    return -torch.where(columns["loss_mask"], ratio_of(columns, logprobs).clamp(0.8, 1.2) * columns["advantages"], 0.0)


def clip_by_magnitude(columns: Tensors, logprobs: torch.Tensor) -> torch.Tensor:
    sizes = {**columns, "advantages": columns["advantages"].abs()}
    return ppo(sizes, logprobs) * columns["advantages"].sign()


def plus_k2(columns: Tensors, logprobs: torch.Tensor) -> torch.Tensor:
    gap = torch.where(columns["loss_mask"], logprobs - columns["logprobs"], 0.0)
    return ppo(columns, logprobs) + 0.02 * gap.square()


def plus_context_likelihood(columns: Tensors, logprobs: torch.Tensor) -> torch.Tensor:
    context = ~columns["loss_mask"] & (columns["position_ids"] > 0)
    return ppo(columns, logprobs) - 0.01 * torch.where(context, logprobs, 0.0)


def stale_masked(columns: Tensors, logprobs: torch.Tensor) -> torch.Tensor:
    ratio = ratio_of(columns, logprobs).detach()
    return torch.where((ratio < 2) & (ratio > 0.5), ppo(columns, logprobs), 0.0)


# Denominators.


def by_unclipped(columns: Tensors, logprobs: torch.Tensor) -> torch.Tensor:
    ratio, advantages, mask = ratio_of(columns, logprobs).detach(), columns["advantages"], columns["loss_mask"]
    kept = mask & ~((advantages > 0) & (ratio > 1.2) | (advantages < 0) & (ratio < 0.8))
    return ppo(columns, logprobs) * mask.sum() / kept.sum().clamp_min(1)


def by_root_of_length(loss: torch.Tensor, columns: Tensors, batch: MicroBatch) -> torch.Tensor:
    trained = per_segment(columns, columns["loss_mask"].float()).clamp_min(1)
    return (loss * (8 / trained).sqrt()).sum()


def by_turn(loss: torch.Tensor, columns: Tensors, batch: MicroBatch) -> torch.Tensor:
    mask, ends = columns["loss_mask"], turn_ends(columns).long()
    turn = ends.cumsum(0) - ends
    sizes = torch.zeros(int(turn.max()) + 1).index_add(0, turn, mask.float()).clamp_min(1)
    return (loss / sizes[turn]).sum() * (mask.sum() / ends.sum().clamp_min(1))


def first_denominator() -> Run:
    kept: list[int] = []

    def run(step: Step, world: int) -> Result:
        kept.append(step.loss_tokens)
        return train(step, world, scale=lambda step, batch, world: world / max(kept[0], 1))

    return run


# Ranks and parameters.


def last_exchanged_only(step: PackedStep) -> Result:
    """What rank 0's optimizer gets."""
    ranks = len(step.ranks)

    def part(rank: Step, last: bool) -> Result:
        return train(rank, ranks, batches=lambda step: list(step)[-1:] if last else list(step)[:-1])

    exchanged, local = averaged([part(rank, True) for rank in ranks_of(step)]), part(ranks_of(step)[0], False)
    return exchanged[0] + local[0], {name: exchanged[1][name] + local[1][name] for name in local[1]}


def with_gradients(change: Callable[[str, torch.Tensor], torch.Tensor]) -> Run:
    def run(step: Step, world: int) -> Result:
        loss, gradients = train(step, world)
        return loss, {name: change(name, gradient) for name, gradient in gradients.items()}

    return run


def clipped_per_micro_batch(step: Step, world: int) -> Result:
    total, gradients = 0.0, {name: torch.zeros_like(p) for name, p in Tiny().named_parameters()}
    for batch in step:
        loss, own = train(step, world, batches=lambda step, batch=batch: [batch])  # type: ignore[misc]
        size = torch.cat([g.ravel() for g in own.values()]).norm()
        total, factor = total + loss, (0.2 / (size + 1e-6)).clamp_max(1.0)
        gradients = {name: gradients[name] + own[name] * factor for name in own}
    return total, gradients


def stepping_inside(step: Step, world: int) -> Result:
    """The optimizer steps after every micro-batch; the step's change of weights is what its gradient would be."""
    model, total, rate = Tiny(), 0.0, 0.5
    for batch in step:
        loss, own = train(step, world, make=lambda: model, batches=lambda step, batch=batch: [batch])  # type: ignore[misc]
        total += loss
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter -= rate * own[name]
        model.zero_grad()
    start = dict(Tiny().named_parameters())
    return total, {name: (start[name] - p).detach() / rate for name, p in model.named_parameters()}


def momentum() -> Callable[[PackedStep], Result]:
    """Half of the last step's gradient is still there: .grad is scaled down instead of set to zero."""
    kept: dict[str, torch.Tensor] = {}

    def run(step: PackedStep) -> Result:
        loss, gradients = averaged([train(rank, len(step.ranks)) for rank in ranks_of(step)])
        for name, gradient in gradients.items():
            kept[name] = gradient + 0.5 * kept.get(name, torch.zeros_like(gradient))
        return loss, dict(kept)

    return run


# Other losses: supervised, and a KL towards a reference.


def cross_entropy(columns: Tensors, logprobs: torch.Tensor) -> torch.Tensor:
    return -torch.where(columns["loss_mask"], logprobs, 0.0)


def cross_entropy_times_advantage(columns: Tensors, logprobs: torch.Tensor) -> torch.Tensor:
    return cross_entropy(columns, logprobs) * columns["advantages"]


def cross_entropy_with_context(columns: Tensors, logprobs: torch.Tensor) -> torch.Tensor:
    context = ~columns["loss_mask"] & (columns["position_ids"] > 0)
    return cross_entropy(columns, logprobs) - 0.1 * torch.where(context, logprobs, 0.0)


def with_kl(reference: str, sign: float, beta: float = 0.1) -> Callable[[Tensors, torch.Tensor], torch.Tensor]:
    def loss(columns: Tensors, logprobs: torch.Tensor) -> torch.Tensor:
        away = torch.where(columns["loss_mask"], columns[reference] - logprobs, 0.0) * sign
        return ppo(columns, logprobs) + beta * (away.exp() - 1 - away)

    return loss


def per_sample(count: Callable[[Tensors], torch.Tensor]) -> Run:
    def reduce(loss: torch.Tensor, columns: Tensors, batch: MicroBatch) -> torch.Tensor:
        return (loss / per_segment(columns, count(columns).float()).clamp_min(1)).sum()

    return lambda step, world: train(
        step, world, reduce=reduce, scale=lambda step, batch, world: world / step.denominators.samples
    )


def run_of(**hooks: Any) -> Run:
    return lambda step, world: train(step, world, **hooks)


def mask_is(make: Callable[[Tensors], torch.Tensor]) -> dict[str, Any]:
    return {"columns": changed(loss_mask=make)}


DATA = [
    bug(
        "last segment is taken for padding",
        "The last segment of a micro-batch is never trained, also where it is a sample and not padding.",
        **mask_is(without_last_segment),
    ),
    bug("drop_last", "The last micro-batch of each rank is dropped.", batches=all_but_last),
    bug("peeked micro-batch runs twice", "The first micro-batch of each rank is trained twice.", batches=first_twice),
    Seeded(
        "every rank reads rank 0",
        first_rank_everywhere,
        whole=True,
        about="All ranks train the data of rank 0; the data of the others is dropped.",
    ),
    Seeded(
        "prefetched step is one behind",
        previous_step(),
        whole=True,
        about="Each call trains the data of the call before.",
    ),
    bug(
        "only good samples",
        "Samples of negative advantage are masked.",
        **mask_is(lambda c: c["loss_mask"] & (c["advantages"] > 0)),
    ),
    bug(
        "overlong filter left on",
        "Samples of more than 24 tokens are masked.",
        **mask_is(lambda c: c["loss_mask"] & (per_segment(c, torch.ones_like(c["advantages"])) <= 24)),
    ),
    bug(
        "labels cut at 24 tokens",
        "Tokens from position 24 of a sample are not trained: a cut of the labels that the denominator does not know.",
        **mask_is(lambda c: c["loss_mask"] & (c["position_ids"] < 24)),
    ),
]

MASKS = [
    bug(
        "first token of a turn not trained",
        "The first trained token of every turn is masked.",
        **mask_is(lambda c: c["loss_mask"] & before(c["loss_mask"])),
    ),
    bug(
        "token after a turn trained",
        "The token after each turn, the first of the tool's or of the user's, is trained too.",
        **mask_is(lambda c: c["loss_mask"] | (before(c["loss_mask"]) & (c["position_ids"] > 0))),
    ),
    bug("only the last turn", "Only the last turn of a sample is trained.", **mask_is(last_turn_only)),
    bug(
        "pad id is the EOS id",
        "Tokens with the id 2, EOS, are masked as padding.",
        **mask_is(lambda c: c["loss_mask"] & (c["token_ids"] != 2)),
    ),
    bug(
        "mask rolled by one",
        "The loss mask is one token early: it was shifted for the labels and the log-probabilities were not.",
        columns=changed(loss_mask=lambda c: c["loss_mask"].roll(-1) & (c["position_ids"] > 0)),
    ),
]

MODEL = [
    bug(
        "boundaries one token late",
        "Every boundary between samples is one token late for attention: first tokens belong to the sample before.",
        columns=changed(sequence_lengths=shifted_boundaries),
    ),
    bug(
        "every second boundary missed",
        "Attention crosses from the first to the second sample of each pair in a row.",
        columns=changed(sequence_lengths=pairs_of_samples),
    ),
    bug("sliding window", "Attention only sees the last 16 tokens.", make=Window),
    bug("causal mask off by one", "A token also sees the next one, which it has to predict.", make=OneAhead),
    bug(
        "positions start at 1",
        "Positions of every sample start at 1 instead of 0.",
        columns=changed(position_ids=lambda c: c["position_ids"] + 1),
    ),
    bug(
        "positions start at 0 at each turn",
        "Positions count from the start of a turn and not from that of the sample.",
        columns=changed(position_ids=since_turn_start),
    ),
    bug(
        "position table of 20",
        "Positions above 19 are clamped to 19.",
        columns=changed(position_ids=lambda c: c["position_ids"].clamp_max(19)),
    ),
    bug("gradient through scores cut", "Query and key get no gradient: the scores are detached.", make=NoScoreGradient),
    bug("context from a cache", "Keys and values of earlier tokens carry no gradient.", make=CachedContext),
    bug("a little dropout", "The model is in train mode with a dropout of 2 %.", make=lambda: Tiny(0.02)),
    Seeded(
        "tied embedding cut",
        run_of(make=TiedCut),
        model=Tied,
        about="The tied embedding gets the gradient of the head only, none from the lookup.",
    ),
]

LOGPROBS = [
    bug(
        "padded vocabulary",
        "The softmax runs over 8 more entries of a padded vocabulary, all with a logit of 0.",
        logits=on_logits(lambda logits: torch.nn.functional.pad(logits, (0, 8))),
    ),
    bug(
        "logits capped",
        "Logits go through a soft cap, 2 * tanh(x / 2), that the model does not have.",
        logits=on_logits(lambda logits: 2 * torch.tanh(logits / 2)),
    ),
    bug(
        "logits in half precision",
        "Logits are rounded to bfloat16 before the softmax. A small effect: 0.2 %.",
        logits=on_logits(lambda logits: logits.bfloat16().float()),
    ),
    bug(
        "last id missing from the softmax",
        "The logit of the last id of the vocabulary is cut off from the softmax.",
        logits=on_logits(lambda logits: torch.cat([logits[:, :-1], torch.full_like(logits[:, -1:], -30.0)], 1)),
    ),
    bug(
        "one temperature per row",
        "The temperature of a micro-batch's first token is used for all of its samples.",
        columns=changed(temperatures=lambda c: c["temperatures"][:1].expand(len(c["temperatures"]))),
    ),
    bug(
        "temperature after the softmax",
        "Log-probabilities are divided by the temperature, not logits.",
        logprobs=temperature_after,
    ),
    bug(
        "temperature multiplied",
        "Logits are multiplied by the temperature instead of divided.",
        columns=changed(temperatures=lambda c: 1 / c["temperatures"]),
    ),
    bug(
        "shifted twice",
        "Labels are shifted by two: row t - 2 of the logits is read for token t.",
        logprobs=shifted_twice,
    ),
    bug("label smoothing left on", "Log-probabilities are mixed with 5 % of a uniform target.", logprobs=smoothed),
    bug(
        "sampler's log-probabilities one late",
        "The sampler's log-probability of the token before is used for each token.",
        columns=changed(logprobs=lambda c: before(c["logprobs"])),
    ),
    bug(
        "sampler's log-probabilities in base 2",
        "The sampler's log-probabilities are in bits and those of the trainer in nats.",
        columns=changed(logprobs=lambda c: c["logprobs"] / np.log(2)),
    ),
    bug(
        "sampler's log-probabilities rounded",
        "The sampler's log-probabilities are kept with one decimal.",
        columns=changed(logprobs=lambda c: (c["logprobs"] * 10).round() / 10),
    ),
]

ADVANTAGES = [
    bug(
        "whitened per micro-batch",
        "Advantages are normalised to mean 0 and deviation 1 over the trained tokens of each micro-batch.",
        columns=changed(advantages=whitened),
    ),
    bug(
        "advantages clamped",
        "Advantages are clamped to [-1, 1].",
        columns=changed(advantages=lambda c: c["advantages"].clamp(-1, 1)),
    ),
    bug(
        "advantages of the neighbour",
        "Every sample has the advantage of the sample before it in the row.",
        columns=changed(advantages=of_previous_sample),
    ),
    bug(
        "discount left on",
        "Advantages are discounted by 0.99 per token from the end.",
        columns=changed(advantages=discounted),
    ),
    bug(
        "bad samples count half",
        "Negative advantages are halved.",
        columns=changed(advantages=lambda c: torch.where(c["advantages"] < 0, 0.5, 1.0) * c["advantages"]),
    ),
    bug(
        "running scale of advantages",
        "Advantages are divided by their deviation since the start.",
        columns=running_scale(),
    ),
    bug(
        "advantage of the first token",
        "All tokens of a sample get its first token's advantage. No effect (0 %) where advantages are per sample.",
        columns=changed(advantages=lambda c: c["advantages"][torch.arange(len(c["advantages"])) - c["position_ids"]]),
    ),
]

LOSS = [
    bug(
        "upper clip of 0.28",
        "The upper clip is 0.28 instead of 0.2.",
        token_loss=lambda c, logprobs: ppo(c, logprobs, high=0.28),
    ),
    bug(
        "ratio of the sequence",
        "One ratio per sample, the geometric mean, instead of one per token.",
        token_loss=sequence_ratio,
    ),
    bug(
        "clipped weights on the likelihood",
        "The clipped ratio is a constant weight of the log-probability, so that clipped tokens still have a gradient.",
        token_loss=weighted_likelihood,
    ),
    bug("clamped without minimum", "The ratio is always clamped, without PPO's minimum.", token_loss=always_clamped),
    bug(
        "clip ignores the sign",
        "The minimum is taken as if all advantages were positive: negative ones are clipped on the wrong side.",
        token_loss=clip_by_magnitude,
    ),
    bug("penalty towards the sampler", "A penalty of 0.02 on the squared log-ratio is added.", token_loss=plus_k2),
    bug(
        "likelihood of the context",
        "Context tokens are trained with a likelihood of weight 0.01.",
        token_loss=plus_context_likelihood,
    ),
    bug("far ratios masked", "Tokens whose ratio is outside 0.5 to 2 are masked.", token_loss=stale_masked),
    Seeded(
        "SFT weighs by advantage",
        run_of(token_loss=cross_entropy_times_advantage),
        loss=Sft(),
        about="Cross-entropy is multiplied by the advantage.",
    ),
    Seeded(
        "SFT trains the context",
        run_of(token_loss=cross_entropy_with_context),
        loss=Sft(),
        about="Context tokens are trained too, with a weight of 0.1.",
    ),
    Seeded(
        "KL towards the sampler",
        run_of(token_loss=with_kl("logprobs", 1.0)),
        loss=Grpo(beta=0.1),
        columns=("temperatures", "teacher_logprobs"),
        about="The KL term reads the sampler's log-probabilities and not the reference's.",
    ),
    Seeded(
        "KL the wrong way",
        run_of(token_loss=with_kl("teacher_logprobs", -1.0)),
        loss=Grpo(beta=0.1),
        columns=("temperatures", "teacher_logprobs"),
        about="The k3 estimate has trainer and reference swapped.",
    ),
]

DENOMINATORS = [
    bug(
        "mean over unclipped tokens", "The loss is divided by the tokens that are not clipped.", token_loss=by_unclipped
    ),
    bug("root of the length", "Samples are weighted by 1 / sqrt(trained tokens).", reduce=by_root_of_length),
    bug("mean of turns", "Each turn counts the same, however long it is.", reduce=by_turn),
    bug(
        "one token too many per sample",
        "The denominator counts one token too many for each sample.",
        scale=lambda step, batch, world: world / (step.loss_tokens + step.denominators.samples),
    ),
    bug(
        "denominator per rank",
        "The loss is divided by this rank's own trained tokens.",
        scale=lambda step, batch, world: 1 / max(sum(b.loss_tokens for b in step), 1),
    ),
    bug(
        "padding in the denominator",
        "Each micro-batch is scaled by its share of real tokens: a mean over padded rows.",
        scale=lambda step, batch, world: world / step.loss_tokens * batch.sample_tokens / max(batch.num_tokens, 1),
    ),
    Seeded(
        "denominator of the first step", first_denominator(), about="The token count of the first step is used for all."
    ),
    Seeded(
        "sample mean over the whole length",
        per_sample(lambda c: torch.ones_like(c["loss_mask"])),
        per="sample",
        about="The mean of a sample is over all of its tokens and not over the trained ones.",
    ),
]

PARAMETERS = [
    Seeded(
        "gradients added up by the exchange",
        run_of(),
        exchange="sum",
        about="Ranks add gradients up although each has scaled by the number of ranks: too large by this number.",
    ),
    Seeded(
        "only the last micro-batch exchanged",
        last_exchanged_only,
        whole=True,
        about="Gradients of all but the last micro-batch stay on their rank and are not averaged.",
    ),
    Seeded(
        "bias frozen", with_gradients(lambda name, g: g * (name != "bias")), about="The bias of the head is frozen."
    ),
    Seeded(
        "head learns slower",
        with_gradients(lambda name, g: g * (0.9 if name == "head" else 1.0)),
        about="The gradient of the head is 10 % too small.",
    ),
    Seeded(
        "rows of ids 0 to 2 frozen",
        with_gradients(lambda name, g: torch.cat([g[:3] * 0, g[3:]]) if name == "embed" else g),
        about="Embeddings of the special ids, EOS among them, get no gradient.",
    ),
    Seeded(
        "gradient elements clamped",
        with_gradients(lambda name, g: g.clamp(-0.03, 0.03)),
        about="Each element of the gradient is clamped to 0.03 before the exchange.",
    ),
    Seeded(
        "clipped per micro-batch",
        clipped_per_micro_batch,
        about="The gradient norm is clipped to 0.2 for each micro-batch and not once for the step.",
    ),
    Seeded(
        "optimizer steps per micro-batch",
        stepping_inside,
        about="The optimizer steps after every micro-batch, so that later ones see other weights.",
    ),
    Seeded(
        "gradient not cleared", momentum(), whole=True, about="Half of the gradient of the step before is still there."
    ),
]

BUGS: list[Seeded] = [*DATA, *MASKS, *MODEL, *LOGPROBS, *ADVANTAGES, *LOSS, *DENOMINATORS, *PARAMETERS]

RIGHT: dict[str, Run] = {
    "tied embedding cut": run_of(make=Tied),
    "SFT weighs by advantage": run_of(token_loss=cross_entropy),
    "SFT trains the context": run_of(token_loss=cross_entropy),
    "KL towards the sampler": run_of(token_loss=with_kl("teacher_logprobs", 1.0)),
    "KL the wrong way": run_of(token_loss=with_kl("teacher_logprobs", 1.0)),
    "sample mean over the whole length": per_sample(lambda c: c["loss_mask"]),
}


def with_teacher(seed: int) -> PackedStep:
    """`realistic` with a reference: its log-probabilities are a third column of noise around those of the model."""
    rng = np.random.default_rng(seed)
    samples = []
    for i in range(12):
        mask = np.arange(int(rng.integers(6, 30))) >= int(rng.integers(1, 5))
        near: dict[str, Any] = {
            n: np.where(mask, rng.normal(-3.4, 0.3, len(mask)), 0.0) for n in ("logprobs", "teacher_logprobs")
        }
        ids = rng.integers(3, VOCABULARY, len(mask))
        samples.append(Sample(id=str(i), token_ids=ids, loss_mask=mask, advantages=float(rng.normal()), **near))
    return pack(samples, ranks=2, seq_len=64, micro_batch_max_tokens=96, long_rows=True, pad_to_multiple_of=8)


def effect_of(seeded: Seeded) -> float:
    """`effect` for the bugs in RIGHT."""
    step = with_teacher(0)
    right, wrong = each_rank(RIGHT[seeded.name]), seeded.step_fn()
    one, other = (np.concatenate([np.ravel(g) for g in dict(fn(step)[1]).values()]) for fn in (right, wrong))
    return float(np.linalg.norm(one - other) / np.linalg.norm(one))
