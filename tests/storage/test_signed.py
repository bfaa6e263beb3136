"""Workers without credentials write to an object store with URLs that the plane signs."""

from __future__ import annotations

import asyncio
import http.client
import logging
import math
import sys
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit

import pytest

import penstock as ps
from penstock.commands.top import _storage
from penstock.errors import Away, ConfigError, Conflict, InvalidInput, PenstockError, StepAborted, StorageError
from penstock.protocol.messages import SignedUrls
from penstock.storage import ObjectStorage, SegmentSealed, SignedStorage, Writer, parse_location
from penstock.storage.interface import new_segment_name
from penstock.storage.object_ranges import begin_name, following, object_name
from penstock.testing.storage_suite import StorageSuite, stored_frame
from penstock.transport.keys import make_keys
from tests.storage.test_direct import SETTINGS, open_plane, server_of, sources_of, train, writer_of
from tests.support.groups import named_group
from tests.support.object_proxy import Fault, ObjectProxy
from tests.support.object_torture import torture_objects
from tests.support.pace import eventually, pace
from tests.support.planes import FAST, PATIENT
from tests.support.s3_server import ACCESS_KEY, SECRET_KEY, s3_environment

pytestmark = pytest.mark.deep

__all__ = ["open_plane"]
OpenPlane = Callable[..., ps.Plane]
Method = Literal["GET", "PUT"]


class Plane:
    """Signs what it is asked to, as a plane does for objects of a worker's own segments."""

    def __init__(self, storage: ObjectStorage, seconds: float = 600.0) -> None:
        self.storage, self.seconds, self.asked = storage, seconds, 0
        self.error: PenstockError | None = None

    async def sign(self, method: Method, names: tuple[str, ...]) -> tuple[list[str], float]:
        self.asked += 1
        if self.error is not None:
            error, self.error = self.error, None
            raise error
        return await asyncio.to_thread(self.storage.sign, method, names, self.seconds), self.seconds


@pytest.fixture
def objects(s3_bucket: str, s3_proxy: ObjectProxy) -> ObjectStorage:
    assert s3_proxy.url
    return ObjectStorage(f"s3://{s3_bucket}/runs/mine", patience_s=3.0 * pace())


@pytest.fixture
def plane(objects: ObjectStorage) -> Plane:
    return Plane(objects)


@pytest.fixture
def signed(plane: Plane) -> SignedStorage:
    return SignedStorage(plane.storage.url, plane.sign, patience_s=3.0 * pace())


# ------------------------------------------------------------------ one suite


class WrittenWithSignedUrls:
    """A storage that is written by a worker without credentials, and read and deleted by others."""

    def __init__(self, objects: ObjectStorage) -> None:
        self._objects = objects
        self.create = SignedStorage(objects.url, Plane(objects).sign).create

    def __getattr__(self, name: str) -> Any:
        return getattr(self._objects, name)


class TestSignedStorage(StorageSuite):
    @pytest.fixture(autouse=True)
    def _bucket(self, s3_bucket: str) -> None:
        self.url = f"s3://{s3_bucket}"

    def storage(self, folder: Path) -> Any:
        return WrittenWithSignedUrls(ObjectStorage(f"{self.url}/{folder.name}"))


class TestSignedStorageOnABadNetwork(StorageSuite):
    @pytest.fixture(autouse=True)
    def _bucket(self, s3_bucket: str, s3_proxy: ObjectProxy) -> None:
        self.url = f"s3://{s3_bucket}"
        s3_proxy.rates = {"500": 0.05, "503": 0.03, "lost": 0.06, "cut": 0.03, "short": 0.05, "refuse": 0.03}

    def storage(self, folder: Path) -> Any:
        return WrittenWithSignedUrls(ObjectStorage(f"{self.url}/{folder.name}"))


# ------------------------------------------------------------------ URLs


def test_urls_are_asked_for_eight_at_a_time_and_used_once_each(
    plane: Plane, signed: SignedStorage, s3_proxy: ObjectProxy
) -> None:
    segment = signed.create(new_segment_name())
    locations = [segment.append([[stored_frame(f"{i}")]])[0] for i in range(14)]
    assert plane.asked == 2  # the object that begins the segment and seven more; then eight
    assert [bytes(plane.storage.read(at)[0]) for at in locations] == [stored_frame(f"{i}") for i in range(14)]
    assert s3_proxy.signed == {"": 15} == {"": s3_proxy.count("PUT")}


