"""Metadata made from arrays is that made from the frame they are encoded in, field by field."""

from __future__ import annotations

import re
import time
from typing import Any

import msgspec
import numpy as np
import pytest
import xxhash
from hypothesis import given, settings

import penstock as ps
from penstock.errors import CorruptFrame, InvalidInput
from penstock.frames import RangedFrame, digest_of, encode_group, front_of
from penstock.frames.metadata import GroupMetadata, check_group, metadata_of, metadata_of_pieces
from penstock.testing.strategies import batches


def as_group(samples: list[ps.Sample]) -> list[ps.Sample]:
    """The same samples as one group of one run and prompt."""
    return [sample.replace(group="g", run="r", prompt="p", mode=samples[0].mode) for sample in samples]


@settings(max_examples=150)
@given(batches().filter(bool))
def test_metadata_of_arrays_are_those_of_the_frame(samples: list[ps.Sample]) -> None:
    made, frame = encode_group(as_group(samples)), ps.encode(as_group(samples))
    assert b"".join(made.pieces) == frame
    assert made.digest() == digest_of([frame]) == xxhash.xxh3_128_digest(frame)
    try:
        expected = check_group(frame, group="g", seq_len=40)
    except InvalidInput as error:
        with pytest.raises(InvalidInput, match=re.escape(str(error))):
            metadata_of_pieces(made, group="g", seq_len=40)
        return
    found = metadata_of_pieces(made, group="g", seq_len=40)
    for name in GroupMetadata.__struct_fields__:  # by their representation: NaN equals NaN
        assert repr(getattr(found, name)) == repr(getattr(expected, name)), name
    assert found.to_bytes() == expected.to_bytes()
    read = GroupMetadata.from_bytes(found.to_bytes())
    assert (read.front, read.size) == (front_of(frame), len(frame))
    assert RangedFrame(read.front).head.ids == read.ids


def sample(i: int, **columns: Any) -> ps.Sample:
    base: dict[str, Any] = {"group": "g", "token_ids": range(8), "loss_mask": np.arange(8) > 0}
    return ps.Sample(id=f"g/{i}", **base | columns)


def test_rewards_are_one_number_per_sample() -> None:
    per_token = [np.nan, 0.5, 0, 0, 0, 0, 0, 1.0]
    given: list[dict[str, Any]] = [{"rewards": 0.5}, {}, {"rewards": per_token}, {"rewards": [0.25] * 8}]
    given += [{"rewards": [np.nan] * 8}, {"rewards": np.nan}]
    found = metadata_of_pieces(encode_group([sample(i, **own) for i, own in enumerate(given)]), group="g", seq_len=8)
    assert np.frombuffer(found.rewards, "<f4").tolist() == pytest.approx(
        [0.5, np.nan, 1.5, 0.25, np.nan, np.nan], nan_ok=True
    )
    assert metadata_of_pieces(encode_group([sample(0)]), group="g", seq_len=8).rewards == b""


def test_environments_are_given_once_where_all_are_the_same() -> None:
    one, two = ([sample(i, env=env) for i, env in enumerate(envs)] for envs in (["a", "a"], ["a", "b"]))
    assert metadata_of_pieces(encode_group(one), group="g", seq_len=8).env == ("a",)
    assert metadata_of_pieces(encode_group(two), group="g", seq_len=8).env == ("a", "b")
    unknown = metadata_of_pieces(encode_group(one), group="g", seq_len=8)
    assert (unknown.truncated, unknown.seconds, unknown.metrics) == (b"", (), {})


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"loss_tokens": bytes(15)}, "15 bytes of loss_tokens; 2 samples take 16"),
        ({"lengths": bytes(24)}, "24 bytes of lengths; 2 samples take 16"),
        ({"rewards": bytes(7)}, "rewards of 1.75 samples; it has 2"),
        ({"rewards": bytes(4)}, "rewards of 1 samples; it has 2"),
        ({"truncated": b"\1"}, "truncated of 1 samples; it has 2"),
        ({"seconds": (1.0, 2.0, 3.0)}, "seconds of 3 samples; it has 2"),
        ({"metrics": {f"m{i}": 1.0 for i in range(33)}}, "33 metrics; at most 32"),
        ({"metrics": {"m" * 65: 1.0}}, "1 metrics; at most 32, with names of at most 64 characters"),
    ],
)
def test_metadata_whose_new_fields_do_not_add_up_are_refused(change: dict[str, Any], words: str) -> None:
    metadata = metadata_of_pieces(encode_group([sample(0), sample(1)]), group="g", seq_len=8)
    with pytest.raises(CorruptFrame, match=f"metadata of a group: {words}"):
        GroupMetadata.from_bytes(msgspec.structs.replace(metadata, **change).to_bytes())
    kept = {"truncated": b"\0\1", "seconds": (1.0, 2.0), "metrics": {"m" * 64: 0.5}}
    again = msgspec.structs.replace(metadata, **kept)
    assert GroupMetadata.from_bytes(again.to_bytes()) == again


def test_metadata_of_arrays_cost_less_than_checking_the_frame() -> None:
    rng = np.random.default_rng(0)
    prompt = rng.integers(0, 150_000, 1024)
    samples = [
        ps.Sample.from_prompt(
            id=f"g/{i}",
            group="g",
            prompt_ids=prompt,
            completion_ids=rng.integers(0, 150_000, 3072),
            completion_logprobs=-rng.random(3072),
            advantages=float(i),
            rewards=float(i % 2),
        )
        for i in range(16)
    ]
    made, frame = encode_group(samples), ps.encode(samples)

    def best(call: Any) -> float:
        took = []
        for _ in range(9):
            began = time.process_time()
            call()
            took.append(time.process_time() - began)
        return min(took)

    arrays = best(lambda: metadata_of(made.samples, made.prefixes, group="g", seq_len=4096))
    checked = best(lambda: check_group(frame, group="g", seq_len=4096))
    assert arrays < checked
