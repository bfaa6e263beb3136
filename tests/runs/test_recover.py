"""`penstock storage recover`: after each mistake that ends in a refusal, every acknowledged group can be trained."""

from __future__ import annotations

import io
import json
import os
import random
import shutil
import sqlite3
import struct
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import xxhash

import penstock as ps
from penstock.cli import main
from penstock.errors import CorruptFile, InvalidInput, PenstockError
from penstock.frames import decode, encode
from penstock.frames.layout import MAGIC
from penstock.log import State
from penstock.plane.settings import PlaneSettings, Replay, Target
from penstock.storage import FolderStorage, parse_location, read_marker
from penstock.storage.interface import new_segment_name
from penstock.storage.scan import MAX_FRONT_BYTES, find_frames, reading_file
from tests.storage.test_operator_mistakes import SETTINGS, close, kill, opened, put, run_with
from tests.support.engines import DirectEngine
from tests.support.groups import named_group

ONE = PlaneSettings(packing=SETTINGS.packing, target=Target(groups=1), disk_reserve_bytes=8 << 20)


def recover(folder: Path, *flags: str) -> None:
    assert main(["storage", "recover", str(folder), "--yes", *flags]) == 0


def is_refused(folder: Path) -> bool:
    try:
        close(opened(folder))
    except PenstockError:
        return True
    return False


def train(engine: DirectEngine) -> list[str]:
    """Train everything that is held; the groups, in order."""
    trained: list[str] = []
    while len(engine.tenant_tables):
        trained += train_one(engine)
    return trained


def train_one(engine: DirectEngine) -> list[str]:
    step = engine.next_step
    assert not isinstance(engine.plan_step(step), str)
    names = [engine.state.rows[op].id for op in engine.state.steps[step].groups]
    engine.received(step)
    engine.commit(step, None)
    return names


def trained_of(folder: Path, settings: PlaneSettings = ONE) -> list[str]:
    engine = opened(folder, settings)
    try:
        assert engine.segments.unregistered == []
        return train(engine)
    finally:
        close(engine)


