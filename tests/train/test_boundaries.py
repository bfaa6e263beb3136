"""Boundaries of a wrong shape or total raise, everywhere, instead of mixing samples silently."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from penstock.errors import InvalidInput
from penstock.packing.accounting import Denominators
from penstock.train.materialize import mask_segments
from penstock.train.tensors import checked_lengths
from penstock.train.vision import mrope_positions

torch = pytest.importorskip("torch")
torch.set_num_threads(1)

from penstock.train.attention import buckets_of, packed_attention  # noqa: E402
from penstock.train.logits import starts_of, token_logprobs  # noqa: E402
from penstock.train.loss import Dppo, Sft  # noqa: E402
from penstock.train.terms import Sums, Terms  # noqa: E402

TAKERS: dict[str, Callable[[Any], Any]] = {
    "token_logprobs": lambda lengths: token_logprobs(torch.zeros(1, 5, 7), torch.zeros(5).long(), lengths),
    "attention": lambda lengths: buckets_of(lengths, 5),
    "mask_segments": lambda lengths: mask_segments(np.ones(5, np.bool_), lengths, [0]),
    "starts_of": starts_of,
    "mrope": lambda lengths: mrope_positions([], lengths),
}
WRONG = {
    "a row of lengths": (torch.tensor([[2, 3]]), r"shape \[1, 2\]; must be \[segments\]"),
    "one number": (torch.tensor(5), r"shape \[\]"),
    "fractions": (torch.tensor([2.0, 3.0]), "must be integers"),
    "an empty segment": (torch.tensor([2, 0, 3]), r"sequence_lengths\[1\]: 0; every segment has at least one token"),
    "a negative segment": (torch.tensor([6, -1]), r"sequence_lengths\[1\]: -1"),
}


@pytest.mark.parametrize("wrong", WRONG)
@pytest.mark.parametrize("taker", TAKERS)
def test_lengths_of_another_form_are_refused_by_everything_that_takes_them(taker: str, wrong: str) -> None:
    lengths, words = WRONG[wrong]
    with pytest.raises(InvalidInput, match=words):
        TAKERS[taker](lengths)


@pytest.mark.parametrize("taker", [name for name in TAKERS if name not in ("starts_of", "mrope")])
def test_lengths_that_do_not_add_up_to_the_row_are_refused(taker: str) -> None:
    with pytest.raises(InvalidInput, match="sequence_lengths: add up to 4 for 5 tokens; padding is a segment"):
        TAKERS[taker](torch.tensor([1, 3]))


@pytest.mark.parametrize("lengths", [[3, 1], np.array([3, 1], np.int32), torch.tensor([3, 1])])
def test_lists_arrays_and_tensors_are_taken(lengths: Any) -> None:
    assert checked_lengths(lengths, 4).tolist() == [3, 1]


def test_attention_refuses_a_row_that_its_segments_do_not_cover_and_a_second_row() -> None:
    segments = buckets_of([2, 3], 5)
    for shape in ((1, 2, 6, 4), (2, 2, 5, 4)):
        query = torch.zeros(shape)
        with pytest.raises(InvalidInput, match="give one row and all of its sequence_lengths"):
            packed_attention(torch.nn.Identity(), query, query, query, None, segments=segments)


def test_token_logprobs_takes_rows_with_and_without_a_batch_dimension() -> None:
    generator = torch.Generator().manual_seed(1)
    logits, ids = torch.randn(5, 7, generator=generator), torch.randint(7, (5,), generator=generator)
    lengths, heat = torch.tensor([2, 3]), torch.full((5,), 0.7)
    flat = token_logprobs(logits, ids, lengths, heat)
    for got in (
        token_logprobs(logits[None], ids, lengths, heat),
        token_logprobs(logits[None], ids[None], lengths, heat[None]),
    ):
        assert all(torch.equal(a, b.view(-1)) for a, b in zip(flat, got, strict=True))
    assert flat[0].shape == (5,) and token_logprobs(logits[None], ids[None], lengths)[0].shape == (1, 5)
    with pytest.raises(InvalidInput, match="give one row"):
        token_logprobs(torch.zeros(2, 5, 7), torch.zeros(2, 5).long(), torch.tensor([5, 5]))


@pytest.mark.parametrize("loss", [Dppo(), Sft()])
def test_a_loss_refuses_logprobs_that_only_broadcast(loss: Any) -> None:
    columns = {"loss_mask": torch.ones(3).bool(), "logprobs": torch.zeros(3), "advantages": torch.ones(3)}
    for wrong in (torch.zeros(0, 3), torch.zeros(1, 3), torch.zeros(3, 1)):
        with pytest.raises(InvalidInput, match=r"trainer_logprobs \[.*\] for a loss_mask \[3\]"):
            loss(columns, wrong)


def test_a_loss_over_no_token_of_a_step_that_has_some_is_an_error() -> None:
    nothing = torch.zeros(0, 9)  # what indexing rows instead of tokens gives
    with pytest.raises(InvalidInput, match=r"shape \[0, 9\], no tokens, in a step that trains 4"):
        Terms(loss=nothing, trainer_logprobs=nothing).mean(Denominators(loss_tokens=4))
    assert Terms(loss=nothing, trainer_logprobs=nothing).mean(Denominators(loss_tokens=0)).item() == 0.0


def test_a_step_that_trained_nothing_although_it_has_tokens_is_an_error() -> None:
    Sums(loss_tokens=3.0).check_trained(7, 3)
    Sums().check_trained(7, 0)
    with pytest.raises(InvalidInput, match="step 7: none of its 3 tokens was trained"):
        Sums().check_trained(7, 3)
