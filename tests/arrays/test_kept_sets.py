"""Sampling masks: sets that ascend, each with the token that was drawn from it."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import penstock as ps
from penstock.arrays import Ragged, Samples
from penstock.arrays.bits import lists_of, steps_of
from penstock.arrays.coercion import ascending, first_bad_set
from penstock.convert import to_samples
from penstock.errors import CorruptFrame, InvalidInput
from penstock.frames.prefixes import find_prefixes
from penstock.frames.reading import decode
from penstock.frames.writing import frame_pieces

lists = st.lists(st.lists(st.integers(0, 9), max_size=5), max_size=8)


def sample(**more: Any) -> ps.Sample:
    return ps.Sample(id="a", **{"token_ids": [1, 2, 3], "loss_mask": [0, 1, 1], **more})


@given(lists)
def test_sets_are_put_in_order_one_by_one(given: list[list[int]]) -> None:
    assert ascending(Ragged.of_lists(given, np.uint32)).tolist() == [sorted(one) for one in given]


@given(lists, st.data())
def test_the_first_bad_set_is_the_one_that_a_plain_loop_finds(given: list[list[int]], data: st.DataObject) -> None:
    ids = [data.draw(st.sampled_from([*one, 4])) for one in given]
    found = first_bad_set(Ragged.of_lists(given, np.uint32), np.array(ids, np.uint32))
    unsorted = [t for t, one in enumerate(given) if any(b <= a for a, b in pairwise(one))]
    lacking = [t for t, (one, token) in enumerate(zip(given, ids, strict=True)) if one and token not in one]
    expected = unsorted or lacking
    assert (None if found is None else found[0]) == (expected[0] if expected else None)


@given(lists)
def test_steps_of_ascending_lists_give_them_back_and_others_have_none(given: list[list[int]]) -> None:
    made = Ragged.of_lists(given, np.uint32)
    steps = steps_of(made)
    assert (steps is None) == any(one != sorted(one) for one in given)
    if steps is not None:
        assert lists_of(steps, made.offsets).tolist() == given


def test_a_token_that_is_not_in_its_own_set_is_named_with_sample_position_and_id() -> None:
    with pytest.raises(InvalidInput, match=r"sample 'a'.sampling_mask\[2\]: 2 ids without 3, the token that was"):
        sample(sampling_mask=[[], [2, 9], [4, 5]])


def test_a_set_that_names_an_id_twice_is_refused() -> None:
    with pytest.raises(InvalidInput, match=r"sample 'a'.sampling_mask\[1\]: id 2 twice"):
        sample(sampling_mask=[[], [2, 2], [3]])


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ([[1], [2]], "2 lists for 3 tokens"),
        ([1, 2, 3], "not one list per token"),
        ([[1.5], [2], [3]], "give whole numbers"),
        ([[-1], [2], [3]], "must be from 0 to"),
        ([["x"], [2], [3]], "dtype <U"),
        (Ragged(np.array([1, 2, 3]), np.array([0, 2, 1, 3])), "they must be whole numbers that rise from 0"),
        (Ragged(np.array([1, 2, 3]), np.array([0, 1, 2, 4])), "they must be whole numbers that rise from 0"),
        (Ragged(np.array([1, 2, 3]), np.array([1, 1, 2, 3])), "they must be whole numbers that rise from 0"),
    ],
)
def test_what_is_not_one_list_per_token_is_refused_in_words(given: Any, words: str) -> None:
    with pytest.raises(InvalidInput, match=rf"sample 'a'.sampling_mask.*{words}"):
        sample(sampling_mask=given)


def test_lists_arrays_and_rows_of_an_array_say_the_same() -> None:
    plain = sample(sampling_mask=[[0, 1], [2, 7], [3, 8]])
    assert sample(sampling_mask=np.array([[1, 0], [7, 2], [3, 8]])) == plain
    assert sample(sampling_mask=Ragged(np.array([0, 1, 2, 7, 3, 8], np.uint32), np.array([0, 2, 4, 6]))) == plain
    assert sample(sampling_mask=[(1, 0), np.array([2, 7]), range(3, 9, 5)]) == plain
    assert sample(sampling_mask=[None, [2], [3]])["sampling_mask"].tolist() == [[], [2], [3]]


def test_a_frame_whose_sets_lack_the_sampled_token_is_refused_with_sample_and_position() -> None:
    batch = Samples.of([ps.Sample(id="first", token_ids=[9]), sample(sampling_mask=[[], [2, 9], [3]])])
    column = batch.columns["sampling_mask"]
    forged = Ragged(Ragged(np.array([8, 9, 3], np.uint32), column.values.offsets), column.offsets)
    bad = Samples(
        columns={**batch.columns, "sampling_mask": forged}, text=batch.text, policy_versions=batch.policy_versions
    )
    frame = b"".join(frame_pieces(bad, find_prefixes(batch["token_ids"].values, batch.offsets), {}))
    with pytest.raises(CorruptFrame, match=r"sample 'a'.sampling_mask\[1\]: 2 ids without 2"):
        decode(frame)


def test_a_turn_takes_sets_for_its_sampled_tokens_or_for_all() -> None:
    mask = [False, True, True]
    short = ps.Turn([1, 8, 9], mask=mask, sampling_mask=[[8, 2], [9]])
    assert short.columns["sampling_mask"].tolist() == [[], [2, 8], [9]]
    full = ps.Turn([1, 8, 9], mask=mask, sampling_mask=[[], [8, 2], [9]])
    assert full.columns["sampling_mask"].tolist() == [[], [2, 8], [9]]
    with pytest.raises(InvalidInput, match=r"turn.sampling_mask: 1 lists for 2 sampled of 3 tokens"):
        ps.Turn([1, 8, 9], mask=mask, sampling_mask=[[8]])
    with pytest.raises(InvalidInput, match=r"turn.sampling_mask\[2\]: 1 ids without 9"):
        ps.Turn([1, 8, 9], mask=mask, sampling_mask=[[8], [7]])


def test_sets_stand_on_the_tokens_that_a_branch_trains_and_on_no_others() -> None:
    turns = [ps.Turn([1, 2]), ps.Turn([3, 4], sampling_mask=[[3], [4, 5]], logprobs=[-1, -1])]
    turns += [ps.Turn([5]), ps.Turn([6], logprobs=[-1]), ps.Turn([7]), ps.Turn([8], logprobs=[-1], sampling_mask=[[8]])]
    tree = ps.Trajectory(turns=turns, parents=[-1, 0, 1, 2, 1, 4], reward=1.0, id="r")
    first, second = to_samples(tree)
    assert first["sampling_mask"].tolist() == [[], [], [3], [4, 5], [], []]
    assert second["sampling_mask"].tolist() == [[], [], [], [], [], [8]]
