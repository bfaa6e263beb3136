"""Packed rows must give the log-probabilities of unpacked rows, or be refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from penstock.errors import ConfigError
from penstock.train.attention import buckets_of
from penstock.train.model import TOLERANCE, build_model, check_packing, forward
from penstock.train.run_config import ModelConfig

pytestmark = pytest.mark.deep

TINY: dict[str, Any] = {
    "vocab_size": 20,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
FAMILIES = {
    "qwen3": {**TINY, "head_dim": 8},
    "qwen2": TINY,
    "llama": TINY,
    "mistral": {**TINY, "sliding_window": None},
    "gpt2": {"vocab_size": 20, "n_embd": 32, "n_layer": 2, "n_head": 4, "bos_token_id": 1, "eos_token_id": 2},
}


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.mark.parametrize("family", FAMILIES)
def test_packed_rows_give_the_logprobs_of_unpacked_rows(family: str) -> None:
    model = build_model(ModelConfig(family=family, config=FAMILIES[family]))
    assert check_packing(model, vocabulary=20, lengths=(5, 1, 9, 3, 17, 2)) < 1e-5


def test_a_model_whose_attention_we_do_not_reproduce_is_refused() -> None:
    model = build_model(ModelConfig(family="gemma2", config={**TINY, "head_dim": 8}))
    with pytest.raises(ConfigError, match="soft-capped"):
        check_packing(model, vocabulary=20)


def test_a_sample_longer_than_the_sliding_window_is_refused() -> None:
    model = build_model(ModelConfig(family="mistral", config={**TINY, "sliding_window": 4}))
    with pytest.raises(ConfigError, match="sliding window of 4"):
        check_packing(model, vocabulary=20)


def test_the_check_fails_for_a_model_that_looks_across_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build_model(ModelConfig(family="qwen3", config=FAMILIES["qwen3"]))
    # One segment instead of four: what a trainer does that forgets the boundaries.
    monkeypatch.setattr("penstock.train.model.buckets_of", lambda _, count: buckets_of([count], count))
    with pytest.raises(ConfigError, match="cannot be trained on packed rows"):
        check_packing(model, vocabulary=20)


def test_gradients_of_a_packed_row_are_those_of_its_samples() -> None:
    lengths = [4, 1, 7]
    model = build_model(ModelConfig(family="qwen3", config=FAMILIES["qwen3"])).double()
    ids = torch.randint(0, 20, (sum(lengths),), generator=torch.Generator().manual_seed(1))
    row = {
        "token_ids": ids,
        "position_ids": torch.cat([torch.arange(n) for n in lengths]),
        "sequence_lengths": torch.tensor(lengths),
    }
    weights = torch.randn(1, sum(lengths), 20, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    (forward(model, row) * weights).sum().backward()
    packed = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    for part, weight in zip(ids.split(lengths), weights.split(lengths, 1), strict=True):
        alone = {
            "token_ids": part,
            "position_ids": torch.arange(len(part)),
            "sequence_lengths": torch.tensor([len(part)]),
        }
        (forward(model, alone) * weight).sum().backward()
    for a, p in zip(packed, model.parameters(), strict=True):
        assert torch.allclose(a, p.grad, atol=1e-10)


def test_buckets_cover_every_token_once() -> None:
    lengths = [3, 1, 8, 5, 9, 1, 2]
    tokens = torch.cat([bucket.tokens for bucket in buckets_of(lengths, sum(lengths))])
    assert sorted(tokens.tolist()) == list(range(sum(lengths)))
    assert TOLERANCE <= 1e-4
