"""Object storage: a real S3 server behind a proxy that fails in every way a network and a server can."""

from __future__ import annotations

import math
import re
import threading
import time
from pathlib import Path

import pytest

from penstock.errors import Away, ConfigError, Conflict, Fenced, StorageError
from penstock.storage import (
    Gone,
    ObjectStorage,
    Storage,
    Writer,
    address_of,
    is_object_url,
    open_storage,
    parse_location,
)
from penstock.storage.custody import Custody, read_marker
from penstock.storage.interface import new_segment_name
from penstock.storage.object_ranges import OBJECT_BYTES
from penstock.storage.object_requests import parse_object_url
from penstock.testing.storage_suite import StorageSuite, stored_frame
from tests.support.object_proxy import Fault, ObjectProxy
from tests.support.s3_server import SECRET_KEY

pytestmark = pytest.mark.deep


class TestObjectStorage(StorageSuite):
    @pytest.fixture(autouse=True)
    def _bucket(self, s3_bucket: str) -> None:
        self.url = f"s3://{s3_bucket}"

    def storage(self, folder: Path) -> Storage:
        return ObjectStorage(f"{self.url}/{folder.name}")


class TestObjectStorageOnABadNetwork(StorageSuite):
    """The same promises while a quarter of all requests fail in one way or another."""

    @pytest.fixture(autouse=True)
    def _bucket(self, s3_bucket: str, s3_proxy: ObjectProxy) -> None:
        self.url = f"s3://{s3_bucket}"
        s3_proxy.rates = {"500": 0.05, "503": 0.03, "lost": 0.06, "cut": 0.03, "short": 0.05, "refuse": 0.03}

    def storage(self, folder: Path) -> Storage:
        return ObjectStorage(f"{self.url}/{folder.name}")


@pytest.fixture
def storage(s3_bucket: str, s3_proxy: ObjectProxy) -> ObjectStorage:
    assert s3_proxy.url
    return ObjectStorage(f"s3://{s3_bucket}/runs/mine", patience_s=3.0)


# ------------------------------------------------------------------ what is written


