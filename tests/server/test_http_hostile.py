"""Clients that mean harm to the HTTP server: bodies without an end, connections that say nothing."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any
from urllib.parse import urlsplit

import pytest

from penstock.server.http_server import HttpServer, Limits
from penstock.server.metrics_page import MetricsPage
from penstock.server.openapi import FRAME
from penstock.server.plane_process import PlaneProcess
from tests.support.attacks import Peak, chunked_body, connect, silent_connections
from tests.support.pace import eventually
from tests.support.plane_processes import SMALL

pytestmark = pytest.mark.process

HEAD = b"POST /v1/groups HTTP/1.1\r\nHost: x\r\n"


@pytest.fixture(scope="module")
def plane() -> Iterator[PlaneProcess]:
    with PlaneProcess(["memory:", *SMALL, "--listen=tcp://127.0.0.1:*", "--http=127.0.0.1:0"]) as process:
        yield process


def ask(url: str, path: str, token: str = "") -> tuple[int, bytes]:
    place = urlsplit(url)
    line = http.client.HTTPConnection(place.hostname or "", place.port, timeout=60)
    with contextlib.closing(line):
        line.request("GET", path, headers={"Authorization": f"Bearer {token}"})
        answer = line.getresponse()
        return answer.status, answer.read()


@pytest.mark.parametrize("kind", ["application/json", FRAME])
def test_a_length_beside_a_transfer_encoding_is_rejected_and_nothing_of_the_body_is_kept(
    plane: PlaneProcess, kind: str
) -> None:
    url, token = plane.ready["http"], plane.ready["http_token"]
    with Peak(plane.pid) as peak:
        answer = chunked_body(url, token, content_type=kind, mebibytes=200)
    assert answer == b"" or answer.startswith(b"HTTP/1.1 411 ")
    assert peak.grown_mb < 40
    answer = chunked_body(url, token, content_type=kind, mebibytes=0)
    assert answer.startswith(b"HTTP/1.1 411 ") and b"transfer-encoding" in answer
    assert b"connection: close" in answer.lower()


@pytest.mark.parametrize("said", [b"", HEAD, HEAD + b"Content-Length: 9\r\n\r\n12"], ids=["nothing", "half", "body"])
def test_a_thousand_silent_connections_keep_no_one_out(plane: PlaneProcess, said: bytes) -> None:
    url, token = plane.ready["http"], plane.ready["http_token"]
    with silent_connections(url, said):
        # While the thousand requests are being refused one by one, a client may be told to come again in a second.
        eventually(lambda: ask(url, "/v1/status", token)[0] == 200)
        for _ in range(20):
            code, answer = ask(url, "/v1/status", token)
            assert code == 200, answer


def test_the_metrics_page_is_read_beside_a_thousand_silent_connections() -> None:
    page = MetricsPage("127.0.0.1:0", dict, lambda _: "numbers\n")
    threads = threading.active_count()
    with silent_connections(page.url):
        assert ask(page.url, "/metrics") == (200, b"numbers\n")
        assert threading.active_count() - threads < 10
    page.close()


class Pages:
    """A small application: /held waits until it is let go, /large answers with much."""

    def __init__(self) -> None:
        self.held = threading.Semaphore(0)
        self.let_go = threading.Event()
        self.sent = threading.Event()

    async def __call__(self, scope: dict[str, Any], _receive: object, send: Callable[..., Any]) -> None:
        if scope["path"] == "/held":
            self.held.release()
            await asyncio.to_thread(self.let_go.wait)
        body = bytes(64 << 20) if scope["path"] == "/large" else b"ok"
        headers = [(b"content-length", str(len(body)).encode())]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        half = len(body) // 2
        await send({"type": "http.response.body", "body": body[:half], "more_body": True})
        await send({"type": "http.response.body", "body": body[half:]})  # waits until the client has read
        self.sent.set()


@contextlib.contextmanager
def serving(**limits: Any) -> Iterator[tuple[Pages, str]]:
    pages = Pages()
    server = HttpServer(pages, "127.0.0.1", 0, setting="test", extra="http", limits=Limits(**limits)).start()
    try:
        yield pages, server.url
    finally:
        pages.let_go.set()
        server.close()


@pytest.mark.parametrize("finished", [False, True], ids=["header", "body"])
def test_a_request_that_drips_in_has_a_deadline(finished: bool) -> None:
    """A header without an end, and the rest of a body that was answered long ago."""
    started = time.monotonic()
    with serving(header_s=0.5) as (_, url), connect(url) as slow:
        if finished:
            slow.sendall(HEAD + b"Content-Length: 1000000\r\n\r\n")
            assert slow.recv(1 << 16).startswith(b"HTTP/1.1 200")
        with pytest.raises(OSError):
            while time.monotonic() - started < 60:
                slow.sendall(b"a")
                time.sleep(0.02)
        assert time.monotonic() - started >= 0.5


def test_a_client_that_does_not_read_its_answer_is_dropped() -> None:
    with serving(send_s=0.5) as (pages, url), connect(url) as line:
        line.sendall(b"GET /large HTTP/1.1\r\nHost: x\r\n\r\n")
        assert pages.sent.wait(60), "the application is not kept waiting"
        total = 0
        with contextlib.suppress(OSError):
            while piece := line.recv(1 << 20):
                total += len(piece)
        assert total < 64 << 20


def test_a_connection_that_does_not_wait_for_its_answers_gets_one() -> None:
    with serving() as (pages, url), connect(url) as line:
        line.sendall(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n" * 100)
        answer = b""
        with contextlib.suppress(OSError):  # a reset, if the server closed before it read the last bytes
            while piece := line.recv(1 << 16):
                answer += piece
        assert answer.count(b"HTTP/1.1 200") == 1 and b"connection: close" in answer.lower()
        assert ask(url, "/") == (200, b"ok") and pages.sent.is_set()


def test_requests_that_cannot_be_read_are_not_logged(
    caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    """Strangers need no token to send them, and a line for each would fill the disk."""
    with serving() as (_, url):
        for _ in range(20):
            with connect(url) as line:
                line.sendall(b"\x16\x03\x01 no HTTP\r\n\r\n")
                assert line.recv(1 << 16).startswith(b"HTTP/1.1 400")
        with connect(url) as line:
            line.sendall(b"GET / HTTP/1.1\r\nHost: x\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n")
            assert line.recv(1 << 16).startswith(b"HTTP/1.1 200")
    assert not [record for record in caplog.records if record.name.startswith(("uvicorn", "penstock"))]
    assert "Invalid HTTP request" not in capfd.readouterr().err


def test_requests_that_are_answered_are_not_closed_for_others_and_a_full_server_says_so() -> None:
    with serving(connections=4, per_address=4) as (pages, url), contextlib.ExitStack() as stack:
        busy = [stack.enter_context(connect(url)) for _ in range(4)]
        for line in busy:
            line.sendall(b"GET /held HTTP/1.1\r\nHost: x\r\n\r\n")
            assert pages.held.acquire(timeout=60)
        with connect(url) as one_more:  # sends nothing, so that the answer is not lost with what was not read
            answer = one_more.recv(1 << 16)
        head, _, body = answer.partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 503 ") and json.loads(body)["error"] == "Overloaded"
        pages.let_go.set()
        assert all(line.recv(1 << 16).startswith(b"HTTP/1.1 200") for line in busy)
        assert ask(url, "/")[0] == 200, "those that wait for a further request make room"


def test_one_address_cannot_take_the_room_of_others() -> None:
    with serving(connections=8, per_address=2) as (_, url), contextlib.ExitStack() as stack:
        port = urlsplit(url).port or 0
        other = stack.enter_context(socket.create_connection(("127.0.0.1", port), 60, ("127.0.0.2", 0)))
        for _ in range(20):
            stack.enter_context(connect(url))
        assert ask(url, "/")[0] == 200
        other.sendall(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
        assert other.recv(1 << 16).startswith(b"HTTP/1.1 200")
