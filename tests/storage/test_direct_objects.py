"""Workers and ranks that use an object store themselves: what a plane in a folder does, over a network that fails."""

from __future__ import annotations

import itertools
import logging
import math
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

import penstock as ps
from penstock.client.source import Source, Step
from penstock.errors import Away, ConfigError, StorageError
from penstock.storage import ObjectStorage, parse_location
from tests.storage.test_direct import (
    SETTINGS,
    digests_of,
    open_plane,
    server_of,
    sources_of,
    train,
    writer_of,
)
from tests.support.groups import named_group
from tests.support.object_proxy import Fault, ObjectProxy
from tests.support.pace import eventually
from tests.support.planes import FAST
from tests.support.s3_server import ACCESS_KEY, SECRET_KEY

pytestmark = pytest.mark.deep

__all__ = ["open_plane"]
OpenPlane = Callable[..., ps.Plane]


@pytest.fixture
def where(s3_bucket: str, s3_proxy: ObjectProxy) -> str:
    assert s3_proxy.url
    return f"s3://{s3_bucket}/runs/mine"


def stored(plane: ps.Plane) -> ObjectStorage:
    storage = server_of(plane).engine.storage
    assert isinstance(storage, ObjectStorage)
    return storage


def closing(sources: list[Source]) -> None:
    for source in sources:
        source.close()


def test_steps_are_those_of_a_plane_in_a_folder_whichever_way_bytes_go(
    open_plane: OpenPlane, tmp_path: Path, where: str
) -> None:
    found: list[list[list[str]]] = []
    for name, settings in (
        ("folder", {}),
        ("direct", {"storage": f"{where}/direct"}),
        ("inline", {"storage": f"{where}/inline", "direct": False}),
    ):
        plane = open_plane(tmp_path / name, **settings)
        for group in "abcd":
            plane.put(named_group(group))
        assert (writer_of(plane) is not None) is (name != "inline")
        sources = sources_of(plane)
        found.append([digests_of(train(sources)) for _ in range(2)])
        assert all((source._reach.reader is not None) is (name != "inline") for source in sources)
        closing(sources)
    assert found[0] == found[1] == found[2]


def test_a_run_goes_on_after_a_restart_and_frees_what_it_trained(
    open_plane: OpenPlane, tmp_path: Path, where: str
) -> None:
    plane = open_plane(tmp_path / "run", storage=where, retain_steps=0)
    for group in "abcd":
        plane.put(named_group(group))
    sources = sources_of(plane)
    first = digests_of(train(sources))
    closing(sources)
    plane.close()
    again = open_plane(tmp_path / "run", storage=where, retain_steps=0)
    assert again.put(named_group("e")) and not again.put(named_group("a"))
    assert again.put(named_group("f"))
    sources = sources_of(again)
    second = [digests_of(train(sources)) for _ in range(2)]
    closing(sources)
    with open_plane(tmp_path / "plain") as plain:
        for group in "abcdef":
            plain.put(named_group(group))
        sources = sources_of(plain)
        assert [digests_of(train(sources)) for _ in range(3)] == [first, *second]
        closing(sources)
    storage = stored(again)
    again.close()
    last = open_plane(tmp_path / "run", storage=where, retain_steps=0)
    eventually(lambda: sum(storage.segments().values()) == 0)
    assert last.ledger.committed == 12


def test_an_object_that_lands_in_a_segment_that_was_deleted_is_deleted_too(
    open_plane: OpenPlane, tmp_path: Path, where: str
) -> None:
    """A writer stood still for a week. Its object is no reason to stop deleting, also after a restart."""
    plane = open_plane(tmp_path / "run", storage=where, retain_steps=0, ranks=1)
    plane.put(named_group("a"))
    engine = server_of(plane).engine
    segment = parse_location(next(iter(engine.log.locations()))).segment
    writer = writer_of(plane)
    assert writer is not None
    late = writer._writer._open
    assert late is not None and late.name == segment
    engine.segments.seal(segment)
    for name in "bcdefg":
        plane.put(named_group(name))
    source = plane.source(0, world=1)
    for _ in range(3):
        source.commit(source.step())
        source.flush()
    source.close()
    storage = stored(plane)
    more = itertools.count()

    def is_deleted() -> bool:
        plane.put(named_group(f"more {next(more)}"))  # a deletion that was decided is done after a transaction
        return segment not in storage.segments()

    eventually(is_deleted)
    late.append([[b"landed late"]])
    assert segment in storage.segments()
    plane.close()
    plane = open_plane(tmp_path / "run", storage=where, retain_steps=0, ranks=1)
    assert plane.status()["storage"]["unregistered"] == []
    eventually(is_deleted)
    plane.close()
    late.append([[b"landed once more"]])
    plane = open_plane(tmp_path / "run", storage=where, retain_steps=0, ranks=1)
    assert plane.status()["storage"]["unregistered"] == []


