"""Metadata of groups say of samples what planning would find in them: no less, and the same after any way they take."""

from __future__ import annotations

import zlib
from dataclasses import fields, replace
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import penstock as ps
from penstock.arrays import Samples
from penstock.arrays.digests import sample_digests
from penstock.arrays.sample_metadata import SampleMetadata
from penstock.errors import CorruptFrame, InvalidInput
from penstock.frames.metadata import WITH, WITHOUT, GroupMetadata, check_group, join_metadata
from penstock.frames.node_prefixes import find_node_prefixes
from penstock.frames.prefixes import MIN_SHARED
from penstock.packing import Packing, pack_with, plan
from tests.support.packable import packable, packings

Groups = list[list[ps.Sample]]


@st.composite
def groups(draw: st.DrawFn) -> Groups:
    """Groups of samples of every kind, each of one run."""
    found = []
    advantages = draw(st.booleans())
    for k in range(draw(st.integers(1, 4))):
        samples = draw(packable(most=6, advantages=advantages).filter(bool))
        run = samples[0].run
        found.append([sample.replace(id=f"{k}/{i}", group=f"g{k}", run=run) for i, sample in enumerate(samples)])
    return found


def metadata_of(samples: list[ps.Sample], seq_len: int = 64) -> GroupMetadata:
    return check_group(ps.encode(samples), group=samples[0].group, seq_len=seq_len)


def group(*columns: dict[str, Any], tokens: int = 8) -> list[ps.Sample]:
    """One sample for each, all of whose tokens but the first are trained."""
    mask = np.arange(tokens) > 0
    base: dict[str, Any] = {"group": "g", "token_ids": range(tokens), "loss_mask": mask}
    return [ps.Sample(**base | {"id": f"g/{i}"} | own) for i, own in enumerate(columns)]


@settings(max_examples=30)
@given(groups(), packings())
def test_joined_metadata_are_those_of_the_joined_samples(made: Groups, packing: Packing) -> None:
    metadata = [metadata_of(samples, packing.seq_len) for samples in made]
    samples = Samples.of(sample for samples in made for sample in samples)
    joined, expected = join_metadata(metadata), SampleMetadata.of(samples, packing.seq_len)
    shared, looked = joined.shared, find_node_prefixes(samples)
    assert shared is not None
    for name in ("parents", "lengths", "patches", "parted"):
        assert getattr(shared, name).tolist() == getattr(looked, name).tolist()
    joined = replace(joined, shared=None)
    for field in fields(SampleMetadata):
        got, wanted = getattr(joined, field.name), getattr(expected, field.name)
        if field.name == "own":  # by their words: NaN equals NaN
            got, wanted = repr(got), repr(wanted)
        if field.name == "has":
            got, wanted = ({name: flags.tolist() for name, flags in has.items()} for has in (got, wanted))
        assert np.array_equal(got, wanted) if isinstance(wanted, np.ndarray) else got == wanted, field.name
    assert [digest for own in metadata for digest in own.digests] == sample_digests(samples)
    assert sum(own.num_tokens for own in metadata) == samples.num_tokens


@settings(max_examples=30)
@given(groups(), packings(), st.booleans())
def test_a_step_planned_from_metadata_is_the_one_that_packing_the_samples_gives(
    made: Groups, packing: Packing, trees: bool
) -> None:
    packing = replace(packing, trees=trees)
    metadata = join_metadata([metadata_of(samples, packing.seq_len) for samples in made])
    samples = Samples.of(sample for samples in made for sample in samples)
    expected, got = pack_with(packing, samples).plan, plan(metadata, packing)
    assert [part.to_bytes() for part in got.rank_plans] == [part.to_bytes() for part in expected.rank_plans]
    assert got.totals == expected.totals


@settings(max_examples=30)
@given(groups())
def test_metadata_survive_being_written_down(made: Groups) -> None:
    for samples in made:
        metadata = metadata_of(samples)
        assert GroupMetadata.from_bytes(metadata.to_bytes()).to_bytes() == metadata.to_bytes()


@settings(max_examples=30)
@given(groups(), st.sampled_from([8, 30, 64]), st.sampled_from([8, 30, 64]))
def test_metadata_that_fit_another_length_are_those_made_for_it(made: Groups, before: int, after: int) -> None:
    for samples in made:
        first, second = metadata_of(samples, before), metadata_of(samples, after)
        assert first.fits(before)
        if first.fits(after):
            assert msgspec.structs.replace(first, seq_len=after).to_bytes() == second.to_bytes()
        else:
            assert max(sample.num_tokens for sample in samples) > min(before, after)


def test_metadata_that_cannot_be_read_are_an_error_in_words() -> None:
    metadata = metadata_of(group({}))
    unreadable = [zlib.compress(data) for data in (b"", b"\xc1", msgspec.msgpack.encode(["x"]), b"\x91\xa1\xff")]
    for data in (b"", b"\xc1", metadata.to_bytes()[:-1], metadata.to_bytes() + b"x", *unreadable):
        with pytest.raises(CorruptFrame, match="metadata of a group: "):
            GroupMetadata.from_bytes(data)
    later = msgspec.structs.replace(metadata, format=5).to_bytes()
    with pytest.raises(CorruptFrame, match="metadata of a group: format 5; this version reads 4"):
        GroupMetadata.from_bytes(later)


@pytest.mark.deep
def test_metadata_that_would_inflate_without_end_are_refused_before_they_do() -> None:
    bomb = zlib.compress(bytes(1 << 28), 9)
    assert len(bomb) < 300_000
    with pytest.raises(CorruptFrame, match="metadata of a group: cut off, or more than 67,108,864 bytes"):
        GroupMetadata.from_bytes(bomb)


