"""Whatever the bytes, decoding gives samples or `CorruptFrame`: nothing else, in bounded memory and time."""

from __future__ import annotations

import random
import struct
import time
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import zstandard

import penstock as ps
from penstock.arrays import Ragged, Samples
from penstock.errors import CorruptFrame
from penstock.frames import ANY_SIZE, Limits, decode, read_head
from penstock.frames.codings import CONSTANT, NARROW, PACKED, PLANES, RAW, RUNS, SPARSE
from penstock.frames.layout import PREFIX_SIZE
from tests.frames.frames import FRAMES, forged, parts

pytestmark = pytest.mark.deep

LIMITS = Limits(max_samples=1 << 12, max_tokens=1 << 17, max_bytes=8 << 20)
PEAK = 24 << 20
"""Bytes: three times what the limits let a frame unfold to."""

frame_files = pytest.mark.parametrize("path", FRAMES, ids=lambda path: path.stem)


@contextmanager
def bounded() -> Iterator[None]:
    """What is done inside may take neither more memory than the limits allow nor more than a second."""
    started = time.process_time()
    tracemalloc.start()
    try:
        yield
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < PEAK, f"{peak} bytes at the peak"
    assert time.process_time() - started < 1.0


@frame_files
def test_a_frame_cut_anywhere_is_corrupt(path: Path) -> None:
    frame = path.read_bytes()
    for size in range(len(frame)):
        with pytest.raises(CorruptFrame):
            decode(frame[:size], limits=LIMITS)


@frame_files
def test_a_frame_with_anything_behind_it_is_corrupt(path: Path) -> None:
    frame = path.read_bytes()
    for more in (b"\0", bytes(8), frame):
        with pytest.raises(CorruptFrame):
            decode(frame + more, limits=LIMITS)


@frame_files
def test_single_bit_flips_are_noticed(path: Path) -> None:
    """Of every byte of the first kilobyte, and of every fifth behind it: one checksum covers the body."""
    frame = path.read_bytes()
    for position in (*range(min(len(frame), 1024)), *range(1024, len(frame), 5)):
        altered = bytearray(frame)
        altered[position] ^= 1 << (position % 8)
        with pytest.raises(CorruptFrame):
            decode(bytes(altered), limits=LIMITS)


def flip(rng: random.Random, data: bytearray) -> None:
    for _ in range(rng.choice([1, 1, 1, 4, 32])):
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)


def overwrite(rng: random.Random, data: bytearray) -> None:
    at = rng.randrange(len(data))
    data[at : at + rng.choice([1, 2, 4, 8])] = rng.choice([b"\0", b"\xff", b"\x80", rng.randbytes(1)]) * rng.choice(
        [1, 8]
    )


def delete(rng: random.Random, data: bytearray) -> None:
    at = rng.randrange(len(data))
    del data[at : at + rng.choice([1, 2, 8, 64])]


def insert(rng: random.Random, data: bytearray) -> None:
    at = rng.randrange(len(data))
    data[at:at] = rng.randbytes(rng.choice([1, 2, 8, 64]))


def swap(rng: random.Random, data: bytearray) -> None:
    a, b, size = rng.randrange(len(data)), rng.randrange(len(data)), rng.choice([1, 4, 8])
    data[a : a + size], data[b : b + size] = data[b : b + size], data[a : a + size]


OPERATIONS: list[Callable[[random.Random, bytearray], None]] = [flip, overwrite, delete, insert, swap]


def test_random_mutations_of_a_frame_are_corrupt() -> None:
    rng = random.Random(1)
    frames = [path.read_bytes() for path in FRAMES]
    for _ in range(10_000):
        frame = rng.choice(frames)
        altered = bytearray(frame)
        rng.choice(OPERATIONS)(rng, altered)
        if bytes(altered) != frame:
            with pytest.raises(CorruptFrame):
                decode(bytes(altered), limits=LIMITS)


