"""A plane's page over HTTP: `/metrics` for Prometheus, `/healthz` and `/readyz` for whoever starts and watches planes.

Beyond loopback `/metrics` needs a token. The other two say no more than yes or no and why, and need none: probes have
no place to keep one.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Protocol

from penstock.errors import ConfigError, WaitTimeout
from penstock.extras import require
from penstock.serve.process.bearer import has_token, is_loopback, parse_address, read_token
from penstock.serve.process.prometheus import CONTENT_TYPE, render


class Health(Protocol):
    """What probes ask. Both may be called from any thread, and answer at once."""

    def not_live(self) -> str:
        """Why the process should be started again, in words; empty while it should not."""

    def not_ready(self) -> str:
        """Why nobody should connect now, in words; empty while everybody may."""


def metrics_token(address: str, file: str | None) -> str | None:
    """The token of a page; raises ConfigError where one is needed and not given. Nothing is bound."""
    host, _ = parse_address(address, "metrics")
    if file is not None:
        return read_token(Path(file), "metrics_token")
    if not is_loopback(host):
        raise ConfigError(
            f"metrics: {address!r} can be reached by other hosts, and whoever reaches the page can read it; give "
            "metrics_token, a file with a token of your own, or use 127.0.0.1:PORT"
        )
    return None


class MetricsPage:
    """Serves `/metrics` from a thread: what `show` makes of what `ask` gives. With `health`, probes too."""

    def __init__(
        self,
        address: str,
        ask: Callable[[], dict[str, Any]],
        show: Callable[[dict[str, Any]], str] = render,
        *,
        token: str | None = None,
        health: Health | None = None,
    ) -> None:
        require("a page for Prometheus", "prometheus_client")
        host, port = parse_address(address, "metrics")
        if token is None:
            metrics_token(address, None)
        # A page without a token answers to its loopback name only: another one is a DNS name that was rebound.
        names = {host, f"[{host}]", "localhost"} if token is None else None
        try:
            self._server = _Http((host, port), _handler(lambda: show(ask()), names, token, health))
        except OSError as error:
            raise ConfigError(
                f"metrics: {address!r}: {error.strerror}; use another port, or 0 for a free one"
            ) from None
        self._thread = threading.Thread(target=self._server.serve_forever, name="penstock-metrics", daemon=True)
        self._thread.start()

    @property
    def url(self) -> str:
        host, port = self._server.server_address[:2]
        name = f"[{host!s}]" if ":" in str(host) else str(host)
        return f"http://{name}:{port}/metrics"

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class _Http(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 16

    def __init__(self, address: tuple[str, int], handler: type[BaseHTTPRequestHandler]) -> None:
        self.address_family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
        super().__init__(address, handler)


def _handler(
    text: Callable[[], str], names: set[str] | None, token: str | None, health: Health | None
) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        server_version, sys_version = "penstock", ""
        timeout = 5

        def do_GET(self) -> None:
            given = self.headers.get("Host", "")
            host = given.rpartition(":")[0] or given
            if health is not None and self.path in ("/healthz", "/readyz"):
                found = health.not_live() if self.path == "/healthz" else health.not_ready()
                self._answer(503 if found else 200, f"{found or 'ok'}\n")
            elif names is not None and host not in names:
                self._answer(403, "this page answers to its loopback name only\n")  # a rebound DNS name
            elif self.path != "/metrics":
                self._answer(404, "the page is /metrics\n")
            elif token is not None and not has_token(self.headers.get("Authorization", ""), token):
                self._answer(401, "send the header Authorization: Bearer TOKEN\n", {"WWW-Authenticate": "Bearer"})
            else:
                self._metrics()

        def _metrics(self) -> None:
            try:
                self._answer(200, text())
            except WaitTimeout as error:
                self._answer(503, f"{error}\n")

        def _answer(self, code: int, text: str, more: dict[str, str] | None = None) -> None:
            body = text.encode()
            self.send_response(code)
            headers = {"Content-Type": CONTENT_TYPE, "Content-Length": str(len(body)), **(more or {})}
            for name, value in {**headers, "X-Content-Type-Options": "nosniff"}.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:  # noqa: A002, ARG002 - the base class's words
            return

    return Handler
