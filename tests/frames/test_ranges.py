"""Samples read by ranges of a frame are those that decoding the whole frame gives, and need few of its bytes."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import penstock as ps
from penstock.arrays import Samples
from penstock.arrays.digests import sample_digests
from penstock.arrays.ragged import Ragged, same_bits
from penstock.errors import CorruptFrame, InvalidInput
from penstock.frames import Pieces, RangedFrame, StepMemory, assemble, front_of, front_size
from penstock.frames.assembly import LARGE_COLUMN
from penstock.frames.gathering import gather, open_frame
from penstock.frames.parts import Range, merged
from penstock.frames.ranges import GAP, SMALL_FRAME
from tests.frames.frames import FRAMES
from tests.frames.test_gathering import Picked, picks

GAPS = (0, 7, GAP)


def read(frame: bytes, rows: list[int], gap: int = GAP) -> tuple[RangedFrame, list[int], Pieces]:
    """One pick, read from nothing but the front and the ranges of these rows."""
    ranged = RangedFrame(front_of(frame))
    ranges = ranged.ranges(rows, gap=gap)
    return ranged, rows, Pieces(ranges, [frame[a:b] for a, b in ranges])


def assembled(picked: Picked, gap: int = GAP, memory: StepMemory | None = None) -> Samples:
    return assemble([read(frame, rows, gap) for frame, rows in picked], memory=memory)


def gathered(picked: Picked) -> Samples:
    return ps.decode(gather([(open_frame(frame), np.array(rows, np.intp)) for frame, rows in picked]))


def assert_identical(got: Samples, expected: Samples) -> None:
    """Not only equal samples: the same columns, dtypes, offsets and bits."""
    assert list(got.columns) == list(expected.columns)
    for name, column in expected.columns.items():
        own = got.columns[name]
        assert own.values.dtype == column.values.dtype, name
        assert np.array_equal(own.offsets, column.offsets), name
        assert same_bits(own.values, column.values), name
        assert own.offsets is got.offsets or column.offsets is not expected.offsets, name
    assert got.text == expected.text
    assert got.images == expected.images
    assert np.array_equal(got.policy_versions, expected.policy_versions)
    assert repr(got.own) == repr(expected.own)
    assert sample_digests(got) == sample_digests(expected)


@settings(max_examples=150)
@given(picks(), st.sampled_from(GAPS))
def test_assembled_samples_are_the_decoded_gathered_ones(picked: Picked, gap: int) -> None:
    try:
        expected = gathered(picked)
    except InvalidInput as error:
        with pytest.raises(InvalidInput, match=str(error).partition(":")[2].replace("[", r"\[")):
            assembled(picked, gap)
        return
    assert_identical(assembled(picked, gap), expected)


@settings(max_examples=60)
@given(picks(), st.randoms(use_true_random=False))
def test_rows_may_come_in_any_order_and_twice(picked: Picked, random: Any) -> None:
    for frame, rows in picked:
        if rows:
            mixed = [random.choice(rows) for _ in range(len(rows) + 1)]
            samples = ps.decode(frame)
            assert list(assembled([(frame, mixed)])) == [samples[i] for i in mixed]


@pytest.mark.parametrize("path", FRAMES, ids=lambda path: path.stem)
def test_golden_frames_are_read_by_range(path: Any) -> None:
    frame = path.read_bytes()
    samples = ps.decode(frame)
    everything = list(range(len(samples)))
    for rows in (*([i] for i in everything), everything[::2], everything):
        if rows:
            assert_identical(assembled([(frame, rows)], gap=0), gathered([(frame, rows)]))
            whole = RangedFrame(frame)
            assert_identical(assemble([(whole, rows, lambda a, b: frame[a:b])]), gathered([(frame, rows)]))


# ---------------------------------------------------------------- how many bytes


def group(samples: int, tokens: int, *, seed: int = 0, experts: tuple[int, int] | None = None) -> list[ps.Sample]:
    """Answers to one prompt, a quarter of the tokens, with log-probabilities; or with routed experts too."""
    rng = np.random.default_rng(seed)
    shared = tokens // 4
    prompt = rng.integers(0, 151_936, shared)
    on_prompt = rng.integers(0, 128, (shared, *experts), np.uint8) if experts else None
    made = []
    for i in range(samples):
        own = tokens - shared
        columns: dict[str, Any] = {}
        if experts is not None and on_prompt is not None:
            rows = rng.integers(0, 128, (own, *experts), np.uint8)
            columns["routed_experts"] = np.concatenate([on_prompt, rows])
        made.append(
            ps.Sample.from_prompt(
                id=f"g{seed}/{i}",
                group=f"g{seed}",
                prompt_ids=prompt,
                completion_ids=rng.integers(0, 151_936, own),
                completion_logprobs=-rng.exponential(1, own).astype(np.float32),
                advantages=float(i),
                **columns,
            )
        )
    return made


def needed_bytes(sample: ps.Sample, *, experts: int = 0) -> int:
    """What the values of one sample take in their codings: 18 bits an id, four bytes a trained token, the experts."""
    return int(sample.num_tokens * 2.25) + 4 * sample.loss_tokens + sample.num_tokens * experts


@pytest.mark.parametrize("row", [0, 5, 15])
def test_one_sample_of_sixteen_reads_little_more_than_its_own_bytes(row: int) -> None:
    text, routed = group(16, 4096), group(16, 2048, experts=(48, 8))
    for samples, experts, most in ((text, 0, 3.0), (routed, 48 * 8, 1.1)):
        frame = ps.encode(samples)
        taken = sum(b - a for a, b in RangedFrame(front_of(frame)).ranges([row]))
        exact = sum(b - a for a, b in RangedFrame(front_of(frame)).ranges([row], gap=0))
        needed = needed_bytes(samples[row], experts=experts)
        assert exact <= 1.02 * needed + 64
        assert taken <= most * needed
        assert taken < len(frame) / 5
        assert list(assembled([(frame, [row])])) == [samples[row]]


def test_a_shared_prefix_is_read_once() -> None:
    frame = ps.encode(group(16, 512, experts=(48, 8)))
    ranged = RangedFrame(front_of(frame))
    one, two = (sum(b - a for a, b in ranged.ranges(rows, gap=0)) for rows in ([3], [3, 4]))
    own = 384 * (48 * 8 + 4 + 2.25)
    assert two - one == pytest.approx(own, abs=64)


def test_the_lists_of_one_sample_are_read_alone() -> None:
    rng = np.random.default_rng(0)
    samples = []
    for i in range(8):
        ids = rng.integers(0, 150_000, 500)
        kept = [sorted({int(one), *rng.integers(0, 150_000, 20).tolist()}) for one in ids]
        samples.append(ps.Sample(id=f"{i}", token_ids=ids, loss_mask=np.arange(500) > 0, sampling_mask=kept))
    frame = ps.encode(samples)
    exact = sum(b - a for a, b in RangedFrame(front_of(frame)).ranges([3], gap=0))
    assert exact < len(frame) / 7
    assert list(assembled([(frame, [3])], gap=0)) == [samples[3]]


def test_the_front_of_sixteen_samples_is_small_and_all_that_is_needed() -> None:
    frame = ps.encode(group(16, 4096))
    front = front_of(frame)
    assert len(front) == front_size(frame) < 700
    assert front_of(frame[: len(front)]) == front
    with pytest.raises(CorruptFrame, match=f"{len(front) - 1} bytes where its front takes {len(front)}"):
        front_of(frame[: len(front) - 1])
    assert RangedFrame(front).size == len(frame)


def test_small_frames_and_those_of_which_most_is_needed_are_read_whole() -> None:
    small, large = ps.encode(group(16, 1024)), ps.encode(group(16, 512, experts=(48, 8)))
    assert len(small) < SMALL_FRAME < len(large)
    half, most = list(range(0, 16, 2)), list(range(1, 16))
    for frame, rows, whole in ((small, [3], True), (large, half, False), (large, most, True), (large, [], False)):
        ranged = RangedFrame(front_of(frame))
        assert (ranged.plan(rows) == [(ranged.front_size, ranged.size)]) == whole
        if rows:
            fetch = Pieces(ranged.plan(rows), [frame[a:b] for a, b in ranged.plan(rows)])
            assert list(assemble([(ranged, rows, fetch)])) == [ps.decode(frame)[i] for i in rows]


# ---------------------------------------------------------------- memory


def test_large_columns_lie_in_the_memory_of_the_step_before() -> None:
    memory = StepMemory()
    steps = [
        [(ps.encode(group(16, tokens, seed=s)), list(range(16))) for s in (1, 2)] for tokens in (60_000, 50_000, 55_000)
    ]
    first = assembled(steps[0], memory=memory)
    assert_identical(first, gathered(steps[0]))
    before, address = memory.nbytes, first["token_ids"].values.ctypes.data
    assert before >= first["token_ids"].values.nbytes >= LARGE_COLUMN
    for step in steps[1:]:
        got = assembled(step, memory=memory)
        assert_identical(got, gathered(step))
        assert got["token_ids"].values.ctypes.data == address
    assert memory.nbytes == before


def test_sparse_columns_in_used_memory_are_zero_where_nothing_is_trained() -> None:
    class Dirty(StepMemory):
        def take(self, name: str, size: int) -> Any:
            found = super().take(name, size)
            found[:] = 0xFF
            return found

    tokens = LARGE_COLUMN // 4 // 2 + 100
    for scattered in (False, True):
        mask = np.arange(tokens) % 2 == 1 if scattered else np.arange(tokens) > tokens // 2
        logprobs = np.where(mask, -0.5, 0).astype(np.float32)
        samples = [
            ps.Sample(id=f"{i}", token_ids=np.full(tokens, i), loss_mask=mask, logprobs=logprobs) for i in (1, 2)
        ]
        picked: Picked = [(ps.encode(samples), [0, 1])]
        assert_identical(assembled(picked, memory=Dirty()), gathered(picked))


# ---------------------------------------------------------------- pieces


def test_pieces_serve_what_was_read_and_nothing_else() -> None:
    pieces = Pieces([(20, 23), (10, 14)], [b"xyz", np.frombuffer(b"abcd", np.uint8)])  # type: ignore[list-item]
    assert bytes(pieces(10, 14)) == b"abcd"
    assert bytes(pieces(21, 22)) == b"y"
    for a, b in ((9, 11), (10, 15), (14, 15), (22, 24), (30, 31)):
        with pytest.raises(CorruptFrame, match=f"bytes {a} to {b} were not fetched"):
            pieces(a, b)
    with pytest.raises(CorruptFrame, match="3 bytes were read of the range 0 to 4"):
        Pieces([(0, 4)], [b"abc"])
    with pytest.raises(CorruptFrame, match="1 buffers for 0 ranges"):
        Pieces([], [b""])


def test_a_store_that_returns_fewer_bytes_is_noticed() -> None:
    frame = ps.encode(group(2, 64))
    with pytest.raises(CorruptFrame, match="token_ids: 0 bytes where bytes"):
        assemble([(RangedFrame(frame), [0], lambda a, b: b"")])


@given(
    st.lists(st.tuples(st.integers(0, 60), st.integers(0, 9)).map(lambda p: (p[0], sum(p))), max_size=9),
    st.integers(0, 9),
)
def test_merged_ranges_cover_the_same_bytes(ranges: list[Range], gap: int) -> None:
    wanted = {at for a, b in ranges for at in range(a, b)}
    found = merged(ranges, gap)
    assert wanted <= {at for a, b in found for at in range(a, b)}
    assert all(next_a - b > gap for (_, b), (next_a, _) in pairwise(found))
    if gap == 0:
        assert wanted == {at for a, b in found for at in range(a, b)}


def test_nothing_picked_and_rows_that_are_not_there_are_refused() -> None:
    frame = ps.encode(group(2, 64))
    with pytest.raises(InvalidInput, match="assemble: no sample was picked; pick at least one"):
        assembled([(frame, [])])
    for rows in ([2], [-1], [0, 5]):
        with pytest.raises(CorruptFrame, match=r"asked for sample -?\d of 2"):
            RangedFrame(frame).ranges(rows)


def test_list_columns_of_all_samples_are_ragged() -> None:
    samples = [ps.Sample(id="a", token_ids=[5, 6, 7], loss_mask=[0, 1, 1], sampling_mask=[[], [2, 6], [7]])]
    assert isinstance(assembled([(ps.encode(samples), [0])])["sampling_mask"].values, Ragged)
