"""Every keeper passes the one suite; the folder also withstands what disks and crashes do."""

from __future__ import annotations

import os
import resource
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from penstock.encode import encode
from penstock.errors import CorruptFrame, DiskFull, StorageError
from penstock.keep import FolderKeeper, Keeper, MemoryKeeper
from penstock.keep import folder as folder_module
from penstock.keep.keeper import DamagedFrame, Pick
from penstock.testing.keepers import KeeperSuite, kept_frame, kept_group


class TestMemoryKeeper(KeeperSuite):
    def keeper(self, folder: Path) -> Keeper:
        return MemoryKeeper()

    def damage(self, keeper: Keeper, location: str) -> None:
        assert isinstance(keeper, MemoryKeeper)
        frame = bytearray(keeper.read(location))
        frame[len(frame) // 2] ^= 1
        keeper.replace(location, bytes(frame))


class TestFolderKeeper(KeeperSuite):
    def keeper(self, folder: Path) -> Keeper:
        self.folder = folder
        return FolderKeeper(folder, life=1)

    def damage(self, keeper: Keeper, location: str) -> None:
        segment, offset, size = location.split(":")
        at = int(offset) + int(size) // 2
        with (self.folder / segment).open("r+b") as file:
            file.seek(at)
            octet = file.read(1)[0]
            file.seek(at)
            file.write(bytes([octet ^ 1]))


def segments(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@contextmanager
def files_at_most(size: int) -> Iterator[None]:
    """No file may grow beyond this: writing fails as it does on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_new_life_begins_new_segments_and_finds_the_frames_of_earlier_ones(tmp_path: Path) -> None:
    first = FolderKeeper(tmp_path, life=1)
    a, b = first.keep([kept_frame("a"), kept_frame("b")])
    first.close()
    second = FolderKeeper(tmp_path, life=2)
    second.retain([a, b])
    (c,) = second.keep([kept_frame("c")])
    assert segments(tmp_path) == ["000001-000001", "000002-000001"]
    assert [bytes(second.read(at)) for at in (a, b, c)] == [kept_frame(name) for name in "abc"]
    assert second.num_bytes == sum(len(kept_frame(name)) for name in "abc")
    second.close()


def test_frames_that_were_never_acknowledged_go_when_the_folder_is_opened_again(tmp_path: Path) -> None:
    first = FolderKeeper(tmp_path, life=1)
    first.keep([kept_frame("a")])
    first.close()
    (tmp_path / "notes.txt").write_text("somebody else's")
    second = FolderKeeper(tmp_path, life=2)
    second.retain([])
    assert segments(tmp_path) == ["notes.txt"]
    assert second.num_bytes == 0
    second.close()


def test_a_torn_tail_of_a_killed_plane_harms_nobody(tmp_path: Path) -> None:
    first = FolderKeeper(tmp_path, life=1)
    (a,) = first.keep([kept_frame("a")])
    with (tmp_path / "000001-000001").open("ab") as file:
        file.write(kept_frame("b")[:100])  # killed while it wrote
    second = FolderKeeper(tmp_path, life=2)
    second.retain([a])
    (c,) = second.keep([kept_frame("c")])
    assert [bytes(second.read(at)) for at in (a, c)] == [kept_frame("a"), kept_frame("c")]
    first.close()
    second.close()


def test_a_full_segment_is_continued_in_a_new_one_and_removed_when_it_is_empty(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(folder_module, "SEGMENT_BYTES", len(kept_frame("a")) + 1)
    keeper = FolderKeeper(tmp_path, life=1)
    locations = [keeper.keep([kept_frame(name)])[0] for name in "abcdef"]
    assert segments(tmp_path) == ["000001-000001", "000001-000002", "000001-000003"]
    keeper.forget(locations[:2])
    keeper.sweep()
    assert segments(tmp_path) == ["000001-000002", "000001-000003"]
    keeper.forget(locations[4:])
    keeper.sweep()
    assert segments(tmp_path) == ["000001-000002", "000001-000003"]  # the last is still written to
    keeper.close()
    assert segments(tmp_path) == ["000001-000002"]
    again = FolderKeeper(tmp_path, life=2)
    again.retain(locations[2:4])
    assert bytes(again.read(locations[3])) == kept_frame("d")
    again.forget(locations[2:4])
    again.sweep()
    assert segments(tmp_path) == []
    again.close()


def test_the_space_of_a_forgotten_frame_is_given_back_before_its_segment_is(tmp_path: Path) -> None:
    keeper, large = FolderKeeper(tmp_path, life=1), bytes(range(256)) * 4096
    a, _ = keeper.keep([large, kept_frame("b")])
    path = tmp_path / a.split(":")[0]
    before = path.stat()
    keeper.forget([a])
    keeper.sweep()
    after = path.stat()
    assert after.st_size == before.st_size
    assert after.st_blocks * 512 <= before.st_blocks * 512 - len(large) // 2
    keeper.close()


def test_what_was_forgotten_and_not_swept_before_a_kill_is_given_back_by_the_next_life(tmp_path: Path) -> None:
    keeper, large = FolderKeeper(tmp_path, life=1), bytes(range(256)) * 4096
    a, b, c = keeper.keep([kept_frame("a"), large, kept_frame("c")])
    path = tmp_path / a.split(":")[0]
    before = path.stat()
    keeper.forget([b])  # and killed before it is swept
    again = FolderKeeper(tmp_path, life=2)
    again.retain([a, c])
    assert path.stat().st_blocks * 512 <= before.st_blocks * 512 - len(large) // 2
    assert [bytes(again.read(at)) for at in (a, c)] == [kept_frame("a"), kept_frame("c")]
    again.close()


def test_a_full_disk_keeps_nothing_and_spoils_nothing(tmp_path: Path) -> None:
    keeper = FolderKeeper(tmp_path, life=1)
    (a,) = keeper.keep([kept_frame("a")])
    size = len(kept_frame("a"))
    with files_at_most(2 * size), pytest.raises(DiskFull, match="nothing was kept; make room, or raise max_disk_bytes"):
        keeper.keep([kept_frame("b"), kept_frame("c")])
    assert (tmp_path / "000001-000001").stat().st_size == size
    assert keeper.num_bytes == size
    b, c = keeper.keep([kept_frame("b"), kept_frame("c")])
    assert [bytes(keeper.read(at)) for at in (a, b, c)] == [kept_frame(name) for name in "abc"]
    keeper.close()


def test_a_folder_that_is_gone_is_an_error_in_words(tmp_path: Path) -> None:
    keeper = FolderKeeper(tmp_path / "frames", life=1)
    (tmp_path / "frames").rmdir()
    with pytest.raises(StorageError, match="frames: No such file"):
        keeper.keep([kept_frame("a")])
    assert keeper.num_bytes == 0
    keeper.close()


def test_a_segment_that_is_cut_short_or_gone_names_the_file(tmp_path: Path) -> None:
    keeper = FolderKeeper(tmp_path, life=1)
    a, b = keeper.keep([kept_frame("a"), kept_frame("b")])
    path = tmp_path / "000001-000001"
    os.truncate(path, len(kept_frame("a")) + 10)
    assert bytes(keeper.read(a)) == kept_frame("a")
    with pytest.raises(ValueError, match=r"000001-000001: \d+ bytes; a frame should end at \d+"):
        keeper.read(b)
    keeper.close()
    again = FolderKeeper(tmp_path, life=2)
    path.unlink()
    with pytest.raises(ValueError, match="000001-000001: No such file"):
        again.read(a)
    again.close()


def test_a_segment_that_is_cut_short_after_it_was_read_is_an_error_and_not_the_end(tmp_path: Path) -> None:
    keeper = FolderKeeper(tmp_path, life=1)
    large = [encode(kept_group(name, tokens=50_000)) for name in "ab"]  # of many pages
    a, b = keeper.keep(large)
    assert [bytes(keeper.read(at)) for at in (a, b)] == large
    os.truncate(tmp_path / "000001-000001", len(large[0]))
    with pytest.raises(DamagedFrame, match=r"group 'b': .*000001-000001: \d+ bytes; a frame should end at \d+"):
        keeper.take([[Pick(a, "a", (0,)), Pick(b, "b", (0,))]])
    assert bytes(keeper.read(a)) == large[0]
    os.truncate(tmp_path / "000001-000001", 0)
    with pytest.raises(CorruptFrame, match="000001-000001: it is empty"):
        keeper.read(a)
    keeper.close()


def test_frames_are_forgotten_while_others_are_kept(tmp_path: Path) -> None:
    keeper = FolderKeeper(tmp_path, life=1)
    fixed = keeper.keep([kept_frame("fixed")])[0]
    old = [keeper.keep([kept_frame(f"old {i}")])[0] for i in range(40)]

    def forget_one_by_one() -> None:
        for at in old:
            keeper.forget([at])

    forgetting = threading.Thread(target=forget_one_by_one)
    forgetting.start()
    new = [keeper.keep([kept_frame(f"new {i}")])[0] for i in range(40)]
    forgetting.join()
    assert [bytes(keeper.read(at)) for at in new] == [kept_frame(f"new {i}") for i in range(40)]
    assert bytes(keeper.read(fixed)) == kept_frame("fixed")
    assert keeper.num_bytes == len(kept_frame("fixed")) + sum(len(kept_frame(f"new {i}")) for i in range(40))
    keeper.close()


def test_frames_and_their_folder_are_for_their_owner_alone(tmp_path: Path) -> None:
    keeper = FolderKeeper(tmp_path / "frames", life=1)
    keeper.keep([kept_frame("a")])
    assert (tmp_path / "frames").stat().st_mode & 0o077 == 0
    assert (tmp_path / "frames" / "000001-000001").stat().st_mode & 0o077 == 0
    keeper.close()
