from __future__ import annotations

import tracemalloc
from typing import Any

import numpy as np
import pytest

from penstock.arrays import ImageSpan
from penstock.capture import Trajectory, Turn, from_steps
from penstock.errors import InvalidInput

HASH = "ab" * 32


def image(offset: int, *, tokens: int = 2) -> ImageSpan:
    return ImageSpan(hash=HASH, grid=(1, 2, 2 * tokens), offset=offset, length=tokens)


def test_a_turn_is_context_unless_something_says_it_was_sampled() -> None:
    assert not Turn([1, 2]).sampled
    assert Turn([1, 2], logprobs=[-1, -2]).sampled
    assert Turn([1, 2], sampled=True).num_sampled == 2
    assert Turn([1, 2], mask=[0, 1]).num_sampled == 1
    assert not Turn([1, 2], mask=[0, 0]).sampled


def test_logprobs_of_all_tokens_and_of_sampled_ones_are_the_same_turn() -> None:
    mask = [False, True, False, True]
    full = Turn([1, 2, 3, 4], mask=mask, logprobs=[np.nan, -0.5, 7.0, -0.25])
    compact = Turn([1, 2, 3, 4], mask=mask, logprobs=[-0.5, -0.25])
    assert full.logprobs is not None and compact.logprobs is not None
    assert full.logprobs.tolist() == compact.logprobs.tolist() == [-0.5, -0.25]


def test_a_constant_column_is_held_as_one_number() -> None:
    turn = Turn([1, 2, 3], logprobs=[-1] * 3, temperatures=[0.7] * 3, weight_versions=[4, 4, 5])
    assert turn.columns["temperatures"].shape == ()
    assert turn.columns["weight_versions"].tolist() == [4, 4, 5]


def test_signed_zeros_do_not_collapse_into_one_number() -> None:
    turn = Turn([1, 2], sampled=True, teacher_logprobs=np.array([-0.0, 0.0], np.float32))
    assert np.signbit(turn.columns["teacher_logprobs"]).tolist() == [True, False]


def test_image_tokens_get_their_type_from_the_spans() -> None:
    turn = Turn([9, 7, 7, 9], images=[image(1)])
    assert turn.columns["mm_token_type_ids"].tolist() == [0, 1, 1, 0]


def test_a_turn_neither_follows_nor_changes_the_callers_array() -> None:
    ids = np.arange(5, dtype=np.uint32)
    turn = Turn(ids[1:3])
    ids[:] = 99
    assert turn.token_ids.tolist() == [1, 2]
    assert turn.token_ids.base is None
    with pytest.raises(ValueError, match="read-only"):
        turn.token_ids[0] = 3
    with pytest.raises(AttributeError):
        turn.role = "user"  # type: ignore[misc]


BAD_TURNS: list[tuple[dict[str, Any], str]] = [
    ({"token_ids": [-1]}, r"turn.token_ids\[0\]: -1"),
    ({"token_ids": [2**32]}, r"turn.token_ids\[0\]: 4294967296"),
    ({"token_ids": [1.5]}, "turn.token_ids: dtype float64"),
    ({"token_ids": ["a"]}, "turn.token_ids"),
    ({"token_ids": [[1]]}, "turn.token_ids: 2 dimensions"),
    ({"token_ids": [1, None]}, "turn.token_ids"),
    ({"logprobs": [-1.0]}, "turn.logprobs: 1 values for 2 sampled of 2 tokens"),
    ({"logprobs": [-1.0, np.nan]}, "turn.logprobs: sampled token 1 is NaN"),
    ({"logprobs": [-np.inf, -1]}, "turn.logprobs: sampled token 0 is -inf"),
    ({"logprobs": [0.5, -1]}, "turn.logprobs: sampled token 0 is 0.5"),
    ({"mask": [1]}, "turn.mask: 1 values for 2 tokens"),
    ({"mask": [1, 2]}, r"turn.mask\[1\]: 2"),
    ({"mask": [0, 1], "logprobs": [-1, -2, -3]}, "turn.logprobs: 3 values for 1 sampled of 2 tokens"),
    ({"sampled": False, "logprobs": [-1, -1]}, "turn.sampled: False"),
    ({"temperatures": 0.0}, r"turn.temperatures\[0\]: is 0"),
    ({"temperatures": [1.0]}, "turn.temperatures: 1 values for 2 tokens"),
    ({"weight_versions": [0.5, 1.5]}, "turn.weight_versions: dtype"),
    ({"routed_experts": np.zeros((3, 1, 1), np.uint8)}, "turn.routed_experts: 3 values for 2 tokens"),
    ({"routed_experts": np.zeros((2, 1), np.uint8)}, "turn.routed_experts: 2 dimensions"),
    ({"entropy": [1, 2]}, "turn: unknown column 'entropy'"),
    ({"images": [image(1)]}, r"turn.images\[0\]: tokens 1..3 of 2"),
    ({"role": "x" * 1000}, "turn.role"),
    ({"role": None}, "turn.role: 'None'; must be a string"),
    ({"temperatures": [1, [2]]}, "turn.temperatures: not an array"),
    ({"teacher_logprobs": [[[1]], 2]}, "turn.teacher_logprobs: not an array"),
]


