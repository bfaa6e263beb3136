"""Seeded inputs that look like the real thing: real text as token ids, log-probabilities of a softmax.

The text is the language reference that ships with CPython. Words become ids of a 151,936-token vocabulary in
the order of their frequency, as a byte-pair vocabulary would have it: frequent words get low ids. The ids thus
repeat and cluster as those of text do, which uniform random ids do not.
"""

from __future__ import annotations

import re
from collections import Counter
from functools import cache

import numpy as np
from numpy.typing import NDArray

from penstock.arrays import Sample

VOCABULARY = 151_936


@cache
def text_ids() -> NDArray[np.uint32]:
    """About 120,000 token ids of real English text."""
    from pydoc_data.topics import topics

    words = re.findall(r"\s?\w+|\s?[^\w\s]|\s+", "\n".join(topics.values()))
    by_frequency = [word for word, _ in Counter(words).most_common()]
    weights = 1 / np.sqrt(np.arange(10, VOCABULARY + 10))
    chosen = np.random.default_rng(0).choice(VOCABULARY, len(by_frequency), replace=False, p=weights / weights.sum())
    ids = dict(zip(by_frequency, np.sort(chosen).tolist(), strict=True))
    return np.array([ids[word] for word in words], np.uint32)


def text(rng: np.random.Generator, count: int) -> NDArray[np.uint32]:
    """A passage of `count` ids, from a random place, with one word in fifty changed so that no two are alike."""
    corpus = text_ids()
    start = int(rng.integers(len(corpus)))
    ids = np.resize(np.concatenate([corpus[start:], corpus[:start]]), count)
    changed = rng.random(count) < 0.02
    ids[changed] = rng.choice(corpus, int(changed.sum()))
    return ids


def logprobs(rng: np.random.Generator, count: int) -> NDArray[np.float32]:
    """Log-probabilities of tokens sampled from softmaxes that are sometimes sure and sometimes not."""
    scale = rng.choice(np.array([1, 3, 8], np.float32), (count, 1))
    logits = np.sort(rng.gumbel(size=(count, 24)).astype(np.float32) * scale, axis=1)[:, ::-1]
    weights = np.exp(logits - logits[:, :1])
    total = weights.sum(axis=1, dtype=np.float32)
    above = np.cumsum(weights, axis=1) < (rng.random(count) * total)[:, None]
    choice = np.minimum(above.sum(axis=1), logits.shape[1] - 1)
    chosen: NDArray[np.float32] = logits[np.arange(count), choice] - logits[:, 0] - np.log(total)
    return chosen


def sample(rng: np.random.Generator, prompt: NDArray[np.uint32], completion: int, name: str) -> Sample:
    """A prompt with a completion of that many tokens, as GRPO would train it."""
    zeros = np.zeros(len(prompt), np.float32)
    return Sample(
        id=name,
        group=name.rsplit("/", 1)[0],
        env="math",
        policy_version=3,
        token_ids=np.concatenate([prompt, text(rng, completion)]),
        loss_mask=np.arange(len(prompt) + completion) >= len(prompt),
        logprobs=np.concatenate([zeros, logprobs(rng, completion)]),
        temperatures=1.0,
        advantages=float(rng.normal()),
        rewards=float(rng.random() < 0.5),
    )


def long_sample(rng: np.random.Generator) -> list[Sample]:
    """One 30,000-token sample: 15,000 of prompt, 15,000 of completion."""
    return [sample(rng, text(rng, 15_000), 15_000, "p0/0")]


def long_group(rng: np.random.Generator) -> list[Sample]:
    """Sixteen 15,000-token answers to one 15,000-token prompt."""
    prompt = text(rng, 15_000)
    return [sample(rng, prompt, 15_000, f"p0/{i}") for i in range(16)]


def step_of_groups(rng: np.random.Generator, groups: int = 64, size: int = 8) -> list[Sample]:
    """A GRPO step: answers of about 2,900 tokens to prompts of about 1,000, in groups that share their prompt."""
    out = []
    for g in range(groups):
        prompt = text(rng, int(rng.integers(400, 1700)))
        lengths = np.clip(rng.lognormal(np.log(2300), 0.7, size), 200, 14_000).astype(int)
        out += [sample(rng, prompt, int(n), f"p{g}/{i}") for i, n in enumerate(lengths)]
    return out


def turns_as_samples(rng: np.random.Generator, rollouts: int = 8, turns: int = 12) -> list[Sample]:
    """Multi-turn rollouts in which every turn became its own sample: each repeats all turns before it."""
    out = []
    for rollout in range(rollouts):
        context = text(rng, 1_500)
        for turn in range(turns):
            made = sample(rng, context, 400, f"r{rollout}/{turn}")
            out.append(made)
            context = np.concatenate([made.token_ids, text(rng, 300)])
    return out


def cumulative_steps(
    rng: np.random.Generator, turns: int = 60, tokens_per_turn: int = 1000
) -> list[dict[str, list[float]]]:
    """A long rollout as agents record it: every turn repeats the full context, in lists of Python numbers."""
    half = tokens_per_turn // 2
    context = text(rng, half).tolist()
    steps = []
    for _ in range(turns):
        completion = text(rng, half).tolist()
        steps.append(
            {"prompt_ids": context, "completion_ids": completion, "completion_logprobs": logprobs(rng, half).tolist()}
        )
        context = [*context, *completion, *text(rng, half).tolist()]
    return steps
