"""Measure how far trainer and sampler disagree under top-p sampling, with sampling masks and without.

The demo's model samples, and the same weights then compute the log-probabilities of the sampled tokens, as a trainer
does on the first step. The policy is the same, so every difference comes from how the tokens are normalized.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from penstock.arrays import Sample
from penstock.capture import Trajectory
from penstock.convert import make_group
from penstock.demo.roles import answer_turn, sample
from penstock.demo.tasks import Task, make_task, model_of
from penstock.packing import PackedStep, pack
from penstock.train import TaskConfig, build_model, forward, kept_of, measure_gap, to_torch, token_logprobs


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """Difference between the log-probabilities of sampler and trainer, over all sampled tokens."""

    mismatch_kl: float
    """Mean of ratio - 1 - log ratio."""
    largest: float
    """Largest absolute log ratio."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    top_p: float
    tokens: int
    kept: float
    """Mean number of ids kept per token."""
    with_masks: Difference
    without: Difference


def measure(top_p: float, *, prompts: int = 64, seed: int = 0) -> Measured:
    """Sample eight rollouts for each prompt and compare."""
    torch.manual_seed(seed)
    task, model = make_task(TaskConfig(), Path()), build_model(model_of("reverse"), seed=seed).eval()
    step = pack(_rollouts(model, task, top_p, prompts, seed), ranks=1, seq_len=64)
    kept = [batch["sampling_mask"].lengths[batch["loss_mask"]] for batch in step.ranks[0] if "sampling_mask" in batch]
    ids, tokens = sum(int(counts.sum()) for counts in kept), step.loss_tokens
    return Measured(
        top_p=top_p,
        tokens=tokens,
        kept=ids / tokens if kept else float(model.config.vocab_size),
        with_masks=_compare(model, step, masks=True),
        without=_compare(model, step, masks=False),
    )


def _rollouts(model: Any, task: Task, top_p: float, prompts: int, seed: int) -> list[Sample]:
    rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    asked = [prompt for prompt in (task.prompt(rng) for _ in range(prompts)) for _ in range(8)]
    rollouts = sample(
        model,
        [prompt.token_ids for prompt in asked],
        max_new_tokens=task.max_new_tokens,
        eos=task.eos,
        generator=generator,
        top_p=top_p,
    )
    pairs = zip(asked, rollouts, strict=True)
    trajectories = [Trajectory(turns=[task.turn(prompt), answer_turn(rollout)]) for prompt, rollout in pairs]
    return list(make_group(trajectories, id="measured", advantage=None).samples)


@torch.no_grad()  # type: ignore[untyped-decorator]
def _compare(model: Any, step: PackedStep, *, masks: bool) -> Difference:
    kl, largest = 0.0, 0.0
    for batch in step.ranks[0]:
        tensors = to_torch(batch)
        logprobs, _ = token_logprobs(
            forward(model, tensors),
            tensors["token_ids"],
            tensors["sequence_lengths"],
            kept=kept_of(tensors) if masks else None,
        )
        gap, mask = measure_gap(logprobs, tensors["logprobs"]), tensors["loss_mask"]
        kl += float(gap.mismatch_kl[mask].sum())
        largest = max(largest, float(gap.log_ratio[mask].abs().max()))
    return Difference(mismatch_kl=kl / step.loss_tokens, largest=largest)