def test_objects_that_are_written_together_ask_once(plane: Plane, signed: SignedStorage) -> None:
    segment = signed.create(new_segment_name())
    asked = plane.asked
    frames = [bytes([i]) * (5 << 20) for i in range(12)]
    locations = segment.append([[frame] for frame in frames])
    assert len({parse_location(at).offset for at in locations}) == 12
    assert plane.asked - asked <= 2
    assert [bytes(plane.storage.read(at)[0]) for at in locations] == frames


def test_an_expired_url_is_renewed(plane: Plane, signed: SignedStorage, s3_proxy: ObjectProxy) -> None:
    """By our clock before it is used, and after the store refused it."""
    segment = signed.create(new_segment_name())
    for i in range(2):
        asked = plane.asked
        signed._urls = {key: type(one)(one.url, 0.0) for key, one in signed._urls.items()}
        segment.append([[stored_frame(f"ours {i}")]])
        assert plane.asked == asked + 1
    assert set(s3_proxy.signed) == {""}
    plane.seconds = 1.0  # of the store; the worker believes that they last
    late = SignedStorage(plane.storage.url, _claims(plane, 600.0), patience_s=3.0)
    segment = late.create(new_segment_name())
    eventually(lambda: not _is_good(late, "PUT", object_name(segment.name, 0)))
    asked, refused = plane.asked, s3_proxy.signed["AccessDenied"]
    (at,) = segment.append([[stored_frame("a")]])
    assert (plane.asked, s3_proxy.signed["AccessDenied"]) == (asked + 1, refused + 1)
    assert bytes(plane.storage.read(at)[0]) == stored_frame("a")


def _claims(plane: Plane, seconds: float) -> Any:
    async def sign(method: Method, names: tuple[str, ...]) -> tuple[list[str], float]:
        return (await plane.sign(method, names))[0], seconds

    return sign


def _is_good(storage: SignedStorage, method: Method, name: str) -> bool:
    """Whether a URL is valid by the store's rules; nothing is asked of the store."""
    from tests.support.signed_urls import problem_with

    parts = urlsplit(storage._known(method, name))
    return not problem_with(method, f"{parts.path}?{parts.query}", parts.netloc)


def send(method: str, url: str, body: bytes = b"", headers: dict[str, str] | None = None) -> tuple[int, bytes]:
    parts = urlsplit(url)
    with closing(http.client.HTTPConnection(parts.netloc, timeout=60)) as connection:
        connection.request(method, f"{parts.path}?{parts.query}", body, headers or {})
        answer = connection.getresponse()
        return answer.status, answer.read()


def test_a_url_is_for_one_kind_of_request_on_one_object(objects: ObjectStorage) -> None:
    segment = new_segment_name()
    (url,) = objects.sign("PUT", [object_name(segment, 0)], 600.0)
    only_new = {"If-None-Match": "*"}
    other = url.replace(f"{segment}/000000", f"{segment}/000001")
    for method, where in (("PUT", other), ("GET", url), ("DELETE", url), ("PUT", url.replace("=600&", "=60000&"))):
        status, words = send(method, where, b"x", only_new)
        assert (status, b"SignatureDoesNotMatch" in words) == (403, True), method
    assert objects.segments() == {}
    assert send("PUT", url, b"x", only_new)[0] == 200
    assert send("PUT", url, b"y", only_new)[0] == 412
    assert asyncio.run(objects.get(object_name(segment, 0)))[0] == b"x"


# ------------------------------------------------------------------ create-only, away, sealed


def test_a_write_whose_answer_was_lost_is_recognised_as_ours(signed: SignedStorage, s3_proxy: ObjectProxy) -> None:
    segment = signed.create(new_segment_name())
    for fault in ("lost", "500", "refuse", "503", "409", "412"):
        s3_proxy.faults = [Fault(fault, method="PUT")]
        segment.append([[stored_frame("a"), fault.encode()]])
    s3_proxy.faults = [Fault("lost", method="PUT", path="/begin")]
    signed.create(new_segment_name())
    assert s3_proxy.count("GET", "/segments/") >= 2


def test_an_object_of_another_writer_is_not_replaced(signed: SignedStorage, objects: ObjectStorage) -> None:
    name = new_segment_name()
    (at,) = objects.create(name).append([[stored_frame("a")]])
    with pytest.raises(Conflict, match="two writers have one name"):
        signed.create(name)
    assert bytes(objects.read(at)[0]) == stored_frame("a")


