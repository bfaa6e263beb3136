"""Ordinary mistakes of operators: each is refused in a sentence, and every acknowledged group is still there."""

from __future__ import annotations

import shutil
import sqlite3
from pathlib import Path

import pytest

from penstock.errors import Conflict, CorruptFile, PenstockError, StorageError
from penstock.frames import decode, encode
from penstock.log import State
from penstock.packing import Packing
from penstock.plane.opening import open_log
from penstock.plane.settings import PlaneSettings, Target
from penstock.storage import FolderStorage
from tests.support.engines import DirectEngine
from tests.support.groups import named_group

SETTINGS = PlaneSettings(packing=Packing(ranks=1, seq_len=64), target=Target(groups=2), disk_reserve_bytes=8 << 20)


def opened(folder: Path, settings: PlaneSettings = SETTINGS) -> DirectEngine:
    """A plane's engine, opened as a real plane opens it."""
    log = open_log(folder, settings)
    try:
        return DirectEngine(settings, log)
    except BaseException:
        log.close()
        raise


def put(engine: DirectEngine, *names: str) -> None:
    for name in names:
        assert engine.put(name, name, encode(named_group(name))) is None
    assert all(outcome.error is None for outcome in engine.flush())


def close(engine: DirectEngine) -> None:
    engine.close()
    engine.log.close()


def run_with(folder: Path, *names: str) -> None:
    engine = opened(folder)
    put(engine, *names)
    close(engine)


def kill(engine: DirectEngine) -> None:
    """End without a last transaction, as kill -9 does."""
    engine.log.close()


def assert_there(folder: Path, *names: str) -> None:
    """Every group can be read, by the next plane."""
    engine = opened(folder)
    rows = {row.id: row.location for row in engine.log.groups_in(State.HELD)}
    assert rows.keys() >= set(names)
    for name in names:
        assert decode(engine.storage.read(rows[name])[0])[0].group == name
    close(engine)


def frames_in(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted((folder / "storage" / "segments").iterdir())}


# ------------------------------------------------------------------ the log


def test_a_missing_log_is_refused_and_nothing_is_deleted(tmp_path: Path) -> None:
    folder, aside = tmp_path / "run", tmp_path / "log.sqlite"
    run_with(folder, "a", "b")
    before = frames_in(folder)
    (folder / "log.sqlite").rename(aside)
    with pytest.raises(CorruptFile, match=r"log\.sqlite: missing, and the run began before; put the newest copy"):
        opened(folder)
    assert not (folder / "log.sqlite").exists()
    assert frames_in(folder) == before
    aside.rename(folder / "log.sqlite")
    assert_there(folder, "a", "b")


