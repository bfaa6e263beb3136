"""A bad network between a process and an object store: an HTTP proxy that fails as real ones do.

with ObjectProxy(endpoint) as proxy:
    proxy.faults.append(Fault("lost", method="PUT", path="/segments/"))      # done, and the answer is lost, once
    proxy.delay_s = 0.05                                                      # added to every request
    proxy.rates = {"500": 0.05, "lost": 0.02, "cut": 0.02}                    # of all requests, at random

500, 503, 403...   answered instead of the store, with the S3 error `code`
412                answered instead of the store: as if somebody else had written the object
refuse             the connection is closed before the request is passed on
lost               the request is done, then the connection is closed without an answer
cut                the answer ends in the middle of its body
short              a whole answer with half of the bytes that were asked for
no-conditions      If-Match and If-None-Match are removed
no-ranges          Range is removed

A signed URL that is expired, altered or used for another object is answered with 403, as S3 does.
"""

from __future__ import annotations

import http.client
import random
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Self
from urllib.parse import urlsplit

from tests.support.signed_urls import is_signed, problem_with

_HOP = {"connection", "keep-alive", "transfer-encoding", "content-length"}
_ERROR = '<?xml version="1.0" encoding="UTF-8"?>\n<Error><Code>{}</Code><Message>injected</Message></Error>'


@dataclass(slots=True)
class Fault:
    """Something that goes wrong with the next requests of a kind."""

    kind: str
    method: str = ""
    """Empty: any."""
    path: str = ""
    """Part of the path."""
    times: float = 1
    code: str = "InternalError"
    """An error that the proxy answers instead of the store."""

    def takes(self, method: str, path: str) -> bool:
        return self.times > 0 and self.method in ("", method) and self.path in path


