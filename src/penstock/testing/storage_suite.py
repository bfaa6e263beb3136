"""A conformance suite for storage engines: subclass it and run it over yours.

    class TestMine(StorageSuite):
        def storage(self, folder): return MyStorage(folder)

Needs the `pytest` package.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from penstock.arrays import Sample, Samples
from penstock.errors import Conflict, CorruptFrame
from penstock.frames import decode, encode
from penstock.storage import DamagedFrame, Gone, Pick, Storage, Wanted, gather_picks, new_segment_name, parse_location


def stored_group(name: str, *, samples: int = 3, tokens: int = 40) -> list[Sample]:
    """Make samples of one prompt that share some tokens and experts. The same name makes the same samples."""
    rng = np.random.default_rng(list(name.encode()))
    prompt = rng.integers(0, 200, tokens, np.uint32)
    found = []
    for i in range(samples):
        ids = np.concatenate([prompt, rng.integers(0, 200, 5 + i, np.uint32)])
        experts = np.repeat(ids.astype(np.uint8), 6).reshape(-1, 2, 3)
        found.append(Sample(id=f"{name}/{i}", group=name, token_ids=ids, routed_experts=experts))
    return found


def stored_frame(name: str) -> bytes:
    return encode(stored_group(name))


class StorageSuite:
    """Every storage engine passes these tests."""

    def storage(self, folder: Path) -> Storage:
        """Open the storage of a folder: empty the first time, the same storage in later calls."""
        raise NotImplementedError

    def write(self, storage: Storage, *names: str) -> list[str]:
        """Write frames of these groups to a new segment. Returns their locations."""
        segment = storage.create(new_segment_name())
        locations = segment.append([[stored_frame(name)] for name in names])
        segment.close()
        return locations

    def test_a_frame_comes_back_to_the_byte(self, tmp_path: Path) -> None:
        storage = self.storage(tmp_path)
        locations = self.write(storage, "a", "b", "c")
        assert len(set(locations)) == 3
        for name, location in zip("abc", locations, strict=True):
            assert bytes(storage.read(location)[0]) == stored_frame(name)
            assert parse_location(location).size == len(stored_frame(name))

    def test_a_frame_may_come_in_pieces_and_change_afterwards(self, tmp_path: Path) -> None:
        storage, frame = self.storage(tmp_path), bytearray(stored_frame("a"))
        expected, segment = bytes(frame), storage.create(new_segment_name())
        (location,) = segment.append([[memoryview(frame)[:7], b"", frame[7:]]])
        frame[:] = bytes(len(frame))
        assert bytes(storage.read(location)[0]) == expected
        segment.close()

    def test_ranges_are_returned_as_asked(self, tmp_path: Path) -> None:
        storage, frame = self.storage(tmp_path), stored_frame("b")
        _, location = self.write(storage, "a", "b")
        ranges = [(0, 8), (3, 3), (len(frame) - 5, len(frame)), (10, 40)]
        assert [bytes(found) for found in storage.read(location, ranges)] == [frame[a:b] for a, b in ranges]

    def test_a_range_that_is_not_all_there_is_gone_never_short(self, tmp_path: Path) -> None:
        storage, size = self.storage(tmp_path), len(stored_frame("b"))
        _, location = self.write(storage, "a", "b")
        for bad in ((0, size + 1), (size, size + 8), (-1, 4), (5, 4)):
            with pytest.raises(Gone):
                storage.read(location, [bad])
        at = parse_location(location)
        with pytest.raises(Gone):
            storage.read(f"{at.segment}:{at.offset}:{at.size + 100}")

    def test_bytes_of_many_frames_are_read_into_memory_that_is_there(self, tmp_path: Path) -> None:
        storage = self.storage(tmp_path)
        locations = [*self.write(storage, "a", "b"), *self.write(storage, "c")]
        memory, taken, expected = memoryview(bytearray(400)), 0, []
        wanted: list[Wanted] = []
        for name, location in [*zip("abc", locations, strict=True), ("a", locations[0])]:
            at, frame = parse_location(location), stored_frame(name)
            for start, size in ((len(frame) - 30, 30), (3, 40), (9, 0)):
                wanted.append((at, at.offset + start, memory[taken : taken + size]))
                taken += size
                expected.append(frame[start : start + size])
        storage.read_into(wanted)
        assert [bytes(view) for _, _, view in wanted] == expected
        at = parse_location(locations[0])
        gone = parse_location(f"{new_segment_name()}:0:64")
        for bad in ((at, at.end - 3, memory[:4]), (at, at.offset - 1, memory[:4]), (gone, 0, memory[:4])):
            with pytest.raises(Gone):
                storage.read_into([wanted[0], bad])

    def test_it_proves_what_the_rest_relies_on(self, tmp_path: Path) -> None:
        storage = self.storage(tmp_path)
        assert storage.prove() == ""
        assert storage.segments() == {} and storage.marker() is None

    def test_a_segment_is_created_once(self, tmp_path: Path) -> None:
        storage, name = self.storage(tmp_path), new_segment_name()
        segment = storage.create(name)
        (location,) = segment.append([[stored_frame("a")]])
        with pytest.raises(Conflict, match="exists"):
            storage.create(name)
        assert bytes(storage.read(location)[0]) == stored_frame("a")
        segment.close()

    def test_what_was_written_is_there_for_another_process(self, tmp_path: Path) -> None:
        first = self.storage(tmp_path)
        locations = self.write(first, "a", "b")
        second = self.storage(tmp_path)
        assert [bytes(second.read(location)[0]) for location in locations] == [stored_frame("a"), stored_frame("b")]

    def test_a_segment_can_be_read_while_it_is_written(self, tmp_path: Path) -> None:
        storage = self.storage(tmp_path)
        segment = storage.create(new_segment_name())
        for name in "abcdef":
            (location,) = segment.append([[stored_frame(name)]])
            assert bytes(storage.read(location)[0]) == stored_frame(name)
        segment.close()

    def test_deleting_takes_what_is_named_and_nothing_else(self, tmp_path: Path) -> None:
        storage = self.storage(tmp_path)
        (a, b), (c,) = self.write(storage, "a", "b"), self.write(storage, "c")
        for _ in range(2):  # again: nothing more happens
            storage.delete([a])
            assert bytes(storage.read(b)[0]) == stored_frame("b")
        storage.delete([parse_location(b).segment, new_segment_name(), f"{new_segment_name()}:0:64"])
        with pytest.raises(Gone):
            storage.read(b)
        assert bytes(storage.read(c)[0]) == stored_frame("c")

    def test_segments_lists_every_segment_until_it_is_deleted(self, tmp_path: Path) -> None:
        storage = self.storage(tmp_path)
        assert storage.segments() == {}
        (a,), (b,) = self.write(storage, "a"), self.write(storage, "b")
        found = storage.segments()
        assert found.keys() == {parse_location(at).segment for at in (a, b)}
        assert sum(found.values()) >= len(stored_frame("a")) + len(stored_frame("b"))
        storage.delete([parse_location(a).segment])
        assert storage.segments().keys() == {parse_location(b).segment}

    def test_the_marker_changes_hands_only_as_expected(self, tmp_path: Path) -> None:
        storage = self.storage(tmp_path)
        assert storage.marker() is None
        assert storage.set_marker(b"one", None)
        assert not storage.set_marker(b"two", None)
        assert not storage.set_marker(b"two", b"other")
        assert storage.marker() == b"one"
        assert storage.set_marker(b"two", b"one")
        assert self.storage(tmp_path).marker() == b"two"

    def test_a_location_that_is_none_is_an_error(self, tmp_path: Path) -> None:
        storage = self.storage(tmp_path)
        for location in ("", "nowhere", "../../etc/passwd", "000001-000009:0:64", f"{new_segment_name()}:0:64"):
            with pytest.raises(CorruptFrame):
                storage.read(location)

    def test_picked_samples_come_in_order_and_a_damaged_group_is_named(self, tmp_path: Path) -> None:
        storage = self.storage(tmp_path)
        a, b = self.write(storage, "a", "b")
        picks = [[Pick(a, "a", (0, 2)), Pick(b, "b", (1,))], [], [Pick(b, "b", (0, 1, 2))]]
        first, none, last = gather_picks(storage, picks)
        in_a, in_b = stored_group("a"), stored_group("b")
        assert decode(first) == Samples.of([in_a[0], in_a[2], in_b[1]])
        assert (len(none), decode(last)) == (0, Samples.of(in_b))
        gone = f"{new_segment_name()}:0:64"
        with pytest.raises(DamagedFrame, match="group 'c': its frame is damaged or gone"):
            next(gather_picks(storage, [[Pick(a, "a", (0,))], [Pick(gone, "c", (0,))]]))
