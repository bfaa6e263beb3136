"""Groups whose frames get late columns: deadlines, errors, restarts, damage, copies, checks, recovery, reruns."""

from __future__ import annotations

import logging
import os
import re
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import penstock as ps
from penstock.client import feed
from penstock.commands.storage import check_lines
from penstock.errors import InvalidInput
from penstock.frames import encode
from penstock.integrations.formats.penstock_files import read_run_groups
from penstock.integrations.formats.shared import Lost, Place
from penstock.log import reading
from penstock.runs import RecordedRun, RunCopy, check, plan_recovery, rerun, stored_samples
from penstock.storage import FolderStorage, Gone, parse_location
from tests.runs.test_recover import recover
from tests.support.groups import named_group
from tests.support.late_groups import nothing_to_delete, taken
from tests.support.pace import eventually, pace
from tests.support.planes import OpenPlane

TEACHER = "teacher_logprobs"
ONE: dict[str, Any] = {"ranks": 1, "groups_per_step": 1, "needs": (TEACHER,), "needs_deadline_s": 600.0}
VALUES = np.linspace(-0.1, -1, 6, dtype=np.float32)


def put(plane: ps.Plane, *names: str, samples: int = 3) -> None:
    for name in names:
        plane.put([sample.replace(mode="opd") for sample in named_group(name, samples=samples)])


def values(name: str, *rows: int) -> dict[str, dict[str, Any]]:
    return {name: {f"{name}/{i}": VALUES - i for i in rows}}


def trained(plane: ps.Plane) -> tuple[tuple[str, ...], list[float]]:
    """Train a step. Returns its samples and their teacher's log-probabilities."""
    (found,), _ = taken(plane)
    return found["ids"], found.get(TEACHER, [])


# ------------------------------------------------------------------ what is missing


@pytest.mark.parametrize("on_missing", ["drop", "train"])
def test_what_misses_the_deadline_is_dropped_or_trained_without(open_plane: OpenPlane, on_missing: str) -> None:
    plane = open_plane(**{**ONE, "needs_deadline_s": pace()}, on_missing=on_missing)
    put(plane, "none", "some")
    plane.put(named_group("rl"))
    plane.attach(TEACHER, values("some", 0, 2))
    eventually(lambda: plane.ledger.waiting == 0)
    if on_missing == "drop":
        assert dict(plane.ledger.dropped) == {"columns missing": 8}
    else:
        # Samples of mode opd are not trained without their teacher: zeros would be wrong with no sign of it.
        ids, column = trained(plane)
        assert (ids, column[:12]) == (("some/0", "some/2"), np.concatenate([VALUES, VALUES - 2]).tolist())
        assert trained(plane) == (("rl/0", "rl/1"), [])
        assert dict(plane.ledger.dropped) == {"columns missing": 3}
        assert dict(plane.ledger.discarded) == {"columns missing": 1}
    assert plane.attach(TEACHER, values("some", 1)) == (0, 0, 1)
    counts = plane.status()["counts"]
    assert (counts["groups_overdue"], counts["values_late"]) == (3, 1)


def test_samples_that_could_not_be_scored_are_left_out(open_plane: OpenPlane) -> None:
    plane = open_plane(**ONE)
    put(plane, "g", "h")
    assert plane.attach(TEACHER, values("g", 0, 1), errors={"g": {"g/2": "too long for the teacher"}}) == (3, 0, 0)
    assert plane.attach(TEACHER, {}, errors={"h": dict.fromkeys(["h/0", "h/1", "h/2"], "no")}) == (3, 0, 0)
    assert trained(plane)[0] == ("g/0", "g/1")
    assert dict(plane.ledger.dropped) == {"scored as error": 3}
    assert dict(plane.ledger.discarded) == {"scored as error": 1}


def test_a_group_put_with_the_column_does_not_wait_and_keeps_it(open_plane: OpenPlane) -> None:
    plane = open_plane(**ONE)
    plane.put([sample.replace(**{TEACHER: VALUES}) for sample in named_group("g")])
    assert plane.ledger.held == 2
    with pytest.raises(ps.errors.Conflict, match="sample 'g/0' has the values it was put with"):
        plane.attach(TEACHER, values("g", 0))


def test_a_column_that_the_group_does_not_wait_for_is_rejected(open_plane: OpenPlane) -> None:
    plane = open_plane(**ONE)
    put(plane, "g")
    with pytest.raises(InvalidInput, match="attach ce_weights: group 'g' waits for teacher_logprobs"):
        plane.attach("ce_weights", values("g", 0))
    assert plane.ledger.waiting == 3