def test_a_store_that_is_away_and_a_plane_that_does_not_sign_are_away(
    plane: Plane, signed: SignedStorage, s3_proxy: ObjectProxy
) -> None:
    segment = signed.create(new_segment_name())
    s3_proxy.faults = [Fault("503", times=math.inf, code="SlowDown")]
    with pytest.raises(Away, match=r"does not answer now \(503 SlowDown\)") as error:
        segment.append([[stored_frame("a")]])
    assert "X-Amz" not in str(error.value) and error.value.__cause__ is None
    s3_proxy.faults = []
    plane.error = Away("the plane has no credentials now")
    assert signed.create(new_segment_name()).append([[stored_frame("a")]])  # asked again
    signed._headers = {"Host": "elsewhere"}  # what was signed is another host
    with pytest.raises(StorageError, match=r"access denied \(403 SignatureDoesNotMatch\)") as refused:
        segment.append([[stored_frame("b")]])
    assert not isinstance(refused.value, Away) and "X-Amz" not in str(refused.value)


def test_a_worker_needs_no_client_of_the_store(
    plane: Plane, s3_proxy: ObjectProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    segment = new_segment_name()
    names = tuple(following(begin_name(segment), 8))
    urls = dict(zip(names, plane.storage.sign("PUT", names, 600.0), strict=True))

    async def sign(_: Method, wanted: tuple[str, ...]) -> tuple[list[str], float]:
        return [urls[name] for name in wanted], 600.0

    with monkeypatch.context() as without:
        for name in ("obstore", "obstore.store", "obstore.exceptions"):
            without.setitem(sys.modules, name, None)
        s3_proxy.faults = [Fault("503", method="PUT"), Fault("refuse", method="PUT")]
        (at,) = SignedStorage(plane.storage.url, sign).create(segment).append([[stored_frame("a")]])
    assert bytes(plane.storage.read(at)[0]) == stored_frame("a")
    assert s3_proxy.injected.total() == 2


def test_no_connection_is_away(plane: Plane, signed: SignedStorage) -> None:
    async def sign(method: Method, names: tuple[str, ...]) -> tuple[list[str], float]:
        urls, seconds = await plane.sign(method, names)
        return ["http://127.0.0.1:9/" + url.split("/", 3)[3] for url in urls], seconds

    storage = SignedStorage(signed.url, sign, patience_s=1.0)
    with pytest.raises(Away, match="no connection, or it was cut"):
        storage.create(new_segment_name())


def test_a_segment_that_was_sealed_is_followed_by_a_new_one(plane: Plane, signed: SignedStorage) -> None:
    writer = Writer(signed, new_segment_name)
    (a,) = writer.write([[stored_frame("a")]])
    signed._urls = {}
    plane.error = SegmentSealed(f"segment {a[:16]}: sealed")
    (b,) = writer.write([[stored_frame("b")]])
    assert parse_location(a).segment != parse_location(b).segment
    assert bytes(plane.storage.read(b)[0]) == stored_frame("b")


# ------------------------------------------------------------------ with a plane


@pytest.fixture
def where(s3_bucket: str, s3_proxy: ObjectProxy) -> str:
    assert s3_proxy.url
    return f"s3://{s3_bucket}/runs/mine"


def forget_credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    """A client that is opened from now on has none. One that asked the store by itself would find no server."""
    for name in s3_environment(""):
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")


def test_a_worker_without_credentials_puts_and_a_rank_with_them_reads(
    open_plane: OpenPlane, tmp_path: Path, where: str, s3_proxy: ObjectProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    plane = open_plane(tmp_path / "run", storage=where, sign_puts_s=600, listen=["tcp://127.0.0.1:*"])
    with monkeypatch.context() as without:
        forget_credentials(without)
        with ps.open(plane.url, timeouts=PATIENT) as worker:  # a question that is repeated has more URLs signed
            for group in "abcd":
                assert worker.put(named_group(group))
            assert isinstance(worker._direct.writer()._storage, SignedStorage)  # type: ignore[union-attr]
    sources = sources_of(plane)
    for _ in range(2):
        train(sources)
    assert all(source._reach.reader is not None for source in sources)
    for source in sources:
        source.close()
    counts = plane.status()["counts"]
    assert (counts["groups_direct"], counts["urls_signed"]) == (4, 9)  # the marker, the first object, seven more
    assert "9 URLs signed for them" in _storage(plane.status())
    assert s3_proxy.count("PUT", "/segments/") == 1 + 4
    assert s3_proxy.signed == {"": 2 + 1 + 5}  # the proof, the marker, the segment


def test_a_worker_on_a_bad_network_loses_and_doubles_nothing(
    open_plane: OpenPlane, tmp_path: Path, where: str, s3_proxy: ObjectProxy
) -> None:
    plane = open_plane(tmp_path / "run", storage=where, sign_puts_s=2, retain_steps=1)
    s3_proxy.rates = {"500": 0.05, "lost": 0.05, "cut": 0.03, "short": 0.05, "refuse": 0.03, "412": 0.01}
    for i in range(12):
        assert plane.put(named_group(f"g{i}"))
    sources = sources_of(plane)
    for _ in range(6):
        train(sources)
    for source in sources:
        source.close()
    assert plane.ledger.committed == plane.ledger.accepted == 24
    s3_proxy.rates = {}
    plane.close()


def test_a_store_that_a_worker_does_not_reach_is_left_to_the_plane(
    open_plane: OpenPlane, tmp_path: Path, where: str, s3_proxy: ObjectProxy
) -> None:
    plane = open_plane(tmp_path / "run", storage=where, sign_puts_s=600)
    s3_proxy.faults = [Fault("403", path="X-Amz-Signature", times=math.inf, code="AccessDenied")]
    assert plane.put(named_group("a"))
    assert writer_of(plane) is None
    assert plane.status()["counts"]["groups"] == 1


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("no-conditions", r"overwrites objects that exist when the URL is signed"),
        ("403", r"access denied \(403 Access"),
    ],
)
def test_a_store_that_takes_no_create_only_writes_with_signed_urls_is_found_out(
    tmp_path: Path, where: str, s3_proxy: ObjectProxy, kind: str, words: str
) -> None:
    s3_proxy.faults = [Fault(kind, method="PUT", path="X-Amz-Signature", times=math.inf, code="AccessDenied")]
    with pytest.raises(StorageError, match=f"sign_puts_s: .*{words}.*pass the plane"):
        ps.open(tmp_path / "run", **{**SETTINGS, "storage": where, "sign_puts_s": 600})  # type: ignore[arg-type]
    assert not [path for _, path in s3_proxy.requests if "/segments/" in path]
    assert not asyncio.run(ObjectStorage(where).listed("proof"))


