"""Attention by segments of a forest is attention under its mask; models that cannot have it are refused in words."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.errors import ConfigError, InvalidInput
from penstock.packing.forest import Forest, grow
from penstock.train import attention as fast
from penstock.train.attention import packed_attention
from penstock.train.model import build_model, check_trees
from penstock.train.run_config import ModelConfig
from tests.train.test_attention import FAMILIES, TINY


@st.composite
def forests(draw: st.DrawFn) -> Forest:
    lengths = draw(st.lists(st.integers(1, 9), min_size=1, max_size=8))
    shared = [0, *(draw(st.integers(0, min(pair))) for pair in pairwise(lengths))]
    return grow(np.array(lengths), np.array(shared), columns={}, padding=draw(st.integers(0, 2)))


def heads(forest: Forest, count: int, seed: int) -> Any:
    generator = torch.Generator().manual_seed(seed)
    shape = (count, forest.num_tokens, 8)
    return torch.randn(shape, generator=generator, dtype=torch.float64, requires_grad=True)


@settings(max_examples=40, deadline=None)
@given(forests(), st.sampled_from([1, 2, 4]), st.sampled_from([None, 0.3]))
def test_results_and_gradients_are_those_under_the_mask(forest: Forest, groups: int, scale: float | None) -> None:
    query, key, value = heads(forest, 4, 0), heads(forest, 4 // groups, 1), heads(forest, 4 // groups, 2)
    weights, mask = heads(forest, 4, 3).detach(), torch.from_numpy(forest.mask())
    wanted = torch.nn.functional.scaled_dot_product_attention(
        query, key, value, attn_mask=mask, scale=scale, enable_gqa=True
    )
    found = fast.tree_attention(query, key, value, fast.tree_of(forest.lengths, forest.parents), scale)
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-12)
    for a, b in zip(*(torch.autograd.grad(out, (query, key, value), weights) for out in (found, wanted)), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-12)


@settings(max_examples=25, deadline=None)
@given(st.integers(1, 20), st.integers(0, 20), st.integers(0, 2**31))
def test_the_fused_kernel_gives_what_plain_torch_gives(keys: int, more: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    query, grad, key, value = (
        torch.randn(1, 2, n, 4, generator=generator, dtype=torch.float64)
        for n in (keys + more, keys + more, keys, keys)
    )
    block, fast.BLOCK = fast.BLOCK, 7
    try:
        plain = fast.attend_plain(query, key, value, 0.5)
        backward = fast.attend_backward_plain(grad, query, key, value, plain[0], plain[1], 0.5)
    finally:
        fast.BLOCK = block
    fused = fast.attend(query, key, value, 0.5)
    for a, b in zip(
        (*fused, *fast.attend_backward(grad, query, key, value, fused[0], fused[1], 0.5)),
        (*plain, *backward),
        strict=True,
    ):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-12)


def test_bfloat16_is_merged_in_float32() -> None:
    forest = grow(np.array([40, 40, 30]), np.array([0, 32, 20]), columns={})
    tree = fast.tree_of(forest.lengths, forest.parents)
    query, key, value = (heads(forest, 2, seed).detach() for seed in range(3))
    narrow = fast.tree_attention(query.bfloat16(), key.bfloat16(), value.bfloat16(), tree)
    assert narrow.dtype == torch.bfloat16
    torch.testing.assert_close(narrow.double(), fast.tree_attention(query, key, value, tree), rtol=0, atol=0.03)


def test_a_tree_of_other_tokens_than_the_row_is_an_error() -> None:
    tree = fast.tree_of(np.array([2, 1]), np.array([-1, 0]))
    row = torch.zeros(1, 2, 4, 8)
    with pytest.raises(InvalidInput, match="1 rows of 4 tokens with segments of 3"):
        packed_attention(None, row, row, row, None, segments=tree)


@pytest.mark.deep
@pytest.mark.parametrize("family", FAMILIES)
def test_a_forest_gives_the_logprobs_of_its_samples(family: str) -> None:
    model = build_model(ModelConfig(family=family, config=FAMILIES[family]))
    assert check_trees(model, vocabulary=20, longest=64) < 1e-5


LINEAR = {
    "num_experts": 2,
    "num_experts_per_tok": 1,
    "moe_intermediate_size": 8,
    "shared_expert_intermediate_size": 8,
    "linear_num_value_heads": 2,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}


@pytest.mark.deep
@pytest.mark.parametrize(
    ("family", "more", "words"),
    [
        (
            "mistral",
            {"sliding_window": 32},
            "a sliding window of 32 tokens with samples of up to 64.*seq_len to at most",
        ),
        ("qwen3_next", {"head_dim": 8, **LINEAR}, "layer 0 is linear_attention, .* set packing.trees = false"),
        ("gemma2", {"head_dim": 8}, "soft-capped"),
        ("gpt_oss", {"head_dim": 8, "num_local_experts": 2, "num_experts_per_tok": 1}, "attention sinks"),
        ("bloom", {}, "does not compute each token from its path: set packing.trees = false"),
    ],
)
@pytest.mark.filterwarnings("ignore")
def test_a_model_that_cannot_branch_is_refused_in_words(family: str, more: dict[str, Any], words: str) -> None:
    model = build_model(ModelConfig(family=family, config={**TINY, **more}))
    with pytest.raises(ConfigError, match=words):
        check_trees(model, vocabulary=20, longest=64)