class ObjectProxy:
    """Requests to `proxy.url` reach an object store at `target`, for better or worse."""

    def __init__(self, target: str, *, seed: int = 0, listener: socket.socket | None = None) -> None:
        """`listener`: a bound socket to listen at, by default one on loopback."""
        found = urlsplit(target)
        self.target = (found.hostname or "", found.port or 80)
        self.faults: list[Fault] = []
        self.delay_s = 0.0
        self.rates: dict[str, float] = {}
        self.requests: list[tuple[str, str]] = []
        """Method and path of each request, in order."""
        self.changes: list[tuple[float, str, str]] = []
        """Unix time, method and path of each request that changed something in the store, in order of arrival."""
        self.on_change: Callable[[str, str], None] = lambda _method, _path: None
        """Called with the method and path of such a request before it is answered."""
        self.injected: Counter[str] = Counter()
        self.signed: Counter[str] = Counter()
        """Requests with a signed URL, by what was wrong with it; under "" the good ones."""
        self._rng, self._lock = random.Random(seed), threading.Lock()
        handler = type("Handler", (_Handler,), {"proxy": self})
        self._server = _Server(("127.0.0.1", 0), handler, bind_and_activate=listener is None)
        if listener is not None:
            self._server.socket.close()
            self._server.socket, self._server.server_address = listener, listener.getsockname()
            self._server.server_activate()
        self.url = "http://{}:{}".format(*self._server.server_address)
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True)
        self._thread.start()

    def fault_for(self, method: str, path: str) -> Fault | None:
        """What goes wrong with this request."""
        with self._lock:
            self.requests.append((method, path))
            found = next((fault for fault in self.faults if fault.takes(method, path)), None)
            if found is None:
                drawn = self._rng.random()
                for kind, rate in self.rates.items():
                    drawn -= rate
                    if drawn < 0:
                        found = Fault(kind)
                        break
            if found is not None:
                found.times -= 1
                self.injected[found.kind] += 1
            return found

    def answered(self, arrived: float, method: str, path: str, status: int) -> None:
        """The store has answered a request."""
        if method not in ("GET", "HEAD") and status < 300:
            with self._lock:
                self.changes.append((arrived, method, path))
            self.on_change(method, path)

    def count(self, method: str, path: str = "") -> int:
        """Requests so far."""
        with self._lock:
            return sum(one == method and path in where for one, where in self.requests)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that went away is part of the game."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    proxy: ObjectProxy
    _upstream: http.client.HTTPConnection | None = None

    def log_message(self, format: str, *_: Any) -> None:  # noqa: A002 - as it is called
        """Nothing is printed."""

    def handle_any(self) -> None:
        size = int(self.headers.get("content-length") or 0)
        body = self.rfile.read(size) if size else b""
        fault = self.proxy.fault_for(self.command, self.path)
        kind = "" if fault is None else fault.kind
        if self.proxy.delay_s:
            time.sleep(self.proxy.delay_s)
        wrong = problem_with(self.command, self.path, self.headers["host"]) if is_signed(self.path) else ""
        if is_signed(self.path):
            self.proxy.signed[wrong] += 1
        if kind == "refuse":
            self.close_connection = True
        elif wrong:
            self._answer(403, {"content-type": "application/xml"}, _ERROR.format(wrong).encode())
        elif fault is not None and kind.isdecimal():
            code = "PreconditionFailed" if kind == "412" else fault.code
            self._answer(int(kind), {"content-type": "application/xml"}, _ERROR.format(code).encode())
        else:
            self._pass_on(kind, body)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("do_"):  # GET, PUT, HEAD, DELETE, POST: all are passed on
            return self.handle_any
        raise AttributeError(name)

    def _pass_on(self, kind: str, body: bytes) -> None:
        headers = {name: value for name, value in self.headers.items() if name.lower() not in _HOP}
        dropped = {"no-conditions": {"if-match", "if-none-match"}, "no-ranges": {"range"}}.get(kind, set())
        headers = {name: value for name, value in headers.items() if name.lower() not in dropped}
        arrived = time.time()
        status, found, data = self._ask(body, headers)
        self.proxy.answered(arrived, self.command, self.path, status)
        if kind == "lost":
            self.close_connection = True
            return
        if kind == "short" and status == 206 and len(data) > 1:
            data = data[: len(data) // 2]
            start = int(found["Content-Range"].split()[1].partition("-")[0])
            total = found["Content-Range"].rpartition("/")[2]
            found["Content-Range"] = f"bytes {start}-{start + len(data) - 1}/{total}"
        self._answer(status, found, data, cut=kind == "cut" and len(data) > 1)

    def _ask(self, body: bytes, headers: dict[str, str]) -> tuple[int, dict[str, str], bytes]:
        """Forward a request to the store over a kept connection. Returns its answer."""
        for attempt in range(2):
            upstream = self._upstream or http.client.HTTPConnection(*self.proxy.target, timeout=60)
            self._upstream = upstream
            try:
                upstream.request(self.command, self.path, body or None, headers | {"Content-Length": str(len(body))})
                answer = upstream.getresponse()
                data = answer.read()
            except (http.client.HTTPException, OSError):
                upstream.close()
                self._upstream = None
                if attempt:
                    raise
                continue
            kept = {name: value for name, value in answer.getheaders() if name.lower() not in _HOP}
            if self.command == "HEAD":
                kept["Content-Length"] = answer.getheader("Content-Length") or "0"
            return answer.status, kept, data
        raise AssertionError("not reached")

    def _answer(self, status: int, headers: dict[str, str], data: bytes, *, cut: bool = False) -> None:
        self.send_response_only(status)
        for name, value in headers.items():
            self.send_header(name, value)
        if self.command != "HEAD" or "Content-Length" not in headers:
            self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data[: len(data) // 2] if cut else data)
        if cut:
            self.wfile.flush()
            self.close_connection = True

    def finish(self) -> None:
        if self._upstream is not None:
            self._upstream.close()
        super().finish()
