"""What the plane decides about segments that clients write themselves."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import xxhash

from penstock.errors import Conflict, InvalidInput
from penstock.frames import check_group, encode
from penstock.log import SqliteLog
from penstock.packing import Packing
from penstock.plane.opening import open_log
from penstock.plane.segments import Outside, Sealed
from penstock.plane.settings import PlaneSettings, Target
from penstock.plane.workers import Inline, Job, Then
from penstock.protocol.messages import Put
from penstock.storage import FolderStorage, MemoryStorage
from tests.support.engines import DirectEngine
from tests.support.groups import named_group

SETTINGS = PlaneSettings(packing=Packing(ranks=1, seq_len=64), target=Target(groups=1), disk_reserve_bytes=8 << 20)


class Bench:
    """An engine, and a client that writes to its storage."""

    def __init__(self) -> None:
        self.engine = DirectEngine(SETTINGS, SqliteLog(None), MemoryStorage())
        (self.name,) = self.engine.segments.register("client")
        self.segment = self.engine.storage.create(self.name)

    def write(self, group: str) -> str:
        return self.segment.append([[encode(named_group(group))]])[0]

    def put(self, group: str, location: str, *, seq_len: int = 64) -> list[object]:
        """Put a group, with metadata made for `seq_len`; its errors, or None where it was accepted."""
        frame = encode(named_group(group))
        metadata = check_group(frame, group=group, seq_len=seq_len).to_bytes()
        put = Put(ticket=1, group=group, digest=xxhash.xxh3_128_digest(frame), location=location, metadata=metadata)
        found = self.engine.pipeline.put_stored("ticket", put, "client")
        outcomes = [found] if found is not None else self.engine.pipeline.collect()
        return [outcome.error for outcome in outcomes]


def test_a_location_that_was_rejected_is_never_accepted_because_it_is_being_freed() -> None:
    bench = Bench()
    location = bench.write("a")
    storage = bench.engine.storage
    assert isinstance(storage, MemoryStorage)
    frame = storage.read(location)[0]
    storage.replace(location, bytes(len(frame)))  # the plane does not see it yet
    assert [type(error).__name__ for error in bench.put("a", location)] == ["Unseen"]
    storage.replace(location, bytes(frame))
    (error,) = bench.put("a", location)  # the same message, which the network brings again
    assert isinstance(error, Sealed)
    assert bench.put("a", bench.write("a")) == [None]
    with bench.engine.recorder.transaction():
        pass
    assert bytes(storage.read(bench.engine.log.location_of("a"))[0]) == frame


def test_only_what_must_be_read_is_looked_at_beside_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    bench, jobs = Bench(), []
    submit = Inline.submit

    def noted(workers: Inline, queue: str, job: Job, then: Then) -> None:
        jobs.append(queue)
        submit(workers, queue, job, then)

    monkeypatch.setattr(Inline, "submit", noted)
    assert bench.put("a", bench.write("a")) == [None]
    assert jobs == ["intake"]  # the first frame of a segment is read back
    for name in "bc":
        assert bench.put(name, bench.write(name)) == [None]
    assert jobs == ["intake"]
    assert bench.put("d", bench.write("d"), seq_len=3) == [None]  # its sender knew another seq_len: read it
    assert jobs == ["intake", "intake"]
    assert bench.engine.counts["groups_direct"] == 4
    assert bench.engine.counts["puts_refused"] == 0


def test_two_groups_that_are_looked_at_together_cannot_be_at_one_place() -> None:
    bench = Bench()
    location = bench.write("a")
    segments = bench.engine.segments
    segments.expect(location, "client")
    with pytest.raises(InvalidInput, match="overlaps a frame that was put before"):
        segments.expect(location, "client")
    segments.settle(location, accepted=False)  # the commit failed: its bytes stay, and it may be put again
    assert segments.expect(location, "client")


def test_a_segment_that_is_created_after_it_was_freed_is_deleted_by_the_next_plane() -> None:
    storage, log, now = MemoryStorage(), SqliteLog(None), [1000.0]
    outside = Outside(wall=lambda: now[0], steady=lambda: now[0])
    engine = DirectEngine(SETTINGS, log, storage, outside)
    (name,) = engine.segments.register("client")
    now[0] += 7 * 24 * 3600  # the client stands still for a week
    for _ in range(3):
        now[0] += 10
        engine.segments.tidy([])
        with engine.recorder.transaction():
            pass
    assert name in log.frees()
    storage.create(name).append([[b"late"]])
    log.take_over()
    again = DirectEngine(SETTINGS, log, storage, outside)
    with again.recorder.transaction():
        pass
    assert not again.segments.unregistered
    assert name not in storage.segments()
    with again.recorder.transaction():
        pass
    assert name not in log.frees()


def test_a_log_from_right_before_a_deletion_is_refused(tmp_path: Path) -> None:
    settings = PlaneSettings(
        packing=SETTINGS.packing,
        target=SETTINGS.target,
        disk_reserve_bytes=8 << 20,
        retain_steps=0,
        storage=str(tmp_path / "storage"),
    )
    run, copied = tmp_path / "run", tmp_path / "copy"
    engine = DirectEngine(settings, open_log(run, settings), FolderStorage(tmp_path / "storage"))
    for name in "ab":
        assert engine.put(name, name, encode(named_group(name))) is None
        assert [outcome.error for outcome in engine.flush()] == [None]
    engine.plan_step(1)
    engine.received(1)
    engine.commit(1, None)
    location = engine.log.location_of("a")
    assert location
    engine.log.shrink()
    shutil.copytree(run, copied, ignore=shutil.ignore_patterns("lock", "*-shm"))
    with engine.recorder.transaction():  # frees the frame of "a", and decides nothing
        pass
    assert not engine.log.location_of("a")
    engine.log.close()
    with pytest.raises(Conflict, match="it was restored from a copy"):
        open_log(copied, settings)


def test_a_client_that_is_gone_and_comes_back_writes_to_a_new_segment() -> None:
    engine = DirectEngine(SETTINGS, SqliteLog(None), MemoryStorage())
    (first,), (other,) = engine.segments.register("one"), engine.segments.register("two")
    engine.segments.seal_writer("one")
    with pytest.raises(Sealed):
        engine.segments.expect(f"{first}:0:10", "one")
    assert engine.segments.expect(f"{other}:0:10", "two")
    (again,) = engine.segments.register("one")
    assert engine.segments.expect(f"{again}:0:10", "one")
    engine.log.close()


def test_a_writer_that_has_gone_is_forgotten() -> None:
    bench = Bench()
    segments = bench.engine.segments
    for number in range(100):
        segments.register(f"client {number}")
        segments.seal_writer(f"client {number}")
    with bench.engine.recorder.transaction():
        pass
    assert set(segments._open) == {"client", "plane"}