def test_values_that_are_longer_than_any_group_are_invalid(open_plane: OpenPlane) -> None:
    plane = open_plane(**ONE, max_group_tokens=64)
    put(plane, "g")
    with pytest.raises(InvalidInput, match="attach teacher_logprobs: frame: says 1 samples, 65 tokens; "):
        plane.attach(TEACHER, {"g": {"g/0": np.zeros(65, np.float32)}})
    assert plane.ledger.waiting == 3


# ------------------------------------------------------------------ restarts and readers


@pytest.mark.parametrize("snapshot_every", [1, 1000])
def test_a_restarted_plane_continues_with_what_was_attached(
    tmp_path: Path, open_plane: OpenPlane, snapshot_every: int
) -> None:
    settings = {**ONE, "snapshot_every": snapshot_every}
    plane = open_plane(tmp_path, **settings)
    put(plane, "a", "b")
    plane.attach(TEACHER, values("a", 0))
    plane.attach(TEACHER, values("b", 0, 1, 2))
    plane.close()
    plane = open_plane(tmp_path, **settings)
    assert (plane.ledger.waiting, plane.ledger.held) == (3, 3)
    (lease,) = plane.lacking(TEACHER, timeout=0)
    assert [sample.id for sample in lease.samples] == ["a/1", "a/2"]
    assert plane.attach(TEACHER, values("a", 0, 1, 2)) == (2, 1, 0)
    assert trained(plane)[0] == ("b/0", "b/1", "b/2")
    assert trained(plane) == (("a/0", "a/1", "a/2"), [*VALUES, *(VALUES - 1), *(VALUES - 2)])
    plane.close()
    assert open_plane(tmp_path, **settings).attach(TEACHER, values("a", 0)) in [(0, 1, 0), (0, 0, 1)]


def test_copies_checks_reruns_and_readers_know_the_new_frames(tmp_path: Path, open_plane: OpenPlane) -> None:
    run = tmp_path / "run"
    plane = open_plane(run, retain="all", **ONE)
    put(plane, "a", "b", "c")
    plane.attach(TEACHER, values("b", 0, 1, 2))
    plane.attach(TEACHER, values("a", 0, 1), errors={"a": {"a/2": "timed out"}})
    plane.attach(TEACHER, values("c", 1))
    steps = [taken(plane)[1].digest for _ in range(2)]
    plane.close()
    report = check(run)
    assert (report.frames, report.damaged, report.missing, report.broken, report.lost) == (3, [], [], [], 0)
    with RunCopy(run, tmp_path / "copy") as copy:
        copied = copy.round()
    assert (copied.groups, copied.damaged) == (3, {})
    for folder in (run, tmp_path / "copy"):
        recorded = RecordedRun.open(folder)
        assert [recorded.steps[number].digests[0] for number in (1, 2)] == steps
        found = rerun(recorded, tmp_path / f"again {folder.name}")
        assert (found.same, found.steps, found.skipped) == (True, 2, 0), found.sentence
    (row,) = [row for row in recorded.groups.values() if row.id == "b"]
    assert stored_samples(run, row.id, row.location)[1][TEACHER].tolist() == (VALUES - 1).tolist()
    other = open_plane(tmp_path / "other", **ONE)
    assert feed(recorded, other, speed=None).groups == 3
    assert (other.ledger.held, other.ledger.waiting) == (5, 3)


def test_a_reader_of_a_live_run_follows_a_group_to_the_frame_that_an_attach_gave_it(
    tmp_path: Path, open_plane: OpenPlane
) -> None:
    plane = open_plane(tmp_path, retain_steps=1, **ONE)
    put(plane, "a", "b", "c")
    recorded = RecordedRun.open(tmp_path)
    before = {row.id: row for row in recorded.groups.values()}
    converted = read_run_groups(Place(str(tmp_path)), Lost())
    assert [next(converted).id for _ in range(3)] == ["a/0", "a/1", "a/2"]
    plane.attach(TEACHER, values("b", 0, 1, 2))
    eventually(lambda: nothing_to_delete(plane))
    # What was listed before the attach names a frame that is deleted by now. The group is neither gone nor damaged.
    column = np.concatenate([VALUES, VALUES - 1, VALUES - 2]).tolist()
    assert [one.id for one in converted] == ["b/0", "b/1", "b/2", "c/0", "c/1", "c/2"]
    row = before["b"]
    assert stored_samples(tmp_path, "b", row.location)[TEACHER].values.tolist() == column
    assert ps.decode(recorded.complete_frame(row.op)).columns[TEACHER].values.tolist() == column
    assert recorded.verify() == 3
    assert not recorded.gone
    plane.attach(TEACHER, values("c", 0, 1, 2))
    for _ in range(2):  # b, then c: b is freed
        trained(plane)
    eventually(lambda: nothing_to_delete(plane))
    for read in (lambda: stored_samples(tmp_path, "b", row.location), lambda: recorded.complete_frame(row.op)):
        with pytest.raises(Gone, match="group 'b'"):
            read()


