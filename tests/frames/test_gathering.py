"""Samples gathered from the bytes of frames are those that decoding, joining and choosing would give."""

from __future__ import annotations

from typing import Any, get_args

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

import penstock as ps
from penstock.arrays import Samples
from penstock.arrays.digests import sample_digests
from penstock.errors import InvalidInput
from penstock.frames import read_head
from penstock.frames.codings import Profile
from penstock.frames.gathering import gather, open_frame
from penstock.testing.strategies import batches, generators
from tests.support import reference

Picked = list[tuple[bytes, list[int]]]
PROFILES: tuple[Profile, ...] = get_args(Profile)


@st.composite
def routed_groups(draw: st.DrawFn) -> list[ps.Sample]:
    """Samples that begin with one prompt, or as an earlier one does, and whose experts follow from their tokens;
    all, some or none of them have experts, which may be zero or differ where tokens do not."""
    rng = draw(generators())
    has: str = draw(st.sampled_from(["all", "all", "some", "none"]))
    spoilt, zero = draw(st.booleans()) and draw(st.booleans()), draw(st.booleans()) and draw(st.booleans())
    made: list[NDArray[np.uint32]] = [rng.integers(0, 500, int(rng.integers(30, 60)), np.uint32)]
    samples = []
    for i in range(draw(st.integers(1, 5))):
        earlier = made[int(rng.integers(len(made)))]
        ids = np.concatenate([earlier[: int(rng.integers(1, len(earlier) + 1))], rng.integers(0, 500, 9, np.uint32)])
        made.append(ids)
        experts = np.stack([ids + k for k in range(6)], axis=1).reshape(-1, 2, 3).astype(np.uint8)
        if spoilt and i == 2:
            experts[3] += 1
        columns: dict[str, Any] = {}
        if has == "all" or (has == "some" and i % 2):
            columns["routed_experts"] = experts * (not zero)
        samples.append(ps.Sample(id=f"{i}", token_ids=ids, rewards=float(i), **columns))
    return samples


@st.composite
def picks(draw: st.DrawFn) -> Picked:
    """Frames of either profile, with the rows to take of each: ascending, sometimes none, at least one in all."""
    found: Picked = []
    for _ in range(draw(st.integers(1, 4))):
        samples = draw(st.one_of(batches(most=4), routed_groups()))
        rows = draw(st.sets(st.integers(0, len(samples) - 1))) if samples else set()
        found.append((ps.encode(samples, draw(st.sampled_from(PROFILES))), sorted(rows)))
    return found


def gathered(picked: Picked) -> Samples:
    return ps.decode(gather([(open_frame(frame), np.array(rows, np.intp)) for frame, rows in picked]))


def chosen(picked: Picked) -> Samples:
    """The plain way: decode every frame of which something is taken, join them, choose."""
    wanted = [(ps.decode(frame), rows) for frame, rows in picked if rows]
    frames = [frame for frame, _ in wanted]
    starts = np.cumsum([0, *map(len, frames)]).tolist()
    rows = [start + row for start, (_, own) in zip(starts, wanted, strict=False) for row in own]
    return Samples.of(sample for frame in frames for sample in frame).take(rows)


@settings(max_examples=60)
@given(picks())
def test_gathered_samples_equal_decoded_joined_and_chosen_ones(picked: Picked) -> None:
    if not any(rows for _, rows in picked):
        with pytest.raises(InvalidInput, match="gather: no sample was picked; pick at least one"):
            gathered(picked)
        return
    kinds = {c.values.dtype for f, rows in picked if rows and (c := ps.decode(f).columns.get("routed_experts"))}
    if len(kinds) > 1:
        with pytest.raises(InvalidInput, match=r"frames have uint16\[2, 3\] and uint8\[2, 3\] per token; give"):
            gathered(picked)
        return
    got, expected = gathered(picked), chosen(picked)
    assert [reference.record(sample) for sample in got] == [reference.record(sample) for sample in expected]
    assert sample_digests(got) == sample_digests(expected)


