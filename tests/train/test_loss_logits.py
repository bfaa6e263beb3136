"""Log-probabilities and entropy from logits: the reference, the shift per segment, gradients, memory."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.errors import InvalidInput
from tests.support import reference_step as plain

torch = pytest.importorskip("torch")
torch.set_num_threads(1)

from penstock.train.logits import token_logprobs  # noqa: E402
from tests.train.watching import LargestFloat32  # noqa: E402

lengths = st.lists(st.integers(1, 5), min_size=1, max_size=5)


def case(seed: int, segments: list[int], vocabulary: int = 7, dtype: Any = torch.float64) -> tuple[Any, Any, Any, Any]:
    generator = torch.Generator().manual_seed(seed)
    count = sum(segments)
    logits = torch.randn(1, count, vocabulary, generator=generator, dtype=torch.float64).mul(3).to(dtype)
    ids = torch.randint(vocabulary, (1, count), generator=generator)
    temperatures = torch.rand(1, count, generator=generator) + 0.5
    return logits, ids, torch.tensor(segments), temperatures


@settings(max_examples=60)
@given(segments=lengths, seed=st.integers(0, 1000), chunk=st.sampled_from([1, 2, 3, 1024]))
def test_equals_the_plain_reference_for_any_chunk(segments: list[int], seed: int, chunk: int) -> None:
    logits, ids, sizes, temperatures = case(seed, segments)
    logprobs, entropy = token_logprobs(logits, ids, sizes, temperatures, chunk=chunk)
    want = plain.token_logprobs(logits[0].tolist(), ids[0].tolist(), segments, temperatures[0].tolist())
    assert logprobs[0].tolist() == pytest.approx([w[0] for w in want], rel=1e-6)
    assert entropy[0].tolist() == pytest.approx([w[1] for w in want], rel=1e-6, abs=1e-9)


@settings(max_examples=30)
@given(segments=lengths, seed=st.integers(0, 1000))
def test_a_sample_has_the_same_values_whatever_stands_before_it(segments: list[int], seed: int) -> None:
    """Packed together and alone: the first token of a sample never borrows its neighbour's prediction."""
    logits, ids, sizes, temperatures = case(seed, segments)
    together = token_logprobs(logits, ids, sizes, temperatures, chunk=2)
    start = 0
    for count in segments:
        own = slice(start, start + count)
        alone = token_logprobs(logits[:, own], ids[:, own], torch.tensor([count]), temperatures[:, own])
        for packed, single in zip(together, alone, strict=True):
            assert torch.equal(packed[:, own], single)
        start += count


@pytest.mark.deep
@settings(max_examples=20)
@given(segments=lengths, seed=st.integers(0, 1000), chunk=st.sampled_from([1, 3, 1024]))
def test_gradients_of_both_results_are_exact(segments: list[int], seed: int, chunk: int) -> None:
    logits, ids, sizes, temperatures = case(seed, segments, vocabulary=5)
    logits.requires_grad_()
    assert torch.autograd.gradcheck(lambda x: token_logprobs(x, ids, sizes, temperatures, chunk=chunk), (logits,))


def test_the_last_token_of_a_sample_trains_nothing_of_the_next() -> None:
    logits, ids, sizes, _ = case(1, [3, 2])
    logits.requires_grad_()
    token_logprobs(logits, ids, sizes)[0].sum().backward()
    used = (logits.grad[0] != 0).any(dim=-1).tolist()
    assert used == [True, True, False, True, False]


def test_bfloat16_logits_give_float32_results_and_bfloat16_gradients() -> None:
    logits, ids, sizes, temperatures = case(2, [6], vocabulary=50, dtype=torch.bfloat16)
    logits.requires_grad_()
    logprobs, entropy = token_logprobs(logits, ids, sizes, temperatures)
    assert logprobs.dtype == entropy.dtype == torch.float32
    logprobs.sum().backward()
    assert logits.grad.dtype == torch.bfloat16
    exact = torch.log_softmax(logits.detach().double()[0, :-1] / temperatures[0, 1:, None].double(), -1)
    assert logprobs[0, 1:].tolist() == pytest.approx(exact.gather(-1, ids[0, 1:, None])[:, 0].tolist(), rel=1e-5)


def test_a_vocabulary_cut_down_with_minus_infinity_has_finite_entropy_and_gradient() -> None:
    logits = torch.full((1, 2, 4), -math.inf)
    logits[..., :2] = 0.0
    logits.requires_grad_()
    logprobs, entropy = token_logprobs(logits, torch.tensor([[0, 1]]), torch.tensor([2]))
    (logprobs.sum() + entropy.sum()).backward()
    assert entropy[0, 1].item() == pytest.approx(math.log(2)) == -logprobs[0, 1].item()
    assert torch.isfinite(logits.grad).all()


def test_widens_one_chunk_at_a_time() -> None:
    """No float32 tensor is larger than a chunk, forward and backward."""
    logits, ids, sizes, _ = case(3, [512], vocabulary=1000, dtype=torch.bfloat16)
    logits.requires_grad_()
    with LargestFloat32() as largest:
        logprobs, _ = token_logprobs(logits, ids, sizes, chunk=16)
        logprobs.sum().backward()
    assert largest.numel <= 16 * 1000


def test_shapes_that_do_not_fit_are_named() -> None:
    with pytest.raises(InvalidInput, match=r"logits \(1, 4, 8\) for token_ids \(1, 3\); give one row"):
        token_logprobs(torch.zeros(1, 4, 8), torch.zeros(1, 3, dtype=torch.int64), torch.tensor([3]))


def test_an_id_that_the_logits_lack_is_named() -> None:
    with pytest.raises(InvalidInput, match=r"token_ids\[1\]: id 9 for logits of 4 tokens"):
        token_logprobs(torch.zeros(1, 3, 4), torch.tensor([1, 9, 2]), torch.tensor([3]))