def test_a_lost_log_is_recovered_with_the_columns(tmp_path: Path, open_plane: OpenPlane) -> None:
    plane = open_plane(tmp_path, **ONE)
    for name in "ab":
        plane.put(named_group(name, samples=3))
    plane.attach(TEACHER, values("a", 0, 1, 2))
    eventually(lambda: nothing_to_delete(plane))
    plane.close()
    (tmp_path / "log.sqlite").unlink()
    recover(tmp_path)
    assert check(tmp_path).broken == []
    plane = open_plane(tmp_path, **{**ONE, "needs": (), "needs_deadline_s": None})
    found = dict(trained(plane) for _ in range(2))
    assert found["a/0", "a/1", "a/2"] == [*VALUES, *(VALUES - 1), *(VALUES - 2)]
    assert found["b/0", "b/1", "b/2"] == []


def location_of(folder: Path, group: str) -> str:
    with reading(folder) as log:
        return log.location_of(group)


@pytest.mark.parametrize("first", ["old", "new"])
def test_a_lost_log_is_recovered_with_the_newest_frame_of_a_group_while_older_ones_are_not_deleted(
    tmp_path: Path, open_plane: OpenPlane, first: str
) -> None:
    plane = open_plane(tmp_path, **ONE)
    put(plane, "a")
    storage = FolderStorage(tmp_path / "storage", create=False)
    old = bytes(storage.read(location_of(tmp_path, "a"))[0])
    plane.attach(TEACHER, values("a", 0))
    plane.attach(TEACHER, values("a", 1, 2))
    eventually(lambda: nothing_to_delete(plane))
    segment = location_of(tmp_path, "a").partition(":")[0]
    plane.close()
    (tmp_path / "log.sqlite").unlink()
    # What a plane leaves that is killed before it deletes. Files are searched by their time.
    left = storage.path("0" * 16)
    left.write_bytes(old)
    at = storage.path(segment).stat().st_mtime_ns + (10**9 if first == "new" else -(10**9))
    os.utime(left, ns=(at, at))
    recover(tmp_path)
    plane = open_plane(tmp_path, **{**ONE, "needs": (), "needs_deadline_s": None})
    assert trained(plane) == (("a/0", "a/1", "a/2"), [*VALUES, *(VALUES - 1), *(VALUES - 2)])


def test_a_frame_that_was_written_and_not_attached_is_unused_and_one_with_other_samples_is_broken(
    tmp_path: Path, open_plane: OpenPlane
) -> None:
    plane = open_plane(tmp_path, **ONE)
    put(plane, "a", "b")
    plane.close()
    segment = location_of(tmp_path, "a").partition(":")[0]
    with FolderStorage(tmp_path / "storage", create=False).path(segment).open("ab") as file:  # then it is killed
        file.write(encode([one.replace(mode="opd", **{TEACHER: VALUES}) for one in named_group("a", samples=3)]))
        file.write(encode(named_group("b", samples=2)))
    report = check(tmp_path)
    assert (report.unused, report.lost, report.ok, report.broken) == (1, 0, True, [])
    assert [text.partition(": ")[2] for text in report.conflicts] == ["group 'b': the log has it with other samples"]
    lines = "\n".join(check_lines(report))
    assert re.search(r"not attached +1 frames, \d+ B", lines) and "  other samples: " in lines
    assert plan_recovery(tmp_path).newer == []  # the log lacks nothing, so it was never attached


def test_what_a_killed_worker_wrote_is_among_the_dead_bytes_after_the_next_deletion(
    tmp_path: Path, open_plane: OpenPlane
) -> None:
    plane = open_plane(tmp_path, **{**ONE, "needs": (), "needs_deadline_s": None, "retain_steps": 0})
    put(plane, "a", "b", samples=1)
    path = FolderStorage(tmp_path / "storage", create=False).path(location_of(tmp_path, "a").partition(":")[0])
    with path.open("ab") as file:
        file.write(b"x" * (1 << 20))
    assert plane.status()["storage"]["dead_bytes"] == 0
    for _ in range(2):  # a step is freed with the next transaction
        trained(plane)
    eventually(lambda: plane.status()["storage"]["dead_bytes"] > 1 << 20)


