"""Whatever can be a sample comes back from bytes as it went in, to the bit."""

from __future__ import annotations

from typing import get_args

import pytest
from hypothesis import given

import penstock as ps
from penstock.arrays import Samples
from penstock.frames import read_head
from penstock.frames.codings import Profile
from penstock.testing.strategies import batches
from tests.support.reference import record

PROFILES: tuple[Profile, ...] = get_args(Profile)


@pytest.mark.parametrize("profile", PROFILES)
@given(samples=batches())
def test_decoded_samples_equal_what_was_encoded_to_the_bit(profile: Profile, samples: list[ps.Sample]) -> None:
    back = ps.decode(ps.encode(samples, profile))
    assert [record(sample) for sample in back] == [record(sample) for sample in samples]


@given(samples=batches())
def test_encoding_decoded_samples_again_gives_the_same_bytes(samples: list[ps.Sample]) -> None:
    frame = ps.encode(samples)
    back = ps.decode(frame)
    assert ps.encode(back) == frame
    assert ps.encode(list(back)) == frame


@given(samples=batches())
def test_columns_and_sample_objects_encode_to_the_same_bytes(samples: list[ps.Sample]) -> None:
    assert ps.encode(Samples.of(samples), "small") == ps.encode(iter(samples), "small")


@given(samples=batches())
def test_front_tells_lengths_ids_and_accounting_from_a_frame_cut_behind_it(samples: list[ps.Sample]) -> None:
    frame = ps.encode(samples)
    body = sum(_body_bytes(frame))
    for data in (frame, frame[: len(frame) - body]):
        front = read_head(data)
        assert front.ids == tuple(sample.id for sample in samples)
        assert front.text["group"] == tuple(sample.group for sample in samples)
        assert front.lengths.tolist() == [sample.num_tokens for sample in samples]
        assert front.loss_tokens.tolist() == [sample.loss_tokens for sample in samples]
        assert front.policy_versions.tolist() == [
            -1 if sample.policy_version is None else sample.policy_version for sample in samples
        ]


def _body_bytes(frame: bytes) -> tuple[int]:
    return (int.from_bytes(frame[24:32], "little"),)
