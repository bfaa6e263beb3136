"""Sampling masks in every shape that producers give them: the same sets on the same tokens, or an error."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.arrays import Ragged
from penstock.capture import Trajectory, Turn, from_arrays, from_chat_completions, from_steps, read_sampling_mask
from penstock.convert import to_samples
from penstock.errors import InvalidInput

SETS = [[3, 9], [], [4, 5, 70_000]]
IDS, OFFSETS, COUNTS = [3, 9, 4, 5, 70_000], [0, 2, 2, 5], [2, 0, 3]


def packed(values: list[int]) -> dict[str, Any]:
    """As msgpack carries an array."""
    array = np.array(values, np.int32)
    return {"__nd__": True, "dtype": "int32", "shape": list(array.shape), "data": array.tobytes()}


SHAPES: dict[str, Any] = {
    "vLLM, in the same process": SimpleNamespace(token_ids=IDS, offsets=OFFSETS),
    "vLLM, as a mapping of arrays": {"token_ids": np.array(IDS, np.int32), "offsets": np.array(OFFSETS, np.int32)},
    "verifiers": SimpleNamespace(ids=np.array(IDS, np.int32), counts=np.array(COUNTS, np.int32)),
    "verifiers, off the wire": {"ids": packed(IDS), "counts": packed(COUNTS)},
    "lists over HTTP": SETS,
    "lists with null for all ids": [SETS[0], None, SETS[2]],
    "a ragged array": Ragged.of_lists(SETS, np.uint32),
}


@pytest.mark.parametrize("shape", SHAPES)
def test_every_shape_gives_the_same_sets(shape: str) -> None:
    assert read_sampling_mask(SHAPES[shape], "step").tolist() == SETS


def test_tensors_are_read_as_arrays_are() -> None:
    torch = pytest.importorskip("torch")
    mask = {"token_ids": torch.tensor(IDS, dtype=torch.int32), "offsets": torch.tensor(OFFSETS)}
    assert read_sampling_mask(mask, "step").tolist() == SETS


def step(**more: Any) -> dict[str, Any]:
    return {"prompt_ids": [1, 2], "completion_ids": [3, 8, 5], "completion_logprobs": [-1.0, -2.0, -0.5], **more}


def sets_of(trajectory: Trajectory) -> Any:
    (sample,) = to_samples(trajectory)
    return sample["sampling_mask"].tolist()


@pytest.mark.parametrize(
    "fields",
    [
        {"sampling_mask": SETS},
        {"sampling_mask": SHAPES["vLLM, in the same process"]},
        {"top_p_token_ids": IDS, "top_p_token_offsets": OFFSETS},
        {"rollout_top_p_token_ids": np.array(IDS), "rollout_top_p_token_offsets": np.array(OFFSETS)},
    ],
)
def test_steps_carry_them_to_the_sample(fields: dict[str, Any]) -> None:
    assert sets_of(from_steps([step(**fields)])) == [[], [], *SETS]
    assert sets_of(from_steps([{"tokens": SimpleNamespace(**step(**fields))}])) == [[], [], *SETS]


def test_responses_carry_them_to_the_sample() -> None:
    content = [{"token": f"token_id:{i}", "logprob": -1.0} for i in (3, 8, 5)]
    choice = {"token_ids": [3, 8, 5], "logprobs": {"content": content}, "sampling_mask": SETS}
    assert sets_of(from_chat_completions([{"prompt_token_ids": [1, 2], "choices": [choice]}])) == [[], [], *SETS]


def test_plain_arrays_carry_them_per_token_or_per_sampled_token() -> None:
    mask = [False, True, False, True]
    for given_sets in ([[3, 9], [7]], [[], [3, 9], [], [7]]):
        rollout = from_arrays([1, 3, 5, 7], mask, logprobs=[-1.0, -2.0], columns={"sampling_mask": given_sets})
        assert sets_of(rollout) == [[], [3, 9], [], [7]]


def test_a_step_without_sets_has_no_column() -> None:
    (sample,) = to_samples(from_steps([step(sampling_mask={"ids": [], "counts": []})]))
    assert "sampling_mask" not in sample


@settings(max_examples=60)
@given(st.lists(st.tuples(st.integers(0, 9), st.sets(st.integers(0, 9)), st.booleans()), min_size=1, max_size=12))
def test_sets_survive_turns_and_branches(rows: list[tuple[int, set[int], bool]]) -> None:
    """Through turns, a fork and back: each trained token has the set it was drawn from, and no other token has one."""
    ids = [token for token, _, _ in rows]
    sets = [sorted(others | {token}) if some else [] for token, others, some in rows]
    said = Turn(ids, logprobs=[-1.0] * len(ids), sampling_mask=sets)
    tree = Trajectory(
        turns=[Turn([1]), said, Turn([2]), Turn([5], logprobs=[-1.0], sampling_mask=[[5, 6]])], parents=[-1, 0, 0, 2]
    )
    first, second = to_samples(tree)
    assert first["sampling_mask"].tolist() == [[], *sets]
    assert second["sampling_mask"].tolist() == [[], [], [5, 6]]


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"sampling_mask": "x"}, r"steps\[0\].sampling_mask: a str; must be a list of ids per token, or ids with"),
        ({"sampling_mask": [[3], [8], ["x"]]}, r"sampling_mask\[2\]"),
        ({"sampling_mask": [[3], [8]]}, r"sampling_mask: 2 lists for 3 sampled of 3 tokens"),
        ({"sampling_mask": [[3], [8], [9]]}, r"sampling_mask\[2\]: 1 ids without 5, the token that was sampled there"),
        ({"sampling_mask": {"token_ids": IDS, "offsets": [0, 2, 9]}}, r"5 ids with offsets \[0, 2, 9\]...\[9\]"),
        ({"sampling_mask": {"token_ids": IDS, "offsets": [0, 3, 2, 5]}}, "must rise from 0"),
        ({"sampling_mask": {"ids": IDS, "counts": [2, 0, 2]}}, "5 ids for counts that add up to 4"),
        ({"sampling_mask": {"ids": IDS, "counts": [[2, 3]]}}, "2 dimensions of int64; must be a list of whole numbers"),
        ({"top_p_token_ids": IDS}, "top_p_token_ids offsets: missing"),
        ({"top_p_token_ids": IDS, "top_p_token_offsets": [0, [1], 2]}, "offsets: .* must be a list of whole numbers"),
        ({"top_p_token_offsets": OFFSETS}, "top_p_token_ids: missing beside its offsets"),
    ],
)
def test_what_cannot_be_is_refused_with_its_place(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidInput, match=words):
        from_steps([step(**fields)])
