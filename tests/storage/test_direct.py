"""Workers and ranks that see the storage use it themselves; the plane sees metadata. Everything else is as before."""

from __future__ import annotations

import asyncio
import re
import shutil
import subprocess
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

import penstock as ps
from penstock.arrays import Sample
from penstock.client.direct import DirectWriter
from penstock.client.source import Source, Step
from penstock.client.storage_reader import StorageReader
from penstock.errors import DiskFull, InvalidInput, StepAborted
from penstock.frames import encode
from penstock.plane.loop import PlaneLoop
from penstock.server.plane_process import PlaneProcess
from penstock.storage import FolderStorage, parse_location
from penstock.transport.keys import make_keys
from tests.support.disks import files_at_most
from tests.support.groups import named_group
from tests.support.plane_processes import wait_until
from tests.support.planes import FAST

SETTINGS = {"ranks": 2, "seq_len": 64, "groups_per_step": 2, "timeouts": FAST}
OpenPlane = Callable[..., ps.Plane]


@pytest.fixture
def open_plane() -> Iterator[OpenPlane]:
    opened: list[ps.Plane] = []

    def open_(where: str | Path, **settings: object) -> ps.Plane:
        plane = ps.open(where, **{**SETTINGS, **settings})  # type: ignore[arg-type]
        opened.append(plane)
        return plane

    yield open_
    for plane in opened:
        plane.close()


def server_of(plane: ps.Plane) -> PlaneLoop:
    assert plane._server is not None
    return plane._server


def writer_of(plane: ps.Plane) -> DirectWriter | None:
    return plane._direct.writer()


def train(sources: list[Source]) -> list[Step]:
    """One step on all ranks."""

    def one(source: Source) -> Step:
        step = source.step()
        source.commit(step)
        return step

    with ThreadPoolExecutor(len(sources)) as pool:
        steps = list(pool.map(one, sources))
    for source in sources:
        source.flush()
    return steps


def sources_of(plane: ps.Plane) -> list[Source]:
    return [plane.source(rank, world=2) for rank in range(2)]


def digests_of(steps: list[Step]) -> list[str]:
    return [step.digest for step in steps]


def damage(server: PlaneLoop, group: str) -> Path:
    """Alter a byte of the values of a stored group; returns its segment."""
    state, storage = server.engine.state, server.engine.storage
    at = parse_location(state.rows[state.by_id[group]].location)
    assert isinstance(storage, FolderStorage)
    path = storage.path(at.segment)
    with path.open("r+b") as file:
        file.seek(at.end - 2)
        octet = file.read(1)[0]
        file.seek(at.end - 2)
        file.write(bytes([octet ^ 0x40]))
    return path


# ------------------------------------------------------------------ who goes direct


def test_a_plane_in_a_folder_and_a_worker_beside_it_write_to_storage_themselves(
    open_plane: OpenPlane, tmp_path: Path
) -> None:
    plane = open_plane(tmp_path / "run", listen=["tcp://127.0.0.1:*"])
    with ps.open(plane.url, timeouts=FAST) as worker:
        assert plane.put(named_group("a"))
        assert worker.put(named_group("b"))
        assert not worker.put(named_group("a"))
        assert writer_of(plane) is not None and writer_of(worker) is not None
    assert plane.status()["counts"]["groups_direct"] == 2
    assert plane.status()["storage"]["writers"] >= 2


def test_the_steps_are_the_same_whichever_way_bytes_go(open_plane: OpenPlane, tmp_path: Path) -> None:
    found = []
    for direct in (True, False):
        plane = open_plane(tmp_path / f"{direct}", direct=direct)
        for name in "abcd":
            plane.put(named_group(name))
        assert (writer_of(plane) is not None) is direct
        sources = sources_of(plane)
        steps = [train(sources), train(sources)]
        assert all((source._reach.reader is not None) is direct for source in sources)
        found.append([digests_of(step) for step in steps])
        arrays = [{name: values.copy() for name, values in batch.columns.items()} for batch in steps[0][0]]
        found.append(arrays)  # type: ignore[arg-type]
        for source in sources:
            source.close()
    assert found[0] == found[2]
    for ours, theirs in zip(found[1], found[3], strict=True):
        for name, values in ours.items():  # type: ignore[attr-defined]
            assert np.array_equal(values, theirs[name], equal_nan=values.dtype.kind == "f")