def test_many_threads_share_objects(open_plane: OpenPlane, tmp_path: Path, where: str, s3_proxy: ObjectProxy) -> None:
    plane = open_plane(tmp_path / "run", storage=where, groups_per_step=8)
    plane.put(named_group("first"))
    before, s3_proxy.delay_s = s3_proxy.count("PUT"), 0.05
    with ThreadPoolExecutor(16) as pool:
        assert all(pool.map(lambda name: plane.put(named_group(name)), [f"g{i}" for i in range(64)]))
    assert s3_proxy.count("PUT") - before <= 32
    assert plane.status()["counts"]["groups_direct"] == 65


def test_puts_and_steps_wait_while_storage_is_away_and_nothing_is_lost(
    open_plane: OpenPlane, tmp_path: Path, where: str, s3_proxy: ObjectProxy, pace: float
) -> None:
    plane = open_plane(tmp_path / "run", storage=where)
    for group in "abcd":
        plane.put(named_group(group))
    sources = sources_of(plane)
    train(sources)
    s3_proxy.faults = [Fault("503", times=math.inf)]
    with pytest.raises(StorageError, match="does not answer now") as error:
        plane.put(named_group("x"), timeout=2.0 * pace)
    assert isinstance(error.value, Away)
    timer = threading.Timer(4.0, s3_proxy.faults.clear)
    timer.start()
    with ThreadPoolExecutor(1) as pool:
        put = pool.submit(plane.put, named_group("e"))
        steps = train(sources)
        assert put.result()
    assert all(isinstance(step, Step) for step in steps)
    assert plane.put(named_group("f"))
    train(sources)
    assert plane.status()["inline_ranks"] == {}
    assert all(source._reach.reader is not None for source in sources)
    assert plane.ledger.committed == 12
    closing(sources)


def test_a_put_does_not_outlast_its_timeout_by_much(
    open_plane: OpenPlane, tmp_path: Path, where: str, s3_proxy: ObjectProxy, pace: float
) -> None:
    plane = open_plane(tmp_path / "run", storage=where)
    plane.put(named_group("a"))
    s3_proxy.delay_s = 60.0
    began = time.monotonic()
    with pytest.raises(Away, match="did not answer in time"):
        plane.put(named_group("b"), timeout=1.5)
    assert time.monotonic() - began < 1.5 + 6.0 * pace  # the plane alone would try for ten seconds
    s3_proxy.delay_s = 0.0


def test_a_bad_network_loses_and_doubles_nothing(
    open_plane: OpenPlane, tmp_path: Path, where: str, s3_proxy: ObjectProxy
) -> None:
    plane = open_plane(tmp_path / "run", storage=where, retain_steps=1)
    s3_proxy.rates = {"500": 0.05, "lost": 0.05, "cut": 0.03, "short": 0.05, "refuse": 0.03, "412": 0.01}
    sources, rounds = sources_of(plane), 0
    # On a slow machine more groups are written with one request, so that fewer requests fail.
    while rounds < 10 and sum(s3_proxy.injected.values()) <= 5:
        names = [f"g{rounds}-{i}" for i in range(16)]
        with ThreadPoolExecutor(4) as pool:
            assert all(pool.map(lambda name: plane.put(named_group(name)), names))
        for _ in range(8):
            train(sources)
        rounds += 1
    closing(sources)
    assert plane.ledger.committed == plane.ledger.accepted == 32 * rounds
    assert sum(s3_proxy.injected.values()) > 5


