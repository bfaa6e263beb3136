from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.arrays import ImageSpan, Sample
from penstock.capture import Trajectory, Turn
from penstock.convert import to_samples
from penstock.errors import InvalidInput
from penstock.packing import pack
from tests.support.reference import branches


@st.composite
def trees(draw: st.DrawFn) -> tuple[list[dict[str, Any]], list[int], list[int | None]]:
    """LoopHooks with masks, hung anywhere, with branch points inside turns."""
    turns: list[dict[str, Any]] = []
    parents: list[int] = []
    keeps: list[int | None] = []
    for i in range(draw(st.integers(1, 9))):
        count = draw(st.integers(1 if i == 0 else 0, 4))
        mask = draw(st.one_of(st.just([False] * count), st.lists(st.booleans(), min_size=count, max_size=count)))
        turns.append({
            "token_ids": draw(st.lists(st.integers(0, 9), min_size=count, max_size=count)),
            "mask": mask,
            "logprobs": [-0.25 * draw(st.integers(1, 9)) if m else 0.0 for m in mask],
        })  # fmt: skip
        parent = draw(st.integers(-1, i - 1))
        size = 0 if parent < 0 else len(turns[parent]["token_ids"])
        parents.append(parent)
        keeps.append(draw(st.one_of(st.none(), st.integers(1, size))) if size else None)
    return turns, parents, keeps


def build(tree: tuple[list[dict[str, Any]], list[int], list[int | None]], **fields: Any) -> Trajectory:
    turns, parents, keeps = tree
    made = [Turn(t["token_ids"], mask=t["mask"], logprobs=t["logprobs"] if any(t["mask"]) else None) for t in turns]
    return Trajectory(turns=made, parents=parents, keeps=keeps, **fields)


@settings(max_examples=300, deadline=None)
@given(trees())
def test_samples_of_a_tree_equal_the_plain_reference(tree: Any) -> None:
    expected = [sample for sample in branches(*tree) if sample.token_ids]
    samples = to_samples(build(tree), id="r")
    assert [s.token_ids.tolist() for s in samples] == [e.token_ids for e in expected]
    assert [s.loss_mask.tolist() for s in samples] == [e.mask for e in expected]
    for sample, plain in zip(samples, expected, strict=True):
        found = sample.get("logprobs")
        assert (np.zeros(sample.num_tokens) if found is None else found).tolist() == plain.logprobs


@settings(max_examples=100, deadline=None)
@given(trees())
def test_every_sampled_token_is_trained_once_unless_it_comes_first(tree: Any) -> None:
    rollout = build(tree)
    turns, parents, _ = tree
    firsts = sum(bool(t["mask"][:1] == [True]) for t, p in zip(turns, parents, strict=True) if _starts(tree, p))
    trained = sum(sample.loss_tokens for sample in to_samples(rollout))
    assert trained == rollout.num_output_tokens - firsts


def _starts(tree: Any, parent: int) -> bool:
    """Whether a turn with this parent begins its sequence: no token precedes it."""
    turns, parents, _ = tree
    while parent >= 0:
        if turns[parent]["token_ids"]:
            return False
        parent = parents[parent]
    return True


@settings(max_examples=100, deadline=None)
@given(trees())
def test_a_failed_rollout_keeps_every_branch_and_trains_none(tree: Any) -> None:
    samples = to_samples(build(tree, error="timeout"))
    assert all(sample.loss_tokens == 0 for sample in samples)
    trained = to_samples(build(tree))
    assert len(samples) >= len(trained)
    kept = [s.token_ids.tolist() for s in samples]
    assert all(s.token_ids.tolist() in kept for s in trained)


SAID = Turn([3, 4], logprobs=[-1.0, -2.0], temperatures=0.5)


def one(*turns: Turn, **fields: Any) -> Sample:
    [sample] = to_samples(Trajectory(turns=turns, **fields))
    return sample


def test_names_are_the_same_for_the_same_rollout() -> None:
    rollout = Trajectory(turns=[Turn([1]), SAID, Turn([5]), SAID], parents=[-1, 0, 0, 2], id="own")
    assert [s.id for s in to_samples(rollout)] == ["own", "own.1"]
    assert [s.id for s in to_samples(rollout, id="g/3")] == ["g/3", "g/3.1"]
    nameless = to_samples(Trajectory(turns=[Turn([1]), SAID]))
    assert nameless[0].id


def test_a_branch_keeps_its_number_when_an_earlier_one_has_nothing_to_train() -> None:
    rollout = Trajectory(turns=[Turn([1]), Turn([2]), Turn([5]), SAID], parents=[-1, 0, 0, 2], id="r")
    assert [s.id for s in to_samples(rollout)] == ["r.1"]


def test_a_constant_temperature_is_one_number_and_prompts_take_the_first() -> None:
    assert float(one(Turn([1]), SAID)["temperatures"]) == 0.5
    other = Turn([6], logprobs=[-1.0], temperatures=0.75)
    assert one(Turn([1]), SAID, Turn([5]), other)["temperatures"].tolist() == [0.5, 0.5, 0.5, 0.5, 0.75]
    silent = Turn([6], logprobs=[-1.0])
    assert one(Turn([1]), SAID, silent)["temperatures"].tolist() == [0.5, 0.5, 0.5, 1.0]