def must_be_refused_or_valid(frame: bytes) -> bool:
    """Decode; whatever comes out must satisfy everything that a sample made by hand satisfies."""
    try:
        samples = decode(frame, limits=LIMITS)
    except CorruptFrame:
        return False
    rebuilt = [sample.replace() for sample in samples]
    assert Samples.of(rebuilt) == samples
    assert decode(ps.encode(samples), limits=LIMITS) == samples
    front = read_head(frame, limits=LIMITS)
    assert front.lengths.tolist() == [sample.num_tokens for sample in rebuilt]
    assert front.loss_tokens.tolist() == [sample.loss_tokens for sample in rebuilt]
    return True


def altered_behind_checksums(rng: random.Random, header: Any, head: bytes, body: bytes) -> bytes:
    pieces = [bytearray(msgspec.msgpack.encode(header)), bytearray(head), bytearray(body)]
    rng.choice(OPERATIONS)(rng, rng.choice([piece for piece in pieces if piece]))
    return forged(*(bytes(piece) for piece in pieces))


def test_mutations_with_fitting_checksums_give_valid_samples_or_corrupt_frame() -> None:
    rng = random.Random(2)
    cut = [parts(path.read_bytes()) for path in FRAMES]
    taken = sum(must_be_refused_or_valid(altered_behind_checksums(rng, *rng.choice(cut))) for _ in range(4_000))
    assert taken > 100  # otherwise nothing behind the first checks was reached


EXTREMES = [0, 1, -1, 2, 3, 7, 8, 63, 64, 255, 2**16, 2**31, 2**32 - 1, 2**32, 2**53, 2**63 - 1, 2**64 - 1, -(2**63)]


def change_leaf(rng: random.Random, node: Any) -> Any:
    """The same structure with one thing in it replaced, repeated, removed or emptied."""
    if not isinstance(node, list) or not node:
        by_kind: list[Any] = [*EXTREMES, None, [], [[]], "", "x", b"", 1.5, True, {}]
        return rng.choice(by_kind)
    at = rng.randrange(len(node))
    deeper = [*node[:at], change_leaf(rng, node[at]), *node[at + 1 :]]
    other = rng.choice(node)
    variants = [deeper] * 8 + [node[:at], [*node, other], [*node[:at], other, *node[at + 1 :]], [*node, *node]]
    return rng.choice(variants)


def test_headers_that_lie_give_valid_samples_or_corrupt_frame() -> None:
    rng = random.Random(3)
    cut = [parts(path.read_bytes()) for path in FRAMES]
    taken = 0
    for _ in range(4_000):
        header, head, body = rng.choice(cut)
        taken += must_be_refused_or_valid(forged(change_leaf(rng, header), head, body))
    assert taken > 10


def test_altered_frames_take_bounded_memory_and_time_one_by_one() -> None:
    rng = random.Random(4)
    cut = [parts(path.read_bytes()) for path in FRAMES]
    for i in range(600):
        header, head, body = rng.choice(cut)
        if i % 2:
            lie = forged(change_leaf(rng, header), head, body)
        else:
            lie = altered_behind_checksums(rng, header, head, body)
        with bounded(), suppress(CorruptFrame):
            decode(lie, limits=LIMITS)


# Frames written by hand: one 64-token sample, described anew for every lie.

TEXT = [[name, 1, [NARROW, 1], 0, [NARROW, 1]] for name in ("group", "env", "run")]


def small_header(num_tokens: int, **changes: Any) -> list[Any]:
    """A header of one sample with constant ids and an untrained mask; changes by field name."""
    fields = {
        "num_samples": 1,
        "num_tokens": num_tokens,
        "num_shared": 0,
        "lengths": [RAW],
        "loss_tokens": [NARROW, 1],
        "policy_versions": [NARROW, 1],
        "text": [["id", 1, [NARROW, 1], 1, [NARROW, 1]], *TEXT, ["mode", 1, [NARROW, 2], 2, [NARROW, 1]]],
        "head_columns": [],
        "body_columns": [["token_ids", "<u4", [CONSTANT]], ["loss_mask", "|b1", [CONSTANT]]],
        "parents": None,
        "shared": None,
        "images": None,
    }
    return list({**fields, **changes}.values())