def test_in_a_store_that_overwrites_nothing_is_deleted(
    open_plane: OpenPlane, tmp_path: Path, where: str, s3_proxy: ObjectProxy
) -> None:
    s3_proxy.faults = [Fault("no-conditions", method="PUT", times=math.inf)]
    plane = open_plane(tmp_path / "run", storage=where, retain_steps=0)
    for group in "abcdef":
        plane.put(named_group(group))
    sources = sources_of(plane)
    for _ in range(3):
        train(sources)
    closing(sources)
    assert "If-None-Match" in plane.status()["storage"]["keeps"]
    before = {(method, path) for method, path in s3_proxy.requests if method in ("DELETE", "POST")}
    assert len(before) == 1  # of the proof
    held = stored(plane).segments()
    assert sum(held.values()) > 0


@pytest.mark.parametrize("address", ["s3://AKIA:hunter2@bucket/x", "s3://bucket/x?secret_access_key=hunter2"])
def test_credentials_in_the_address_are_refused_before_anything_is_made(address: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="credentials and options do not belong") as error:
        ps.open(tmp_path / "run", **{**SETTINGS, "storage": address})  # type: ignore[arg-type]
    assert "hunter2" not in str(error.value)
    assert not (tmp_path / "run").exists()


def test_no_secret_is_in_status_logs_files_or_representations(
    open_plane: OpenPlane, tmp_path: Path, where: str, s3_proxy: ObjectProxy, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.DEBUG):
        plane = open_plane(tmp_path / "run", storage=where)
        plane.put(named_group("a"))
        s3_proxy.faults = [Fault("403", times=1, method="PUT", code="SignatureDoesNotMatch")]
        plane.put(named_group("b"))
        shown = [repr(plane.status()), repr(stored(plane)), caplog.text, repr(server_of(plane).engine.settings)]
    plane.close()
    shown += [path.read_bytes().decode(errors="replace") for path in (tmp_path / "run").rglob("*") if path.is_file()]
    for text in shown:
        assert SECRET_KEY not in text
        assert ACCESS_KEY not in text


def test_a_missing_bucket_keeps_a_plane_from_starting_with_words(tmp_path: Path, s3_bucket: str) -> None:
    with pytest.raises(StorageError, match="no such bucket; create it"):
        ps.open(tmp_path / "run", **{**SETTINGS, "storage": f"s3://{s3_bucket}-missing/x"})  # type: ignore[arg-type]


def test_a_producer_that_may_only_put_and_a_rank_that_may_only_get_go_direct(
    open_plane: OpenPlane, tmp_path: Path, where: str, s3_proxy: ObjectProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The policies of docs/object-storage.md, as a proxy that answers 403 to everything else."""
    plane = open_plane(tmp_path / "run", storage=where, listen=["tcp://127.0.0.1:*"])
    target = f"http://{s3_proxy.target[0]}:{s3_proxy.target[1]}"
    with ObjectProxy(target) as puts, ObjectProxy(target) as gets:
        for method in ("HEAD", "DELETE", "POST"):
            puts.faults.append(Fault("403", method=method, times=math.inf, code="AccessDenied"))
            gets.faults.append(Fault("403", method=method, times=math.inf, code="AccessDenied"))
        puts.faults += [
            Fault("403", method="GET", path="/segments/", times=math.inf, code="AccessDenied"),
            Fault("403", method="GET", path="list-type", times=math.inf, code="AccessDenied"),
            Fault("403", method="PUT", path="/marker", times=math.inf, code="AccessDenied"),
        ]
        gets.faults += [Fault("403", method="PUT", times=math.inf, code="AccessDenied")]
        monkeypatch.setenv("AWS_ENDPOINT_URL", puts.url)
        with ps.open(plane.url, timeouts=FAST) as worker:
            for group in "abcd":
                assert worker.put(named_group(group))
            assert writer_of(worker) is not None
        monkeypatch.setenv("AWS_ENDPOINT_URL", gets.url)
        sources = [ps.connect(plane.url, rank=rank, world=2, timeouts=FAST) for rank in range(2)]
        for _ in range(2):
            train(sources)
        assert all(source._reach.reader is not None for source in sources)
        closing(sources)
        assert puts.injected["403"] == gets.injected["403"] == 0
    assert plane.status()["counts"]["groups_direct"] == 4