def test_an_empty_log_on_a_full_storage_is_refused_and_nothing_is_deleted(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    run_with(folder, "a", "b")
    before, aside = frames_in(folder), tmp_path / "aside"
    aside.mkdir()
    for path in folder.glob("log.*"):
        path.rename(aside / path.name)
    with pytest.raises(Conflict, match=r"holds frames of run 'run' .* and the log is empty; put that run's log back"):
        opened(folder)
    assert frames_in(folder) == before
    for path in folder.glob("log.*"):
        path.unlink()
    for path in aside.iterdir():
        path.rename(folder / path.name)
    assert_there(folder, "a", "b")


@pytest.mark.parametrize("witness", [True, False])
def test_an_older_log_is_refused_and_nothing_is_deleted(witness: bool, tmp_path: Path) -> None:
    folder, copy, newest = tmp_path / "run", tmp_path / "copy", tmp_path / "newest"
    run_with(folder, "a")
    shutil.copytree(folder, copy)
    run_with(folder, "b")
    shutil.copytree(folder, newest)
    before = frames_in(folder)
    shutil.copy(copy / "log.sqlite", folder / "log.sqlite")
    if witness:  # the whole log was restored, with the file that counts its transactions
        shutil.copy(copy / "log.witness", folder / "log.witness")
    words = r"restored from a copy" if witness else r"ends at transaction \d+, and \d+ were committed"
    with pytest.raises((Conflict, CorruptFile), match=words):
        opened(folder)
    assert frames_in(folder) == before
    for name in ("log.sqlite", "log.witness"):
        shutil.copy(newest / name, folder / name)
    assert_there(folder, "a", "b")


def test_a_refused_start_changes_nothing_however_often_it_is_tried(tmp_path: Path) -> None:
    folder, copy = tmp_path / "run", tmp_path / "copy"
    run_with(folder, "a")
    shutil.copytree(folder, copy)
    for name in "bcd":
        run_with(folder, name)
    for name in ("log.sqlite", "log.witness"):
        shutil.copy(copy / name, folder / name)
    for _ in range(6):  # the epoch must not creep past the marker's
        with pytest.raises(Conflict, match="restored from a copy"):
            opened(folder)


def test_a_log_copied_without_its_wal_is_refused(tmp_path: Path) -> None:
    folder, copy = tmp_path / "run", tmp_path / "copy"
    engine = opened(folder)
    put(engine, "a", "b")
    shutil.copytree(folder, copy, ignore=shutil.ignore_patterns("*-wal", "*-shm"))
    kill(engine)
    with pytest.raises(CorruptFile, match=r"is its -wal file missing|ends at transaction \d+, and \d+ were committed"):
        opened(copy)


@pytest.mark.deep
def test_a_write_ahead_log_cut_at_any_page_is_never_believed(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    engine = opened(folder)
    for name in "abcdefgh":
        put(engine, name)
    wal, committed = folder / "log.sqlite-wal", engine.log.meta("commits", 0)
    full, frame = wal.stat().st_size, 24 + 4096
    assert full > 10 * frame
    found = set()
    for number, size in enumerate(range(0, full, frame)):
        copy = tmp_path / f"cut{number}"
        shutil.copytree(folder, copy, ignore=shutil.ignore_patterns("*-shm"))
        with (copy / "log.sqlite-wal").open("r+b") as file:
            file.truncate(32 + size if size else 0)
        try:
            cut = opened(copy)
        except (CorruptFile, Conflict) as error:
            found.add(type(error))
            continue
        assert cut.log.meta("commits", 0) >= committed, "acknowledged groups were forgotten"
        close(cut)
    assert CorruptFile in found
    kill(engine)


@pytest.mark.parametrize("flip", range(0, 100, 9))
def test_a_flipped_bit_in_the_write_ahead_log_is_never_believed(flip: int, tmp_path: Path) -> None:
    folder, copy = tmp_path / "run", tmp_path / "copy"
    engine = opened(folder)
    for name in "abcd":
        put(engine, name)
    shutil.copytree(folder, copy, ignore=shutil.ignore_patterns("*-shm"))
    acked = {row.id for row in engine.log.groups()}
    kill(engine)
    data = bytearray((copy / "log.sqlite-wal").read_bytes())
    data[len(data) * flip // 100] ^= 1
    (copy / "log.sqlite-wal").write_bytes(data)
    try:
        damaged = opened(copy)
    except (CorruptFile, Conflict):
        return
    assert {row.id for row in damaged.log.groups()} == acked
    close(damaged)


def test_a_log_without_its_witness_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    run_with(folder, "a")
    (folder / "log.witness").unlink()
    with pytest.raises(CorruptFile, match=r"log\.witness: missing or damaged, so it is unknown whether .* is complete"):
        opened(folder)


def test_a_log_that_is_removed_under_a_running_plane_is_noticed_before_anything_is_acknowledged(tmp_path: Path) -> None:
    engine = opened(tmp_path / "run")
    put(engine, "a")
    (tmp_path / "run" / "log.sqlite").unlink()
    assert engine.put("b", "b", encode(named_group("b"))) is None
    (outcome,) = engine.flush()
    assert isinstance(outcome.error, StorageError)
    assert "removed or replaced under the running plane" in str(outcome.error)
    kill(engine)


# ------------------------------------------------------------------ the storage


def test_the_storage_of_another_run_is_refused(tmp_path: Path) -> None:
    run_with(tmp_path / "one", "a")
    run_with(tmp_path / "two", "b")
    before = frames_in(tmp_path / "two")
    shutil.rmtree(tmp_path / "one" / "storage")
    shutil.copytree(tmp_path / "two" / "storage", tmp_path / "one" / "storage")
    with pytest.raises(Conflict, match=r"belongs to run 'run' \(.*\), and this log is of run"):
        opened(tmp_path / "one")
    assert frames_in(tmp_path / "one") == frames_in(tmp_path / "two") == before
    assert_there(tmp_path / "two", "b")


def test_a_storage_that_is_not_mounted_is_refused_and_found_again(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    run_with(folder, "a")
    (folder / "storage").rename(tmp_path / "unmounted")
    with pytest.raises(Conflict, match=r"empty, and the log needs 1 frames there; mount the storage"):
        opened(folder)
    shutil.rmtree(folder / "storage")
    (tmp_path / "unmounted").rename(folder / "storage")
    assert_there(folder, "a")


def test_segments_without_a_marker_are_refused(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    run_with(folder, "a")
    (folder / "storage" / "marker").rename(tmp_path / "marker")
    with pytest.raises(Conflict, match="holds 1 segments and no marker"):
        opened(folder)
    (tmp_path / "marker").rename(folder / "storage" / "marker")
    assert_there(folder, "a")


def test_a_folder_that_is_removed_under_a_running_plane_is_noticed_by_the_next_put(tmp_path: Path) -> None:
    engine = opened(tmp_path / "run")
    put(engine, "a")
    shutil.rmtree(tmp_path / "run" / "storage")
    refused = engine.put("b", "b", encode(named_group("b")))
    assert refused is not None
    assert isinstance(refused.error, StorageError)
    assert "removed or replaced while it was written" in str(refused.error)
    kill(engine)


def test_an_unknown_segment_stops_all_deletion_until_it_is_dealt_with(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    run_with(folder, "a", "b")
    stray = folder / "storage" / "segments" / "0123456789abcdef"
    stray.write_bytes(b"somebody's frames")
    engine = opened(folder)
    assert engine.segments.unregistered == ["0123456789abcdef"]
    _train_all(engine)
    close(engine)
    assert stray.read_bytes() == b"somebody's frames"
    assert len(frames_in(folder)) >= 2
    stray.unlink()
    again = opened(folder)
    assert again.segments.unregistered == []
    close(again)


def _train_all(engine: DirectEngine) -> None:
    staged = engine.plan_step(engine.next_step)
    assert not isinstance(staged, str), staged
    engine.received(engine.next_step)
    engine.commit(engine.next_step, None)


def test_a_copy_of_a_run_is_a_run_of_its_own_and_leaves_the_first_alone(tmp_path: Path) -> None:
    run_with(tmp_path / "run", "a", "b")
    shutil.copytree(tmp_path / "run", tmp_path / "copy")
    before = frames_in(tmp_path / "run")
    run_with(tmp_path / "copy", "c")
    assert frames_in(tmp_path / "run") == before
    assert_there(tmp_path / "run", "a", "b")
    assert_there(tmp_path / "copy", "a", "b", "c")


def test_two_planes_on_one_storage_with_two_logs_are_refused(tmp_path: Path) -> None:
    shared = PlaneSettings(packing=SETTINGS.packing, target=SETTINGS.target, storage=str(tmp_path / "shared"))
    first = opened(tmp_path / "one", shared)
    put(first, "a")
    with pytest.raises(Conflict, match="holds frames of run 'run'"):
        opened(tmp_path / "two", shared)
    put(first, "b")
    close(first)


def test_a_plane_that_was_replaced_deletes_nothing(tmp_path: Path) -> None:
    shared = PlaneSettings(packing=SETTINGS.packing, target=SETTINGS.target, storage=str(tmp_path / "shared"))
    first = opened(tmp_path / "one", shared)
    put(first, "a", "b")
    shutil.copytree(tmp_path / "one", tmp_path / "elsewhere", ignore=shutil.ignore_patterns("lock", "*-shm"))
    second = opened(tmp_path / "elsewhere", shared)  # as a plane does that was started on another host
    before = FolderStorage(tmp_path / "shared").segments()
    _train_all(first)
    with pytest.raises(PenstockError, match="taken over by epoch 2"):
        for _ in range(70):
            first.state.retire(first.next_step)
            with first.recorder.transaction():
                pass
    assert FolderStorage(tmp_path / "shared").segments() == before
    kill(first)
    close(second)


# ------------------------------------------------------------------ volumes


@pytest.mark.parametrize("what", ["a file for the folder", "a folder for the log"])
def test_a_file_for_a_folder_and_the_reverse_are_errors_of_ours(what: str, tmp_path: Path) -> None:
    if what == "a file for the folder":
        (tmp_path / "run").write_text("a file")
    else:
        (tmp_path / "run" / "log.sqlite").mkdir(parents=True)
    with pytest.raises(PenstockError, match="run"):
        opened(tmp_path / "run")


def test_an_old_log_is_refused_and_its_frames_stay(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    (folder / "frames").mkdir(parents=True)
    (folder / "frames" / "000001-000001").write_bytes(encode(named_group("a")))
    with sqlite3.connect(folder / "log.sqlite") as log:
        log.execute("CREATE TABLE meta (name TEXT PRIMARY KEY, value) WITHOUT ROWID")
        log.execute("INSERT INTO meta VALUES ('format', 4)")
    log.close()
    with pytest.raises(CorruptFile, match="format 4; this version reads format 5"):
        opened(folder)
    assert (folder / "frames" / "000001-000001").exists()