def small_head(num_tokens: int) -> bytes:
    zero = b"\0"
    counts = struct.pack("<q", num_tokens) + zero + zero
    return counts + b"\x01a" + zero + (zero + zero) * 3 + b"\x02rl" + zero


BODY = struct.pack("<I4x", 7) + bytes(8)


def test_the_frame_written_by_hand_is_a_good_one() -> None:
    samples = decode(forged(small_header(64), small_head(64), BODY), limits=LIMITS)
    assert samples[0] == ps.Sample(id="a", token_ids=[7] * 64, policy_version=0)


def refused(header: Any, head: bytes = small_head(64), body: bytes = BODY, limits: Limits = LIMITS) -> str:
    frame = forged(header, head, body)
    with bounded(), pytest.raises(CorruptFrame) as caught:
        decode(frame, limits=limits)
    return str(caught.value)


@pytest.mark.parametrize("count", [2**17 + 1, 2**40, 2**63 - 1])
def test_token_counts_beyond_the_limits_are_refused_before_anything_is_allocated(count: int) -> None:
    assert str(count) in refused(small_header(count), small_head(count))


def test_the_default_limits_refuse_a_small_frame_that_unfolds_to_gigabytes() -> None:
    message = refused(small_header(2**29), small_head(2**29), limits=Limits())
    assert f"{2**29} tokens" in message


def test_a_step_that_no_memory_can_hold_is_refused_whatever_the_plane_says() -> None:
    assert "would unfold to" in refused(small_header(2**39), small_head(2**39), limits=ANY_SIZE)


def test_a_byte_limit_refuses_columns_that_are_each_within_the_token_limit() -> None:
    experts = ["routed_experts", "<u2", [CONSTANT], [1000, 1000]]
    header = small_header(64)
    header[8] = [*header[8], experts]
    assert "would unfold to" in refused(header)


def test_a_decompression_bomb_costs_nothing() -> None:
    bomb = zstandard.ZstdCompressor().compress(bytes(1 << 24))
    header = small_header(
        64, body_columns=[["token_ids", "<u4", [PACKED, 8, [len(bomb), 0]]], ["loss_mask", "|b1", [CONSTANT]]]
    )
    body = bomb + bytes(-len(bomb) % 8) + bytes(8)
    message = refused(header, body=body)
    assert str(1 << 24) in message


def test_a_bomb_that_does_not_say_its_size_costs_nothing() -> None:
    stream = zstandard.ZstdCompressor(write_content_size=False).compressobj()
    bomb = stream.compress(bytes(1 << 24)) + stream.flush()
    header = small_header(
        64, body_columns=[["token_ids", "<u4", [PACKED, 8, [len(bomb), 0]]], ["loss_mask", "|b1", [CONSTANT]]]
    )
    refused(header, body=bomb + bytes(-len(bomb) % 8 + 8))


@pytest.mark.parametrize("depth", [100, 100_000])
def test_deep_nesting_is_refused(depth: int) -> None:
    nested = b"\x94\x04\x00\x90\x91" * depth + b"\x91\x00"  # a block in a block in a block ...
    header = msgspec.msgpack.encode(small_header(64, lengths=[RAW]))
    refused(header.replace(b"\x91\x00", nested, 1))
    refused(b"\x91" * depth + b"\x00")


def test_an_array_that_says_it_has_four_billion_items_is_refused() -> None:
    header = msgspec.msgpack.encode(small_header(64))
    refused(header[:5] + b"\xdd\xff\xff\xff\xff" + header[5:])
    refused(b"\xdd\xff\xff\xff\xff")


