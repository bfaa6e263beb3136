"""A plane's page over HTTP: `/metrics` for Prometheus, `/healthz` and `/readyz` for whoever starts and watches planes.

Beyond loopback `/metrics` needs a token. The other two say no more than yes or no and why, and need none: probes have
no place to keep one.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, Protocol, TypeAlias

from penstock.errors import ConfigError, WaitTimeout
from penstock.extras import require
from penstock.server.bearer import has_token, is_loopback, parse_address, read_token
from penstock.server.http_server import HttpThread, Limits
from penstock.server.prometheus import CONTENT_TYPE, render

App: TypeAlias = Callable[..., Awaitable[None]]
_LIMITS = Limits(connections=64, per_address=32)
"""Scrapers and probes are few."""


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
        require("a page for Prometheus", "prometheus_client", "uvicorn", extra="metrics")
        host, port = parse_address(address, "metrics")
        if token is None:
            metrics_token(address, None)
        # A page without a token answers to its loopback name only: another one is a DNS name that was rebound.
        names = {host, f"[{host}]", "localhost"} if token is None else None
        app = _app(lambda: show(ask()), names, token, health)
        self._server = HttpThread(app, host, port, setting="metrics", extra="metrics", limits=_LIMITS)

    @property
    def url(self) -> str:
        return f"{self._server.url}/metrics"

    def close(self) -> None:
        self._server.close()


def _app(text: Callable[[], str], names: set[str] | None, token: str | None, health: Health | None) -> App:
    """The page as an ASGI application."""

    async def answer(path: str, host: str, authorization: str) -> tuple[int, str]:
        if health is not None and path in ("/healthz", "/readyz"):
            found = health.not_live() if path == "/healthz" else health.not_ready()
            return (503 if found else 200), f"{found or 'ok'}\n"
        if names is not None and (host.rpartition(":")[0] or host) not in names:
            return 403, "this page answers to its loopback name only\n"  # a rebound DNS name
        if path != "/metrics":
            return 404, "the page is /metrics\n"
        if token is not None and not has_token(authorization, token):
            return 401, "send the header Authorization: Bearer TOKEN\n"
        try:
            return 200, await asyncio.to_thread(text)  # waits for the plane's loop; probes are answered meanwhile
        except WaitTimeout as error:
            return 503, f"{error}\n"

    async def app(scope: dict[str, Any], _receive: object, send: Callable[[dict[str, Any]], Awaitable[None]]) -> None:
        given = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        if scope["method"] == "GET":
            code, said = await answer(scope["path"], given.get("host", ""), given.get("authorization", ""))
        else:
            code, said = 405, "the page is read with GET\n"
        body = said.encode()
        headers = {"content-type": CONTENT_TYPE, "content-length": str(len(body)), "x-content-type-options": "nosniff"}
        headers |= {"www-authenticate": "Bearer"} if code == 401 else {}
        pairs = [(name.encode(), value.encode()) for name, value in headers.items()]
        await send({"type": "http.response.start", "status": code, "headers": pairs})
        await send({"type": "http.response.body", "body": body})

    return app
