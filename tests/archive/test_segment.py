"""A segment reads back as it was written, or is said to be damaged."""

from __future__ import annotations

from pathlib import Path

import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from penstock.archive.places import check_place, open_place
from penstock.archive.recorded import RecordedRun, segment_of
from penstock.archive.segment import (
    FrameEntry,
    Front,
    GroupEntry,
    RecordEntry,
    StepEntry,
    checksum_of,
    name_of,
    read_front,
    write_segment,
)
from penstock.errors import ConfigError, CorruptFile, InvalidInput, InvalidReference, StorageError

FRAMES = [b"first frame", b"second" * 50]


def front(number: int = 1, previous: bytes = b"", first: int = 1) -> Front:
    """A segment of two groups in one step."""
    ops = (first, first + 1)
    groups = tuple(
        GroupEntry(
            op=op,
            id=f"g{op}",
            digest=xxhash.xxh3_128_digest(frame),
            policy_version=None,
            samples=2,
            tokens=12,
            size=len(frame),
            run="",
            prompt="p",
            kinds=(("logprobs", "with"),),
            evaluation=False,
            at=1.7e9 + op,
        )
        for op, frame in zip(ops, FRAMES, strict=True)
    )
    offsets = (0, len(FRAMES[0]))
    return Front(
        number=number,
        previous=previous,
        run_id="ab" * 16,
        run="demo",
        epoch=1,
        settings="[packing]\nranks = 2\n",
        through_op=first + 2,
        through_step=number,
        step_op=first + 2,
        through_part=0,
        groups=groups,
        records=(RecordEntry(op=first + 3, data=b"\x90"),),
        steps=(
            StepEntry(
                step=number,
                op=first + 2,
                groups=ops,
                digests=("aa", "bb"),
                policy_version=0,
                samples=4,
                tokens=24,
                loss_tokens=12,
            ),
        ),
        frames=tuple(
            FrameEntry(op=op, offset=at, size=len(frame), digest=xxhash.xxh3_128_digest(frame))
            for op, at, frame in zip(ops, offsets, FRAMES, strict=True)
        ),
    )


def test_a_segment_reads_back_as_it_was_written(tmp_path: Path) -> None:
    made = front()
    data = write_segment(made, FRAMES)
    assert read_front(data, "here") == made
    open_place(str(tmp_path), create=True).put_if_absent(name_of(1), data)
    recorded = RecordedRun.open(str(tmp_path))
    assert [recorded.frame(op) for op in (1, 2)] == FRAMES
    assert recorded.steps[1].digests == ("aa", "bb")
    assert recorded.verify() == 2


def test_a_segment_of_format_1_is_written_and_read_as_ever() -> None:
    golden = (Path(__file__).parent.parent / "golden" / "archive" / "segment_format_1").read_bytes()
    assert write_segment(front(), FRAMES) == golden
    assert read_front(golden, "golden") == front()


def test_every_damage_is_noticed(tmp_path: Path) -> None:
    data = write_segment(front(), FRAMES)
    path = tmp_path / name_of(1)
    path.parent.mkdir()

    def read() -> None:
        recorded = RecordedRun.open(str(tmp_path))
        assert recorded.verify() == 2

    for length in range(0, len(data), 7):
        path.write_bytes(data[:length])
        with pytest.raises(CorruptFile, match="segments/00000001"):
            read()
    for at in range(len(data)):
        path.write_bytes(data[:at] + bytes([data[at] ^ 0x10]) + data[at + 1 :])
        with pytest.raises(CorruptFile, match="segments/00000001"):
            read()
    path.write_bytes(data)
    read()


@given(st.binary(max_size=200))
def test_bytes_that_are_no_segment_are_refused(data: bytes) -> None:
    with pytest.raises(CorruptFile):
        read_front(data, "here")


def test_a_gap_a_renamed_segment_and_one_of_another_archive_are_noticed(tmp_path: Path) -> None:
    blobs = open_place(str(tmp_path), create=True)
    first = write_segment(front(), FRAMES)
    second = write_segment(front(2, checksum_of(first), first=11), FRAMES)
    blobs.put_if_absent(name_of(1), first)
    blobs.put_if_absent(name_of(3), second)
    with pytest.raises(CorruptFile, match="00000002: missing"):
        RecordedRun.open(str(tmp_path))
    blobs.put_if_absent(name_of(2), first)
    with pytest.raises(CorruptFile, match="says that it is segment 1"):
        segment_of(blobs, 2)
    blobs.delete(name_of(3))
    blobs.delete(name_of(2))
    blobs.put_if_absent(name_of(2), write_segment(front(2, b"another", first=11), FRAMES))
    with pytest.raises(CorruptFile, match="does not follow"):
        RecordedRun.open(str(tmp_path))
    blobs.delete(name_of(2))
    blobs.put_if_absent(name_of(2), second)
    assert RecordedRun.open(str(tmp_path)).verify() == 4


def test_a_later_format_is_refused_with_its_number() -> None:
    data = bytearray(write_segment(front(), FRAMES))
    data[8] = 2
    with pytest.raises(CorruptFile, match="format 2; this version reads format 1"):
        read_front(bytes(data), "here")


@pytest.mark.parametrize(
    "where", ["", "ftp://host/x", "s3://", "s3://bucket/run/", "s3://bucket?x=1", "s3://me:pw@b/x"]
)
def test_an_address_that_no_archive_can_have_is_refused(where: str) -> None:
    with pytest.raises(ConfigError, match="archive"):
        check_place(where)


def test_a_place_without_an_archive_is_said_to_be_one(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="no archive of a run there"):
        RecordedRun.open(str(tmp_path))
    with pytest.raises(StorageError, match="no such folder"):
        RecordedRun.open(f"file://{tmp_path}/none")
    with pytest.raises(InvalidReference):
        check_place("file://elsewhere/x")
