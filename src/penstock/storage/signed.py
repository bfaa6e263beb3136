"""Storage for a worker that has no credentials: an object store whose requests the plane signs.

    worker                          plane                          object store
    sign PUT 000000 ... 000007  ->  is that segment yours?
                                <-  eight URLs, valid for a time
    PUT 000000, If-None-Match: *  ------------------------------>  created, or 412

A URL allows one kind of request on one object. It is asked for again before it expires, and after the store refused it.
Everything else is as with credentials: one create-only request for each object, the same retries and the same errors.
"""

from __future__ import annotations

import asyncio
import http.client
import threading
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias
from urllib.parse import urlsplit

from penstock.errors import Away
from penstock.storage.object_ranges import following, segment_in
from penstock.storage.object_requests import PATIENCE_S, Missing, Refusal, parse_object_url, persist, run
from penstock.storage.object_writes import ObjectSegment, begin_segment
from penstock.storage.objects import MARKER, ObjectStorage

Method: TypeAlias = Literal["GET", "PUT"]
Sign: TypeAlias = Callable[[Method, tuple[str, ...]], Awaitable[tuple[Sequence[str], float]]]
"""Asks the plane for URLs of objects. Returns them, in order, and for how many seconds they are valid."""
SIGNED_SCHEMES = ("s3", "az")
"""Stores that honour a create-only write with a signed URL. Google Cloud Storage wants its condition signed too."""
_AHEAD = 8
"""Objects of a segment whose URLs are asked for together."""
_SIGN_S = 5.0
"""How long the plane may take to sign. After that the store counts as away, and the group is sent to the plane."""
_MOST_KEPT = 64
"""URLs kept for later requests."""
_TIMEOUT_S = 10.0
"""How long the store may send nothing. The caller limits the request as a whole."""
_IDLE_S = 4.0
"""Idle connections are closed after this: stores close them too, some after five seconds."""
_MOST_WORDS = 4096
"""Bytes read of the message of a failed request."""


@dataclass(frozen=True, slots=True)
class _Signed:
    url: str
    until: float

    def __repr__(self) -> str:
        return "_Signed(...)"  # anyone who has the URL may use it


class SignedStorage:
    """Writes segments for a worker without credentials. Reads the marker, and objects that it has written itself."""

    segment_bytes = ObjectStorage.segment_bytes
    batch_bytes = ObjectStorage.batch_bytes
    gather_s = ObjectStorage.gather_s

    def __init__(self, url: str, sign: Sign, *, patience_s: float = PATIENCE_S) -> None:
        """Makes no request yet."""
        parsed, self._sign, self._patience_s = parse_object_url(url), sign, patience_s
        self.url = str(parsed)
        self._headers = {"If-None-Match": "*"} | ({"x-ms-blob-type": "BlockBlob"} if parsed.scheme == "az" else {})
        self._urls: dict[tuple[Method, str], _Signed] = {}
        self._asking = asyncio.Lock()

    def __repr__(self) -> str:
        return f"SignedStorage({self.url!r})"

    def create(self, segment: str) -> ObjectSegment:
        return begin_segment(self, segment)

    def marker(self) -> bytes | None:
        try:
            return run(self.get(MARKER))[0]
        except Missing:
            return None

    def close(self) -> None:
        """Connections close by themselves."""

    # -------------------------------------------------------------- requests

    async def put_once(self, name: str, data: bytes) -> None:
        """Make one attempt to write an object that must not exist."""
        await self._request("PUT", name, data)

    async def get(self, name: str, *, deadline: float | None = None, most: int = 1 << 16) -> tuple[bytes, Any]:
        """Read an object. Of one larger than `most`, reads just enough to tell."""

        async def act() -> bytes:
            return await self._request("GET", name, most=most)

        return await self.ask(name, act, size=most, deadline=deadline), None

    async def ask(
        self, name: str, act: Callable[[], Awaitable[Any]], *, size: int = 0, deadline: float | None = None
    ) -> Any:
        where = f"{self.url}/{name} (with a URL that the plane signed)"
        return await persist(act, where, size=size, deadline=deadline, patience_s=self._patience_s)

    async def _request(self, method: Method, name: str, body: bytes = b"", *, most: int = 0) -> bytes:
        headers = self._headers if method == "PUT" else {}
        url = self._known(method, name)
        if url:
            try:
                return await asyncio.to_thread(_send, method, url, headers, body, most=most)
            except Refusal as error:
                if error.status not in (400, 401, 403):
                    raise
                self._urls.pop((method, name), None)  # expired by the store's clock, or its key was replaced
        url = await self._signed(method, name)
        return await asyncio.to_thread(_send, method, url, headers, body, most=most)

    # -------------------------------------------------------------- URLs

    def _known(self, method: Method, name: str) -> str:
        found = self._urls.get((method, name))
        return "" if found is None or found.until < time.monotonic() else found.url

    async def _signed(self, method: Method, name: str) -> str:
        """Return a URL that is valid now. Requests that are made together ask for it once."""
        async with self._asking:
            return self._known(method, name) or await self._ask_plane(method, name)

    async def _ask_plane(self, method: Method, name: str) -> str:
        is_next = method == "PUT" and segment_in(name)
        names = tuple(following(name, _AHEAD)) if is_next else (name,)
        asked_at = time.monotonic()  # the time on the way counts
        try:
            urls, seconds = await asyncio.wait_for(self._sign(method, names), _SIGN_S)
        except TimeoutError:
            raise Away(f"{self.url}/{name}: the plane has not signed a URL for {_SIGN_S:g} s") from None
        until = asked_at + 0.75 * seconds  # the rest is for clocks that differ, and for a body on its way
        kept = list(self._urls.items())[-_MOST_KEPT:]
        new = {(method, one): _Signed(url, until) for one, url in zip(names, urls, strict=True)}
        self._urls = dict(kept) | new
        return urls[0]