def test_the_oldest_version_that_sampled_a_token_is_the_samples() -> None:
    old, new = Turn([3], logprobs=[-1], weight_versions=4), Turn([4], logprobs=[-1], weight_versions=6)
    sample = one(Turn([1]), old, new, policy_version=5)
    assert sample.policy_version == 4
    assert sample["weight_versions"].tolist() == [4, 4, 6]
    silent = Turn([5], logprobs=[-1])
    assert one(Turn([1]), new, silent, policy_version=5)["weight_versions"].tolist() == [5, 6, 5]
    assert one(Turn([1]), new, policy_version=5).policy_version == 6
    assert one(Turn([1]), silent, policy_version=5).policy_version == 5
    unknown = one(Turn([1]), new, silent)
    assert unknown["weight_versions"].tolist() == [-1, 6, -1] and unknown.policy_version is None


def test_partial_routing_is_no_routing() -> None:
    rows = np.ones((2, 3, 1), np.uint8)
    routed = Turn([3, 4], logprobs=[-1, -2], routed_experts=rows)
    assert "routed_experts" not in one(Turn([1]), routed)
    whole = one(Turn([1], routed_experts=rows[:1]), routed)
    assert whole["routed_experts"].shape == (3, 3, 1)
    empty = one(Turn([], role="user"), Turn([1], routed_experts=rows[:1]), routed)
    assert empty["routed_experts"].shape == (3, 3, 1)


def test_routing_of_different_width_is_widened_not_cut() -> None:
    narrow = Turn([1], routed_experts=np.full((1, 1, 1), 255, np.uint8))
    wide = Turn([2], logprobs=[-1], routed_experts=np.full((1, 1, 1), 300, np.uint16))
    assert one(narrow, wide)["routed_experts"].reshape(-1).tolist() == [255, 300]


def test_images_move_with_their_turn() -> None:
    image = ImageSpan(hash="e" * 64, grid=(1, 2, 4), offset=1, length=2)
    shown = Turn([9, 7, 7], images=[image])
    tree = Trajectory(turns=[Turn([1]), SAID, shown, SAID, Turn([5]), SAID], parents=[-1, 0, 1, 2, 1, 4])
    first, second = to_samples(tree)
    assert [span.offset for span in first.images] == [4]
    assert first["mm_token_type_ids"].tolist() == [0, 0, 0, 0, 1, 1, 0, 0]
    assert second.images == () and "mm_token_type_ids" not in second


def test_weights_train_observations_once_and_without_policy_gradient() -> None:
    tool = Turn([5, 6], ce_weights=[0.0, 0.5], role="tool")
    tree = Trajectory(turns=[Turn([1]), SAID, tool, SAID, Turn([8]), SAID], parents=[-1, 0, 1, 2, 2, 4])
    first, second = to_samples(tree)
    assert first.loss_mask.tolist() == [False, True, True, False, True, True, True]
    assert first["ce_weights"].tolist() == [0, 0, 0, 0, 0.5, 0, 0]
    assert first["rl_weights"].tolist() == [1, 1, 1, 1, 0, 1, 1]
    assert not second["ce_weights"].any()
    assert second.loss_mask.tolist() == [False] * 6 + [True, True]


@pytest.mark.parametrize(
    ("mode", "terms"),
    [
        ("rl", {"rl": [1, 1, 0, 1, 1], "ce": [0, 0, 0.5, 0, 0]}),
        ("sft", {"rl": [0] * 5, "ce": [1, 1, 0.5, 1, 1], "ref_kl": [0] * 5}),
        ("opd", {"rl": [0] * 5, "ce": [0, 0, 0.5, 0, 0], "ref_kl": [1, 1, 0, 1, 1]}),
    ],
)
def test_weights_of_one_turn_leave_the_others_with_those_of_the_mode(mode: str, terms: dict[str, list[float]]) -> None:
    tool = Turn([5, 6], ce_weights=[0.0, 0.5], role="tool")
    step = pack([one(Turn([1]), SAID, tool, SAID, mode=mode)], ranks=1, seq_len=8)
    (batch,) = step.ranks[0]
    assert {name: batch[f"{name}_weights"][batch["loss_mask"]].tolist() for name in terms} == terms
    for name, weights in terms.items():
        assert getattr(step.denominators, f"{name}_tokens") == np.count_nonzero(weights)


@pytest.mark.parametrize("mode", ["sft", "opd"])
def test_other_modes_need_no_logprobs(mode: str) -> None:
    sample = one(Turn([1]), Turn([2, 3], sampled=True), mode=mode)
    assert (sample.mode, "logprobs" in sample, sample.loss_tokens) == (mode, False, 2)


def test_a_sampled_first_token_is_not_trained() -> None:
    assert one(SAID).loss_mask.tolist() == [False, True]


@pytest.mark.parametrize(
    ("version", "words"),
    [(2**31, "2147483648; beside turns with weight_versions"), (-1, "-1; must be a whole number"), (2**64, "whole")],
)
def test_a_version_that_does_not_fit_beside_versions_per_token_is_named(version: int, words: str) -> None:
    rollout = Trajectory(turns=[Turn([1]), Turn([2], logprobs=[-1.0], weight_versions=[0])])
    with pytest.raises(InvalidInput, match=words):
        to_samples(rollout, policy_version=version)
    [sample] = to_samples(rollout, policy_version=2**31 - 1)
    assert sample.policy_version == 0
