"""Exports of an invented run: small conversations about sums, with a sampler that drifts away from the trainer.

For tests of the viewer, for its pictures and for trying it out: no model, no torch, the same bytes for the same seed.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from penstock.arrays import Sample
from penstock.arrays.columns import Array
from penstock.packing import MicroBatch, pack
from penstock.train.terms import Terms
from penstock.view.export import TokenExporter
from penstock.view.step_files import Keep

_PIECES = re.compile(r"<\|?\w+\|?>|</\w+>| ?\w+| ?[^\w\s]|\n|\s")
_ENVS = ("arithmetic", "lookup", "reverse")
_DOUBTS = ("Wait, let me check that again.", "Hmm, that looks too large.", "Actually, carry the one first.")


@dataclass(slots=True)
class Words:
    """A vocabulary of words that grows as texts arrive."""

    ids: dict[str, int] = field(default_factory=dict)

    def encode(self, text: str) -> list[int]:
        return [self.ids.setdefault(piece, len(self.ids)) for piece in _PIECES.findall(text)]

    def save(self, folder: Path) -> None:
        """Write a `tokenizer.json` that the viewer reads."""
        folder.mkdir(parents=True, exist_ok=True)
        model = {"type": "WordLevel", "vocab": self.ids, "unk_token": "<unk>"}
        (folder / "tokenizer.json").write_text(json.dumps({"version": "1.0", "model": model, "added_tokens": []}))


def conversation(rng: np.random.Generator, words: Words, *, turns: int = 2) -> tuple[list[int], list[bool], float]:
    """Token ids, which of them the model sampled, and the reward."""
    ids: list[int] = []
    sampled: list[bool] = []

    def say(text: str, *, trained: bool) -> None:
        piece = words.encode(text)
        ids.extend(piece)
        sampled.extend([trained] * len(piece))

    say("<|im_start|>system\nYou are a careful assistant. Think first, then answer.<|im_end|>\n", trained=False)
    right = True
    for _ in range(turns):
        a, b = (int(n) for n in rng.integers(11, 99, 2))
        say(f"<|im_start|>user\nWhat is {a} times {b}? Show your work.<|im_end|>\n", trained=False)
        say("<|im_start|>assistant\n", trained=False)
        doubt = f"{_DOUBTS[int(rng.integers(3))]} " if rng.random() < 0.6 else ""
        right = bool(rng.random() < 0.6)
        answer = a * b if right else a * b + int(rng.integers(1, 90))
        say(
            f"<think>\n{a} times {b} is {a} times {b // 10 * 10} plus {a} times {b % 10}.\n"
            f"{a} times {b // 10 * 10} = {a * (b // 10 * 10)}, and {a} times {b % 10} = {a * (b % 10)}.\n"
            f"{doubt}Together that gives {answer}.\n</think>\nThe answer is {answer}.<|im_end|>\n",
            trained=True,
        )
    return ids, sampled, float(right)


def samples_of_step(rng: np.random.Generator, words: Words, step: int, *, groups: int, size: int) -> list[Sample]:
    """Groups of rollouts, a few of them distilled or supervised, some of them stale."""
    out = []
    for group in range(groups):
        env = _ENVS[group % len(_ENVS)]
        mode = "sft" if group % 7 == 5 else "opd" if group % 7 == 6 else "rl"
        for member in range(size):
            ids, sampled, reward = conversation(rng, words, turns=int(rng.integers(1, 4)))
            mask = np.array(sampled)
            logprobs = np.where(mask, -(rng.exponential(0.35, len(ids)) ** 1.5), 0.0).astype(np.float32)
            out.append(
                Sample(
                    id=f"s{step}-g{group}-{member}",
                    group=f"s{step}-g{group}",
                    prompt=f"sums-{group}",
                    env=env,
                    mode=mode,
                    policy_version=max(step - int(rng.integers(1, 4)), 0),
                    token_ids=ids,
                    loss_mask=mask,
                    logprobs=logprobs,
                    advantages=reward - 0.6,
                    rewards=reward,
                    teacher_logprobs=(logprobs * 0.8).astype(np.float32) if mode == "opd" else None,
                )
            )
    return out


def terms_of(rng: np.random.Generator, batch: MicroBatch, *, drift: float = 0.1) -> Terms:
    """What a DPPO loss would have returned, had the trainer drifted from the sampler by that much."""
    mask, sampler = batch["loss_mask"], batch["logprobs"]
    count = batch.num_tokens
    noise = rng.normal(0, drift, count) + np.where(rng.random(count) < 0.012, rng.normal(0, 2.2, count), 0)
    trainer = np.minimum(sampler + noise, -1e-5).astype(np.float32)
    trainer[~mask] = -np.abs(rng.normal(2, 1, count))[~mask].astype(np.float32)
    log_ratio = trainer - sampler
    delta = np.exp(trainer) - np.exp(sampler)
    advantages = batch["advantages"]
    above, below = delta > 0.2, delta < -0.2
    masked = mask & np.where(advantages > 0, above, below)
    return Terms(
        loss=np.where(mask & ~masked, -advantages * np.exp(log_ratio), 0).astype(np.float32),
        trainer_logprobs=trainer,
        entropy=_entropy(rng, trainer),
        log_ratio=log_ratio,
        ratio=np.exp(log_ratio),
        mismatch_kl=np.expm1(log_ratio) - log_ratio,
        prob_delta=delta,
        masked=masked,
        masked_high=mask & (advantages > 0) & above,
        masked_low=mask & (advantages < 0) & below,
        rules={"": {"kind": "dppo", "high": 0.2, "low": 0.2}},
    )


def _entropy(rng: np.random.Generator, trainer: NDArray[np.float32]) -> Array:
    return np.clip(-trainer * 0.8 + rng.exponential(0.2, len(trainer)), 0, None).astype(np.float32)


def make_export(
    folder: Path,
    *,
    steps: int = 4,
    ranks: int = 2,
    groups: int = 7,
    size: int = 4,
    seed: int = 0,
    run: str = "",
    keep: Keep | None = None,
    words: Words | None = None,
) -> Words:
    """Export an invented run into `folder`, with its `tokenizer.json`; gives its vocabulary."""
    rng, words = np.random.default_rng(seed), words or Words()
    exporters = [TokenExporter(folder, rank=rank, world=ranks, keep=keep) for rank in range(ranks)]
    for step in range(1, steps + 1):
        samples = samples_of_step(rng, words, step, groups=groups, size=size)
        samples = [sample.replace(run=run) for sample in samples] if run else samples
        packed = pack(samples, ranks=ranks, seq_len=1024, micro_batch_max_tokens=1024, pad_to_multiple_of=64)
        for exporter, own in zip(exporters, packed.ranks, strict=True):
            for batch in own:
                terms = terms_of(rng, batch, drift=0.03 + 0.02 * step)
                exporter.write(step, batch, terms, policy_version=step)
            metrics = {"grad_norm": 1.5 / step**0.5, "buffer_age_s": 30 / step}
            exporter.close_step(step, runs={run: step}, metrics=metrics)
    for exporter in exporters:
        exporter.close()
    words.save(folder)
    return words