def _routed(count: int, *, layers: int = 2, tokens: int = 64) -> list[ps.Sample]:
    """Samples of one prompt that is most of their tokens; their experts follow from the tokens."""
    rng = np.random.default_rng(count + layers)
    prompt = rng.integers(0, 200, tokens, np.uint32)
    samples = []
    for i in range(count):
        ids = np.concatenate([prompt, rng.integers(0, 200, 4, np.uint32)])
        experts = np.repeat(ids.astype(np.uint8), layers * 4).reshape(-1, layers, 4)
        samples.append(ps.Sample(id=f"{i}", token_ids=ids, routed_experts=experts))
    return samples


@pytest.mark.parametrize("profile", PROFILES)
def test_a_prefix_that_picked_samples_share_is_stored_once(profile: Profile) -> None:
    frame = open_frame(ps.encode(_routed(8), profile))
    one, all_of_them = (len(gather([(frame, np.arange(n))])) for n in (1, 8))
    per_token = 2 * 4 + 2
    assert all_of_them < one + 7 * (4 * per_token + 60)


def test_a_prefix_shared_with_a_sample_that_was_not_picked_comes_along() -> None:
    samples = _routed(4)
    picked: Picked = [(ps.encode(samples), [2, 3])]
    assert gathered(picked) == Samples.of(samples[2:])
    assert read_head(gather([(open_frame(picked[0][0]), np.array([2, 3]))])).prefixes is not None


def test_a_frame_that_is_picked_from_twice_gives_both_parts_in_order() -> None:
    samples = _routed(4)
    frame = ps.encode(samples)
    assert gathered([(frame, [3]), (frame, [0, 1])]) == Samples.of([samples[3], samples[0], samples[1]])


def test_experts_of_differing_shapes_are_refused_in_words() -> None:
    picked: Picked = [(ps.encode(_routed(2, layers=layers)), [0]) for layers in (2, 3)]
    with pytest.raises(InvalidInput, match=r"routed_experts: frames have uint8\[2, 4\] and uint8\[3, 4\] per token"):
        gathered(picked)


def _answers(name: str, **columns: Any) -> list[ps.Sample]:
    """Two samples of five tokens, the last three trained."""
    mask = [False, False, True, True, True]
    return [ps.Sample(id=f"{name}{i}", token_ids=[1, 2, 3, 4, i], loss_mask=mask, **columns) for i in range(2)]


def test_log_probabilities_of_trained_tokens_are_gathered_whatever_the_other_frames_have() -> None:
    sparse = _answers("a", logprobs=np.array([0, 0, -1, -2, -3], np.float32))
    full = _answers("b", logprobs=np.array([-9, -9, -1, -2, -3], np.float32))
    absent = _answers("c")
    assert "logprobs" in open_frame(ps.encode(sparse)).sparse
    assert "logprobs" not in open_frame(ps.encode(full)).sparse
    for groups in (
        [sparse],
        [sparse, sparse],
        [sparse, full],
        [full, sparse],
        [sparse, absent],
        [absent, sparse, full],
    ):
        picked: Picked = [(ps.encode(group), [1]) for group in groups]
        assert list(gathered(picked)) == list(chosen(picked))
        assert sample_digests(gathered(picked)) == sample_digests(chosen(picked))


def test_lists_that_only_trained_tokens_have_are_gathered() -> None:
    kept: list[list[int]] = [[], [], [3, 7], [4], [0, 1, 9]]
    group = _answers("a", logprobs=np.array([0, 0, -1, -2, -3], np.float32), sampling_mask=kept)
    picked: Picked = [(ps.encode(group), [1]), (ps.encode(_answers("b")), [0])]
    assert list(gathered(picked)) == list(chosen(picked)) == [group[1], _answers("b")[0]]
