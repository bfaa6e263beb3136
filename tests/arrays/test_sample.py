"""A sample is valid from the moment it exists; anything else is refused by name and value."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.arrays import TOKEN_COLUMNS, ImageSpan, Sample, check_text
from penstock.arrays.ragged import arrays_in
from penstock.errors import InvalidInput, UnknownKey
from penstock.testing.strategies import samples
from tests.support.reference import record

HASH = "ab" * 32
TYPES = [0, 1, 1, 0]


def span(**changes: Any) -> ImageSpan:
    return ImageSpan(**{"hash": HASH, "grid": (1, 2, 4), "offset": 1, "length": 2, "merge": 2, **changes})


def build(**changes: Any) -> Sample:
    """A good sample of four tokens with one thing changed."""
    good: dict[str, Any] = {"id": "s7", "token_ids": [1, 2, 3, 4], "loss_mask": [0, 0, 1, 1]}
    return Sample(**{**good, **changes})


IDS, MASK = "token_ids", "loss_mask"
BAD: dict[str, tuple[dict[str, Any], str, str]] = {
    # what is wrong: (what is given, the field the message names, the value it shows)
    "a negative id": ({IDS: [1, -7, 3, 4]}, "token_ids[1]", "-7"),
    "an id of 2**32": ({IDS: [1, 2, 2**32, 4]}, "token_ids[2]", "4294967296"),
    "an id beyond int64": ({IDS: np.array([1, 2, 2**63, 4], np.uint64)}, "token_ids[2]", "9223372036854775808"),
    "a list with an id beyond int64": ({IDS: [1, 2, 2**63, 4]}, "token_ids", "float64"),
    "an id beyond uint64": ({IDS: [1, 2, 2**70, 4]}, "token_ids", "object"),
    "float ids": ({IDS: [1.0, 2.0, 3.0, 4.0]}, "token_ids", "float64"),
    "bool ids": ({IDS: [True, False, True, True]}, "token_ids", "bool"),
    "text ids": ({IDS: ["a", "b", "c", "d"]}, "token_ids", "<U1"),
    "object ids": ({IDS: np.array([1, 2, 3, 4], object)}, "token_ids", "object"),
    "a ragged list": ({IDS: [[1], [2, 3]]}, "token_ids", "inhomogeneous"),
    "ids of rank 2": ({IDS: [[1, 2, 3, 4]]}, "token_ids", "2 dimensions"),
    "ids of rank 0": ({IDS: 5}, "token_ids", "0 dimensions"),
    "no ids": ({IDS: None}, "token_ids", "empty"),
    "an empty sample": ({IDS: [], MASK: []}, "token_ids", "empty"),
    "a short mask": ({MASK: [0, 1, 1]}, "loss_mask", "3 values for 4 tokens"),
    "a mask of other numbers": ({MASK: [0, 1, 2, 1]}, "loss_mask[2]", "2"),
    "a float mask": ({MASK: [0.0, 0.5, 1.0, 1.0]}, "loss_mask", "float64"),
    "a trained first token": ({MASK: [1, 0, 1, 1]}, "loss_mask[0]", "True"),
    "short logprobs": ({"logprobs": [0.0, -1.0, -1.0]}, "logprobs", "3 values for 4 tokens"),
    "long logprobs": ({"logprobs": [0.0] * 5}, "logprobs", "5 values for 4 tokens"),
    "one logprob for all": ({"logprobs": -1.0}, "logprobs", "0 dimensions"),
    "a positive logprob": ({"logprobs": [0.0, 0.0, 0.25, -1.0]}, "logprobs[2]", "0.25"),
    "NaN on a trained token": ({"logprobs": [0.0, 0.0, -1.0, math.nan]}, "logprobs[3]", "NaN"),
    "-inf on a trained token": ({"logprobs": [0.0, 0.0, -math.inf, -1.0]}, "logprobs[2]", "-inf"),
    "NaN of a teacher": ({"teacher_logprobs": [0.0, 0.0, math.nan, -1.0]}, "teacher_logprobs[2]", "NaN"),
    "a NaN advantage": ({"advantages": math.nan}, "advantages", "NaN"),
    "an infinite advantage": ({"advantages": [0.0, 0.0, math.inf, 0.0]}, "advantages[2]", "inf"),
    "an infinite reward": ({"rewards": math.inf}, "rewards", "inf"),
    "an advantage beyond float32": ({"advantages": [0.0, 0.0, 0.0, 1e39]}, "advantages[3]", "1e+39"),
    "two advantages for four tokens": ({"advantages": [0.0, 1.0]}, "advantages", "2 values for 4 tokens"),
    "a temperature of zero": ({"temperatures": 0.0}, "temperatures", "0"),
    "a text reward": ({"rewards": "1.0"}, "rewards", "'1.0'"),
    "a bool advantage": ({"advantages": True}, "advantages", "bool"),
    "a complex logprob": ({"logprobs": [0j, 0j, 0j, 0j]}, "logprobs", "complex128"),
    "NaN weights": ({"rl_weights": [1.0, math.nan, 1.0, 1.0]}, "rl_weights[1]", "NaN"),
    "experts of rank 2": ({"routed_experts": np.zeros((4, 8), np.uint8)}, "routed_experts", "2 dimensions"),
    "experts for three tokens": ({"routed_experts": np.zeros((3, 2, 8), np.uint8)}, "routed_experts", "3 values"),
    "experts of no layer": ({"routed_experts": np.zeros((4, 0, 8), np.uint8)}, "routed_experts", "(4, 0, 8)"),
    "an expert of 65,536": ({"routed_experts": np.full((4, 2, 8), 65_536)}, "routed_experts[0]", "65536"),
    "a negative expert": ({"routed_experts": np.full((4, 2, 8), -1)}, "routed_experts[0]", "-1"),
    "a token type of 256": ({"mm_token_type_ids": [0, 256, 0, 0]}, "mm_token_type_ids[1]", "256"),
    "an unknown column": ({"logprob": [0.0] * 4}, "unknown column", "logprob"),
    "an empty id": ({"id": ""}, "id", "''"),
    "an id that is a number": ({"id": 17}, "id", "17"),
    "a group with a newline": ({"group": "a\nb"}, "group", "U+000A"),
    "an env with an escape": ({"env": "\x1b[31m"}, "env", "U+001B"),
    "a run with a C1 control": ({"run": "a\x9bb"}, "run", "U+009B"),
    "a lone surrogate": ({"group": "a\ud800"}, "group", "U+D800"),
    "a group too long": ({"group": "g" * 513}, "group", "gggg"),
    "an unknown mode": ({"mode": "dpo"}, "mode", "dpo"),
    "a negative policy version": ({"policy_version": -1}, "policy_version", "-1"),
    "a fractional policy version": ({"policy_version": 1.5}, "policy_version", "1.5"),
    "a boolean policy version": ({"policy_version": True}, "policy_version", "True"),
    "a policy version beyond the limit": ({"policy_version": 2**53 + 1}, "policy_version", str(2**53 + 1)),
    "a weight version below -1": ({"weight_versions": [0, 0, -2, 1]}, "weight_versions[2]", "-2"),
    "a hash that is none": ({"images": [span(hash="xyz")]}, "images[0].hash", "xyz"),
    "a hash of bytes": ({"images": [span(hash=b"\xab")]}, "images[0].hash", "xab"),
    "a grid of two": ({"images": [span(grid=(2, 4))]}, "images[0].grid", "(2, 4)"),
    "a grid of numpy numbers": ({"images": [span(grid=(1, np.int64(2), 4))]}, "images[0].grid", "4"),
    "a grid that does not fit": ({"images": [span(length=3)]}, "images[0]", "3 placeholder tokens"),
    "a merge of zero": ({"images": [span(merge=0)]}, "images[0]", "merge 0"),
    "an image behind the end": ({"images": [span(offset=3)]}, "images[0]", "3..5"),
    "an image before the start": ({"images": [span(offset=-1)]}, "images[0].offset", "-1"),
    "a numpy offset": ({"images": [span(offset=np.int64(1))]}, "images[0].offset", "1"),
    "images that overlap": ({"images": [span(), span(offset=2)]}, "images[1]", "2..4"),
    "a media type with a newline": ({"images": [span(media_type="image/png\n")]}, "images[0].media_type", "image/png"),
    "an image on text": ({"images": [span()], "mm_token_type_ids": [0, 1, 0, 0]}, "images[0]", "1..3"),
    "image tokens without image": ({"mm_token_type_ids": TYPES}, "images", "2 image tokens"),
    "an image that is a dict": ({"images": [{"hash": HASH}]}, "images[0]", "dict"),
}


@pytest.mark.parametrize(("given_values", "field", "value"), BAD.values(), ids=BAD.keys())
def test_bad_input_is_refused_naming_sample_field_and_value(
    given_values: dict[str, Any], field: str, value: str
) -> None:
    with pytest.raises(InvalidInput) as caught:
        build(**given_values)
    message = str(caught.value)
    assert "sample " in message
    if "id" not in given_values:
        assert "'s7'" in message
    assert field in message
    assert value in message


GOOD: dict[str, dict[str, Any]] = {
    "NaN where nothing is trained": {"logprobs": [math.nan, math.nan, -1.0, -1.0]},
    "-inf where nothing is trained": {"logprobs": [-math.inf, 0.0, -1.0, -1.0]},
    "a logprob a hair above zero": {"logprobs": [0.0, 0.0, 1e-7, -1.0]},
    "a NaN reward": {"rewards": math.nan},
    "whole-number advantages": {"advantages": [0, 1, 2, 3]},
    "the largest id": {IDS: [1, 2, 3, 2**32 - 1]},
    "ids in int64": {IDS: np.array([1, 2, 3, 4], np.int64)},
    "ids in big-endian": {IDS: np.array([1, 2, 3, 4], ">u4")},
    "half-precision logprobs": {"logprobs": np.array([0, 0, -1, -2], np.float16)},
    "experts in int64": {"routed_experts": np.full((4, 2, 8), 300)},
    "an image": {"images": [span()], "mm_token_type_ids": TYPES},
    "an image without token types": {"images": [span()]},
    "a generator of images": {"images": iter([span()])},
    "text in any script": {"id": "数学/é/🙂", "group": "ünï"},
}


@pytest.mark.parametrize("given_values", GOOD.values(), ids=GOOD.keys())
def test_unusual_but_good_input_is_taken(given_values: dict[str, Any]) -> None:
    sample = build(**given_values)
    assert sample.num_tokens == 4
    assert bool(sample.images) == ("images" in given_values)


def test_columns_have_their_declared_dtype_whatever_they_were_given_as() -> None:
    sample = build(logprobs=[0, 0, -1, -2], routed_experts=np.zeros((4, 1, 2), np.int64), rewards=1)
    assert sample.token_ids.dtype == np.uint32
    assert sample.loss_mask.dtype == np.bool_
    assert sample["logprobs"].dtype == np.float32
    assert sample["routed_experts"].dtype == np.uint8
    assert build(routed_experts=np.full((4, 1, 2), 256))["routed_experts"].dtype == np.uint16
    assert sample["rewards"].shape == ()


@given(samples())
def test_arrays_of_a_sample_cannot_be_written_to(sample: Sample) -> None:
    assert not any(array.flags.writeable for cells in sample.columns.values() for array in arrays_in(cells))


def test_fields_of_a_sample_cannot_be_set() -> None:
    with pytest.raises(AttributeError, match="replace"):
        build().env = "other"


PER_TOKEN = sorted(name for name, column in TOKEN_COLUMNS.items() if not column.trailing and not column.ragged)


@pytest.mark.parametrize("name", PER_TOKEN)
@pytest.mark.parametrize("shape", ["plain", "every second", "two rows", "too short", "subclass"])
def test_an_array_that_needs_no_conversion_is_checked_like_a_list(name: str, shape: str) -> None:
    values = np.array([0, 1, 1, 1, 0, 0], TOKEN_COLUMNS[name].dtype)
    array = {
        "plain": values[:3],
        "every second": values[::2],
        "two rows": values.reshape(2, 3),
        "too short": values[:2],
        "subclass": values[:3].view(np.recarray),
    }[shape]
    others = {"token_ids": [5, 6, 7], "loss_mask": [0, 1, 1]}
    found = [_made(others | {name: given}) for given in (array, array.tolist())]
    assert found[0] == found[1]
    if isinstance(found[0], Sample):
        assert type(found[0][name]) is np.ndarray and not found[0][name].flags.writeable and values.flags.writeable


def _made(columns: dict[str, Any]) -> Sample | str:
    try:
        return Sample(id="a", **columns)
    except InvalidInput as error:
        return str(error)


def test_an_array_of_the_right_dtype_is_not_copied() -> None:
    ids = np.arange(4, dtype=np.uint32)
    assert np.shares_memory(build(token_ids=ids).token_ids, ids)
    assert ids.flags.writeable


@given(samples())
def test_a_sample_equals_itself_rebuilt_and_its_copy(sample: Sample) -> None:
    assert sample.replace() == sample
    assert record(sample.replace()) == record(sample)
    assert hash(sample.replace()) == hash(sample)
    for made in (copy.copy(sample), copy.deepcopy(sample)):
        assert made == sample
        assert not made.token_ids.flags.writeable


CHANGES: list[Callable[[Sample], Sample]] = [
    lambda s: s.replace(group="other"),
    lambda s: s.replace(policy_version=9),
    lambda s: s.replace(rewards=None),
    lambda s: s.replace(rewards=[1.0, 1.0, 1.0, 1.0]),
    lambda s: s.replace(token_ids=[1, 2, 3, 5]),
    lambda s: s.replace(logprobs=[-0.0, 0.0, -1.0, -2.0]),
    lambda s: s.replace(images=[span()]),
]


@pytest.mark.parametrize("change", CHANGES)
def test_a_sample_does_not_equal_one_with_anything_changed(change: Callable[[Sample], Sample]) -> None:
    sample = build(logprobs=[0.0, 0.0, -1.0, -2.0], rewards=1.0)
    assert change(sample) != sample


def test_equality_tells_nan_payloads_apart() -> None:
    nans = np.array([0x7FC00000, 0x7FC00001], np.uint32).view(np.float32)
    assert build(rewards=nans[0]) == build(rewards=nans[0])
    assert build(rewards=nans[0]) != build(rewards=nans[1])


def test_a_sample_made_of_prompt_and_completion_equals_the_flat_one() -> None:
    made = Sample.from_prompt(
        id="a", prompt_ids=[1, 2], completion_ids=[3, 4], completion_mask=[1, 0], completion_logprobs=[-1.0, -2.0]
    )
    flat = Sample(id="a", token_ids=[1, 2, 3, 4], loss_mask=[0, 0, 1, 0], logprobs=[0.0, 0.0, -1.0, -2.0])
    assert made == flat


@pytest.mark.parametrize(("given", "expected"), [(0.7, 0.7), ([0.7, 1.2], [0.7, 0.7, 0.7, 1.2])])
def test_a_completion_brings_its_temperatures(given: Any, expected: Any) -> None:
    made = Sample.from_prompt(id="a", prompt_ids=[1, 2], completion_ids=[3, 4], completion_temperatures=given)
    assert made == Sample(id="a", token_ids=[1, 2, 3, 4], loss_mask=[0, 0, 1, 1], temperatures=expected)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"prompt_ids": []}, r"loss_mask\[0\]"),
        ({"completion_temperatures": [1.0]}, "completion_temperatures: 1 values for 2 tokens"),
        ({"completion_temperatures": [1.0, 0.0]}, r"temperatures\[3\]: is 0; must be greater than 0"),
        ({"prompt_ids": [-1]}, r"prompt_ids\[0\]: -1"),
        ({"completion_logprobs": [-1.0]}, "completion_logprobs: 1 values for 2 tokens"),
        ({"completion_mask": [1]}, "completion_loss_mask: 1 values for 2 tokens"),
    ],
)
def test_a_bad_prompt_or_completion_is_refused_by_its_own_name(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        Sample.from_prompt(**{"id": "a", "prompt_ids": [1, 2], "completion_ids": [3, 4], **changes})


def test_a_policy_version_that_nobody_gave_is_none_and_not_zero() -> None:
    assert build().policy_version is None
    assert build(policy_version=0).policy_version == 0
    assert build(policy_version=2**53).policy_version == 2**53
    assert build(weight_versions=[5, -1, 4, 6]).policy_version is None  # of one token nobody knows
    assert build() != build(policy_version=0)


def test_the_oldest_weight_version_is_the_policy_version_unless_given() -> None:
    assert build(weight_versions=[5, 5, 4, 6]).policy_version == 4
    assert build(weight_versions=[5, 5, 4, 6], policy_version=3).policy_version == 3


def test_ids_are_made_when_none_is_given_and_differ() -> None:
    assert Sample(token_ids=[1]).id != Sample(token_ids=[1]).id


def test_a_column_that_is_not_there_is_named_with_those_that_are() -> None:
    with pytest.raises(UnknownKey, match=r"no column 'rewards'; it has token_ids, loss_mask"):
        build()["rewards"]


def test_a_rejected_sample_leaves_the_arrays_it_was_given_as_they_were() -> None:
    ids = np.array([1, 2, 3, 4], np.uint32)
    with pytest.raises(InvalidInput):
        build(token_ids=ids, rewards=math.inf)
    assert ids.flags.writeable
    assert ids.tolist() == [1, 2, 3, 4]


@given(
    st.fixed_dictionaries(
        {
            "id": st.text(max_size=8) | st.just("x" * 513),
            "group": st.text(max_size=3) | st.sampled_from([7, None, "ok", "é", "a\x00b"]),
            "prompt": st.sampled_from(["", "p", "x" * 300]),
            "env": st.sampled_from(["", "math", "\u202e"]),
            "run": st.just(""),
            "mode": st.sampled_from(["rl", "sft", "none"]),
        }
    )
)
def test_names_are_checked_alike_together_and_one_by_one(text: dict[str, Any]) -> None:
    """Plain names pass in one check of the joined text. With a rollout, each name is checked by itself."""

    def problem(**more: str) -> str:
        try:
            check_text(text | more, "sample")
        except InvalidInput as error:
            return str(error)
        return ""

    assert problem(rollout="") == problem(rollout="{}")