def test_frames_that_are_written_together_share_objects_of_at_most_8_mib(
    storage: ObjectStorage, s3_proxy: ObjectProxy
) -> None:
    frames = [bytes([i]) * (3 << 20) for i in range(5)] + [b"x" * (2 * OBJECT_BYTES + 1), b"y"]
    segment = storage.create(new_segment_name())
    before = s3_proxy.count("PUT")
    locations = segment.append([[frame] for frame in frames])
    assert s3_proxy.count("PUT") - before == 5
    assert [parse_location(at).offset // OBJECT_BYTES for at in locations] == [0, 0, 1, 1, 2, 3, 6]
    middle = storage.read(
        locations[5], [(OBJECT_BYTES - 5, OBJECT_BYTES + 5), (2 * OBJECT_BYTES, 2 * OBJECT_BYTES + 1)]
    )
    assert [bytes(found) for found in middle] == [b"x" * 10, b"x"]
    assert [bytes(storage.read(at)[0]) for at in locations] == frames
    assert segment.end == sum(map(len, frames))
    objects = [part for parts in storage.parts().values() for part in parts]
    assert max(one.size for one in objects if one.start != 3 * OBJECT_BYTES) <= OBJECT_BYTES


def test_an_object_is_never_overwritten(storage: ObjectStorage) -> None:
    name = new_segment_name()
    first = storage.create(name)
    (at,) = first.append([[stored_frame("a")]])
    second = type(first)(storage, name)  # as if two processes had one name
    with pytest.raises(Conflict, match="two writers have one name"):
        second.append([[stored_frame("b")]])
    assert bytes(storage.read(at)[0]) == stored_frame("a")


def test_a_write_whose_answer_was_lost_is_recognised_as_ours(storage: ObjectStorage, s3_proxy: ObjectProxy) -> None:
    segment = storage.create(new_segment_name())
    for fault in ("lost", "500", "refuse", "503", "409", "412"):
        s3_proxy.faults = [Fault(fault, method="PUT")]
        (at,) = segment.append([[stored_frame("a"), fault.encode()]])
        assert bytes(storage.read(at)[0]) == stored_frame("a") + fault.encode()
    s3_proxy.faults = [Fault("lost", method="PUT", path="/begin")]
    storage.create(new_segment_name())
    s3_proxy.faults = [Fault("lost", method="PUT", path="/marker"), Fault("lost", method="PUT", path="/marker")]
    assert storage.set_marker(b"one", None)
    s3_proxy.faults = [Fault("lost", method="PUT", path="/marker")]
    assert storage.set_marker(b"two", b"one")
    assert storage.marker() == b"two"


def test_a_lost_answer_is_not_taken_for_ours_where_somebody_else_wrote(
    storage: ObjectStorage, s3_proxy: ObjectProxy
) -> None:
    assert storage.set_marker(b"one", None)
    s3_proxy.faults = [Fault("412", method="PUT", path="/marker")]
    assert not storage.set_marker(b"two", b"one")
    assert storage.marker() == b"one"


def test_a_plane_that_was_paused_and_replaced_before_it_deletes_deletes_nothing(
    storage: ObjectStorage, s3_proxy: ObjectProxy
) -> None:
    segment = storage.create(new_segment_name())
    (location,) = segment.append([[b"frame"]])
    old = Custody(storage, run_id="a" * 32, run="mine", epoch=1, commits=1)
    paused = threading.Event()

    def pause(method: str, path: str) -> None:
        if method == "PUT" and path.endswith("/marker") and not paused.is_set():
            paused.set()  # the marker is moved, and the answer is on its way
            Custody(ObjectStorage(storage.url), run_id="a" * 32, run="mine", epoch=2, commits=3)
            time.sleep(1.5)

    s3_proxy.on_change = pause
    with pytest.raises(Fenced, match="another plane moved the marker; this one deletes nothing"):
        old.delete([location, segment.name], 2)
    assert paused.is_set() and bytes(storage.read(location)[0]) == b"frame"
    assert not s3_proxy.count("DELETE") + s3_proxy.count("POST")


def test_a_new_plane_takes_a_storage_over_while_the_old_one_still_moves_the_marker(
    storage: ObjectStorage, s3_proxy: ObjectProxy
) -> None:
    old = Custody(storage, run_id="a" * 32, run="mine", epoch=1, commits=1)
    s3_proxy.faults = [Fault("412", method="PUT", path="/marker", times=2)]  # the old one was faster, twice
    new = Custody(ObjectStorage(storage.url), run_id="a" * 32, run="mine", epoch=2, commits=3)
    assert read_marker(storage) == new.marker
    with pytest.raises(Fenced, match="taken over by epoch 2"):
        old.delete([], 2)


def test_a_producer_that_may_not_read_writes_again_elsewhere(storage: ObjectStorage, s3_proxy: ObjectProxy) -> None:
    writer = Writer(storage, new_segment_name)
    (first,) = writer.write([[stored_frame("a")]])
    s3_proxy.faults = [
        Fault("lost", method="PUT", path="/000001"),
        Fault("403", method="GET", path="/000001", code="AccessDenied"),
    ]
    with pytest.raises(Away, match="whether this process wrote it is unknown"):
        writer.write([[stored_frame("b")]])
    (second,) = writer.write([[stored_frame("b")]])
    assert parse_location(first).segment != parse_location(second).segment


# ------------------------------------------------------------------ away and gone


def test_a_store_that_is_away_is_tried_until_the_deadline(
    storage: ObjectStorage, s3_proxy: ObjectProxy, pace: float
) -> None:
    segment = storage.create(new_segment_name())
    (at,) = segment.append([[stored_frame("a")]])
    s3_proxy.faults = [Fault("503", times=math.inf, code="SlowDown")]
    began = time.monotonic()
    with pytest.raises(Away, match=r"does not answer now \(503 SlowDown\)"):
        segment.append([[stored_frame("b")]], began + 1.5 * pace)
    assert 1.0 < time.monotonic() - began < 1.5 * pace + 20
    with pytest.raises(Away):
        storage.read(at)
    s3_proxy.faults = [Fault("503", times=3), Fault("refuse", times=1)]
    assert bytes(storage.read(at)[0]) == stored_frame("a")


def test_a_server_that_hangs_is_given_up_at_the_deadline(storage: ObjectStorage, s3_proxy: ObjectProxy) -> None:
    segment = storage.create(new_segment_name())
    s3_proxy.delay_s = 30.0
    began = time.monotonic()
    with pytest.raises(Away, match="did not answer in time"):
        segment.append([[stored_frame("b")]], began + 1.5)
    assert time.monotonic() - began < 20
    s3_proxy.delay_s = 0.0


def test_no_server_is_away_and_a_deleted_object_is_gone(
    storage: ObjectStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    segment = storage.create(new_segment_name())
    a, b = segment.append([[stored_frame("a")], [stored_frame("b")]])
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    with pytest.raises(Away, match="no connection"):
        ObjectStorage(storage.url, patience_s=1.0).marker()
    storage.delete([a])
    assert bytes(storage.read(b)[0]) == stored_frame("b")
    storage.delete([b])  # now all of its object
    with pytest.raises(Gone, match="no such object"):
        storage.read(b)
    assert storage.segments() == {segment.name: 0}


def test_a_short_or_cut_answer_is_asked_for_again_and_a_short_object_is_gone(
    storage: ObjectStorage, s3_proxy: ObjectProxy
) -> None:
    segment = storage.create(new_segment_name())
    (at,) = segment.append([[stored_frame("a")]])
    s3_proxy.faults = [Fault("short", method="GET"), Fault("cut", method="GET"), Fault("short", method="GET")]
    assert bytes(storage.read(at)[0]) == stored_frame("a")
    assert s3_proxy.injected["short"] == 2
    place = parse_location(at)
    with pytest.raises(Gone, match="ends before byte"):
        storage.read(f"{place.segment}:{place.offset}:{place.size + 100}")
    with pytest.raises(Gone, match="ends before byte"):
        storage.read(f"{place.segment}:{place.offset + place.size + 10}:50")


def test_ranges_of_many_frames_are_read_with_few_requests_at_a_time(
    storage: ObjectStorage, s3_proxy: ObjectProxy, pace: float
) -> None:
    frames = [bytes([i]) * 100_000 for i in range(64)]
    segment = storage.create(new_segment_name())
    locations = [parse_location(at) for at in segment.append([[frame] for frame in frames])]
    views = [memoryview(bytearray(2 * 500)) for _ in frames]
    wanted = [(at, at.offset + 100, view[:500]) for at, view in zip(locations, views, strict=True)]
    wanted += [(at, at.offset + 90_000, view[500:]) for at, view in zip(locations, views, strict=True)]
    before, s3_proxy.delay_s = s3_proxy.count("GET"), 0.2
    began = time.monotonic()
    storage.read_into(wanted)
    assert [bytes(view) for view in views] == [frame[:1000] for frame in frames]
    assert s3_proxy.count("GET") - before <= 2
    assert time.monotonic() - began < 0.2 * 5 * pace


# ------------------------------------------------------------------ the proof, and words for operators


@pytest.mark.parametrize(
    ("kind", "path", "words"),
    [("no-conditions", "/proof/", "If-None-Match is ignored"), ("no-conditions", "?", "")],
)
def test_a_store_that_ignores_create_only_writes_is_found_out(
    kind: str, path: str, words: str, storage: ObjectStorage, s3_proxy: ObjectProxy
) -> None:
    s3_proxy.faults = [Fault(kind, method="PUT", path=path, times=math.inf)]
    found = storage.prove()
    assert words in found and bool(words) == bool(found)
    assert not s3_proxy.faults or s3_proxy.count("DELETE") + s3_proxy.count("POST") == 1


@pytest.mark.parametrize("kind", ["no-ranges", "short"])
def test_a_store_that_returns_other_bytes_than_were_asked_for_is_refused(
    kind: str, storage: ObjectStorage, s3_proxy: ObjectProxy
) -> None:
    s3_proxy.faults = [Fault(kind, method="GET", times=math.inf)]
    with pytest.raises(StorageError, match="does not return the requested bytes of an object"):
        storage.prove()


@pytest.mark.parametrize(
    ("status", "code", "words"),
    [
        ("403", "AccessDenied", r"access denied \(403 AccessDenied\).*docs/storage.md"),
        ("403", "InvalidAccessKeyId", r"access denied \(403 InvalidAccessKeyId\)"),
        ("403", "RequestTimeTooSkewed", r"the clock of this host is off"),
        ("400", "AuthorizationHeaderMalformed", r"another region.*AWS_REGION"),
        ("301", "PermanentRedirect", r"another region.*AWS_REGION"),
        ("400", "ExpiredToken", r"session token has expired"),
        ("404", "NoSuchBucket", r"no such bucket; create it"),
        ("400", "InvalidRequest", r"refused \(400 InvalidRequest\)"),
    ],
)
def test_what_is_wrong_is_said_at_once_with_what_to_do(
    status: str, code: str, words: str, storage: ObjectStorage, s3_proxy: ObjectProxy
) -> None:
    s3_proxy.faults = [Fault(status, times=math.inf, code=code)]
    acts = (storage.prove, storage.marker, storage.segments, lambda: storage.create(new_segment_name()))
    for act in acts:
        before = len(s3_proxy.requests)
        with pytest.raises(StorageError, match=words) as error:
            act()
        assert not isinstance(error.value, Away)
        assert len(s3_proxy.requests) - before <= 2
        assert storage.url in str(error.value) and SECRET_KEY not in str(error.value)
        assert "AKIA" not in str(error.value) and "injected" not in str(error.value)


def test_a_missing_bucket_is_said_to_be_missing(s3_bucket: str) -> None:
    storage = ObjectStorage(f"s3://{s3_bucket}-not/runs")
    for act in (storage.prove, storage.marker, storage.segments, lambda: storage.create(new_segment_name())):
        with pytest.raises(StorageError, match="no such bucket"):
            act()


@pytest.mark.parametrize(
    "text",
    [
        "s3://AKIA:secret@bucket/runs",
        "s3://bucket/runs?access_key=secret",
        "gs://user:secret@bucket",
        "az://container/x#secret",
    ],
)
def test_credentials_in_an_address_are_refused_and_not_repeated(text: str) -> None:
    with pytest.raises(ConfigError, match="credentials and options do not belong in the address") as error:
        parse_object_url(text)
    assert "secret" not in str(error.value)


@pytest.mark.parametrize(
    "text", ["s3://", "s3:///runs", "s3://b/../x", "s3://bucket/a//b", "s3://bucket/ä", "ftp://a/b"]
)
def test_an_address_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="storage"):
        parse_object_url(text)


def test_an_address_of_another_scheme_is_neither_a_store_nor_a_folder() -> None:
    assert all(map(is_object_url, ("s3://bucket/a", "GS://bucket", "azure://container")))
    assert not any(
        map(is_object_url, ("tcp://host:7440", "postgresql://host/db", "file:///data", "/data", "ftp://a/b"))
    )
    for act in (address_of, open_storage):
        with pytest.raises(ConfigError, match=r"storage 'ftp'://...: give a folder, or s3://BUCKET/PREFIX"):
            act("ftp://host/data")


def test_addresses_of_all_stores(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AZURE_STORAGE_ACCOUNT_NAME", "AZURE_STORAGE_ACCOUNT_KEY"):
        monkeypatch.setenv(name, "YWNjb3VudA==")
    for text, url in (
        ("s3://bucket/runs/a", "s3://bucket/runs/a"),
        ("gs://bucket", "gs://bucket"),
        ("azure://container/runs/", "az://container/runs"),
    ):
        storage = ObjectStorage(text)
        assert storage.url == url
        assert re.fullmatch(r"ObjectStorage\('[a-z0-9]+://[a-z/]+'\)", repr(storage))
