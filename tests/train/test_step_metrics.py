"""What a step came to: means are over what was measured, and over nothing else."""

from __future__ import annotations

import math

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from penstock import Sample, pack, to_torch  # noqa: E402
from penstock.train.loss import ByMode, Dppo  # noqa: E402
from penstock.train.metrics_sinks import packed  # noqa: E402
from penstock.train.terms import Sums  # noqa: E402
from tests.support.groups import named_group  # noqa: E402


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


def test_what_was_packed_is_named_by_rank_and_in_total() -> None:
    step = pack([one for name in "abcdefgh" for one in named_group(name, tokens=6)], ranks=2, seq_len=12)
    accounting = step.accounting
    found = [packed(accounting, rank) for rank in (0, 1)]
    for name in ("tokens", "loss_tokens", "samples", "micro_batches"):
        assert found[0][f"pack/local_{name}"] + found[1][f"pack/local_{name}"] == found[0][f"pack/total_{name}"]
    assert found[0]["pack/total_micro_batches"] == sum(len(batches) for batches in step.ranks)
    assert found[0]["pack/total_samples"] == 16
    assert found[0]["pack/total_max_micro_batch_tokens"] <= found[0]["pack/micro_batch_max_tokens"] == 12


def test_staleness_of_trained_samples_is_not_called_the_buffers() -> None:
    assert not [name for name in Sums().metrics() if name.startswith("buffer/")]
    assert {"train/staleness", "train/max_staleness"} <= Sums().metrics().keys()


def test_values_per_token_make_the_reward_and_the_priority_of_a_sample() -> None:
    per_token = {"advantages": [0, 0, 2, -3, 9], "rewards": [math.nan, 0, 0.25, 0.5, 0]}
    once = {"advantages": -1.5, "rewards": 1.0}
    samples = [
        Sample(id=name, token_ids=range(5), loss_mask=[0, 1, 1, 1, 0], logprobs=[-1.0] * 5, **values)
        for name, values in (("per token", per_token), ("once", once))
    ]
    (batch,) = pack(samples, ranks=1, seq_len=16).ranks[0]
    sums = Sums()
    sums.add(batch, Dppo()(to_torch(batch), torch.full((batch.num_tokens,), -1.0)), version=0)
    assert sums.priorities == pytest.approx({"per token": 3.05, "once": 1.55})
    assert (sums.reward_sum, sums.rewarded) == (1.75, 2)