@pytest.mark.parametrize(
    ("method", "name", "words"),
    [
        ("PUT", "marker", "only objects of own segments"),
        ("PUT", "segments/../marker", "only objects of own segments"),
        ("GET", "proof/x", "only objects of own segments"),
        ("PUT", "segments/3f9c21d07b6a4e58/000000", "sealed or unknown here"),
        ("DELETE", "marker", "ask for GET or PUT"),
    ],
)
def test_a_plane_signs_only_for_objects_of_the_workers_own_segments(
    open_plane: OpenPlane, tmp_path: Path, where: str, method: Method, name: str, words: str
) -> None:
    plane = open_plane(tmp_path / "run", storage=where, sign_puts_s=600)
    with pytest.raises(PenstockError, match=words):
        asyncio.run(plane._sign_urls(method, (name,)))
    with pytest.raises(InvalidInput, match="1 to 64"):
        asyncio.run(plane._sign_urls("PUT", ()))
    assert plane.status()["counts"]["urls_signed"] == 0


def test_a_segment_of_another_worker_and_a_sealed_one_are_not_signed_for(
    open_plane: OpenPlane, tmp_path: Path, where: str
) -> None:
    plane = open_plane(tmp_path / "run", storage=where, sign_puts_s=600, listen=["tcp://127.0.0.1:*"])
    with ps.open(plane.url, timeouts=FAST) as one, ps.open(plane.url, timeouts=FAST) as other:
        name = begin_name(one._open_segment())
        assert asyncio.run(one._sign_urls("PUT", (name,)))
        with pytest.raises(SegmentSealed, match="belongs to another writer"):
            asyncio.run(other._sign_urls("PUT", (name,)))
        one.put(named_group("a"))
        first = one._direct.writer()._writer._open.name  # type: ignore[union-attr]
        server_of(plane).engine.segments.seal(first)
        with pytest.raises(SegmentSealed, match="sealed"):
            asyncio.run(one._sign_urls("PUT", (object_name(first, 9),)))
        one._direct.writer()._storage._urls = {}  # type: ignore[union-attr]
        assert one.put(named_group("b"))
        assert one._direct.writer()._writer._open.name != first  # type: ignore[union-attr]
    assert plane.status()["counts"]["groups_direct"] == 2