# ------------------------------------------------------------------ plain HTTP requests
#
# Over connections that are kept; nothing of a URL is shown or logged. obstore cannot do this: its store for plain HTTP
# has no create-only writes. Requests run on threads, and each thread has connections of its own, so that nothing is
# shared with another thread or with a forked process.


class _Connections(threading.local):
    def __init__(self) -> None:
        self.kept: dict[tuple[str, str], tuple[http.client.HTTPConnection, float]] = {}
        """Scheme and host -> a connection, and when it was last used."""


_connections = _Connections()


def _send(method: str, url: str, headers: Mapping[str, str], body: bytes = b"", *, most: int = 0) -> bytes:
    """Return the body of a good answer, up to `most` bytes and one more. Raises Refusal or TimeoutError.

    Redirects are not followed: a signature is for one host."""
    try:
        return _answered(method, url, headers, body, most)
    except TimeoutError:
        raise
    except (OSError, http.client.HTTPException, ValueError):  # their messages may hold the URL
        raise Refusal(0) from None


def _answered(method: str, url: str, headers: Mapping[str, str], body: bytes, most: int) -> bytes:
    parts = urlsplit(url)
    key = (parts.scheme, parts.netloc)
    connection = _taken(key)
    try:
        with suppress(BrokenPipeError, ConnectionResetError):  # a store that refuses may not wait for the body
            connection.request(method, f"{parts.path}?{parts.query}", body or None, dict(headers))
        answer = connection.getresponse()
        is_good = answer.status < 300
        data = answer.read(most + 1 if is_good else _MOST_WORDS)
    except BaseException:
        connection.close()
        raise
    if answer.isclosed():  # all of it was read
        _connections.kept[key] = connection, time.monotonic()
    else:
        connection.close()
    if not is_good:
        raise Refusal(answer.status, data.decode(errors="replace"))
    return data


def _taken(key: tuple[str, str]) -> http.client.HTTPConnection:
    """Return a connection of this thread that is not in use. Closes those that were idle for long."""
    kept, now = _connections.kept, time.monotonic()
    for old in [one for one, (_, used_at) in kept.items() if now - used_at >= _IDLE_S]:
        kept.pop(old)[0].close()
    if key in kept:
        return kept.pop(key)[0]
    scheme, host = key
    kind = http.client.HTTPSConnection if scheme == "https" else http.client.HTTPConnection
    return kind(host, timeout=_TIMEOUT_S)
