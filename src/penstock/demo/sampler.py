"""Sample rollouts from a Hugging Face model: prompts of one length, with the log-probability of every token."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True, slots=True)
class Rollout:
    token_ids: list[int]
    """Up to and including the end token."""
    logprobs: list[float]
    """Normalized over `kept`."""
    kept: list[list[int]] | None
    """For each token the ids it was sampled from; None if from the whole vocabulary."""
    finished: bool
    """Whether the end token was sampled."""


def sample(
    model: Any,
    prompts: list[list[int]],
    *,
    max_new_tokens: int,
    eos: int,
    generator: torch.Generator,
    temperature: float = 1.0,
    top_p: float = 1.0,
    banned: tuple[int, ...] = (),
    first: dict[str, Any] | None = None,
) -> list[Rollout]:
    """Sample one completion per prompt, at `temperature`, from the likeliest ids that together reach `top_p`.

    Prompts must have one length: without padding the log-probabilities equal those the trainer computes. `banned` ids
    are never sampled. `first` is passed to the model with the prompt (images).
    """
    from transformers import DynamicCache

    ids, cache = torch.tensor(prompts), DynamicCache()
    done = torch.zeros(len(prompts), dtype=torch.bool)
    tokens, logprobs, kept, more = [], [], [], first or {}
    for _ in range(max_new_tokens):
        with torch.no_grad():
            logits = model(input_ids=ids, past_key_values=cache, use_cache=True, **more).logits[:, -1].float()
        if banned:
            logits[:, list(banned)] = float("-inf")
        logits /= temperature
        log_p = torch.log_softmax(logits, -1)
        if top_p < 1.0:
            inside = nucleus(log_p, top_p)
            log_p = torch.log_softmax(logits.masked_fill(~inside, float("-inf")), -1)
            kept.append([row.nonzero()[:, 0].tolist() for row in inside])
        ids = torch.multinomial(log_p.exp(), 1, generator=generator)
        tokens.append(ids[:, 0].clone())
        logprobs.append(log_p.gather(1, ids)[:, 0])
        done |= ids[:, 0] == eos
        more = {}
        if bool(done.all()):
            break
    rows, lps = torch.stack(tokens, 1).tolist(), torch.stack(logprobs, 1).tolist()
    sets = [[at[i] for at in kept] if kept else None for i in range(len(prompts))]
    return [_cut(row, lp, own, eos) for row, lp, own in zip(rows, lps, sets, strict=True)]


def nucleus(log_p: torch.Tensor, top_p: float) -> torch.Tensor:
    """[B, V] Mark the fewest likeliest ids whose probabilities add up to `top_p`, at least one.

    >>> nucleus(torch.tensor([[0.1, 0.6, 0.3]]).log(), 0.8).tolist()
    [[False, True, True]]
    """
    likeliest = log_p.exp().sort(-1, descending=True)
    # Mass before each id: 0.6 0.3 0.1 gives 0.0 0.6 0.9. The id that crosses top_p is kept, the one after it is not.
    before = likeliest.values.cumsum(-1) - likeliest.values
    return torch.zeros_like(log_p, dtype=torch.bool).scatter(-1, likeliest.indices, before < top_p)


def _cut(tokens: list[int], logprobs: list[float], kept: list[list[int]] | None, eos: int) -> Rollout:
    end = tokens.index(eos) + 1 if eos in tokens else len(tokens)
    return Rollout(tokens[:end], logprobs[:end], None if kept is None else kept[:end], eos in tokens)
