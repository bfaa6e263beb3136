from __future__ import annotations

import base64
import copy
import sys
from types import FrameType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.arrays import ImageSpan
from penstock.capture import from_rollout, from_steps
from penstock.convert import to_samples
from penstock.errors import InvalidInput
from tests.support.reference import interleave, interleaved


def step(prompt: list[int], completion: list[int], **more: Any) -> dict[str, Any]:
    logprobs = [-float(i + 1) / 8 for i in range(len(completion))]
    return {"prompt_ids": prompt, "completion_ids": completion, "completion_logprobs": logprobs, **more}


@st.composite
def conversations(draw: st.DrawFn) -> list[dict[str, Any]]:
    """Cumulative steps over three tokens, so that prefixes meet by accident as well as by design."""
    few = st.lists(st.integers(1, 3), max_size=4)
    seen: list[list[int]] = [draw(st.lists(st.integers(1, 3), min_size=1, max_size=4))]
    steps: list[dict[str, Any]] = []
    for _ in range(draw(st.integers(1, 12))):
        base = draw(st.sampled_from(seen[-3:] + seen[:1] + [[]]))
        cut = draw(st.sampled_from([len(base)] * 3 + [draw(st.integers(0, len(base)))]))
        prompt = base[:cut] + draw(few)
        completion = draw(few)
        mask = draw(st.lists(st.integers(0, 1), min_size=len(completion), max_size=len(completion)))
        lps = draw(st.lists(st.sampled_from([-0.5, -1.5, -2.25]), min_size=len(completion), max_size=len(completion)))
        more = {"completion_mask": mask} if draw(st.booleans()) else {}
        steps.append({"prompt_ids": prompt, "completion_ids": completion, "completion_logprobs": lps, **more})
        seen += [prompt, prompt + completion]
    if not any(s["prompt_ids"] + s["completion_ids"] for s in steps):
        steps[0]["prompt_ids"] = [1]
    return steps


def check_folding(steps: list[dict[str, Any]]) -> None:
    expected = [s for s in interleave(steps) if s.token_ids]
    before = copy.deepcopy(steps)
    rollout = from_steps(steps, id="t")
    samples = to_samples(rollout)
    if not any(any(s.mask) for s in expected):
        # With nothing to train the plain rule also lists samples that are wholly part of another: ours share tokens.
        assert all(sample.loss_tokens == 0 for sample in samples)
    else:
        assert [s.token_ids.tolist() for s in samples] == [s.token_ids for s in expected]
        assert [s.loss_mask.tolist() for s in samples] == [s.mask for s in expected]
        assert [_logprobs(s) for s in samples] == [s.logprobs for s in expected]
    assert steps == before


@settings(max_examples=300, deadline=None)
@given(conversations())
def test_folded_steps_give_the_samples_of_the_plain_rule(steps: list[dict[str, Any]]) -> None:
    check_folding(steps)


