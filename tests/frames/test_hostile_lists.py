"""Lists and own columns in frames that were tampered with: our error, before anything large is made."""

from __future__ import annotations

import tracemalloc
from typing import Any

import numpy as np
import pytest

import penstock as ps
from penstock.errors import CorruptFrame
from penstock.frames import Limits, decode
from penstock.frames.codings import CONSTANT, DELTAS, FLAT, RAW, SPARSE
from tests.frames.frames import forged, parts

LIMITS = Limits(max_samples=1 << 10, max_tokens=1 << 16, max_bytes=8 << 20)
LISTS = [[], [2, 6], [7]]


def tampered(place: int, value: Any, *, body: bytes | None = None) -> bytes:
    """A frame whose sampling mask is described otherwise."""
    header, head, own = parts(
        ps.encode([ps.Sample(id="a", token_ids=[5, 6, 7], loss_mask=[0, 1, 1], sampling_mask=LISTS)])
    )
    column = header[8][2]
    assert column[0] == "sampling_mask"
    column[place] = value
    return forged(header, head, own if body is None else body)


@pytest.mark.parametrize(
    ("place", "value"),
    [
        (8, 2),  # fewer values than the counts add up to
        (8, 4),
        (8, -1),
        (8, 2**40),  # more than the reader takes
        (8, 2**63 - 1),
        (7, None),  # values of lists without their lengths
        (7, [CONSTANT, 0, [], []]),
        (7, [RAW, 0, [], []]),
        (7, [SPARSE, 3, [], [[3, 2, [], []]]]),
        (7, [DELTAS, 0, [], [[3, 2, [], []]]]),
        (2, [FLAT, 0, [], [[3, 4, [], []]]]),
        (2, [DELTAS, 0, [], []]),
        (2, [DELTAS, 0, [], [[DELTAS, 0, [], [[3, 4, [], []]]]]]),
        (2, [SPARSE, 2, [], [[3, 4, [], []]]]),
        (3, [2]),  # trailing dimensions and lists at once
        (6, True),  # lists do not share prefixes
        (10, [2]),  # items per sample: too few, of too many samples, negative, beyond any limit
        (10, []),
        (10, [2, 1]),
        (10, [4, -1]),
        (10, [2**64 - 1]),
        (1, "<f4"),
    ],
)
def test_a_column_of_lists_that_does_not_add_up_is_corrupt(place: int, value: Any) -> None:
    with pytest.raises(CorruptFrame):
        decode(tampered(place, value), limits=LIMITS)


def test_a_tiny_frame_that_says_it_holds_gigabytes_of_lists_is_refused_before_they_are_made() -> None:
    counts = np.full(3, 2**31 - 1, np.uint32).tobytes()
    body = bytes.fromhex("65070000000000000600000000000000") + counts + bytes(4) + bytes(8)
    header, head, _ = parts(tampered(7, [RAW, 0, [], []]))
    header[8][2][2] = [CONSTANT, 0, [], []]
    for items in (3 * (2**31 - 1), 1 << 20, 1 << 19):
        header[8][2][8] = items
        tracemalloc.start()
        try:
            with pytest.raises(CorruptFrame):
                decode(forged(header, head, body), limits=LIMITS)
            assert tracemalloc.get_traced_memory()[1] < 3 * LIMITS.max_bytes
        finally:
            tracemalloc.stop()


def test_steps_that_wrap_around_are_not_a_set() -> None:
    samples = [ps.Sample(id="a", token_ids=range(80), sampling_mask=[[n, n + 90] for n in range(80)])]
    header, head, body = parts(ps.encode(samples, "small"))
    column = header[8][2]
    assert column[2][0] == DELTAS
    column[2] = [DELTAS, 0, [], [[RAW, 0, [], []]]]
    sizes = len(body) - (len(body) % 8)
    steps = np.array([[n, 2**32 - 1] for n in range(80)], np.uint32).tobytes()
    for start in range(0, sizes, 8):
        with pytest.raises(CorruptFrame):
            decode(forged(header, head, body[:start] + steps), limits=LIMITS)


@pytest.mark.parametrize("lengths", [[0], [0, 0], [1, 0, 40]])
def test_samples_whose_lists_are_all_empty_come_back(lengths: list[int]) -> None:
    samples = [
        ps.Sample(id=f"{i}", token_ids=range(n + 1), sampling_mask=[[]] * (n + 1)) for i, n in enumerate(lengths)
    ]
    for frame in (ps.encode(samples), ps.encode(samples, "small")):
        assert list(decode(frame)) == samples


def test_items_that_another_sample_has_are_corrupt() -> None:
    samples = [ps.Sample(id=f"{i}", token_ids=[5, 6], sampling_mask=[[], [6]]) for i in range(2)]
    header, head, body = parts(ps.encode(samples))
    assert header[8][2][10] == [1, 1]
    header[8][2][10] = [2, 0]
    with pytest.raises(CorruptFrame, match="sampling_mask: the items per sample in the header are not those of the"):
        decode(forged(header, head, body))


def test_bools_in_rows_are_true_or_false_whatever_the_byte() -> None:
    flags = ps.Column("flags", dtype="bool", trailing=1)
    rows = np.array([[True, False], [False, True], [True, True]])
    header, head, body = parts(ps.encode([ps.Sample(id="a", token_ids=[5, 6, 7], columns={flags: rows})]))
    at = body.index(rows.tobytes())
    altered = body[:at] + bytes([2, 0, 0, 255, 1, 1]) + body[at + 6 :]
    found = decode(forged(header, head, altered))["flags"].values
    assert found.view(np.uint8).tolist() == rows.astype(np.uint8).tolist()
