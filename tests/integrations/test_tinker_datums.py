"""Samples as datums of the real Tinker types: shifted by one, images as chunks, outputs back by sample id."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tinker
from hypothesis import given, settings
from hypothesis import strategies as st
from tinker.proto.request_conv import forward_backward_request_to_proto
from tinker.types.forward_backward_input import ForwardBackwardInput
from tinker.types.forward_backward_request import ForwardBackwardRequest

import penstock as ps
from penstock.arrays import ImageSpan
from penstock.convert import to_samples
from penstock.errors import InvalidInput
from penstock.integrations.formats.tinker_datums import from_datums, sample_ids, to_datums
from penstock.testing import draw_screenshot


def numbers(datum: Any, name: str) -> list[Any]:
    values: list[Any] = datum.loss_fn_inputs[name].tolist()
    return values


@st.composite
def rollouts(draw: st.DrawFn) -> ps.Sample:
    count, seed = draw(st.integers(2, 40)), draw(st.integers(0, 2**32 - 1))
    rng = np.random.default_rng(seed)
    mask = rng.random(count) < draw(st.sampled_from([0.0, 0.5, 1.0]))
    mask[0] = False
    return ps.Sample(
        id=f"s{seed}",
        token_ids=rng.integers(0, 2**31 - 1, count),
        loss_mask=mask,
        logprobs=np.where(mask, -rng.exponential(1, count), 0).astype(np.float32),
        advantages=float(np.float32(rng.normal()))
        if draw(st.booleans())
        else rng.normal(size=count).astype(np.float32),
    )


@settings(max_examples=50)
@given(samples=st.lists(rollouts(), max_size=4, unique_by=lambda sample: sample.id))
def test_samples_come_back_from_datums_by_their_provenance(samples: list[ps.Sample]) -> None:
    made = to_datums(samples, provenance=True)
    assert [sample_ids(datum) for datum in made.datums] == [(sample.id,) for sample in samples]
    for sample, back in zip(samples, from_datums(made.datums), strict=True):
        assert back.id == sample.id and back.token_ids.tolist() == sample.token_ids.tolist()
        assert back.loss_mask.tolist() == sample.loss_mask.tolist()
        mask = sample.loss_mask
        for name in ("logprobs", "advantages"):
            a, b = (np.broadcast_to(each[name], len(mask))[mask] for each in (sample, back))
            assert a.tolist() == b.tolist()


@given(sample=rollouts())
def test_spans_tile_the_inputs_and_the_targets_and_name_what_was_sampled(sample: ps.Sample) -> None:
    [datum] = to_datums([sample], provenance=True).datums
    for spans, first in ((datum.model_input_spans, 0), (datum.loss_fn_input_spans, 1)):
        at = first
        for span in spans or ():
            sampled = isinstance(span, tinker.SampledProvenanceSpan)
            assert span.offset == at and (sample.loss_mask[at : at + span.length] == sampled).all()
            at += span.length
        assert at == sample.num_tokens - 1 + first


def test_targets_are_the_next_tokens_and_nothing_untrained_has_a_signal() -> None:
    columns: dict[str, Any] = {
        "loss_mask": [0, 0, 1, 1, 0],
        "logprobs": [np.nan, 9e-4, -0.5, -0.25, np.nan],
        "advantages": 2.0,
    }
    [datum] = to_datums([ps.Sample(id="a", token_ids=[1, 2, 3, 4, 5], **columns)]).datums
    assert datum.model_input.to_ints() == [1, 2, 3, 4] and numbers(datum, "target_tokens") == [2, 3, 4, 5]
    assert numbers(datum, "logprobs") == [0, -0.5, -0.25, 0] and numbers(datum, "advantages") == [0, 2, 2, 0]
    assert set(datum.loss_fn_inputs) == {"target_tokens", "logprobs", "advantages"}


def test_tokens_without_a_policy_gradient_weight_have_no_advantage() -> None:
    turns = [ps.Turn([1, 2]), ps.Turn([3, 4], logprobs=[-0.5, -0.25]), ps.Turn([5], ce_weights=0.5)]
    samples = to_samples(ps.Trajectory(turns=turns), advantage=2.0)
    [datum] = to_datums(samples).datums
    assert datum.loss_fn_inputs["advantages"].tolist() == [0.0, 2.0, 2.0, 0.0]
    [datum] = to_datums(samples, loss_fn="cross_entropy").datums
    assert datum.loss_fn_inputs["weights"].tolist() == [0.0, 0.0, 0.0, 0.5]


def test_cross_entropy_takes_weights_and_gives_them_back() -> None:
    plain = ps.Sample(id="a", mode="sft", token_ids=[1, 2, 3], loss_mask=[0, 1, 1])
    weighed = plain.replace(id="b", ce_weights=[7.0, 0.5, 2.0])
    made = to_datums([plain, weighed], loss_fn="cross_entropy")
    assert [numbers(datum, "weights") for datum in made.datums] == [[1, 1], [0.5, 2]]
    back = from_datums(made.datums, ids=made.ids)
    assert [sample.mode for sample in back] == ["sft", "sft"] and "ce_weights" not in back[0]
    assert back[1]["ce_weights"].tolist() == [0, 0.5, 2] and back[1].loss_mask.tolist() == [False, True, True]


def test_outputs_of_forward_backward_come_back_by_sample_along_its_tokens() -> None:
    samples = [
        ps.Sample(id=name, token_ids=range(n), logprobs=[0] * n, advantages=0.0) for name, n in (("a", 3), ("b", 2))
    ]
    made = to_datums(samples)
    outputs = [{"logprobs": tinker.TensorData.from_numpy(np.arange(n, dtype=np.float32))} for n in (2, 1)]
    found = made.by_sample(outputs)
    assert list(found) == ["a", "b"] and found["a"][1:].tolist() == [0, 1] and np.isnan(found["a"][0])
    with pytest.raises(InvalidInput, match="outputs: 1 for 2 datums"):
        made.by_sample(outputs[:1])


def test_an_image_is_a_chunk_in_the_place_of_its_tokens(tmp_path: Path) -> None:
    store = ps.AssetStore(tmp_path)
    ref = store.put(draw_screenshot(seed=0, width=56, height=56))
    span = ImageSpan(hash=ref.hash, grid=(1, 4, 4), offset=1, length=4)
    sample = ps.Sample(
        id="a",
        token_ids=[7, 9, 9, 9, 9, 8, 6],
        loss_mask=[0] * 6 + [1],
        logprobs=[-1.0] * 7,
        advantages=1.0,
        images=[span],
    )
    [datum] = to_datums([sample], images=store.get, provenance=True).datums
    text, image, rest = datum.model_input.chunks
    assert (text.tokens, image.expected_tokens, rest.tokens) == ([7], 4, [8])
    assert image.data == store.get(ref.hash) and image.format == "png"
    assert numbers(datum, "target_tokens") == [0, 0, 0, 0, 8, 6]
    with pytest.raises(InvalidInput, match="no bytes; pass images="):
        to_datums([sample])
    with pytest.raises(InvalidInput, match="not text"):
        from_datums([datum])
    with pytest.raises(InvalidInput, match="ends the sample"):
        to_datums(
            [ps.Sample(token_ids=[7, 9, 9, 9, 9], logprobs=[0] * 5, advantages=0.0, images=[span])], images=store.get
        )


def test_the_client_of_tinker_can_send_them() -> None:
    """Its own encoder of requests takes what is made here."""
    sample = ps.Sample(id="a", token_ids=[1, 2, 3], loss_mask=[0, 1, 1], logprobs=[0, -0.5, -0.25], advantages=1.0)
    made = to_datums([sample], provenance=True)
    given_to = ForwardBackwardInput(data=made.datums, loss_fn="importance_sampling")
    message = forward_backward_request_to_proto(
        ForwardBackwardRequest(model_id="m", seq_id=1, forward_backward_input=given_to)
    )
    [datum] = message.data
    assert np.frombuffer(datum.model_input[0].encoded_text.tokens, np.int32).tolist() == [1, 2]
    assert np.frombuffer(datum.loss_fn_inputs["target_tokens"].dense, np.int64).tolist() == [2, 3]
    assert [span.sampled_tokens.sequence_id for span in datum.loss_fn_input_spans] == ["a"]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"token_ids": [5], "logprobs": [0.0], "loss_mask": None}, "1 token; a datum needs at least two"),
        ({"logprobs": None}, "sample 'a'.logprobs: none; loss 'ppo' needs them"),
        ({"advantages": None}, "sample 'a'.advantages: none"),
        ({"token_ids": [1, 2**31, 3]}, "ids of a datum must be below 2"),
    ],
)
def test_a_sample_that_is_no_datum_says_why(changes: dict[str, Any], said: str) -> None:
    sample = ps.Sample(id="a", token_ids=[1, 2, 3], loss_mask=[0, 1, 1], logprobs=[0, -0.5, -0.25], advantages=1.0)
    with pytest.raises(InvalidInput, match=said):
        to_datums([sample.replace(**changes)], loss_fn="ppo")


def test_the_cookbooks_mask_says_what_is_trained() -> None:
    """A sampled token with a log-probability and an advantage of 0.0 is trained too."""
    data = {"target_tokens": [6, 7, 8], "logprobs": [0.0, 0.0, -0.5], "advantages": [0.0, 0.0, 0.0]}
    inputs = {name: tinker.TensorData.from_numpy(np.array(values)) for name, values in data.items()}
    inputs["mask"] = tinker.TensorData.from_numpy(np.array([0.0, 1.0, 1.0], np.float32))
    datum = tinker.Datum(model_input=tinker.ModelInput.from_ints([5, 6, 7]), loss_fn_inputs=inputs)
    [sample] = from_datums([datum])
    assert sample.loss_mask.tolist() == [False, False, True, True] and sample.mode == "rl"
    inputs["mask"] = tinker.TensorData.from_numpy(np.ones(2, np.float32))
    short = tinker.Datum(model_input=tinker.ModelInput.from_ints([5, 6, 7]), loss_fn_inputs=inputs)
    with pytest.raises(InvalidInput, match=r"datum '0'.mask: \(2,\) values for 3 targets"):
        from_datums([short])


def test_a_loss_that_tinker_does_not_have_is_rejected() -> None:
    sample = ps.Sample(id="a", token_ids=[5, 6], loss_mask=[0, 1], logprobs=[0, -0.5], advantages=1.0)
    with pytest.raises(InvalidInput, match="loss_fn 'nonsense': unknown to tinker; use one of cross_entropy, "):
        to_datums([sample], loss_fn="nonsense")
    assert to_datums([sample], loss_fn="cispo").ids == ("a",)
