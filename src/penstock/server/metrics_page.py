"""The metrics page: `/metrics` for Prometheus, `/healthz` and `/readyz` for supervisors and Kubernetes probes.

Beyond loopback `/metrics` needs a token. The other two only answer yes or no with a reason and need none, because
probes cannot store one.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, Protocol, TypeAlias

from penstock.errors import ConfigError, WaitTimeout
from penstock.extras import require
from penstock.server.http_server import HttpServer, Limits, has_token, is_loopback, parse_address, read_token
from penstock.server.prometheus import CONTENT_TYPE, render

App: TypeAlias = Callable[..., Awaitable[None]]
_LIMITS = Limits(connections=64, per_address=32)
"""Scrapers and probes are few."""


class Health(Protocol):
    """The answers to probes. Both methods may be called from any thread and return at once."""

    def not_live(self) -> str:
        """Return the reason to restart the process, or ""."""

    def not_ready(self) -> str:
        """Return why clients should not connect now, or ""."""


def metrics_token(address: str, file: str | None) -> str | None:
    """Read the page's token. Raises ConfigError if one is needed and not given. Does not open the address."""
    host, _ = parse_address(address, "metrics")
    if file is not None:
        return read_token(Path(file), "metrics_token")
    if not is_loopback(host):
        raise ConfigError(
            f"metrics: {address!r} can be reached by other hosts, which could read the page; give "
            "metrics_token, a file with a token of your own, or use 127.0.0.1:PORT"
        )
    return None


class MetricsPage:
    """Serves `/metrics` on a thread: `show(ask())`. With `health`, it answers probes too."""

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
        # A page without a token answers only requests for its loopback name. Any other name means DNS rebinding: a web
        # page in the user's browser whose domain now resolves to 127.0.0.1.
        names = {host, f"[{host}]", "localhost"} if token is None else None
        app = _app(lambda: show(ask()), names, token, health)
        self._server = HttpServer(app, host, port, setting="metrics", extra="metrics", limits=_LIMITS).start()

    @property
    def url(self) -> str:
        return f"{self._server.url}/metrics"

    def close(self) -> None:
        self._server.close()


def _app(render_page: Callable[[], str], names: set[str] | None, token: str | None, health: Health | None) -> App:
    """Return the page as an ASGI application."""

    async def answer(path: str, host: str, authorization: str) -> tuple[int, str]:
        if health is not None and path in ("/healthz", "/readyz"):
            found = health.not_live() if path == "/healthz" else health.not_ready()
            return (503 if found else 200), f"{found or 'ok'}\n"
        if names is not None and (host.rpartition(":")[0] or host) not in names:
            return 403, "this page answers only to its loopback name\n"  # DNS rebinding
        if path != "/metrics":
            return 404, "the page is /metrics\n"
        if token is not None and not has_token(authorization, token):
            return 401, "send the header Authorization: Bearer TOKEN\n"
        try:
            return 200, await asyncio.to_thread(render_page)  # waits for the plane's loop; probes do not
        except WaitTimeout as error:
            return 503, f"{error}\n"

    async def app(scope: dict[str, Any], _receive: object, send: Callable[[dict[str, Any]], Awaitable[None]]) -> None:
        given = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        if scope["method"] == "GET":
            code, text = await answer(scope["path"], given.get("host", ""), given.get("authorization", ""))
        else:
            code, text = 405, "use GET\n"
        body = text.encode()
        headers = {"content-type": CONTENT_TYPE, "content-length": str(len(body)), "x-content-type-options": "nosniff"}
        headers |= {"www-authenticate": "Bearer"} if code == 401 else {}
        pairs = [(name.encode(), value.encode()) for name, value in headers.items()]
        await send({"type": "http.response.start", "status": code, "headers": pairs})
        await send({"type": "http.response.body", "body": body})

    return app