def test_lengths_that_wrap_around_to_the_token_count_are_refused() -> None:
    huge = 2**63 - 1
    head = struct.pack("<qqq", huge, huge, 66) + small_head(64)[8:]
    header = small_header(64, num_samples=3, loss_tokens=[CONSTANT], policy_versions=[CONSTANT])
    assert (np.array([huge, huge, 66]).sum()) == 64
    assert "samples of 66 to" in refused(header, head)


def body_columns(*columns: list[Any]) -> list[Any]:
    return small_header(64, body_columns=list(columns))


IDS, MASK = ["token_ids", "<u4", [CONSTANT]], ["loss_mask", "|b1", [CONSTANT]]
REWARDS = ["rewards", "<f4", [RAW], [], [NARROW, 1], 0]
NO_REWARDS = ["rewards", "<f4", [CONSTANT]]
LIES: dict[str, tuple[list[Any], str]] = {
    "no ids": (body_columns(MASK, NO_REWARDS), "token_ids is missing"),
    "no mask": (body_columns(IDS, NO_REWARDS), "loss_mask is missing"),
    "ids twice": (body_columns(IDS, MASK, IDS), "'token_ids' is given 2 times"),
    "ids not for all samples": (body_columns([*IDS, [], [NARROW, 2], 0], MASK), "token_ids: not given for every token"),
    "an unknown column": (body_columns(IDS, MASK, ["secrets", "<u4", [RAW]]), "'secrets' is not one this reader knows"),
    "a column of another dtype": (body_columns(["token_ids", "<u8", [RAW]], MASK), "<u8"),
    "a dtype of Python objects": (body_columns(["token_ids", "|O", [RAW]], MASK), "|O"),
    "experts without dimensions": (body_columns(IDS, MASK, ["routed_experts", "|u1", [RAW]]), "0 trailing dimensions"),
    "experts of no layer": (body_columns(IDS, MASK, ["routed_experts", "|u1", [RAW], [0, 8]]), "trailing shape"),
    "an unknown coding": (body_columns(["token_ids", "<u4", [17]], MASK), "coding 17"),
    "a sparse mask": (body_columns(IDS, ["loss_mask", "|b1", [SPARSE, 0, [], [[RAW]]]]), "coding 4"),
    "more raw bytes than there are": (body_columns(["token_ids", "<u4", [RAW]], MASK), "256 bytes at 0"),
    "a width that is none": (body_columns(["token_ids", "<u4", [NARROW, 3]], MASK), "in 3 bits"),
    "planes too few": (body_columns(["token_ids", "<u4", [PLANES, 0, [4]]], MASK), "1 planes where 4"),
    "a plane of negative size": (body_columns(["token_ids", "<u4", [PACKED, 8, [-1, 0]]], MASK), "-1 bytes"),
    "more runs than values": (body_columns(["token_ids", "<u4", [RUNS, 65, [], [[NARROW, 8]]]], MASK), "65 runs"),
    "no runs": (body_columns(["token_ids", "<u4", [RUNS, 0, [], [[NARROW, 8]]]], MASK), "0 runs"),
    "runs of runs": (body_columns(["token_ids", "<u4", [RUNS, 1, [], [[RUNS, 1]]]], MASK), "run lengths in coding 2"),
    "shared prefixes without parents": (
        body_columns(["token_ids", "<u4", [CONSTANT], [], None, 0, True], MASK),
        "shares prefixes where there are none",
    ),
    "shared tokens without saying where": (small_header(64, num_shared=3), "3 shared tokens"),
    "a per-token column in the head": (small_header(64, head_columns=[MASK]), "'loss_mask' is given 2 times"),
    "logprobs in the head": (small_header(64, head_columns=[["logprobs", *REWARDS[1:]]]), "logprobs: in the head"),
    "a head column without rows": (small_header(64, head_columns=[REWARDS[:3]]), "must say which samples"),
    "images for other samples": (small_header(64, images=[[], []]), "images for 2 of 1"),
    "more samples than tokens": (small_header(64, num_samples=65), "65 samples in 64 tokens"),
    "a negative count": (small_header(64, num_samples=-1), "-1 samples"),
    "text missing": (small_header(64, text=[]), "text column"),
    "text twice": (small_header(64, text=small_header(64)[6] * 2), "given 2 times"),
    "more strings than samples": (small_header(64, text=[["id", 2, [RAW], 1, [RAW]]]), "2 strings for 1 samples"),
}


