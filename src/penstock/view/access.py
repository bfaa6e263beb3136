"""Access control of the viewer: an ASGI wrapper that checks every request first.

The viewer listens on loopback and requires a token of 256 bits. The token is passed once in the URL and then as an
HttpOnly, SameSite=Strict cookie. The Host header must name the loopback address, which defeats DNS rebinding: another
site's name that resolves to 127.0.0.1 is rejected. Any port is accepted, because an SSH tunnel may end on any port.
Only GET and HEAD are allowed. Requests are rejected unless allowed here, including routes added later.
"""

from __future__ import annotations

import hashlib
import re
import secrets
import threading
from collections.abc import Awaitable, Callable, MutableMapping
from typing import TYPE_CHECKING, Any

from penstock.errors import ConfigError

if TYPE_CHECKING:
    from starlette.requests import Request

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
_HOST = re.compile(r"(?:127\.0\.0\.1|localhost|\[::1\])(?::\d{1,5})?", re.IGNORECASE)
_HEADERS = [
    (b"content-security-policy", POLICY.encode()),
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
    (b"cross-origin-opener-policy", b"same-origin"),
    (b"cross-origin-resource-policy", b"same-origin"),
    (b"cache-control", b"no-store"),
]


def new_token() -> str:
    """Return 256 random bits as URL-safe text."""
    return secrets.token_urlsafe(32)


def cookie_name(token: str) -> str:
    """Return the name of the cookie that carries a token. It reveals nothing about the token."""
    return f"penstock_{hashlib.sha256(token.encode()).hexdigest()[:12]}"


class Guard:
    """Passes requests with the token and a loopback Host header to the app, rejects others."""

    def __init__(self, app: App, *, token: str) -> None:
        if len(token) < 22:
            raise ConfigError(f"token: {len(token)} characters; at least 22, which hold 128 bits")
        self._app, self._token = app, token
        self.closing = threading.Event()
        """Set when the server shuts down. Open streams end then."""
        # Cookies are shared between ports. Two viewers on one machine must not overwrite each other's.
        self.cookie = cookie_name(token)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        from starlette.requests import Request
        from starlette.responses import PlainTextResponse

        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        if scope["type"] != "http":
            await send({"type": "websocket.close", "code": 1008})
            return
        request = Request(scope)
        refusal = _refusal(request)
        if refusal is not None:
            answer: App = PlainTextResponse(refusal[1], refusal[0])
        elif scope["path"] == "/" and self._is_token(request.query_params.getlist("token")):
            cookie = f"{self.cookie}={self._token}; Path=/; HttpOnly; SameSite=Strict"
            answer = PlainTextResponse("", 303, {"location": "/", "set-cookie": cookie})
        elif self._is_token([request.cookies.get(self.cookie, "")]):
            answer = self._app
        else:
            answer = PlainTextResponse("This page needs the token in the printed URL; open that URL again.\n", 403)
        await answer(scope, receive, _with_headers(send))

    def _is_token(self, given: list[str]) -> bool:
        return len(given) == 1 and secrets.compare_digest(given[0].encode(), self._token.encode())


def _refusal(request: Request) -> tuple[int, str] | None:
    hosts = request.headers.getlist("host")
    if request.method not in ("GET", "HEAD"):
        return 405, "Only GET and HEAD.\n"
    if len(hosts) != 1 or not _HOST.fullmatch(hosts[0]):
        return 421, "Unknown host name; use the printed URL, or 127.0.0.1 with your port.\n"
    if any(origin.lower() != f"http://{hosts[0].lower()}" for origin in request.headers.getlist("origin")):
        return 403, "Not from another site.\n"
    if any(site not in ("same-origin", "none") for site in request.headers.getlist("sec-fetch-site")):
        return 403, "Not from another site.\n"
    if not request.scope["query_string"].isascii() or not request.scope["path"].startswith("/"):
        return 400, "Not an address: write other characters as %XX.\n"
    return None


def _with_headers(send: Send) -> Send:
    async def sending(message: MutableMapping[str, Any]) -> None:
        if message["type"] == "http.response.start":
            message["headers"] = [*message.get("headers", []), *_HEADERS]
        await send(message)

    return sending
