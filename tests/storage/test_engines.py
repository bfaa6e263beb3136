"""Every storage engine passes the one suite; engines that break a promise fail it."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import pytest

from penstock.errors import CorruptFrame, DiskFull, StorageError
from penstock.frames.layout import Buffer
from penstock.storage import Away, FolderStorage, Gone, MemoryStorage, Storage, Writer
from penstock.storage.in_memory import MemorySegment
from penstock.storage.interface import Pieces, Range, SegmentFile, new_segment_name
from penstock.testing.storage_suite import StorageSuite, stored_frame
from tests.support.disks import files_at_most


class TestMemoryStorage(StorageSuite):
    def storage(self, folder: Path) -> Storage:
        known: dict[Path, Storage] = self.__dict__.setdefault("known", {})
        return known.setdefault(folder, MemoryStorage())


class TestFolderStorage(StorageSuite):
    def storage(self, folder: Path) -> Storage:
        return FolderStorage(folder / "storage")


# ------------------------------------------------------------------ engines that lie are found out


class OverwritingStorage(MemoryStorage):
    """Ignores that a segment must be new, as some S3 servers do."""

    def create(self, segment: str) -> MemorySegment:
        self._frames.pop(segment, None)
        return super().create(segment)

    def set_marker(self, new: bytes, old: bytes | None) -> bool:
        self._marker = new
        return True


class ShortStorage(MemoryStorage):
    """Returns fewer bytes than asked for instead of an error."""

    def read(self, location: str, ranges: Sequence[Range] | None = None) -> list[Buffer]:
        if ranges is None:
            return super().read(location)
        frame = super().read(location)[0]
        return [frame[max(a, 0) : b] for a, b in ranges]


class ForgetfulStorage(MemoryStorage):
    """Loses what was written last, as a disk does that was never told to sync."""

    def create(self, segment: str) -> MemorySegment:
        made = super().create(segment)
        made.append = lambda frames, deadline=0.0: MemorySegment(segment, {}).append(frames, deadline)  # type: ignore[method-assign]
        return made


@pytest.mark.parametrize("kind", [OverwritingStorage, ShortStorage, ForgetfulStorage])
def test_the_suite_fails_for_an_engine_that_breaks_a_promise(kind: type[MemoryStorage], tmp_path: Path) -> None:
    class Suite(StorageSuite):
        def storage(self, folder: Path) -> Storage:
            known: dict[Path, Storage] = self.__dict__.setdefault("known", {})
            return known.setdefault(folder, kind())

    failed = []
    for name in [name for name in dir(StorageSuite) if name.startswith("test_")]:
        folder = tmp_path / name
        folder.mkdir()
        try:
            getattr(Suite(), name)(folder)
        except (AssertionError, pytest.fail.Exception, CorruptFrame):
            failed.append(name)
    assert failed


# ------------------------------------------------------------------ the folder, on disks that fail


def test_a_full_disk_keeps_nothing_and_the_next_write_goes_to_a_new_segment(tmp_path: Path) -> None:
    storage, finished = FolderStorage(tmp_path), []
    writer = Writer(storage, new_segment_name, lambda name, end: finished.append((name, end)))
    (a,) = writer.write([[stored_frame("a")]])
    with files_at_most(len(stored_frame("a")) + 10), pytest.raises(DiskFull, match="nothing was kept"):
        writer.write([[stored_frame("b")]])
    assert [name for name, _ in finished] == [a.split(":")[0]]
    (b,) = writer.write([[stored_frame("b")]])
    assert b.split(":")[0] != a.split(":")[0]
    assert [bytes(storage.read(at)[0]) for at in (a, b)] == [stored_frame("a"), stored_frame("b")]


def test_a_full_or_old_segment_is_followed_by_a_new_one(tmp_path: Path) -> None:
    now = 0.0
    writer = Writer(FolderStorage(tmp_path), new_segment_name, segment_bytes=10, clock=lambda: now)
    first, second = (writer.write([[stored_frame("a")]])[0].split(":")[0] for _ in range(2))
    assert first != second
    slow = Writer(FolderStorage(tmp_path), new_segment_name, clock=lambda: now)
    before = slow.write([[stored_frame("a")]])[0].split(":")[0]
    assert slow.write([[stored_frame("a")]])[0].split(":")[0] == before
    now = 301.0
    assert slow.write([[stored_frame("a")]])[0].split(":")[0] != before


@pytest.mark.parametrize("how", ["removed", "moved", "replaced"])
def test_a_segment_that_is_taken_away_while_it_is_written_is_noticed(how: str, tmp_path: Path) -> None:
    storage = FolderStorage(tmp_path)
    segment: SegmentFile = storage.create(new_segment_name())
    segment.append([[stored_frame("a")]])
    path = storage.path(segment.name)
    if how == "removed":
        path.unlink()
    else:
        path.rename(tmp_path / "elsewhere")
    if how == "replaced":
        path.write_bytes((tmp_path / "elsewhere").read_bytes())
    with pytest.raises(StorageError, match="removed or replaced while it was written"):
        segment.append([[stored_frame("b")]])


def test_a_segment_that_is_gone_and_a_storage_that_is_away_are_different_errors(tmp_path: Path) -> None:
    storage = FolderStorage(tmp_path / "storage")
    segment = storage.create(new_segment_name())
    (a,) = segment.append([[stored_frame("a")]])
    path = storage.path(segment.name)
    os.truncate(path, 10)
    with pytest.raises(Gone, match=r"ends .* bytes before the frame"):
        storage.read(a)
    path.unlink()
    with pytest.raises(Gone, match="No such file"):
        storage.read(a)
    (tmp_path / "storage").rename(tmp_path / "unmounted")
    with pytest.raises(Away, match="is the storage mounted here"):
        storage.read(a)


def test_the_space_of_a_deleted_frame_is_free_before_its_segment_is(tmp_path: Path) -> None:
    storage, large = FolderStorage(tmp_path), bytes(range(256)) * 4096
    segment = storage.create(new_segment_name())
    large_at, small_at = segment.append([[large], [stored_frame("b")]])
    before = storage.segments()[segment.name]
    storage.delete([large_at])
    assert storage.segments()[segment.name] <= before - len(large) // 2
    assert bytes(storage.read(small_at)[0]) == stored_frame("b")


def test_frames_smaller_than_a_page_are_freed_with_their_neighbours(tmp_path: Path) -> None:
    storage = FolderStorage(tmp_path / "frames")
    segment = storage.create("0123456789abcdef")
    locations = segment.append([[bytes([i]) * 1000] for i in range(64)])
    segment.close()
    before = storage.segments()[segment.name]
    storage.delete(locations[1:31] + locations[:1] + locations[32:])
    assert storage.segments()[segment.name] <= before // 4
    assert storage.read(locations[31]) == [bytes([31]) * 1000]


def test_a_long_list_of_pieces_is_written_whole(tmp_path: Path) -> None:
    storage, pieces = FolderStorage(tmp_path), [bytes([i % 251]) * (i % 5) for i in range(3000)]
    frames: list[Pieces] = [pieces, [b"end"]]
    first, second = storage.create(new_segment_name()).append(frames)
    assert bytes(storage.read(first)[0]) == b"".join(pieces)
    assert bytes(storage.read(second)[0]) == b"end"


def test_segments_and_their_folder_are_for_their_owner_alone(tmp_path: Path) -> None:
    storage = FolderStorage(tmp_path / "storage")
    segment = storage.create(new_segment_name())
    assert storage.path(segment.name).parent.stat().st_mode & 0o077 == 0
    assert storage.path(segment.name).stat().st_mode & 0o077 == 0