@pytest.mark.parametrize("deleted", [True, False])
def test_a_log_from_before_an_attach_gets_the_new_frame(tmp_path: Path, open_plane: OpenPlane, deleted: bool) -> None:
    run, copy = tmp_path / "run", tmp_path / "copy"
    plane = open_plane(run, **ONE)
    put(plane, "all", "some", "none")
    frames = FolderStorage(run / "storage", create=False)
    first = bytes(frames.read(location_of(run, "all"))[0])
    plane.attach(TEACHER, values("some", 0))
    eventually(lambda: nothing_to_delete(plane))
    plane.close()
    shutil.copytree(run, copy)
    plane = open_plane(run, **ONE)
    plane.attach(TEACHER, values("all", 0, 1, 2))
    plane.attach(TEACHER, values("some", 1))
    eventually(lambda: nothing_to_delete(plane))
    plane.close()
    for name in ("log.sqlite", "log.witness"):
        shutil.copy(copy / name, run / name)
    if not deleted:  # the plane was killed before storage had deleted the old frames
        for name in ("all", "some", "none"):
            at = parse_location(location_of(copy, name))
            frames.path(at.segment).touch()
            with frames.path(at.segment).open("r+b") as file:
                file.seek(at.offset)
                file.write(bytes(FolderStorage(copy / "storage", create=False).read(str(at))[0]))
    assert {row.id for row, _ in plan_recovery(run).newer} == {"all", "some"}
    recover(run)
    report = check(run)
    assert (report.frames, report.missing, report.damaged, report.broken) == (3, [], [], [])
    plane = open_plane(run, **ONE)
    eventually(lambda: plane.ledger.held == 3)
    assert trained(plane) == (("all/0", "all/1", "all/2"), [*VALUES, *(VALUES - 1), *(VALUES - 2)])
    assert not plane.put_frame("all", first)  # a worker that repeats its put
    assert plane.attach(TEACHER, values("some", 0, 1, 2)) == (1, 2, 0)
    assert trained(plane)[0] == ("some/0", "some/1", "some/2")
    assert plane.ledger.waiting == 3


# ------------------------------------------------------------------ damage


def damage(folder: Path, group: str, at: int) -> None:
    """Overwrite bytes of a group's frame: of its front, or of a column."""
    place = parse_location(location_of(folder, group))
    with FolderStorage(folder / "storage", create=False).path(place.segment).open("r+b") as file:
        file.seek(place.offset + at if at >= 0 else place.end + at)
        file.write(b"\xff" * 8)


@pytest.mark.parametrize(("at", "direct"), [(-8, True), (-8, False), (0, False)])
def test_a_damaged_group_that_waits_is_dropped_as_lost_and_the_others_are_leased(
    tmp_path: Path, open_plane: OpenPlane, caplog: pytest.LogCaptureFixture, at: int, direct: bool
) -> None:
    plane = open_plane(tmp_path, direct=direct, **ONE)
    put(plane, "good", "bad")
    damage(tmp_path, "bad", at)
    seen: Counter[str] = Counter()
    with caplog.at_level(logging.ERROR, "penstock"):
        for lease in plane.lacking(TEACHER, groups=2, timeout=10):
            seen.update(list(lease.groups))
            lease.attach({sample.id: VALUES for sample in lease.samples})
            if plane.ledger.waiting == 0:
                break
    eventually(lambda: plane.ledger.waiting == 0)
    assert seen == {"good": 1}
    assert dict(plane.ledger.dropped) == {"lost": 3}
    assert plane.status()["counts"]["groups_lost"] == 1


def test_an_attach_to_a_damaged_group_attaches_nothing(tmp_path: Path, open_plane: OpenPlane) -> None:
    plane = open_plane(tmp_path, **ONE)
    put(plane, "bad")
    damage(tmp_path, "bad", -8)
    with pytest.raises(ps.errors.CorruptFrame, match="group 'bad'"):
        plane.attach(TEACHER, values("bad", 0, 1, 2))
    eventually(lambda: plane.ledger.waiting == 0)
    assert dict(plane.ledger.dropped) == {"lost": 3}