def files_in(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


# ------------------------------------------------------------------ each refusal, and then recover


def no_log(folder: Path) -> None:
    (folder / "log.sqlite").unlink()


def nothing_of_the_log(folder: Path) -> None:
    for path in folder.glob("log.*"):
        path.unlink()


def refused_start_on_nothing(folder: Path) -> None:
    nothing_of_the_log(folder)
    assert is_refused(folder)  # leaves an empty log behind


def garbage_for_a_log(folder: Path) -> None:
    (folder / "log.sqlite").write_bytes(b"SQLite format 3\0" + b"x" * 20_000)


def no_log_and_no_marker(folder: Path) -> None:
    nothing_of_the_log(folder)
    (folder / "storage" / "marker").unlink()


def no_witness(folder: Path) -> None:
    (folder / "log.witness").unlink()


def garbage_for_a_witness(folder: Path) -> None:
    (folder / "log.witness").write_bytes(b"penstock-log 1 nonsense")


def no_marker(folder: Path) -> None:
    (folder / "storage" / "marker").unlink()


def garbage_for_a_marker(folder: Path) -> None:
    (folder / "storage" / "marker").write_bytes(b"{")


def marker_ahead(folder: Path) -> None:
    storage = FolderStorage(folder / "storage")
    found = read_marker(storage)
    assert found is not None
    new = json.dumps(
        {"run_id": found.run_id, "epoch": found.epoch + 7, "commits": found.commits + 900, "run": found.run}
    )
    assert storage.set_marker(new.encode(), storage.marker())


MISTAKES: list[Callable[[Path], None]] = [
    no_log,
    nothing_of_the_log,
    refused_start_on_nothing,
    garbage_for_a_log,
    no_log_and_no_marker,
    no_witness,
    garbage_for_a_witness,
    no_marker,
    garbage_for_a_marker,
    marker_ahead,
]


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda mistake: mistake.__name__)
def test_after_each_mistake_every_acknowledged_group_is_trained_once(
    mistake: Callable[[Path], None], tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    run_with(folder, "a", "b")
    run_with(folder, "c")
    before = FolderStorage(folder / "storage").segments()
    mistake(folder)
    assert is_refused(folder)
    recover(folder)
    assert FolderStorage(folder / "storage").segments() == before
    assert sorted(trained_of(folder)) == ["a", "b", "c"]
    assert main(["storage", "check", str(folder)]) == 0


@pytest.mark.parametrize("with_witness", [True, False])
def test_an_older_log_gets_the_groups_that_came_after_it(with_witness: bool, tmp_path: Path) -> None:
    folder, copy = tmp_path / "run", tmp_path / "copy"
    run_with(folder, "a")
    shutil.copytree(folder, copy)
    for name in "bcd":
        run_with(folder, name)
    for name in ("log.sqlite", "log.witness")[: 1 + with_witness]:
        shutil.copy(copy / name, folder / name)
    assert is_refused(folder)
    recover(folder)
    assert trained_of(folder) == ["a", "b", "c", "d"]


def test_a_log_from_before_some_steps_goes_on_without_the_groups_that_were_freed_since(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, copy = tmp_path / "run", tmp_path / "copy"
    settings = PlaneSettings(
        packing=ONE.packing, target=ONE.target, retain_steps=0, snapshot_every=1, disk_reserve_bytes=8 << 20
    )
    engine = opened(folder, settings)
    put(engine, "t", "a", "b", "c")
    train_one(engine)
    close(engine)
    shutil.copytree(folder, copy)
    engine = opened(folder, settings)
    assert [train_one(engine), train_one(engine)] == [["a"], ["b"]]
    put(engine, "d")
    close(engine)
    for name in ("log.sqlite", "log.witness"):
        shutil.copy(copy / name, folder / name)
    assert is_refused(folder)
    recover(folder, "--step", "4")
    assert "2 groups in the log have no frame" in capsys.readouterr().out
    engine = opened(folder, settings)
    engine.resume(1, 4)
    assert train(engine) == ["c", "d"]
    assert [group["id"] for group in engine.quarantine()] == ["a", "b"]
    assert engine.ledger.as_dict()["balanced"]
    close(engine)


@pytest.mark.parametrize("seed", range(6))
def test_a_log_with_a_damaged_page_is_recovered(seed: int, tmp_path: Path) -> None:
    folder, rng = tmp_path / "run", random.Random(seed)
    run_with(folder, *"abcdefgh")
    data = bytearray((folder / "log.sqlite").read_bytes())
    page = rng.randrange(len(data) // 4096) * 4096
    data[page : page + 4096] = rng.randbytes(4096)
    (folder / "log.sqlite").write_bytes(data)
    recover(folder)
    assert sorted(trained_of(folder)) == list("abcdefgh")


def test_what_can_be_read_of_a_damaged_log_counts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "run"
    engine = opened(folder, ONE)
    put(engine, *"abcd")
    assert engine.put("e", "e", encode(named_group("e")), evaluation=True) is None
    engine.flush()
    assert [train_one(engine), train_one(engine)] == [["a"], ["b"]]
    close(engine)
    with sqlite3.connect(folder / "log.sqlite") as log:
        (page,) = log.execute("SELECT rootpage FROM sqlite_master WHERE name = 'facts'").fetchone()
    log.close()
    with (folder / "log.sqlite").open("r+b") as file:
        file.seek((page - 1) * 4096)
        file.write(os.urandom(4096))
    assert main(["storage", "check", str(folder)]) == 1
    recover(folder)
    assert "3 groups are left out: according to the damaged log" in capsys.readouterr().out
    engine = opened(folder, ONE)
    engine.resume(1, 3)
    assert train(engine) == ["c", "d"]
    close(engine)


def test_a_real_plane_serves_what_was_recovered(tmp_path: Path) -> None:
    def opened_plane() -> ps.Plane:
        return ps.open(tmp_path / "run", ranks=1, seq_len=64, groups_per_step=2, disk_reserve_bytes=8 << 20)

    with opened_plane() as plane:
        for name in "abcd":
            plane.put(named_group(name))
    no_log(tmp_path / "run")
    recover(tmp_path / "run")
    with opened_plane() as plane, plane.source(rank=0) as source:
        found = []
        for _ in range(2):
            step = next(source.steps(timeout=30))
            found += [name for batch in step for name in batch.segments.ids]
            source.commit(step)
    assert sorted(found) == [f"{name}/{i}" for name in "abcd" for i in range(2)]


def test_a_log_copied_without_its_wal_is_recovered(tmp_path: Path) -> None:
    folder, copy = tmp_path / "run", tmp_path / "copy"
    engine = opened(folder)
    put(engine, "a", "b")
    shutil.copytree(folder, copy, ignore=shutil.ignore_patterns("*-wal", "*-shm", "lock"))
    kill(engine)
    assert is_refused(copy)
    recover(copy)
    assert sorted(trained_of(copy)) == ["a", "b"]


@pytest.mark.parametrize("damaged", [False, True])
def test_the_write_ahead_log_of_a_killed_plane_is_not_taken_for_that_of_the_new_log(
    damaged: bool, tmp_path: Path
) -> None:
    folder, copy = tmp_path / "run", tmp_path / "copy"
    engine = opened(folder)
    put(engine, "a", "b")
    shutil.copytree(folder, copy, ignore=shutil.ignore_patterns("*-shm", "lock", "log.witness"))
    kill(engine)
    if damaged:
        garbage_for_a_log(copy)
    recover(copy)
    assert sorted(path.name for path in (copy / "before-recover-1").iterdir()) == [
        "log.sqlite",
        "log.sqlite-wal",
        "marker",
    ]
    assert not (copy / "log.sqlite-wal").exists()
    assert sorted(trained_of(copy)) == ["a", "b"]


@pytest.mark.parametrize("part", range(1, 10, 2))
def test_a_write_ahead_log_that_was_cut_is_recovered(part: int, tmp_path: Path) -> None:
    folder, copy = tmp_path / "run", tmp_path / "copy"
    engine = opened(folder)
    for name in "abcdefgh":
        put(engine, name)
    shutil.copytree(folder, copy, ignore=shutil.ignore_patterns("*-shm", "lock"))
    kill(engine)
    wal = copy / "log.sqlite-wal"
    with wal.open("r+b") as file:
        file.truncate(wal.stat().st_size * part // 10)
    assert is_refused(copy)
    recover(copy)
    assert not wal.exists()
    assert sorted(trained_of(copy)) == list("abcdefgh")


def test_the_storage_of_another_run_is_not_mixed_in_and_can_be_used_in_a_new_folder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_with(tmp_path / "one", "a")
    run_with(tmp_path / "two", "b", "c")
    shutil.rmtree(tmp_path / "one" / "storage")
    shutil.copytree(tmp_path / "two" / "storage", tmp_path / "one" / "storage")
    before = files_in(tmp_path / "one")
    assert main(["storage", "recover", str(tmp_path / "one"), "--yes"]) == 1
    assert "put the storage of this run back" in capsys.readouterr().err
    assert files_in(tmp_path / "one") == before
    recover(tmp_path / "one" / "storage", "--into", str(tmp_path / "new"))
    assert sorted(trained_of(tmp_path / "new")) == ["b", "c"]


def test_a_storage_that_is_not_mounted_is_not_recovered_from(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "run"
    run_with(folder, "a")
    (folder / "storage").rename(tmp_path / "unmounted")
    assert main(["storage", "recover", str(folder), "--yes"]) == 1
    assert main(["storage", "check", str(folder)]) == 1
    assert is_refused(folder)  # makes an empty storage
    assert main(["storage", "recover", str(folder), "--yes"]) == 1
    assert "mount the storage or put it back; nothing was changed" in capsys.readouterr().err
    shutil.rmtree(folder / "storage")
    (tmp_path / "unmounted").rename(folder / "storage")
    assert trained_of(folder) == ["a"]


def test_an_unregistered_segment_is_registered_with_its_groups_or_left_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "run"
    run_with(folder, "a")
    segments = folder / "storage" / "segments"
    good, empty, junk = (segments / f"{number:016x}" for number in (1, 2, 3))
    good.write_bytes(encode(named_group("b")) + encode(named_group("a")))
    empty.write_bytes(bytes(5000))
    junk.write_bytes(b"somebody's file")
    recover(folder)
    assert f"left alone: {junk.name}" in capsys.readouterr().out
    engine = opened(folder, ONE)
    assert engine.segments.unregistered == [junk.name]
    assert sorted(train(engine)) == ["a", "b"]
    close(engine)
    assert junk.read_bytes() == b"somebody's file"


def test_a_plane_at_work_keeps_its_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    engine = opened(tmp_path / "run")
    put(engine, "a")
    assert main(["storage", "recover", str(tmp_path / "run"), "--yes"]) == 1
    assert "has it open" in capsys.readouterr().err
    close(engine)


# ------------------------------------------------------------------ what it asks, says and keeps


def test_nothing_changes_unless_the_answer_is_yes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "run"
    run_with(folder, "a", "b")
    no_log(folder)
    before = files_in(folder)
    for answer in ("", "n\n", "what\n"):
        monkeypatch.setattr("sys.stdin", io.StringIO(answer))
        assert main(["storage", "recover", str(folder)]) == 1
        out = capsys.readouterr().out
        assert "would be made, with 2 groups (4 samples" in out
        assert "may have been trained already" in out
        assert out.endswith("Nothing was changed.\n")
    assert main(["storage", "recover", str(folder), "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert found["done"] is None
    assert found["plan"]["groups"] == ["a", "b"]
    assert {k: v for k, v in files_in(folder).items() if k != "lock"} == {
        k: v for k, v in before.items() if k != "lock"
    }
    monkeypatch.setattr("sys.stdin", io.StringIO("y\n"))
    assert main(["storage", "recover", str(folder)]) == 0
    assert sorted(trained_of(folder)) == ["a", "b"]


def test_what_was_there_is_copied_and_a_second_recovery_has_nothing_to_do(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "run"
    run_with(folder, "a")
    garbage_for_a_log(folder)
    old = (folder / "log.sqlite").read_bytes()
    marker = (folder / "storage" / "marker").read_bytes()
    recover(folder)
    assert (folder / "before-recover-1" / "log.sqlite").read_bytes() == old
    assert (folder / "before-recover-1" / "marker").read_bytes() == marker
    assert not (folder / "recover.building").exists()
    capsys.readouterr()
    recover(folder)
    assert "Nothing to recover" in capsys.readouterr().out
    assert not (folder / "before-recover-2").exists()


def test_run_id_epoch_and_decision_go_on_behind_the_marker(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    run_with(folder, "a")
    marker_ahead(folder)
    found = read_marker(FolderStorage(folder / "storage"))
    assert found is not None
    nothing_of_the_log(folder)
    recover(folder)
    engine = opened(folder)
    assert engine.log.run_id == found.run_id
    assert engine.log.epoch > found.epoch + 1
    assert engine.log.commits > found.commits
    close(engine)


def test_a_plane_that_was_taken_for_dead_deletes_nothing_after_a_recovery(tmp_path: Path) -> None:
    shared = PlaneSettings(packing=SETTINGS.packing, target=SETTINGS.target, storage=str(tmp_path / "shared"))
    first = opened(tmp_path / "one", shared)
    put(first, "a", "b")
    (tmp_path / "two").mkdir()
    recover(tmp_path / "two", "--storage", str(tmp_path / "shared"))
    before = FolderStorage(tmp_path / "shared").segments()
    train(first)
    with pytest.raises(PenstockError, match="taken over by epoch 2"):
        for _ in range(70):
            first.state.retire(first.next_step)
            with first.recorder.transaction():
                pass
    kill(first)
    assert FolderStorage(tmp_path / "shared").segments() == before
    found = PlaneSettings(packing=ONE.packing, target=ONE.target, storage=str(tmp_path / "shared"))
    assert sorted(trained_of(tmp_path / "two", found)) == ["a", "b"]


def test_a_repeated_put_of_a_recovered_group_is_known(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    run_with(folder, "a")
    no_log(folder)
    recover(folder)
    engine = opened(folder)
    outcome = engine.put("a", "a", encode(named_group("a")))
    assert outcome is not None
    assert outcome.duplicate
    close(engine)


def test_groups_can_be_set_aside_or_dropped(tmp_path: Path) -> None:
    for state in ("quarantined", "dropped"):
        folder = tmp_path / state
        run_with(folder, "a", "b")
        no_log(folder)
        recover(folder, "--as", state)
        assert trained_of(folder) == []
    engine = opened(tmp_path / "quarantined")
    assert [group["id"] for group in engine.quarantine()] == ["a", "b"]
    assert engine.ledger.as_dict()["balanced"]
    close(engine)
    assert main(["quarantine", str(tmp_path / "quarantined"), "--release", "b"]) == 0
    assert trained_of(tmp_path / "quarantined") == ["b"]
    engine = opened(tmp_path / "dropped")
    assert engine.ledger.as_dict()["dropped"] == {"lost": 4}
    assert engine.ledger.as_dict()["balanced"]
    close(engine)


def test_a_trainer_goes_on_with_the_step_of_its_checkpoint(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "run"
    engine = opened(folder, ONE)
    put(engine, "a", "b", "c")
    close(engine)
    no_log(folder)
    recover(folder, "--step", "501", "--policy-version", "77")
    for _ in range(2):
        engine = opened(folder, ONE)
        engine.resume(1, 501)
        assert (engine.next_step, engine.policy_version) == (501, 77)
        with pytest.raises(InvalidInput, match="steps before 501 were freed"):
            engine.resume(1, 500)
        close(engine)
    assert sorted(trained_of(folder)) == ["a", "b", "c"]
    engine = opened(folder, ONE)
    assert engine.next_step == 504
    close(engine)
    assert main(["storage", "recover", str(folder), "--step", "400", "--yes"]) == 1
    assert "the log is at step 504" in capsys.readouterr().err


def test_the_newest_policy_version_of_the_groups_counts_as_published(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    engine = opened(folder, ONE)
    for version, name in enumerate("abc"):
        assert engine.put(name, name, encode(named_group(name, policy_version=version))) is None
    engine.flush()
    close(engine)
    no_log(folder)
    recover(folder)
    engine = opened(folder, ONE)
    assert engine.policy_version == 2
    close(engine)


def test_more_groups_than_a_table_holds_wait_in_line(tmp_path: Path) -> None:
    folder, names = tmp_path / "run", [f"g{i}" for i in range(20)]
    run_with(folder, *names)
    no_log(folder)
    recover(folder)
    small = PlaneSettings(
        packing=SETTINGS.packing, target=Target(groups=1), replay=Replay(capacity=4), disk_reserve_bytes=8 << 20
    )
    assert trained_of(folder, small) == names


def test_another_seq_len_cuts_recovered_groups_as_any_other(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    engine = opened(folder)
    assert engine.put("a", "a", encode(named_group("a", tokens=60))) is None
    engine.flush()
    close(engine)
    no_log(folder)
    recover(folder)
    short = PlaneSettings(
        packing=type(SETTINGS.packing)(ranks=1, seq_len=40), target=Target(groups=1), disk_reserve_bytes=8 << 20
    )
    assert trained_of(folder, short) == ["a"]


# ------------------------------------------------------------------ killed recoveries


def test_a_recovery_that_is_killed_at_any_replacement_can_be_called_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for count in range(4):  # marker, log, witness; or not at all
        folder, copy = tmp_path / f"run{count}", tmp_path / f"copy{count}"
        run_with(folder, "a")
        shutil.copytree(folder, copy)
        run_with(folder, "b")
        shutil.copy(copy / "log.sqlite", folder / "log.sqlite")
        left, real = [count], os.replace

        def dying(source: Any, target: Any, left: list[int] = left, real: Any = real) -> None:
            if not left[0]:
                raise KeyboardInterrupt
            left[0] -= 1
            real(source, target)

        monkeypatch.setattr("os.replace", dying)
        assert main(["storage", "recover", str(folder), "--yes"]) == (130 if count < 3 else 0)
        monkeypatch.undo()
        if is_refused(folder):
            recover(folder)
        assert sorted(trained_of(folder)) == ["a", "b"]


# ------------------------------------------------------------------ files that are torn, punched or hostile


def pieces_of(path: Path) -> list[tuple[int, int, bool]]:
    with reading_file(path) as file:
        return [(piece.offset, piece.size, not piece.problem) for piece in find_frames(file)]


def test_frames_between_holes_and_a_torn_tail_are_found(tmp_path: Path) -> None:
    frames = [encode(named_group(name, tokens=4000)) for name in "abc"]
    storage = FolderStorage(tmp_path)
    segment = storage.create(new_segment_name())
    locations = segment.append([[frame] for frame in frames] + [[frames[0][:-100]]])
    storage.delete([locations[1]])
    path, size = storage.path(segment.name), [len(frame) for frame in frames]
    assert pieces_of(path) == [
        (0, size[0], True),
        (size[0] + size[1], size[2], True),
        (sum(size), size[0] - 100, False),
    ]
    with path.open("r+b") as file:
        file.seek(size[0] // 2)
        file.write(b"\xff" * 8)
    assert pieces_of(path)[0] == (0, size[0], False)
    with path.open("r+b") as file:  # a damaged front: the frame behind it is found by its magic
        file.seek(20)
        file.write(b"\xff" * 8)
    assert pieces_of(path)[0] == (size[0] + size[1], size[2], True)


@pytest.mark.parametrize("seed", range(20))
def test_whole_frames_are_found_at_any_offset_among_random_bytes(seed: int, tmp_path: Path) -> None:
    rng, data, expected = random.Random(seed), b"", []
    for number in range(8):
        junk = rng.randbytes(rng.randrange(200))
        data += junk + (MAGIC if rng.random() < 0.3 else b"") + rng.randbytes(rng.randrange(60))
        frame = encode(named_group(f"g{number}", tokens=rng.randrange(2, 400)))
        expected.append((len(data), len(frame), True))
        data += frame
    path = tmp_path / "file"
    path.write_bytes(data + rng.randbytes(30))
    assert [piece for piece in pieces_of(path) if piece[2]] == expected


@pytest.mark.deep
@pytest.mark.parametrize("kind", ["magic everywhere", "large fronts", "sparse", "random"])
def test_a_hostile_file_is_bounded_in_time_and_memory(kind: str, tmp_path: Path, pace: float) -> None:
    path, rng = tmp_path / "file", random.Random(1)
    good = encode(named_group("a"))
    header = bytearray(good[:48])
    if kind == "magic everywhere":
        path.write_bytes(MAGIC * (4 << 20))
    elif kind == "large fronts":  # each claims a front of 32 MB, so that each must be hashed
        header[12:16] = (32 << 20).to_bytes(4, "little")
        path.write_bytes((bytes(header) + bytes(16)) * (1 << 20))
    elif kind == "sparse":
        with path.open("wb") as file:
            file.write(good)
            file.truncate(1 << 40)
    else:
        path.write_bytes(b"".join(rng.randbytes(100) + MAGIC for _ in range(100_000)))
    began = time.monotonic()
    found = pieces_of(path)
    assert time.monotonic() - began < 20 * pace
    if kind == "large fronts":
        tracemalloc.start()
        try:
            pieces_of(path)
            assert tracemalloc.get_traced_memory()[1] < 2 * MAX_FRONT_BYTES
        finally:
            tracemalloc.stop()
    assert [piece for piece in found if piece[2]] == ([(0, len(good), True)] if kind == "sparse" else [])


def test_frames_that_a_plane_would_not_take_are_named_and_the_others_recovered(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "run"
    run_with(folder, "a")
    segment = next((folder / "storage" / "segments").iterdir())
    two = [*named_group("x"), *named_group("y")]
    with segment.open("ab") as file:
        file.write(encode(two) + encode(named_group("b")) + encode(named_group("a", tokens=8)) + encode([]))
    recover(folder)
    out = capsys.readouterr().out
    assert "holds a sample of group 'y'" in out
    assert "group 'a': the log has it with other samples" in out
    assert sorted(trained_of(folder)) == ["a", "b"]


def test_frames_that_are_to_be_deleted_are_not_put_back(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    engine = opened(folder)
    put(engine, "a", "b")
    location = engine.log.location_of("b")
    close(engine)
    with sqlite3.connect(folder / "log.sqlite") as log:  # as after a reject whose deletion did not happen yet
        log.execute("DELETE FROM groups WHERE id = 'b'")
        log.execute("INSERT INTO frees VALUES (?)", (location,))
    log.close()
    no_witness(folder)
    recover(folder)
    engine = opened(folder)
    assert [row.id for row in engine.log.groups_in(State.HELD)] == ["a"]
    close(engine)


# ------------------------------------------------------------------ old folders, archives, any files


def test_frames_of_an_old_folder_are_copied_into_a_new_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    old, new = tmp_path / "old", tmp_path / "new"
    (old / "frames").mkdir(parents=True)
    (old / "frames" / "000001-000001").write_bytes(encode(named_group("a")) + bytes(4096) + encode(named_group("b")))
    (old / "frames" / "000002-000001").write_bytes(encode(named_group("c")) + encode(named_group("a")))
    with sqlite3.connect(old / "log.sqlite") as log:
        log.execute("CREATE TABLE meta (name TEXT PRIMARY KEY, value) WITHOUT ROWID")
        log.execute("INSERT INTO meta VALUES ('format', 4)")
    log.close()
    with pytest.raises(CorruptFile, match="format 4"):
        opened(old)
    before = files_in(old / "frames")
    for action in ("check", "recover"):
        assert main(["storage", action, str(old)]) == 1
        assert "--into NEW_FOLDER" in capsys.readouterr().err
    recover(old, "--into", str(new))
    assert files_in(old / "frames") == before
    assert main(["storage", "check", str(new)]) == 0
    assert sorted(trained_of(new)) == ["a", "b", "c"]
    capsys.readouterr()
    recover(old, "--into", str(new))  # they are known, also after they were trained
    assert "Nothing to recover" in capsys.readouterr().out


def test_golden_frames_and_archives_are_read(tmp_path: Path) -> None:
    golden = Path(__file__).parents[1] / "golden" / "v1"
    archive = tmp_path / "archive" / "segments"
    archive.mkdir(parents=True)
    frame = encode(named_group("archived"))
    front = b"what an earlier version wrote down"
    header = struct.pack("<8sII16s", b"PSARCHIV", 1, len(front), xxhash.xxh3_128_digest(front))
    (archive / "00000001").write_bytes(header + front + frame)
    recover(tmp_path / "archive", "--into", str(tmp_path / "new"))
    recover(golden / "plain_group_fast.frame", "--into", str(tmp_path / "new"))
    engine = opened(tmp_path / "new")
    rows = {row.id: row.location for row in engine.log.groups_in(State.HELD)}
    name = decode((golden / "plain_group_fast.frame").read_bytes())[0].group
    assert rows.keys() == {"archived", name}
    assert bytes(engine.storage.read(rows["archived"])[0]) == frame
    assert parse_location(rows["archived"]).size == len(frame)
    close(engine)