def test_with_keys_only_writers_get_urls(open_plane: OpenPlane, tmp_path: Path, where: str) -> None:
    keys = tmp_path / "keys"
    make_keys(keys)
    plane = open_plane(tmp_path / "run", storage=where, sign_puts_s=600, listen=["tcp://127.0.0.1:*"], keys=str(keys))
    with ps.open(plane.url, timeouts=FAST, keys=keys) as client:
        with pytest.raises(InvalidInput, match="only for writers"):
            asyncio.run(client._sign_urls("GET", ("marker",)))
        assert client.put(named_group("a"))
        assert writer_of(client) is None


def test_no_signature_is_in_status_logs_files_or_representations(
    open_plane: OpenPlane, tmp_path: Path, where: str, s3_proxy: ObjectProxy, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.DEBUG):
        plane = open_plane(tmp_path / "run", storage=where, sign_puts_s=600)
        plane.put(named_group("a"))
        s3_proxy.faults = [
            Fault("403", times=2, method="PUT", path="X-Amz-Signature", code="SignatureDoesNotMatch"),
        ]
        plane.put(named_group("b"))  # refused twice: the plane writes it
        writer = plane._direct
        urls = asyncio.run(plane._sign_urls("GET", ("marker",)))[0]
        message = SignedUrls(ticket=1, urls=tuple(urls), seconds=1.0)
        shown = [repr(plane.status()), caplog.text, repr(message), repr(writer), repr(server_of(plane).engine.settings)]
    plane.close()
    shown += [path.read_bytes().decode(errors="replace") for path in (tmp_path / "run").rglob("*") if path.is_file()]
    assert "X-Amz-Signature" in urls[0] and "groups go through the plane from now on" in caplog.text
    for text in shown:
        assert not any(word in text for word in ("X-Amz", SECRET_KEY, ACCESS_KEY))


def test_an_object_that_its_worker_replaces_is_found_by_the_rank(
    open_plane: OpenPlane, tmp_path: Path, where: str
) -> None:
    """The condition is no part of the signature: who leaves it out can replace what it wrote."""
    plane = open_plane(tmp_path / "run", storage=where, sign_puts_s=600)
    for name in "abc":
        plane.put(named_group(name))
    state = server_of(plane).engine.state
    at = parse_location(state.rows[state.by_id["b"]].location)
    storage = writer_of(plane)._storage  # type: ignore[union-attr]
    assert isinstance(storage, SignedStorage)
    frame = bytearray(server_of(plane).engine.storage.read(str(at))[0])
    frame[-2] ^= 0x40
    assert send("PUT", storage._known("PUT", object_name(at.segment, at.offset >> 23)), bytes(frame))[0] == 200
    with pytest.raises(StepAborted, match="group 'b'"):
        train(sources_of(plane))
    assert [one["id"] for one in plane.status()["quarantine"]] == ["b"]
    train(again := sources_of(plane))
    assert plane.ledger.committed == len(named_group("a")) + len(named_group("c"))
    for source in again:
        source.close()


@pytest.mark.parametrize("storage", [None, "folder", "gs://bucket/x"])
def test_a_storage_that_cannot_be_signed_for_is_refused(storage: str | None, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"sign_puts_s: 600 .* s3:// and az://"):
        ps.open(tmp_path / "run", **{**SETTINGS, "storage": storage, "sign_puts_s": 600})  # type: ignore[arg-type]


def test_azure_urls_are_made_for_one_object_and_one_kind_of_request(monkeypatch: pytest.MonkeyPatch) -> None:
    """Made, not used: there is no such server here."""
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_NAME", "account")
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_KEY", "YWNjb3VudA==")
    (put,) = ObjectStorage("az://frames/runs").sign("PUT", [object_name("3f9c21d07b6a4e58", 0)], 600.0)
    assert "/frames/runs/segments/3f9c21d07b6a4e58/000000?" in put and "sp=w" in put and "sr=b" in put
    storage = SignedStorage("az://frames/runs", Plane(ObjectStorage("az://frames/runs")).sign)
    assert storage._headers == {"If-None-Match": "*", "x-ms-blob-type": "BlockBlob"}


# ------------------------------------------------------------------ kills


@pytest.mark.process
def test_a_run_of_workers_without_credentials_survives_kills(tmp_path: Path, pace: float) -> None:
    """Plane, producers and ranks are killed. URLs live for three seconds, so many expire in between.

    Longer on a busy machine: there a URL could expire on its way, and the group would go to the plane."""
    result, proxy = torture_objects(tmp_path / "run", kills=5, seed=7, sign_puts_s=3.0 * pace)
    assert result.good, result
    assert result.kills["plane"] and result.kills["producer"]
    assert proxy.signed[""] >= 10
