"""Log-probabilities over the ids that the sampler kept: the reference, a dense masked softmax, gradients, memory."""

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

from penstock.train.logits import kept_of, token_logprobs  # noqa: E402

VOCABULARY = 7


@st.composite
def cases(draw: st.DrawFn) -> tuple[Any, Any, list[int], Any, list[list[int]]]:
    """Logits, ids, lengths, temperatures, and for each token a set that holds it, or an empty one."""
    segments = draw(st.lists(st.integers(1, 5), min_size=1, max_size=5))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 1000)))
    count = sum(segments)
    logits = torch.randn(count, VOCABULARY, generator=generator, dtype=torch.float64) * 3
    ids = torch.randint(VOCABULARY, (count,), generator=generator)
    others = st.sets(st.integers(0, VOCABULARY - 1))
    sets = [sorted(draw(others) | {token}) if draw(st.booleans()) else [] for token in ids.tolist()]
    return logits, ids, segments, torch.rand(count, generator=generator) + 0.5, sets


def flat(sets: list[list[int]]) -> tuple[Any, Any]:
    lengths = torch.tensor([0, *map(len, sets)])
    return torch.tensor([i for one in sets for i in one], dtype=torch.int64), lengths.cumsum(0)


def dense(logits: Any, ids: Any, segments: list[int], temperatures: Any, sets: list[list[int]]) -> tuple[Any, Any]:
    """A masked softmax over all logits at once, sample by sample."""
    masked = torch.full(logits.shape, -math.inf, dtype=logits.dtype)
    for t, one in enumerate(sets):
        masked[t, one or slice(None)] = 0.0
    logprobs, entropies = [], []
    for rows, own, temperature, mask in zip(*(x.split(segments) for x in (logits, ids, temperatures, masked)), strict=True):  # fmt: skip # noqa: E501
        nothing = torch.tensor([math.log(VOCABULARY)], dtype=logits.dtype)
        log_p = (rows[:-1] * temperature[1:, None].reciprocal() + mask[1:]).log_softmax(-1)
        finite = log_p.masked_fill(log_p == -math.inf, 0.0)
        logprobs += [-nothing, log_p.gather(-1, own[1:, None])[:, 0]]
        entropies += [nothing, -(log_p.exp() * finite).sum(-1)]
    return torch.cat(logprobs), torch.cat(entropies)


@settings(max_examples=100)
@given(cases(), st.sampled_from([1, 2, 3, 1024]))
def test_equals_the_plain_reference_for_any_chunk(case: Any, chunk: int) -> None:
    logits, ids, segments, temperatures, sets = case
    logprobs, entropy = token_logprobs(logits, ids, torch.tensor(segments), temperatures, kept=flat(sets), chunk=chunk)
    want = plain.token_logprobs(logits.tolist(), ids.tolist(), segments, temperatures.tolist(), sets)
    assert logprobs.tolist() == pytest.approx([w[0] for w in want], rel=1e-6, abs=1e-9)
    assert entropy.tolist() == pytest.approx([w[1] for w in want], rel=1e-6, abs=1e-9)


@settings(max_examples=60)
@given(cases(), st.sampled_from([1, 3, 1024]))
def test_values_and_gradients_are_those_of_a_dense_masked_softmax(case: Any, chunk: int) -> None:
    logits, ids, segments, temperatures, sets = case
    found, wanted = logits.clone().requires_grad_(), logits.clone().requires_grad_()
    got = token_logprobs(found, ids, torch.tensor(segments), temperatures, kept=flat(sets), chunk=chunk)
    expected = dense(wanted, ids, segments, temperatures, sets)
    weights = torch.rand(2, len(ids), generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    for values, other in zip(got, expected, strict=True):
        assert torch.allclose(values, other, rtol=0, atol=1e-12)
    sum((value * weight).sum() for value, weight in zip(got, weights, strict=True)).backward()
    sum((value * weight).sum() for value, weight in zip(expected, weights, strict=True)).backward()
    if max(segments) > 1:
        assert torch.allclose(found.grad, wanted.grad, rtol=0, atol=1e-12)


@settings(max_examples=30)
@given(cases())
def test_empty_sets_and_sets_of_all_ids_change_nothing(case: Any) -> None:
    logits, ids, segments, temperatures, _ = case
    plain_ones = token_logprobs(logits, ids, torch.tensor(segments), temperatures)
    for one in ([], list(range(VOCABULARY))):
        sets = flat([one] * len(ids))
        again = token_logprobs(logits, ids, torch.tensor(segments), temperatures, kept=sets)
        assert all(torch.equal(a, b) for a, b in zip(plain_ones, again, strict=True))


def test_a_token_that_alone_was_kept_is_certain_and_has_no_gradient() -> None:
    logits = torch.randn(3, VOCABULARY, generator=torch.Generator().manual_seed(1)).requires_grad_()
    ids = torch.tensor([4, 2, 6])
    logprobs, entropy = token_logprobs(logits, ids, torch.tensor([3]), kept=flat([[], [2], [6]]))
    (logprobs.sum() + entropy.sum()).backward()
    assert logprobs[1:].tolist() == [0.0, 0.0] and entropy[1:].tolist() == [0.0, 0.0]
    assert not logits.grad.any()


def test_ids_outside_the_set_get_no_gradient_in_any_dtype() -> None:
    logits = torch.randn(2, 50, generator=torch.Generator().manual_seed(2)).to(torch.bfloat16).requires_grad_()
    logprobs, entropy = token_logprobs(logits, torch.tensor([1, 7]), torch.tensor([2]), kept=flat([[], [3, 7, 40]]))
    (logprobs[1] + entropy[1]).backward()
    assert logprobs.dtype == torch.float32 and logits.grad.dtype == torch.bfloat16
    assert logits.grad[0].nonzero()[:, 0].tolist() == [3, 7, 40]


def test_the_tensors_of_a_micro_batch_name_the_sets() -> None:
    values, offsets = flat([[], [1, 2]])
    assert kept_of({"token_ids": values}) is None
    assert kept_of({"sampling_mask_values": values, "sampling_mask_offsets": offsets}) == (values, offsets)


@pytest.mark.parametrize("offsets", [[0, 1], [0, 1, 3], [1, 1, 2], [0, 2, 1, 2], [[0, 1, 2]]])
def test_offsets_that_do_not_fit_are_named(offsets: Any) -> None:
    with pytest.raises(InvalidInput, match=r"kept: values \(2,\) and offsets .* for 2 tokens; give"):
        token_logprobs(
            torch.zeros(2, 5),
            torch.tensor([1, 2]),
            torch.tensor([2]),
            kept=(torch.tensor([1, 2]), torch.tensor(offsets)),
        )