@pytest.mark.parametrize(("header", "message"), LIES.values(), ids=LIES.keys())
def test_a_header_that_lies_is_refused_saying_how(header: list[Any], message: str) -> None:
    assert message in refused(header)


def good_frame(**columns: Any) -> tuple[list[Any], bytes, bytes]:
    sample = ps.Sample(id="a", token_ids=range(10, 14), loss_mask=[0, 0, 1, 1], **columns)
    return parts(ps.encode([sample]))


@pytest.mark.parametrize(
    ("name", "value"),
    [("logprobs", np.nan), ("logprobs", 1.0), ("advantages", np.inf), ("temperatures", 0.0), ("rl_weights", np.nan)],
)
def test_a_value_no_sample_may_have_is_refused_in_a_frame_as_well(name: str, value: float) -> None:
    good = np.float32(-0.625 if name == "logprobs" else 0.625)
    header, head, body = good_frame(**{name: np.array([good / 2, good / 2, good, good], np.float32)})
    assert good.tobytes() in body
    with pytest.raises(CorruptFrame, match=name):
        decode(forged(header, head, body.replace(good.tobytes(), np.float32(value).tobytes())))


def test_a_trained_first_token_is_refused_in_a_frame_as_well() -> None:
    header, head, body = good_frame()
    mask_at = body.index(bytes([0b1100]))
    altered = body[:mask_at] + bytes([0b0101]) + body[mask_at + 1 :]
    with pytest.raises(CorruptFrame, match="first token"):
        decode(forged(header, head, altered))


def test_image_tokens_without_an_image_are_refused_in_a_frame_as_well() -> None:
    good = Samples.of([ps.Sample(id="a", token_ids=range(4))])
    types = Ragged(np.array([0, 1, 0, 0], np.uint8), good.offsets)
    columns = {**good.columns, "mm_token_type_ids": types}
    frame = ps.encode(Samples(columns=columns, text=good.text, policy_versions=good.policy_versions))
    with pytest.raises(CorruptFrame, match="mm_token_type_ids has 1 image tokens"):
        decode(frame)


def test_text_with_a_control_character_is_refused_in_a_frame_as_well() -> None:
    header, head, body = parts(ps.encode([ps.Sample(id="abc", token_ids=[1])]))
    with pytest.raises(CorruptFrame, match=r"U\+001B"):
        decode(forged(header, head.replace(b"abc", b"a\x1bc"), body))
    with pytest.raises(CorruptFrame, match="utf-8"):
        decode(forged(header, head.replace(b"abc", b"a\xffc"), body))


@pytest.mark.parametrize(
    "data", [b"", b"PENSTOCK", bytes(PREFIX_SIZE), bytearray(), memoryview(b""), np.zeros(0, np.uint8)]
)
def test_what_is_not_a_frame_is_corrupt(data: Any) -> None:
    with pytest.raises(CorruptFrame):
        decode(data)


@pytest.mark.parametrize(("at", "what"), [(8, "format version 2"), (10, "flags 1"), (20, "upgrade")])
def test_another_version_or_unknown_flags_ask_for_an_upgrade(at: int, what: str) -> None:
    frame = bytearray(ps.encode([]))
    frame[at] += 1
    with pytest.raises(CorruptFrame, match=what):
        decode(bytes(frame))
