"""Shared prefixes against plain Python."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import penstock as ps
from penstock.arrays import offsets_of
from penstock.arrays.shared_prefixes import common_prefix
from penstock.frames import prefixes
from penstock.frames.prefixes import MIN_SHARED, cut, find_prefixes, restore, shares_values
from tests.support import reference


@st.composite
def families(draw: st.DrawFn) -> list[list[int]]:
    """Rows of few distinct values that often begin as an earlier one does."""
    rows: list[list[int]] = []
    for _ in range(draw(st.integers(1, 7))):
        begin: list[int] = []
        if rows:
            parent = draw(st.sampled_from(rows))
            begin = parent[: draw(st.integers(0, len(parent)))]
        rows.append([*begin, *draw(st.lists(st.integers(0, 2), min_size=1, max_size=50))])
    return rows


@given(families())
def test_prefixes_are_as_long_as_they_can_be_and_unfold_to_the_rows(rows: list[list[int]]) -> None:
    values, offsets = np.concatenate([np.array(row, np.uint32) for row in rows]), offsets_of([len(r) for r in rows])
    found = find_prefixes(values, offsets)
    for i, (parent, shared) in enumerate(zip(found.parents.tolist(), found.shared.tolist(), strict=True)):
        assert parent < i
        assert (parent < 0) == (shared == 0)
        if shared:
            assert shared == reference.common_prefix(rows[i], rows[parent])
        if i <= 4:  # only so many of the samples before are tried
            longest = max((reference.common_prefix(rows[i], row) for row in rows[:i]), default=0)
            assert shared == (longest if longest >= MIN_SHARED else 0)
    stored = cut(values, offsets, found)
    own = [row[shared:] for row, shared in zip(rows, found.shared.tolist(), strict=True)]
    assert stored.tolist() == [value for row in own for value in row]
    assert reference.unfold(own, found.parents.tolist(), found.shared.tolist()) == rows
    assert restore(stored, offsets, found).tolist() == values.tolist()


@given(st.integers(0, 3000), st.integers(0, 3000), st.integers(0, 3000))
def test_common_prefix_equals_the_reference(same: int, a: int, b: int) -> None:
    left = np.concatenate([np.ones(same, np.uint32), np.full(a, 2, np.uint32)])
    right = np.concatenate([np.ones(same, np.uint32), np.full(b, 3, np.uint32)])
    assert common_prefix(left, right) == reference.common_prefix(left.tolist(), right.tolist())


@given(st.lists(st.integers(MIN_SHARED, 80), min_size=2, max_size=5), st.integers(0, 1))
def test_siblings_share_as_much_as_the_reference_says_wherever_the_last_one_split(splits: list[int], more: int) -> None:
    # Every row repeats the prompt up to its own split. What its elder sibling shared is tried first.
    prompt = list(range(80))
    rows = [[*prompt[:at], 1000 + i, *prompt[: more * 40]] for i, at in enumerate(splits)]
    found = find_prefixes(
        np.concatenate([np.array(row, np.uint32) for row in rows]), offsets_of([len(row) for row in rows])
    )
    for i, shared in enumerate(found.shared.tolist()):
        longest = max((reference.common_prefix(rows[i], row) for row in rows[:i]), default=0)
        assert shared == (longest if longest >= MIN_SHARED else 0)


@given(st.lists(st.tuples(st.integers(30, 45), st.integers(0, 9)), min_size=2, max_size=24))
def test_siblings_that_split_where_the_last_one_did_are_found_as_by_the_search(ends: list[tuple[int, int]]) -> None:
    # Many of these split at token 40, where the prompt ends; others are shorter, or go on with a token of a sibling.
    prompt = list(range(40))
    rows = [np.array([*prompt[:at], token, 7], np.uint32) for at, token in ends]
    values, offsets = np.concatenate(rows), offsets_of([len(row) for row in rows])
    found = find_prefixes(values, offsets)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prefixes._Siblings, "is_usual", lambda _self, _token: False)
        searched = find_prefixes(values, offsets)
    assert found.parents.tolist() == searched.parents.tolist()
    assert found.shared.tolist() == searched.shared.tolist()


def test_values_that_differ_where_tokens_are_shared_are_not_shared() -> None:
    rows = np.tile(np.arange(40, dtype=np.uint32), 2)
    offsets = offsets_of([40, 40])
    found = find_prefixes(rows, offsets)
    values = np.zeros((80, 2), np.uint8)
    assert shares_values(values, offsets, found)
    values[75, 1] = 1
    assert not shares_values(values, offsets, found)


def test_a_group_stores_its_prompt_once() -> None:
    rng = np.random.default_rng(0)
    prompt = rng.integers(0, 2**17, 2000)
    group = [ps.Sample.from_prompt(prompt_ids=prompt, completion_ids=rng.integers(0, 2**17, 50)) for _ in range(16)]
    assert len(ps.encode(group)) < len(ps.encode(group[:1])) + 16 * 50 * 4


def test_turns_that_repeat_all_turns_before_them_store_each_once() -> None:
    rng = np.random.default_rng(0)
    ids = rng.integers(0, 2**17, 4000)
    turns = [ps.Sample(id=f"{n}", token_ids=ids[:n]) for n in range(200, 4001, 200)]
    assert len(ps.encode(turns)) < 1.1 * len(ps.encode(turns[-1:])) + 200
