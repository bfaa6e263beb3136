"""Whatever front and body say, reading by range gives valid samples or CorruptFrame, in bounded memory and time."""

from __future__ import annotations

import random
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import penstock as ps
from penstock.arrays import Samples
from penstock.errors import CorruptFrame
from penstock.frames import Limits, Pieces, RangedFrame, assemble, decode, front_of
from penstock.frames.codings import CONSTANT, DELTAS, FLAT, NARROW, PACKED, PLANES, RAW, RUNS, SPARSE
from tests.frames.frames import FRAMES, forged, parts
from tests.frames.test_hostile import LIMITS, OPERATIONS, altered_behind_checksums, bounded, change_leaf

pytestmark = pytest.mark.deep

frame_files = pytest.mark.parametrize("path", FRAMES, ids=lambda path: path.stem)


def read(frame: bytes, rows: list[int] | None = None, *, limits: Limits = LIMITS) -> Samples | None:
    """Samples from nothing but the front and the ranges of these rows; all of them unless given, None for no sample."""
    ranged = RangedFrame(front_of(frame), limits=limits)
    rows = list(range(len(ranged))) if rows is None else rows
    ranges = ranged.ranges(rows)
    assert all(ranged.front_size <= a < b <= ranged.size for a, b in ranges)
    return assemble([(ranged, rows, Pieces(ranges, [frame[a:b] for a, b in ranges]))]) if rows else None


def is_valid_or_refused(frame: bytes) -> bool:
    try:
        samples = read(frame)
    except CorruptFrame:
        return False
    if samples is not None:
        assert Samples.of([sample.replace() for sample in samples]) == samples
    return True


@frame_files
def test_every_bit_flip_in_a_front_is_noticed(path: Path) -> None:
    frame = path.read_bytes()
    for position in range(len(front_of(frame))):
        altered = bytearray(frame)
        altered[position] ^= 1 << (position % 8)
        with pytest.raises(CorruptFrame):
            read(bytes(altered))


@frame_files
def test_a_front_cut_anywhere_is_corrupt(path: Path) -> None:
    front = front_of(path.read_bytes())
    for size in range(0, len(front), 3):
        with pytest.raises(CorruptFrame):
            RangedFrame(front[:size], limits=LIMITS)


@frame_files
def test_a_damaged_body_gives_valid_samples_or_corrupt_frame(path: Path) -> None:
    rng, frame = random.Random(3), path.read_bytes()
    at = len(front_of(frame))
    for _ in range(60 if len(frame) > at else 0):
        altered = bytearray(frame[at:])
        rng.choice(OPERATIONS)(rng, altered)
        is_valid_or_refused(frame[:at] + bytes(altered))


def test_mutations_with_fitting_checksums_give_valid_samples_or_corrupt_frame() -> None:
    rng = random.Random(4)
    cut = [parts(path.read_bytes()) for path in FRAMES]
    taken = 0
    for k in range(3_000):
        header, head, body = rng.choice(cut)
        if k % 2:
            frame = altered_behind_checksums(rng, header, head, body)
        else:
            try:
                frame = forged(change_leaf(rng, header), head, body)
            except (TypeError, OverflowError, ValueError):  # cannot be written as msgpack
                continue
        if k % 20:
            taken += is_valid_or_refused(frame)
        else:
            with bounded():
                taken += is_valid_or_refused(frame)
    assert taken > 100  # otherwise nothing behind the first checks was reached


def routed() -> list[ps.Sample]:
    rng, mask = np.random.default_rng(0), np.arange(12) > 3
    return [
        ps.Sample(
            id=f"{i}",
            token_ids=range(i, i + 12),
            loss_mask=mask,
            logprobs=np.where(mask, -0.5 - rng.random(12), 0),
            routed_experts=rng.integers(1, 9, (12, 2, 3)),
            sampling_mask=[[n + i, n + 90] for n in range(12)],
            teacher_topk_ids=rng.integers(0, 9, (12, 2)),
            teacher_topk_logprobs=-rng.random((12, 2)),
        )
        for i in range(3)
    ]


