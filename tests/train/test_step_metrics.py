"""What a step came to: means are over what was measured, and over nothing else."""

from __future__ import annotations

import math

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from penstock import Sample, pack, to_torch  # noqa: E402
from penstock.train.modes import ByMode  # noqa: E402
from penstock.train.step_metrics import Sums  # noqa: E402


def sums_of(*modes: str) -> dict[str, float]:
    samples = [
        Sample(
            id=f"{mode}{i}",
            mode=mode,
            token_ids=range(5),
            loss_mask=[0, 1, 1, 1, 1],
            logprobs=None if mode == "sft" else [0, -1, -1, -1, -1],
            advantages=1.0,
        )
        for i, mode in enumerate(modes)
    ]
    (batch,) = pack(samples, ranks=1, seq_len=64).ranks[0]
    tensors = to_torch(batch)
    tensors.setdefault("logprobs", torch.zeros_like(tensors["advantages"]))
    trainer = torch.full_like(tensors["advantages"], -1.5)
    sums = Sums()
    sums.add(batch, ByMode()(tensors, trainer), version=1)
    return sums.metrics()


def test_supervised_tokens_do_not_thin_the_mismatch_with_the_sampler() -> None:
    alone, beside = sums_of("rl"), sums_of("rl", "sft", "sft")
    assert alone["train/mismatch_kl"] == pytest.approx(np.expm1(-0.5) + 0.5)
    assert beside["train/mismatch_kl"] == pytest.approx(alone["train/mismatch_kl"])
    assert beside["train/masked"] == alone["train/masked"]


def test_where_nothing_was_sampled_there_is_no_mismatch() -> None:
    assert math.isnan(sums_of("sft")["train/mismatch_kl"]) and math.isnan(sums_of("sft")["train/masked"])