@settings(max_examples=60, deadline=None)
@given(conversations())
def test_a_hash_never_decides_alone(steps: list[dict[str, Any]]) -> None:
    """With every hash equal to every other, folding is slower and just as right."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("penstock.capture.prefix_tree._mix", lambda keys, position: np.zeros(len(keys), np.uint64))
        check_folding(steps)


def _logprobs(sample: Any) -> list[float]:
    found: list[float] = sample["logprobs"].tolist()
    return found


@settings(max_examples=100, deadline=None)
@given(conversations())
def test_a_branch_that_opens_stores_only_what_nothing_stored_before(steps: list[dict[str, Any]]) -> None:
    rollout = from_steps(steps)
    parents, keeps = list(rollout.parents or ()), [keep or 0 for keep in rollout.keeps or ()]

    def tokens(turn: int, count: int | None) -> list[int]:
        if turn < 0:
            return []
        own: list[int] = rollout.turns[turn].token_ids[:count].tolist()
        return tokens(parents[turn], keeps[turn]) + own

    opens = {i for i, p in enumerate(parents) if p < 0 or keeps[i] < rollout.turns[p].num_tokens or p in parents[:i]}
    for i in opens:
        if not rollout.turns[i].sampled:
            first_own = len(tokens(parents[i], keeps[i])) + 1
            prefix = tokens(i, 1)
            assert all(tokens(j, None)[:first_own] != prefix for j in range(i))


def test_branch_opens_where_prefix_breaks_and_shares_what_came_before() -> None:
    rollout = from_steps([step([1, 2], [3, 4]), step([1, 2, 3, 9], [5]), step([1, 2, 3, 4, 6], [7])])
    assert [turn.token_ids.tolist() for turn in rollout.turns] == [[1, 2], [3, 4], [9], [5], [6], [7]]
    assert list(rollout.parents or ()) == [-1, 0, 1, 2, 1, 4]
    assert list(rollout.keeps or ()) == [0, 2, 1, 1, 2, 1]
    first, second = to_samples(rollout, id="r")
    assert (first.id, first.token_ids.tolist()) == ("r", [1, 2, 3, 4, 6, 7])
    assert first.loss_mask.tolist() == [False, False, True, True, False, True]
    assert (second.id, second.token_ids.tolist()) == ("r.1", [1, 2, 3, 9, 5])
    assert second.loss_mask.tolist() == [False, False, False, False, True]


def test_the_longest_of_two_matching_branches_is_continued() -> None:
    rollout = from_steps(
        [step([1], [2]), step([9], [8]), step([1, 2, 3], [4]), step([1], [2, 3]), step([1, 2, 3, 5], [6])]
    )
    tokens = [sample.token_ids.tolist() for sample in to_samples(rollout)]
    assert tokens == [[1, 2, 3, 4], [9, 8], [1, 2, 3, 5, 6]]


def test_objects_and_nested_tokens_read_like_mappings() -> None:
    plain = [step([1, 2], [3]), step([1, 2, 3, 4], [5])]
    objects = [SimpleNamespace(tokens=SimpleNamespace(**s)) for s in plain]
    assert to_samples(from_steps(objects, id="t")) == to_samples(from_steps(plain, id="t"))


def test_a_rollout_record_brings_its_outcome() -> None:
    record = {
        "example_id": 7,
        "trajectory": [{"tokens": step([1], [2])}],
        "reward": 0.5,
        "error": None,
        "is_truncated": True,
        "metrics": {"calls": 1.0},
        "sampling_args": {"temperature": 0.7},
    }
    rollout = from_rollout(record, env="math")
    assert (rollout.id, rollout.reward, rollout.truncated, rollout.env) == ("7", 0.5, True, "math")
    [sample] = to_samples(rollout)
    assert float(sample["temperatures"]) == np.float32(0.7)


# Routing


def experts(tokens: list[int], position: int) -> list[list[int]]:
    """What a router would say: a function of everything up to the position."""
    state = 7
    for token in tokens[: position + 1]:
        state = (state * 31 + token) % 251
    return [[state, (state + 1) % 251], [(state * 3) % 251, (state * 5) % 251]]


def payload(tokens: list[int], start: int, *, raw: bool = False) -> dict[str, Any]:
    rows = np.array([experts(tokens, i) for i in range(start, len(tokens) - 1)], np.uint8).reshape(-1, 2, 2)
    data: Any = rows.tobytes() if raw else base64.b64encode(rows.tobytes()).decode()
    return {"data": data, "shape": list(rows.shape), "start": start, "dtype": "uint8"}


@settings(max_examples=150, deadline=None)
@given(conversations(), st.data())
def test_routing_lands_on_the_tokens_it_was_computed_for(steps: list[dict[str, Any]], data: st.DataObject) -> None:
    known: set[tuple[int, ...]] = set()
    for i, s in enumerate(steps):
        whole = s["prompt_ids"] + s["completion_ids"]
        # A server leaves out rows up to one position before the end of what this step continues; of a step that
        # continues nothing, up to one position before the end of anything it has served.
        ends = [tuple(sample.token_ids) for sample in interleaved(steps[:i])]
        active = [ids for ids in ends if tuple(s["prompt_ids"][: len(ids)]) == ids]
        served = max((len(ids) for ids in active or known if tuple(s["prompt_ids"][: len(ids)]) == ids), default=0)
        start = data.draw(st.integers(0, max(served - 1, 0)))
        if whole:
            s["routed_experts"] = payload(whole, min(start, max(len(whole) - 1, 0)), raw=data.draw(st.booleans()))
            known.add(tuple(whole))
    for sample in to_samples(from_steps(steps)):
        tokens = sample.token_ids.tolist()
        expected = np.array([experts(tokens, i) for i in range(len(tokens))])
        found = sample["routed_experts"]
        assert np.array_equal(found[:-1], expected[:-1])
        assert not found[-1].any() or np.array_equal(found[-1], expected[-1])


def test_a_gap_in_the_routing_leaves_the_branch_without_it() -> None:
    first = step([1, 2], [3], routed_experts=payload([1, 2, 3], 0))
    gap = step([1, 2, 3, 4], [5], routed_experts=payload([1, 2, 3, 4, 5], 3))  # the row of token 3 is missing
    none = step([1, 2, 3, 4], [5])
    for second in (gap, none):
        [sample] = to_samples(from_steps([first, second]))
        assert "routed_experts" not in sample
    other = step([1, 9], [5], routed_experts=payload([1, 9, 5], 0))
    with_it = [s for s in to_samples(from_steps([first, gap, other])) if "routed_experts" in s]
    assert [s.token_ids.tolist() for s in with_it] == [[1, 9, 5]]


def test_wide_expert_ids_keep_their_width() -> None:
    rows = np.full((2, 1, 1), 300, np.uint16)
    routed = {"data": rows.tobytes(), "shape": [2, 1, 1], "start": 0, "dtype": "uint16"}
    [sample] = to_samples(from_steps([step([1, 2], [3], routed_experts=routed)]))
    assert sample["routed_experts"].dtype == np.uint16
    assert sample["routed_experts"].reshape(-1).tolist() == [300, 300, 0]


# Images


def image(offset: int, letter: str) -> ImageSpan:
    return ImageSpan(hash=letter * 64, grid=(1, 2, 4), offset=offset, length=2)


def test_images_follow_their_turn_into_the_sample() -> None:
    as_mapping = {"hash": "b" * 64, "grid": [1, 2, 4], "offset": 4, "length": 2}
    rollout = from_steps([
        step([1, 7, 7], [2], images=[image(1, "a")]),
        step([1, 7, 7, 2, 7, 7, 3], [4], images=[image(1, "a"), as_mapping]),
    ])  # fmt: skip
    assert [[span.offset for span in turn.images] for turn in rollout.turns] == [[1], [], [0], []]
    [sample] = to_samples(rollout)
    assert [(span.hash[0], span.offset) for span in sample.images] == [("a", 1), ("b", 4)]
    assert sample["mm_token_type_ids"].tolist() == [0, 1, 1, 0, 1, 1, 0, 0]


def described(offset: int, letter: str = "a", **item: Any) -> dict[str, Any]:
    """One image as an environment describes it."""
    return {
        "mm_hashes": {"image": [letter * 64]},
        "mm_placeholders": {"image": [{"offset": offset, "length": 2}]},
        "mm_items": {"image": [{"image_grid_thw": [[1, 2, 4]], **item}]},
    }


def test_descriptors_without_pixels_are_taken_as_references() -> None:
    both = {
        "mm_hashes": {"image": ["a" * 64, "b" * 64]},
        "mm_placeholders": {"image": [(1, 2), (4, 2)]},
        "mm_items": {"image": [{"image_grid_thw": [1, 2, 4]}, {"image_grid_thw": np.array([[1, 2, 4]])}]},
    }
    rollout = {
        "trajectory": [
            {"tokens": step([1, 7, 7], [2], multi_modal_data=described(1))},
            {"tokens": step([1, 7, 7, 2, 7, 7, 3], [4], multi_modal_data=both)},
        ],
        "reward": 1.0,
    }
    [sample] = to_samples(from_rollout(rollout))
    spans = from_steps([step([1, 7, 7, 2, 7, 7, 3], [4], images=[image(1, "a"), image(4, "b")])]).turns[0].images
    assert sample.images == spans
    assert sample["mm_token_type_ids"].tolist() == [0, 1, 1, 0, 1, 1, 0, 0]


def test_placeholders_are_found_by_token_types_and_other_hashes_are_looked_up() -> None:
    data = described(1, letter="z")
    del data["mm_placeholders"]
    given = step([1, 7, 7], [2], multi_modal_data=data, mm_token_type_ids=[0, 1, 1, 0])
    [sample] = to_samples(from_steps([given], image_hashes={"z" * 64: "c" * 64}.__getitem__))
    assert sample.images == (image(1, "c"),)


def test_an_empty_descriptor_is_no_image() -> None:
    assert from_steps([step([1], [5], multi_modal_data={"mm_hashes": {}})]).turns[0].images == ()


def test_equal_placeholders_of_different_images_are_different_prefixes() -> None:
    rollout = from_steps([
        step([1, 7, 7, 5], [2], images=[image(1, "a")]),
        step([1, 7, 7, 5, 2, 6], [3], images=[image(1, "b")]),
    ])  # fmt: skip
    samples = to_samples(rollout)
    assert [[span.hash[0] for span in sample.images] for sample in samples] == [["a"], ["b"]]
    assert [sample.token_ids.tolist() for sample in samples] == [[1, 7, 7, 5, 2], [1, 7, 7, 5, 2, 6, 3]]


# Bad input: every case names the step and the field, and nothing is kept


BAD: list[tuple[Any, str]] = [
    ({"tokens": None}, r"steps\[1\].tokens: None"),
    ({"prompt_ids": [1, 2, 3]}, r"steps\[1\].completion_ids: missing"),
    ({"completion_ids": [1]}, r"steps\[1\].prompt_ids: missing"),
    (step([1], [-5]), r"steps\[1\].completion_ids\[0\]: -5"),
    (step([1, 2**40], [5]), r"steps\[1\].prompt_ids\[1\]: 1099511627776"),
    (step([1], [5], completion_logprobs=[-1.0, -2.0]), r"steps\[1\].logprobs: 2 values for 1 sampled"),
    (step([1], [5], completion_logprobs=[float("nan")]), r"steps\[1\].logprobs: sampled token 0 is NaN"),
    (step([1], [5], completion_logprobs=["x"]), r"steps\[1\].logprobs: dtype"),
    (step([1], [5], completion_logprobs=None), r"steps\[1\].logprobs: missing for 1 tokens"),
    (step([1], [5], completion_mask=[1, 1]), r"steps\[1\].mask: 2 values for 1 tokens"),
    (step([1], [5], prompt_mask=[0, 0]), r"steps\[1\].prompt_mask: 2 values for 1 tokens"),
    (step([1], [5], prompt_mask=[1]), r"steps\[1\].prompt_mask\[0\]: True"),
    (step([1], [5], mm_token_type_ids=[0]), r"steps\[1\].mm_token_type_ids: 1 values for 2 tokens"),
    (step([1], [5], multi_modal_data={"pixel_values": [1]}), r"steps\[1\].multi_modal_data.pixel_values: not a field"),
    (step([1], [5], multi_modal_data=described(1, pixel_values=np.zeros((8, 4)))), r"\['pixel_values'\]: pixels or fe"),
    (step([1], [5], multi_modal_data=described(1, image=b"x")), r"mm_items\['image'\]\[0\]\['image'\]: pixels or fea"),
    (step([1], [5], multi_modal_data=described(1, letter="z")), r"hash 'zzz.*is not the sha256.*pass image_hashes="),
    (step([1], [5], multi_modal_data={"mm_hashes": {"video": ["a"]}}), r"mm_hashes: video; only images"),
    (step([1], [5], multi_modal_data=described(1) | {"mm_hashes": {"image": []}}), "1 items, 0 hashes and 1 placeh"),
    (step([1], [5], multi_modal_data=described(1) | {"mm_placeholders": {}}), "mm_placeholders: missing, and so are"),
    (step([1], [5], multi_modal_data=described(1, image_grid_thw=[1, 2])), r"image_grid_thw: \[1, 2\]; must be time"),
    (step([1], [5], images=[{"hash": "a" * 64}]), r"steps\[1\].images\[0\]: Missing required argument 'grid'"),
    (step([1], [5], images=[image(0, "a")]), r"steps\[1\].images\[0\]: tokens 0..2 of 1"),
    (step([1], [5], images=[image(0, "z")]), r"steps\[1\].images\[0\].hash"),
    (step([1], [5], temperature=-1.0), r"steps\[1\].temperatures\[0\]: is -1"),
    (step([1], [5], routed_experts={"data": "!!", "shape": [1, 1, 1]}), r"steps\[1\].routed_experts.data: neither"),
    (step([1], [5], routed_experts={"data": "AAAA", "shape": [1, 1, 1]}), "routed_experts.data: 3 bytes for shape"),
    (step([1], [5], routed_experts={"data": "AA==", "shape": [1, 1]}), r"routed_experts.shape: \[1, 1\]"),
    (step([1], [5], routed_experts={"data": "AA==", "shape": [1, 1, 1], "dtype": "O"}), "routed_experts.dtype: 'O'"),
    (step([1], [5], routed_experts={"data": "AA==", "shape": [1, 1, 1], "start": -1}), "routed_experts.start: -1"),
]  # fmt: skip


@pytest.mark.parametrize(("bad", "message"), BAD, ids=[m[:45] for _, m in BAD])
def test_a_bad_step_rejects_the_rollout_whole(bad: Any, message: str) -> None:
    good = step([1, 2], [3])
    before = copy.deepcopy([good, bad])
    with pytest.raises(InvalidInput, match="trajectory 'x'.*" + message):
        from_steps([good, bad], id="x")
    assert repr([good, bad]) == repr(before)


# Scaling


def num_lines(steps: list[dict[str, Any]]) -> int:
    """Lines of Python executed while folding: deterministic, unlike time."""
    count = 0

    def trace(frame: FrameType, event: str, arg: object) -> Any:
        nonlocal count
        count += event == "line"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        from_steps(steps)
    finally:
        sys.settrace(before)
    return count


def conversation(num_turns: int, *, forks: bool = False) -> list[dict[str, Any]]:
    rng = np.random.default_rng(0)
    context = rng.integers(0, 150_000, 8).astype(np.uint32)
    steps = []
    for _ in range(num_turns):
        completion = rng.integers(0, 150_000, 4).astype(np.uint32)
        steps.append({"prompt_ids": context, "completion_ids": completion, "completion_logprobs": np.full(4, -1.0)})
        kept = completion[:0] if forks else completion
        context = np.concatenate([context, kept, rng.integers(0, 150_000, 4).astype(np.uint32)])
    return steps


def test_python_work_per_step_does_not_grow_with_the_history() -> None:
    short, long = num_lines(conversation(500)), num_lines(conversation(2000))
    assert long < 4.1 * short


def test_two_thousand_turns_fold_into_one_sample_without_repeats() -> None:
    steps = conversation(2000)
    rollout = from_steps(steps)
    assert rollout.num_tokens == len(steps[-1]["prompt_ids"]) + 4
    [sample] = to_samples(rollout)
    assert sample.num_tokens == rollout.num_tokens


def test_a_fork_at_every_step_still_stores_each_token_once() -> None:
    steps = conversation(300, forks=True)
    rollout = from_steps(steps)
    assert rollout.num_tokens == len(steps[-1]["prompt_ids"]) + 4 * 300
    assert len(to_samples(rollout)) == 300


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"mm_hashes": {"audio": 1}}, "mm_hashes: audio; only images"),
        ({"mm_items": {"image": [{"image_grid_thw": [1, [2]]}]}}, "image_grid_thw'.*pixels or features"),
        ({"mm_items": {"image": [{"features": [[1.0, 2.0], [3.0]]}]}}, "features'.*pixels or features"),
    ],
)
def test_descriptors_of_odd_shape_are_named(changes: dict[str, Any], words: str) -> None:
    good = {
        "mm_hashes": {"image": ["a" * 64]},
        "mm_placeholders": {"image": [{"offset": 1, "length": 4}]},
        "mm_items": {"image": [{"image_grid_thw": [1, 4, 4]}]},
    }
    step = {"prompt_ids": [1, 9, 9, 9, 9, 2], "completion_ids": [3], "completion_logprobs": [-1.0]}
    [image] = from_steps([{**step, "multi_modal_data": good}]).turns[0].images
    assert image.grid == (1, 4, 4)
    with pytest.raises(InvalidInput, match=words):
        from_steps([{**step, "multi_modal_data": {**good, **changes}}])