@pytest.mark.parametrize("name", ["token_ids", "loss_mask", "logprobs", "routed_experts", "sampling_mask"])
@pytest.mark.parametrize("coding", [RAW, CONSTANT, RUNS, NARROW, SPARSE, PLANES, PACKED, DELTAS, FLAT, 9, -1])
def test_a_column_in_another_coding_does_not_add_up(name: str, coding: int) -> None:
    header, head, body = parts(ps.encode(routed()))
    column = next(spec for spec in header[8] if spec[0] == name)
    inner = [[NARROW, 4, [], []]]
    for block in (
        [coding, 0, [], []],
        [coding, 3, [8], inner],
        [coding, 24, [8, -8], inner],
        [coding, 4, [2**62] * 2, []],
    ):
        if block[:2] == column[2][:2] and block[3] == column[2][3]:
            continue
        column[2] = block
        with bounded():
            assert not is_valid_or_refused(forged(header, head, body)) or decode(forged(header, head, body))


def damaged(name: str, value: Any, dtype: Any) -> bytes:
    """A frame whose second sample has this value on its sixth token, with checksums that fit."""
    tokens = 70
    mask = np.arange(tokens) > 3
    rng = np.random.default_rng(0)
    columns: dict[str, Any] = {"logprobs": np.where(mask, -1 - rng.random(tokens), 0).astype(np.float32)}
    columns |= {"advantages": rng.random(tokens).astype(np.float32), "weight_versions": rng.integers(1, 9, tokens)}
    columns |= {"mm_token_type_ids": np.zeros(tokens, np.uint8)}
    samples = [ps.Sample(id=f"{i}", token_ids=rng.integers(0, 9, tokens), loss_mask=mask, **columns) for i in range(3)]
    frame = bytearray(ps.encode(samples))
    header, head, _ = parts(bytes(frame))
    ranged = RangedFrame(bytes(frame))
    part = ranged.columns[name].part
    at = (
        part.at
        + (int(ranged.columns[name].starts[1]) + (2 if ranged.columns[name].is_sparse else 5))
        * np.dtype(dtype).itemsize
    )
    assert part.block.coding == RAW
    frame[at : at + np.dtype(dtype).itemsize] = np.array(value, dtype).tobytes()
    return forged(header, head, bytes(frame[ranged.front_size :]))


@pytest.mark.parametrize(
    ("name", "value"), [("logprobs", np.nan), ("logprobs", 0.5), ("advantages", np.inf), ("advantages", np.nan)]
)
def test_a_value_that_cannot_be_is_noticed_in_the_sample_that_has_it(name: str, value: float) -> None:
    frame = damaged(name, value, "<f4")
    for rows in ([1], [0, 1], [1, 2]):
        with pytest.raises(CorruptFrame, match=f"{name}: value"):
            read(frame, rows)
    assert read(frame, [0, 2]) is not None  # what the other samples have is sound


def test_a_mask_that_is_not_the_one_the_head_counted_is_corrupt() -> None:
    samples = [
        ps.Sample(id=f"{i}", token_ids=range(9), loss_mask=[0, 0, 1] * 3, logprobs=[0, 0, -1] * 3) for i in (0, 1)
    ]
    header, head, body = parts(ps.encode(samples))
    ranged = RangedFrame(ps.encode(samples))
    at = ranged.columns["loss_mask"].part.at - ranged.front_size
    for position in (at, at + 1):
        altered = bytearray(body)
        altered[position] ^= 0b0010
        with pytest.raises(CorruptFrame, match="the loss tokens in the header are not those of the mask"):
            read(forged(header, head, bytes(altered)))


def test_a_tiny_front_that_says_it_holds_millions_of_tokens_costs_nothing_to_refuse() -> None:
    nothing = np.zeros(1 << 22, np.float32)
    front = front_of(ps.encode([ps.Sample(id="bomb", token_ids=np.full(1 << 22, 7), logprobs=nothing, rewards=1.0)]))
    with bounded(), pytest.raises(CorruptFrame, match="this reader takes"):
        RangedFrame(front, limits=LIMITS)


def test_a_chain_of_thousands_of_shared_prefixes_is_read_at_once() -> None:
    beginning = list(range(40))
    alike = ps.encode([ps.Sample(id=str(i), token_ids=[*beginning, i]) for i in range(20_000)])
    growing = ps.encode([ps.Sample(id=str(i), token_ids=[*beginning, *range(i)]) for i in range(1_300)])
    for frame, count in ((alike, 20_000), (growing, 1_300)):
        began, samples = time.process_time(), decode(frame)
        for rows in ([count - 1], list(range(0, count, 2)), list(range(count))):
            got = read(frame, rows, limits=Limits())
            assert got is not None
            assert got.ids == tuple(samples.ids[i] for i in rows)
            assert np.array_equal(got["token_ids"].values, samples.take(rows)["token_ids"].values)
        assert time.process_time() - began < 5.0
