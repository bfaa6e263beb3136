"""A group's newer frame tells which late values it got, with the digests by which they were attached."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest

from penstock.arrays import NO_COLUMNS, Column, Own, declared
from penstock.frames import (
    UNCUT,
    GroupMetadata,
    LateValuesFrame,
    check_group,
    decode,
    encode,
    encode_values,
    new_values,
    with_digests,
)
from penstock.frames.late_columns import NO_DIGEST, LateColumns
from tests.support.groups import named_group

SAMPLES = [sample.replace(mode="opd") for sample in named_group("g", samples=3)]
TOKENS = SAMPLES[0].num_tokens
TOPK = {
    "teacher_topk_ids": np.arange(TOKENS * 2, dtype=np.uint32).reshape(TOKENS, 2),
    "teacher_topk_logprobs": -np.ones((TOKENS, 2), np.float32),
}


def metadata_of(frame: bytes) -> GroupMetadata:
    return check_group(frame, group="g", seq_len=UNCUT, is_partial=True)


@pytest.mark.parametrize(
    ("column", "given", "own"),
    [
        ("rl_weights", np.ones(TOKENS, np.float32), NO_COLUMNS),
        ("teacher_topk_logprobs", TOPK, NO_COLUMNS),
        ("mine", np.arange(TOKENS, dtype=np.float32), declared((Column(name="mine", dtype="float32", per="token"),))),
    ],
    ids=["rl_weights", "topk", "own"],
)
def test_the_values_of_a_newer_frame_have_the_digests_by_which_they_were_attached(
    column: str, given: Any, own: Own
) -> None:
    first = encode(SAMPLES)
    attached = LateValuesFrame(encode_values(column, {"g": {"g/0": given, "g/2": given}}), column, own=own)
    newer = b"".join(map(bytes, attached.merged("g", decode(first)).pieces))
    expected = {column: {0: attached.digests["g"]["g/0"], 2: attached.digests["g"]["g/2"]}}
    before = metadata_of(first)
    assert new_values(before, metadata_of(newer), decode(newer)) == expected
    assert new_values(metadata_of(newer), metadata_of(newer), decode(newer)) == {}
    (joined,) = with_digests(before, expected).values()
    assert joined == expected[column][0] + NO_DIGEST + expected[column][2]
    # One that had a value before keeps it.
    some = msgspec.structs.replace(before, late=LateColumns(digests={column: NO_DIGEST + b"x" * 16 + NO_DIGEST}))
    assert with_digests(some, expected)[column][16:32] == b"x" * 16
