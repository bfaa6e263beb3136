"""Plain-Python references for turning rollouts into samples: lists and loops, short enough to check by eye.

Each follows the written rule as directly as it can and shares nothing with the fast paths: sequences are compared token
by token, every sample has its own copy, advantages are computed term by term.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass
class PlainSample:
    token_ids: list[int] = field(default_factory=list)
    mask: list[bool] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)


def interleave(steps: Sequence[Mapping[str, Any]]) -> list[PlainSample]:
    """Return the samples of cumulative steps, without those that train nothing."""
    return _trainable(interleaved(steps))


def interleaved(steps: Sequence[Mapping[str, Any]]) -> list[PlainSample]:
    """Return all samples of cumulative steps. A step continues the longest sample that is a prefix of its prompt, or
    starts a new one."""
    samples: list[PlainSample] = []
    for step in steps:
        prompt, completion = list(step["prompt_ids"]), list(step["completion_ids"])
        sampled = [bool(m) for m in step.get("completion_mask", [1] * len(completion))]
        best: PlainSample | None = None
        for sample in samples:
            is_prefix = sample.token_ids == prompt[: len(sample.token_ids)]
            if is_prefix and (best is None or len(sample.token_ids) > len(best.token_ids)):
                best = sample
        if best is None:
            best = PlainSample()
            samples.append(best)
        context = prompt[len(best.token_ids) :]
        best.token_ids += context + completion
        best.mask += [False] * len(context) + sampled
        logprobs = [lp if m else 0.0 for lp, m in zip(step["completion_logprobs"], sampled, strict=True)]
        best.logprobs += [0.0] * len(context) + logprobs
    return samples


def branches(
    turns: Sequence[Mapping[str, Any]], parents: Sequence[int], keeps: Sequence[int | None]
) -> list[PlainSample]:
    """Return the samples of a tree of turns: one per leaf. A sampled token is trained by the first path it is on.

    A turn is `{"token_ids", "mask", "logprobs"}` with one value per token.
    """

    def path_to(turn: int, count: int) -> list[tuple[int, int]]:
        if turn < 0:
            return []
        keep = keeps[turn]
        above = len(turns[parents[turn]]["token_ids"]) if keep is None and parents[turn] >= 0 else keep or 0
        return path_to(parents[turn], above) + [(turn, i) for i in range(count)]

    def continues(child: int, turn: int) -> bool:
        return parents[child] == turn and keeps[child] in (None, len(turns[turn]["token_ids"]))

    # A branch is named by the turn that opens it: a root, a turn that keeps only part of its parent, or a second turn
    # that continues the same parent. With parents [-1, 0, 1, 1]: turns 0, 1, 2 are branch 0, turn 3 opens branch 3.
    opener: list[int] = []
    ends: dict[int, int] = {}
    for i, parent in enumerate(parents):
        first = parent >= 0 and continues(i, parent) and not any(continues(j, parent) for j in range(i))
        opener.append(opener[parent] if first else i)
        ends[opener[i]] = i
    samples, seen = [], set()
    for leaf in ends.values():
        sample = PlainSample()
        for place in path_to(leaf, len(turns[leaf]["token_ids"])):
            turn, i = place
            trained = bool(turns[turn]["mask"][i]) and place not in seen
            seen.add(place)
            sample.token_ids.append(turns[turn]["token_ids"][i])
            sample.mask.append(trained)
            sample.logprobs.append(turns[turn]["logprobs"][i] if trained else 0.0)
        samples.append(sample)
    return _trainable(samples)


def _trainable(samples: list[PlainSample]) -> list[PlainSample]:
    """Remove samples that train nothing, unless all are such. A first token is never trained."""
    for sample in samples:
        if sample.mask:
            sample.mask[0] = False
    if any(any(sample.mask) for sample in samples):
        return [sample for sample in samples if any(sample.mask)]
    return samples


def grpo(rewards: Sequence[float]) -> list[float]:
    mean = math.fsum(rewards) / len(rewards)
    return [r - mean for r in rewards] if len(rewards) > 1 else [0.0]


def standardized(rewards: Sequence[float], eps: float) -> list[float]:
    centered = grpo(rewards)
    std = math.sqrt(math.fsum(c * c for c in centered) / len(rewards))
    return [c / (std + eps) for c in centered]


def leave_one_out(rewards: Sequence[float]) -> list[float]:
    if len(rewards) == 1:
        return [0.0]
    total = math.fsum(rewards)
    return [r - (total - r) / (len(rewards) - 1) for r in rewards]


def max_rl(rewards: Sequence[float]) -> list[float]:
    mean = math.fsum(rewards) / len(rewards)
    return [(r - mean) / mean if mean > 0 and len(rewards) > 1 else 0.0 for r in rewards]


def efficiency(rewards: Sequence[float], costs: Sequence[float]) -> list[float]:
    """Shape rewards: raise those of correct rollouts that cost less than the average correct one."""
    best = max(rewards)
    correct_costs = [c for r, c in zip(rewards, costs, strict=True) if r >= best]
    typical = math.fsum(correct_costs) / len(correct_costs)
    if best <= 0 or typical <= 0:
        return list(rewards)
    bonuses = [min(max(1 - c / typical, 0.0), 1.0) for c in costs]
    return [r * (1 + b) if r >= best else r for r, b in zip(rewards, bonuses, strict=True)]


def length_penalty(rewards: Sequence[float], weighted: Sequence[tuple[float, Sequence[int]]]) -> list[float]:
    """Shape rewards: lower each by the mean reward times its count's share of the largest count."""
    mean = math.fsum(rewards) / len(rewards)
    return [
        reward - mean * math.fsum(weight * counts[i] / max(max(counts), 1) for weight, counts in weighted)
        for i, reward in enumerate(rewards)
    ]


def gibberish(
    ids: Sequence[int], logprobs: Sequence[float], sampled: Sequence[bool], *, rare_above: int, below: float
) -> int | None:
    """Return the index, among sampled tokens, of the first that is rare and unlikely, or None."""
    number = 0
    for token, logprob, was_sampled in zip(ids, logprobs, sampled, strict=True):
        if was_sampled:
            if token > rare_above and logprob < below:
                return number
            number += 1
    return None


def repetition(logprobs: Sequence[float], sampled: Sequence[bool], *, window: int, above: float) -> int | None:
    """Return the index, among sampled tokens, at which a run of likely tokens reaches length `window`, or None."""
    number = run = 0
    for logprob, was_sampled in zip(logprobs, sampled, strict=True):
        if was_sampled:
            run = run + 1 if logprob > above else 0
            if run >= window:
                return number
            number += 1
    return None
