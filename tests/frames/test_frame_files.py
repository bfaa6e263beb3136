"""Files of frames: several groups in one file, read one at a time, and nothing believed that a file says of itself."""

from __future__ import annotations

import io
import itertools
import os
import struct
import tracemalloc

import numpy as np
import pytest
from hypothesis import given

import penstock as ps
from penstock.errors import CorruptFrame
from penstock.frames import Limits, by_group, read_frames, write_frames
from penstock.testing.strategies import batches
from tests.support.reference import record


def written(samples: list[ps.Sample]) -> bytes:
    file = io.BytesIO()
    write_frames(file, samples)
    return file.getvalue()


def read(data: bytes, limits: Limits | None = None) -> list[ps.Sample]:
    frames = read_frames(io.BytesIO(data), name="x.penstock", limits=limits or Limits())
    return [sample for frame in frames for sample in frame]


def group(name: str, count: int = 2, tokens: int = 3) -> list[ps.Sample]:
    return [ps.Sample(id=f"{name}/{i}", group=name, token_ids=range(i, i + tokens)) for i in range(count)]


@given(samples=batches(most=8))
def test_samples_come_back_from_a_file_in_their_order_to_the_bit(samples: list[ps.Sample]) -> None:
    assert [record(sample) for sample in read(written(samples))] == [record(sample) for sample in samples]


def test_a_frame_holds_one_group_and_files_are_joined_end_to_end() -> None:
    one, other = written([*group("a"), *group("b", 3)]), written(group("c"))
    frames = list(read_frames(io.BytesIO(one + other)))
    assert [frame.text["group"][0] for frame in frames] == ["a", "b", "c"]
    assert [len(frame) for frame in frames] == [2, 3, 2]
    assert one == ps.encode(group("a"), "small") + ps.encode(group("b", 3), "small")
    assert read(b"") == []


def test_samples_of_a_group_that_cannot_stand_in_one_frame_stand_in_two() -> None:
    shapes = [np.zeros((2, 1, k), np.uint8) for k in (2, 2, 3)]
    samples = [ps.Sample(group="a", token_ids=[1, 2], routed_experts=experts) for experts in shapes]
    own = [ps.Sample(group="a", token_ids=[1, 2], columns={"task": task}) for task in (1, 2.5)]
    assert [len(batch) for batch in by_group([*samples, *own])] == [2, 2, 1]
    assert [s["task"].item() for s in read(written(own))] == [1, 2.5]
    assert [len(batch) for batch in by_group(group("a", 5), most=2)] == [2, 2, 1]


def test_a_file_that_was_cut_names_the_frame_that_is_not_whole() -> None:
    data = written([*group("a"), *group("b")])
    first = len(ps.encode(group("a"), "small"))
    for end in (first + 1, first + 47, first + 60, len(data) - 1):
        frames = read_frames(io.BytesIO(data[:end]), name="x.penstock")
        assert len(next(frames)) == 2
        with pytest.raises(CorruptFrame, match=r"x.penstock frame 1: .*(was cut|at least 48)"):
            next(frames)
    assert len(read(data[:first])) == 2


def test_a_frame_that_was_altered_or_is_none_is_named() -> None:
    data = bytearray(written([*group("a"), *group("b")]))
    data[-1] ^= 1
    with pytest.raises(CorruptFrame, match=r"x.penstock frame 1: frame: body checksum"):
        read(bytes(data))
    with pytest.raises(CorruptFrame, match=r"x.penstock frame 0: frame: begins with b'\{"):
        read(b'{"id": "a", "token_ids": [1, 2, 3], "loss_mask": [0, 1, 1]}\n')
    with pytest.raises(CorruptFrame, match=r"frame 2: .*not a Penstock frame"):
        read(bytes(written([*group("a"), *group("b")])) + b"\n" * 48)


def test_a_size_that_is_a_lie_takes_no_memory() -> None:
    data = bytearray(written(group("a")))
    data[24:32] = struct.pack("<Q", 3 << 30)
    tracemalloc.start()
    with pytest.raises(CorruptFrame, match="was cut"):
        read(bytes(data))
    data[24:32] = struct.pack("<Q", 1 << 60)
    with pytest.raises(CorruptFrame, match="this reader takes"):
        read(bytes(data))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 8 << 20
    with pytest.raises(CorruptFrame, match=r"frame 0: says .* this reader takes 100"):
        read(written(group("a", tokens=300)), Limits(max_bytes=100))


def test_a_pipe_is_read_as_a_file_is_and_one_frame_at_a_time() -> None:
    taking, giving = os.pipe()
    with os.fdopen(taking, "rb") as file, os.fdopen(giving, "wb", buffering=0) as end:
        frames = read_frames(file)
        for name in ("a", "b"):
            end.write(written(group(name)))
        assert [frame.text["group"][0] for frame in itertools.islice(frames, 2)] == ["a", "b"]
        end.close()
        assert list(frames) == []