def test_memory_that_is_reused_is_never_part_of_a_step_that_was_given_out(
    open_plane: OpenPlane, tmp_path: Path
) -> None:
    plane = open_plane(tmp_path / "run", ranks=1, seq_len=1 << 16, groups_per_step=1)
    rng = np.random.default_rng(0)

    def large(name: str) -> list[Sample]:
        experts = rng.integers(0, 200, (4000, 24, 32), np.uint8)
        return [
            Sample(
                id=f"{name}/{i}",
                group=name,
                token_ids=rng.integers(0, 1000, 4000),
                loss_mask=[False] + [True] * 3999,
                logprobs=-rng.random(4000),
                routed_experts=experts,
            )
            for i in range(3)
        ]

    for name in "abc":
        plane.put(large(name))
    source = plane.source(0, world=1)
    first = source.step()
    batches = [dict(batch.columns) for batch in first]
    before = [{name: values.copy() for name, values in columns.items()} for columns in batches]
    source.commit(first)
    for _ in range(2):
        source.commit(source.step())
    assert source._reach.reader is not None and source._reach.reader._memory.nbytes > 4 << 20
    for columns, copies in zip(batches, before, strict=True):
        for name, values in columns.items():
            assert np.array_equal(values, copies[name], equal_nan=values.dtype.kind == "f"), name
    source.close()


def test_evaluation_groups_tenants_and_frames_go_direct_too(open_plane: OpenPlane, tmp_path: Path) -> None:
    plane = open_plane(tmp_path / "run", ranks=1, groups_per_step=2, shares={"x": 1.0, "y": 1.0})
    for name, run in (("a", "x"), ("b", "y")):
        assert plane.put([sample.replace(run=run) for sample in named_group(name)])
    assert plane.put([sample.replace(run="x") for sample in named_group("e")], evaluation=True)
    frame = encode([sample.replace(run="y") for sample in named_group("f")])
    assert plane.put_frame("f", frame)
    assert plane.status()["counts"]["groups_direct"] == 4
    assert plane.ledger.evaluation == len(named_group("e"))
    source = plane.source(0, world=1)
    source.commit(source.step())
    source.close()


def test_what_is_wrong_with_a_group_is_said_by_the_plane_and_counted_there(
    open_plane: OpenPlane, tmp_path: Path
) -> None:
    plane = open_plane(tmp_path / "run", needs=["routed_experts"])
    with pytest.raises(InvalidInput, match="routed_experts"):
        plane.put(named_group("a"))
    with pytest.raises(InvalidInput, match="holds a sample of group"):
        plane.put([*named_group("b"), *named_group("c")])
    assert plane.status()["counts"]["puts_refused"] == 2
    assert plane.status()["storage"]["live_bytes"] == 0


def test_a_client_key_sends_frames_and_a_writer_key_writes_them(open_plane: OpenPlane, tmp_path: Path) -> None:
    make_keys(tmp_path / "keys", writers=("writer",))
    mine = tmp_path / "mine"  # a worker's own copy
    mine.mkdir()
    for theirs, own in (("plane.key", "plane.key"), ("writer.key", "client.key"), ("writer.secret", "client.secret")):
        shutil.copy(tmp_path / "keys" / theirs, mine / own)
    plane = open_plane(tmp_path / "run", listen=["tcp://127.0.0.1:*"], keys=str(tmp_path / "keys"))
    for keys, is_direct in ((tmp_path / "keys", False), (mine, True)):
        with ps.open(plane.url, keys=str(keys), timeouts=FAST) as worker:
            assert worker.put(named_group(f"by {keys.name}"))
            assert (writer_of(worker) is not None) is is_direct
    assert plane.status()["counts"]["groups_direct"] == 1


def test_a_worker_that_sees_another_storage_under_that_path_sends_its_frames(
    open_plane: OpenPlane, tmp_path: Path
) -> None:
    plane = open_plane(tmp_path / "run", listen=["tcp://127.0.0.1:*"])
    storage = tmp_path / "run" / "storage"
    marker = (storage / "marker").read_bytes()
    (storage / "marker").write_bytes(marker.replace(b'"epoch":1', b'"epoch":7'))
    with ps.open(plane.url, timeouts=FAST) as worker:
        assert worker.put(named_group("a"))
        assert writer_of(worker) is None
    (storage / "marker").write_bytes(marker)


def test_a_copied_folder_is_found_by_the_first_frame_and_nothing_is_lost(open_plane: OpenPlane, tmp_path: Path) -> None:
    plane = open_plane(tmp_path / "run", listen=["tcp://127.0.0.1:*"])
    copied = tmp_path / "copied"
    shutil.copytree(tmp_path / "run" / "storage", copied)
    with ps.open(plane.url, timeouts=FAST) as worker:
        worker._direct.writer()
        worker._direct._writer = DirectWriter(FolderStorage(copied), worker._open_segment)
        assert worker.put(named_group("a"))
        assert writer_of(worker) is None
        assert worker.put(named_group("b"))
    sources = sources_of(plane)
    train(sources)
    for source in sources:
        source.close()


