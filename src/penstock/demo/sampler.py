"""Rollouts from a Hugging Face model: a batch of prompts of one length, with the log-probability of every token."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True, slots=True)
class Rollout:
    token_ids: list[int]
    """Up to and including the end token."""
    logprobs: list[float]
    finished: bool


def sample(
    model: Any,
    prompts: list[list[int]],
    *,
    max_new_tokens: int,
    eos: int,
    generator: torch.Generator,
    banned: tuple[int, ...] = (),
    first: dict[str, Any] | None = None,
) -> list[Rollout]:
    """One completion per prompt, sampled at temperature 1.

    Prompts have one length, so there is no padding that could differ from what the trainer computes. `banned` ids
    are never sampled; `first` goes to the model with the prompt (images).
    """
    from transformers import DynamicCache

    ids, cache = torch.tensor(prompts), DynamicCache()
    done = torch.zeros(len(prompts), dtype=torch.bool)
    tokens, logprobs, more = [], [], first or {}
    for _ in range(max_new_tokens):
        with torch.no_grad():
            logits = model(input_ids=ids, past_key_values=cache, use_cache=True, **more).logits[:, -1].float()
        if banned:
            logits[:, list(banned)] = float("-inf")
        log_p = torch.log_softmax(logits, -1)
        ids = torch.multinomial(log_p.exp(), 1, generator=generator)
        tokens.append(ids[:, 0].clone())
        logprobs.append(log_p.gather(1, ids)[:, 0])
        done |= ids[:, 0] == eos
        more = {}
        if bool(done.all()):
            break
    rows, lps = torch.stack(tokens, 1).tolist(), torch.stack(logprobs, 1).tolist()
    return [_cut(row, lp, eos) for row, lp in zip(rows, lps, strict=True)]


def _cut(tokens: list[int], logprobs: list[float], eos: int) -> Rollout:
    end = tokens.index(eos) + 1 if eos in tokens else len(tokens)
    return Rollout(tokens[:end], logprobs[:end], eos in tokens)