@pytest.mark.parametrize(("given", "message"), BAD_TURNS, ids=[m[:40] for _, m in BAD_TURNS])
def test_a_bad_turn_is_refused_with_its_field_and_value(given: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        Turn(**{"token_ids": [1, 2], **given})


A, B = Turn([1, 2]), Turn([3, 4], logprobs=[-1, -1])
BAD_TRAJECTORIES: list[tuple[dict[str, Any], str]] = [
    ({"turns": []}, "'t'.turns: 0 turns without a token"),
    ({"turns": [Turn([])]}, "'t'.turns: 1 turns without a token"),
    ({"turns": [A, [3, 4]]}, r"'t' turns\[1\]: a list"),
    ({"parents": [-1]}, "'t'.parents: 1 values for 2 turns"),
    ({"parents": [0, 0]}, r"'t' turns\[0\].parent: 0"),
    ({"parents": [-1, 1]}, r"'t' turns\[1\].parent: 1"),
    ({"keeps": [None, 3]}, r"'t' turns\[1\].keep: 3; its parent turns\[0\] has 2 tokens"),
    ({"keeps": [None, 0]}, r"'t' turns\[1\].keep: 0"),
    ({"keeps": [1, None]}, r"'t' turns\[0\].keep: 1"),
    ({"turns": [A, B, Turn([5], sampled=True)]}, r"'t' turns\[2\].logprobs: missing for 1 sampled tokens"),
    ({"turns": [Turn([7, 7], images=[image(0)]), B], "keeps": [None, 1]}, r"turns\[1\].keep: 1 cuts an image"),
    ({"reward": float("nan")}, "'t'.reward: nan"),
    ({"reward": "good"}, "'t'.reward: 'good'"),
    ({"reward": 10**400}, "'t'.reward: inf; must be finite"),
    ({"error": 3}, "'t'.error: 3; must be a string"),
    ({"truncated": "no"}, "'t'.truncated: 'no'; must be True or False"),
    ({"policy_version": -1}, "'t'.policy_version: -1"),
    ({"policy_version": True}, "'t'.policy_version: True"),
    ({"mode": "dpo"}, "'t'.mode: 'dpo'"),
    ({"env": "a\x00b"}, "'t'.env: holds the control character"),
    (
        {
            "turns": [
                Turn([1], routed_experts=np.zeros((1, 2, 1), np.uint8)),
                Turn([2], routed_experts=np.zeros((1, 1, 2), np.uint8)),
            ]
        },
        r"turns\[1\].routed_experts: \[layers, top_k\]",
    ),
]


@pytest.mark.parametrize(("given", "message"), BAD_TRAJECTORIES, ids=[m[:40] for _, m in BAD_TRAJECTORIES])
def test_a_bad_trajectory_is_refused_with_its_turn_and_field(given: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidInput, match="trajectory.*" + message):
        Trajectory(**{"turns": [A, B], "id": "t", **given})


def test_counts_come_from_the_turns() -> None:
    turns = [Turn([1, 2, 3]), Turn([4, 5], mask=[0, 1], logprobs=[-1]), Turn([6], role="tool"), B]
    rollout = Trajectory(turns=turns)
    assert (rollout.num_turns, rollout.num_tokens) == (2, 8)
    assert (rollout.num_output_tokens, rollout.num_input_tokens, rollout.num_env_tokens) == (3, 5, 1)


def long_rollout(seed: int) -> list[dict[str, Any]]:
    """60 cumulative turns to 60,000 tokens, as lists; half of them sampled."""
    rng = np.random.default_rng(seed)
    context = rng.integers(0, 151_936, 500).tolist()
    steps = []
    for _ in range(60):
        completion = rng.integers(0, 151_936, 500).tolist()
        logprobs = (-rng.random(500)).tolist()
        steps.append({"prompt_ids": context, "completion_ids": completion, "completion_logprobs": logprobs})
        context = context + completion + rng.integers(0, 151_936, 500).tolist()
    return steps


def test_250_long_rollouts_fit_in_200_megabytes() -> None:
    """Held memory of 4 rollouts, scaled up; the same steps as lists would hold 1.8 M boxed ints each."""
    inputs = [long_rollout(seed) for seed in range(4)]
    tracemalloc.start()
    try:
        held = [from_steps(steps, temperature=1.0) for steps in inputs]
        size, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    tokens = sum(rollout.num_tokens for rollout in held)
    assert tokens == 4 * 60_000 - 4 * 500 + 4 * 500
    assert size / tokens < 10
    assert size / 4 * 250 < 200e6