# ------------------------------------------------------------------ segments


def test_a_sealed_segment_costs_one_more_write(open_plane: OpenPlane, tmp_path: Path) -> None:
    plane = open_plane(tmp_path / "run")
    assert plane.put(named_group("a"))
    engine = server_of(plane).engine
    (mine,) = [name for name, one in engine.segments._all.items() if one.row.writer != "plane"]
    engine.segments.seal(mine)
    assert plane.put(named_group("b"))
    assert plane.ledger.held == len(named_group("a")) + len(named_group("b"))
    assert len({parse_location(at).segment for at in engine.log.locations()}) == 2


def test_a_client_that_comes_back_under_another_address_gets_a_segment_of_its_own(
    open_plane: OpenPlane, tmp_path: Path
) -> None:
    plane = open_plane(tmp_path / "run", listen=["tcp://127.0.0.1:*"])
    with ps.open(plane.url, timeouts=FAST) as first, ps.open(plane.url, timeouts=FAST) as again:
        assert first.put(named_group("a"))
        again._direct.writer()
        again._direct._writer = writer_of(first)  # as after the connection was made anew, with the same open segment
        assert again._direct._writer is not None
        again._direct._writer._writer._next = again._open_segment
        assert again.put(named_group("b"))
    assert plane.status()["counts"]["groups_direct"] == 2


def test_producers_go_on_in_new_segments_after_the_plane_restarts(tmp_path: Path) -> None:
    url = f"ipc://{tmp_path}/s"
    with ps.open(tmp_path / "run", listen=[url], **SETTINGS) as plane:  # type: ignore[arg-type]
        worker = ps.open(url, timeouts=FAST)
        assert worker.put(named_group("a"))
    with ps.open(tmp_path / "run", listen=[url], **SETTINGS) as plane:  # type: ignore[arg-type]
        assert worker.put(named_group("b"))
        assert not worker.put(named_group("a"))
        assert writer_of(worker) is not None
        assert plane.ledger.held == len(named_group("a")) + len(named_group("b"))
        worker.close()


def test_many_threads_share_syncs_and_nothing_is_mixed_up(open_plane: OpenPlane, tmp_path: Path) -> None:
    plane = open_plane(tmp_path / "run", groups_per_step=8)
    names = [f"g{i}" for i in range(64)]
    with ThreadPoolExecutor(16) as pool:
        assert all(pool.map(lambda name: plane.put(named_group(name)), names))
    state, storage = server_of(plane).engine.state, server_of(plane).engine.storage
    for name in names:
        assert bytes(storage.read(state.rows[state.by_id[name]].location)[0]) == encode(named_group(name))


def test_a_full_disk_is_said_to_the_caller_and_the_same_group_can_be_put_again(
    open_plane: OpenPlane, tmp_path: Path
) -> None:
    plane = open_plane(tmp_path / "run")
    plane.put(named_group("a"))
    big = named_group("big", tokens=60)
    with files_at_most(1 << 12):
        found: list[BaseException] = []

        def put() -> None:
            try:
                for i in range(30):
                    plane.put(named_group(f"f{i}", tokens=60), timeout=60)
            except BaseException as error:  # noqa: BLE001 - looked at below
                found.append(error)

        thread = threading.Thread(target=put)
        thread.start()
        thread.join()
    assert found and isinstance(found[0], DiskFull)
    assert plane.put(big)


def test_a_write_that_finds_no_room_leaves_no_bytes_behind(tmp_path: Path) -> None:
    storage = FolderStorage(tmp_path)
    segment = storage.create("0" * 16)
    first = segment.append([[b"a" * 8192]])[0]
    with files_at_most(64 << 10), pytest.raises(DiskFull):
        segment.append([[b"b" * 8192], [b"c" * (128 << 10)]])
    assert storage.segments()["0" * 16] == 8192
    assert storage.read(first) == [b"a" * 8192]


@pytest.mark.process
def test_a_group_that_only_its_worker_has_no_room_for_is_written_by_the_plane(tmp_path: Path) -> None:
    words = ["--ranks=1", "--seq-len=64", "--groups-per-step=2", "--listen=tcp://127.0.0.1:*"]
    plane = PlaneProcess([str(tmp_path / "run"), *words], stderr=subprocess.DEVNULL)
    try:
        with ps.open(plane.url, timeouts=FAST) as worker:
            assert worker.put(named_group("a"))
            with files_at_most(100):
                assert worker.put(named_group("b"))
                assert asyncio.run(worker.aput(named_group("c")))
            wait_until(lambda: not worker._direct.is_paused)
            assert worker.put(named_group("d"))
            assert not worker.put(named_group("b"))
            found = worker.status()["counts"]
        assert (found["groups"], found["groups_direct"]) == (4, 2)
    finally:
        plane.kill()


