"""From samples to tensors through Python lists, as trainers do it, and through arrays, as we do it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from benchmarks.packers import first_fit_plain
from penstock.arrays import Ragged, Samples, offsets_of
from penstock.packing import Packing, SampleMetadata, bytes_needed, fill, plan

MULTIPLE = 64


def make_samples(count: int = 512, tokens: int = 2_000_000, seed: int = 0) -> Samples:
    """`count` samples of about `tokens` tokens in total, with what a GRPO step carries."""
    rng = np.random.default_rng(seed)
    lengths = np.clip(rng.lognormal(0, 0.6, count), 0.1, 6.0)
    lengths = (lengths * (tokens / lengths.sum())).astype(np.int64)
    offsets = offsets_of(lengths)
    total = int(offsets[-1])
    single = offsets_of(np.ones(count, np.int64))
    within = np.arange(total) - np.repeat(offsets[:-1], lengths)
    return Samples(
        columns={
            "token_ids": Ragged(rng.integers(0, 151_936, total, np.uint32), offsets),
            "loss_mask": Ragged(within * 3 > np.repeat(lengths, lengths), offsets),
            "logprobs": Ragged(-rng.random(total, np.float32), offsets),
            "temperatures": Ragged(np.ones(count, np.float32), single),
            "advantages": Ragged(rng.normal(size=count).astype(np.float32), single),
            "rewards": Ragged(rng.random(count).astype(np.float32), single),
        },
        text={
            "id": tuple(map(str, range(count))),
            "group": tuple(str(i // 8) for i in range(count)),
            "prompt": ("",) * count,
            "env": ("math",) * count,
            "run": ("",) * count,
            "mode": ("rl",) * count,
            "rollout": ("",) * count,
        },
        policy_versions=np.zeros(count, np.int64),
    )


class ToTensors:
    """Ours: plan, fill and tensors of all ranks. Like a training rank, it fills the same memory at every step."""

    def __init__(self, samples: Samples, packing: Packing) -> None:
        self.samples, self.packing = samples, packing
        self.memory = [np.empty(0, np.uint8) for _ in range(packing.ranks)]

    def __call__(self) -> int:
        """One step; the tokens computed."""
        from penstock.train import to_torch

        tokens = 0
        for share in plan(SampleMetadata.of(self.samples, self.packing.seq_len), self.packing).rank_plans:
            if len(self.memory[share.rank]) < bytes_needed(share):
                self.memory[share.rank] = np.empty(bytes_needed(share), np.uint8)
            for batch in fill(self.samples, share, out=self.memory[share.rank]):
                tokens += to_torch(batch)["token_ids"].shape[0]
        return tokens


def as_lists(samples: Samples) -> list[dict[str, Any]]:
    """The samples as trainers keep them in lists: prompt and completion apart, one number per sample as it is."""
    out = []
    for sample in samples:
        prompt = int(np.argmax(sample.loss_mask))
        ids, mask = sample.token_ids.tolist(), sample.loss_mask.tolist()
        out.append(
            {
                "prompt_ids": ids[:prompt],
                "completion_ids": ids[prompt:],
                "prompt_mask": mask[:prompt],
                "completion_mask": mask[prompt:],
                "completion_logprobs": sample["logprobs"][prompt:].tolist(),
                "env": sample.env,
                **{name: float(sample[name]) for name in ("temperatures", "advantages", "rewards")},
            }
        )
    return out


def lists_to_tensors(samples: Sequence[dict[str, Any]], ranks: int, cap: int) -> int:
    """The list path: a list per sample and column, first fit decreasing, lists extended by lists, torch.tensor."""
    import torch

    prepared = [_prepare(sample) for sample in samples]
    lengths = [len(sample["token_ids"]) for sample in prepared]
    order = sorted(range(len(samples)), key=lambda i: -lengths[i])
    bins = first_fit_plain(lengths, order, cap)
    kinds = {"token_ids": torch.int64, "position_ids": torch.int64, "loss_mask": torch.bool}
    tokens = 0
    for members in [*bins, *[bins[-1]] * (-len(bins) % ranks)]:
        row: dict[str, list[Any]] = {name: [] for name in prepared[0]}
        for i in members:
            for name, values in prepared[i].items():
                row[name].extend(values)
        padding = -len(row["token_ids"]) % MULTIPLE
        for values in row.values():
            values.extend([0] * padding)
        del row["env_names"]  # carried along per token, and never a tensor
        tensors = {n: torch.tensor(v, dtype=kinds.get(n, torch.float32)).unsqueeze(0) for n, v in row.items()}
        tokens += tensors["token_ids"].shape[1]
    return tokens


def _prepare(sample: dict[str, Any]) -> dict[str, list[Any]]:
    ids = sample["prompt_ids"] + sample["completion_ids"]
    return {
        "token_ids": ids,
        "loss_mask": sample["prompt_mask"] + sample["completion_mask"],
        "logprobs": [0.0] * len(sample["prompt_ids"]) + sample["completion_logprobs"],
        "position_ids": list(range(len(ids))),
        "env_names": [sample["env"]] * len(ids),
        **{name: [sample[name]] * len(ids) for name in ("temperatures", "advantages", "rewards")},
    }