def test_a_prefix_is_shared_as_far_as_all_agrees_that_a_model_computes_from() -> None:
    tokens = np.arange(100)
    logprobs, experts = np.full(100, -0.5, np.float32), np.zeros((100, 2, 3), np.uint8)
    other_logprobs, other_experts = logprobs.copy(), experts.copy()
    other_logprobs[70:] = -0.25
    other_experts[50, 1] = 1
    base: dict[str, Any] = {"token_ids": tokens, "loss_mask": tokens > 0}
    base |= {"logprobs": logprobs, "routed_experts": experts}
    changes: list[dict[str, Any]] = [{}, {}, {"logprobs": other_logprobs}, {"routed_experts": other_experts}]
    made = [ps.Sample(id=f"g/{i}", group="g", rewards=float(i), **base | own) for i, own in enumerate(changes)]
    found = metadata_of(made, seq_len=200)
    assert found.parents == (-1, 0, 1, 2)
    assert found.shared == (0, 100, 100, 50)  # log-probabilities are each sample's own


def test_a_prefix_whose_first_token_was_routed_otherwise_is_not_shared() -> None:
    tokens = 2 * MIN_SHARED
    experts = [np.full((tokens, 2, 3), k, np.uint8) for k in (1, 2)]
    found = metadata_of(group(*({"routed_experts": own} for own in experts), tokens=tokens))
    assert (found.parents, found.shared, found.parted) == ((-1, -1), (0, 0), (0, tokens))
    assert metadata_of(group({"token_ids": range(8)}, {"token_ids": range(8, 16)})).shared == ()


def test_trained_tokens_are_counted_by_the_version_that_sampled_them() -> None:
    versions = np.array([3, 3, 3, 4, 4, 4, 4, 9])
    mask = np.array([0, 0, 1, 1, 1, 0, 1, 0], np.bool_)
    found = metadata_of(group({"weight_versions": versions, "loss_mask": mask}, {}))
    assert found.versions == (((3, 1), (4, 3)), ((-1, 7),))
    assert metadata_of(group({}, {})).versions == ()


def test_a_group_is_as_old_as_its_oldest_sample_that_says() -> None:
    assert metadata_of(group({"policy_version": 7}, {"policy_version": 5}, {})).policy_version == 5
    assert metadata_of(group({}, {})).policy_version is None


def test_a_group_says_what_the_others_in_its_step_must_have() -> None:
    have = {"logprobs": np.full(8, -1.0)}
    assert metadata_of(group(have, have)).kinds == {"logprobs": WITH, "advantages": WITHOUT}
    assert metadata_of(group({"advantages": 0.5})).kinds == {"logprobs": WITHOUT, "advantages": WITH}
    assert metadata_of(group({"mode": "sft"})).kinds == {}
    assert metadata_of(group({"mode": "sft"} | have)).kinds == {"logprobs": WITH}
    experts = {"routed_experts": np.zeros((8, 4, 2), np.uint16), "mode": "sft"}
    assert metadata_of(group(experts)).kinds == {"routed_experts": "<u2[4, 2]"}


def test_a_group_of_two_kinds_is_refused_in_words() -> None:
    with pytest.raises(
        InvalidInput,
        match=r"group 'g': sample 'g/1' has no logprobs, which 1 other .* of mode rl or opd, .* or for none",
    ):
        metadata_of(group({"logprobs": np.full(8, -1.0)}, {}))
    with pytest.raises(InvalidInput, match="sample 'g/1' has no logprobs"):
        metadata_of(group({"logprobs": np.full(8, -1.0), "mode": "sft"}, {}))
    untrained = {"loss_mask": np.zeros(8, np.bool_)}
    assert metadata_of(group({"logprobs": np.full(8, -1.0)}, untrained)).kinds["logprobs"] == WITH


@pytest.mark.parametrize(
    ("samples", "words"),
    [
        (group({"group": "h"}), "group 'g': holds a sample of group 'h'; put groups one by one"),
        (group({"run": "a"}, {"run": "b"}), "group 'g': samples of runs 'a' and 'b'; a group belongs to one run"),
        (group({"prompt": "1"}, {"prompt": "2"}), "samples of prompts '1' and '2'; a group belongs to one prompt"),
        (group({"id": "x"}, {"id": "x"}), "group 'g': two samples have the same id; ids must be unique"),
        ([], "group 'g': no samples; a group has at least one"),
    ],
)
def test_a_group_that_is_not_one_group_is_refused(samples: list[ps.Sample], words: str) -> None:
    with pytest.raises(InvalidInput, match=words):
        check_group(ps.encode(samples), group="g", seq_len=64)


def test_an_altered_frame_has_no_metadata() -> None:
    frame = bytearray(ps.encode(group({})))
    frame[-1] ^= 1
    with pytest.raises(CorruptFrame):
        check_group(frame, group="g", seq_len=64)


def test_the_metadata_of_sixteen_samples_take_a_few_kilobytes() -> None:
    rng = np.random.default_rng(0)
    prompt = rng.integers(0, 2**17, 1000)
    samples = [
        ps.Sample.from_prompt(
            id=f"math/train-000017/{i}",
            group="math/train-000017",
            policy_version=3,
            prompt_ids=prompt,
            completion_ids=rng.integers(0, 2**17, 3000),
            completion_logprobs=-rng.random(3000),
            advantages=float(i),
            rewards=float(i % 2),
        )
        for i in range(16)
    ]
    assert len(metadata_of(samples, 4096).to_bytes()) <= 6000