def test_a_storage_folder_that_vanishes_sends_groups_to_the_plane_which_says_what_is_wrong(
    open_plane: OpenPlane, tmp_path: Path
) -> None:
    plane = open_plane(tmp_path / "run", listen=["tcp://127.0.0.1:*"])
    with ps.open(plane.url, timeouts=FAST) as worker:
        assert worker.put(named_group("a"))
        (tmp_path / "run" / "storage").rename(tmp_path / "away")
        with pytest.raises(OSError, match="storage"):
            worker.put(named_group("b"))
        (tmp_path / "away").rename(tmp_path / "run" / "storage")
        assert worker.put(named_group("b"))


# ------------------------------------------------------------------ damage


def test_a_damaged_group_is_named_quarantined_and_the_step_planned_without_it(
    open_plane: OpenPlane, tmp_path: Path
) -> None:
    plane = open_plane(tmp_path / "run")
    for name in "abc":
        plane.put(named_group(name))
    damage(server_of(plane), "b")
    with pytest.raises(StepAborted, match="group 'b'"):
        train(sources_of(plane))
    assert [one["id"] for one in plane.status()["quarantine"]] == ["b"]
    steps = train(again := sources_of(plane))
    assert plane.ledger.committed == len(named_group("a")) + len(named_group("c"))
    assert plane.ledger.balanced and len(steps) == 2
    for source in again:
        source.close()


def test_a_group_whose_segment_is_gone_is_counted_as_lost(open_plane: OpenPlane, tmp_path: Path) -> None:
    plane = open_plane(tmp_path / "run", listen=["tcp://127.0.0.1:*"])
    with ps.open(plane.url, timeouts=FAST) as worker:
        worker.put(named_group("lost"))
    for name in "ab":
        plane.put(named_group(name))
    state = server_of(plane).engine.state
    segment = parse_location(state.rows[state.by_id["lost"]].location).segment
    (tmp_path / "run" / "storage" / "segments" / segment).unlink()
    with pytest.raises(StepAborted, match="group 'lost'"):
        train(sources_of(plane))
    assert plane.ledger.dropped["lost"] == len(named_group("lost"))
    train(again := sources_of(plane))
    assert plane.ledger.balanced
    for source in again:
        source.close()


def test_a_rank_with_a_bad_mount_is_sent_its_samples_and_named(open_plane: OpenPlane, tmp_path: Path) -> None:
    plane = open_plane(tmp_path / "run")
    for name in "abcdef":
        plane.put(named_group(name))
    sources = sources_of(plane)
    steps = [train(sources)]
    empty = tmp_path / "empty"
    (empty / "segments").mkdir(parents=True)
    sources[1]._reach.reader = StorageReader(FolderStorage(empty, create=False))
    steps += [train(sources), train(sources)]
    assert list(plane.status()["inline_ranks"]) == ["rank 1"]
    assert plane.status()["counts"]["ranks_served_inline"] == 1
    assert plane.status()["quarantine"] == [] and plane.ledger.balanced
    assert plane.ledger.committed == sum(len(named_group(name)) for name in "abcdef")
    for source in sources:
        source.close()


# ------------------------------------------------------------------ one path


def test_only_put_and_read_ask_whether_a_client_reaches_storage() -> None:
    """Every place that asks; nothing else may depend on the kind of deployment."""
    root = Path(ps.__file__).parent
    asks = re.compile(r"\b(?:reachable|writable)\(|may_write|\.direct\b(?! import)|inline_ranks")
    places = {
        str(path.relative_to(root))
        for path in root.rglob("*.py")
        if asks.search(path.read_text()) and not {"testing", "bench"} & set(path.parts)
    }
    assert places == {
        "commands/top.py",  # shows who cannot read it
        "client/attaching.py",  # a scoring worker writes frames with late columns
        "client/column_lease.py",  # and reads what it scores
        "plane/column_leases.py",  # or is sent it
        "protocol/messages.py",  # what is said about it
        "protocol/admission.py",  # who may write
        "protocol/rank_session.py",  # a rank says whether it reads
        "protocol/members.py",  # which ranks are sent their samples
        "protocol/coordinator.py",
        "protocol/steps.py",  # a step with samples, or without
        "client/direct.py",  # the question, and put
        "client/storage_reader.py",  # read
        "plane/effect_runner.py",  # the setting
        "plane/loop.py",  # passes on what the others say, and whether a peer has a key to write
    }
