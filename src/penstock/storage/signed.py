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
import secrets
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from penstock.errors import Away, StorageError
from penstock.storage.object_ranges import following, segment_in
from penstock.storage.object_requests import PATIENCE_S, Missing, Refusal, Taken, parse_object_url, persist, run
from penstock.storage.object_writes import put_new
from penstock.storage.objects import MARKER, ObjectSegment, ObjectStorage, begin_segment
from penstock.storage.plain_http import request

Method: TypeAlias = Literal["GET", "PUT"]
Sign: TypeAlias = Callable[[Method, tuple[str, ...]], Awaitable[tuple[Sequence[str], float]]]
"""Asks the plane for URLs of objects. Returns them, in order, and for how many seconds they are valid."""
SIGNED_SCHEMES = ("s3", "az")
"""Stores that honour a create-only write with a signed URL. Google Cloud Storage wants its condition signed too."""
_AHEAD = 8
"""Objects of a segment whose URLs are asked for together."""
_SIGN_S = 5.0
"""How long the plane may take to sign. Then the write counts as away, and its group passes the plane."""
_MOST_KEPT = 64


@dataclass(frozen=True, slots=True)
class _Signed:
    url: str
    until: float

    def __repr__(self) -> str:
        return "_Signed(...)"  # whoever has the URL may use it


class SignedStorage:
    """What a worker needs to write segments. It reads the marker, and objects that it has written itself."""

    segment_bytes = ObjectStorage.segment_bytes
    batch_bytes = ObjectStorage.batch_bytes
    gather_s = ObjectStorage.gather_s

    def __init__(self, url: str, sign: Sign, *, patience_s: float = PATIENCE_S) -> None:
        """Nothing is asked of the plane or the store yet."""
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

    async def put_new(self, name: str, data: bytes, deadline: float | None = None) -> None:
        """Write an object that must not exist. Raises Conflict if it does, with other bytes."""
        await put_new(self, name, data, deadline)

    async def put_once(self, name: str, data: bytes) -> None:
        """Make one attempt to write an object that must not exist."""
        await self._request("PUT", name, data)

    async def get(self, name: str, *, deadline: float | None = None, most: int = 1 << 16) -> tuple[bytes, Any]:
        """An object, or as much of it as tells that it is larger than `most`."""

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
                return await asyncio.to_thread(request, method, url, headers, body, most=most)
            except Refusal as error:
                if error.status not in (400, 401, 403):
                    raise
                self._urls.pop((method, name), None)  # expired by the store's clock, or its key was replaced
        url = await self._signed(method, name)
        return await asyncio.to_thread(request, method, url, headers, body, most=most)

    # -------------------------------------------------------------- URLs

    def _known(self, method: Method, name: str) -> str:
        found = self._urls.get((method, name))
        return "" if found is None or found.until < time.monotonic() else found.url

    async def _signed(self, method: Method, name: str) -> str:
        """A URL that is valid now. Requests that are made together ask once."""
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


def prove_signing(storage: ObjectStorage, seconds: float) -> None:
    """Raise StorageError unless the store keeps create-only writes apart that are made with signed URLs."""

    async def sign(method: Method, names: tuple[str, ...]) -> tuple[Sequence[str], float]:
        return await storage.sign_async(method, names, seconds), seconds

    run(_prove(storage, SignedStorage(storage.url, sign)))


async def _prove(storage: ObjectStorage, signed: SignedStorage) -> None:
    name = f"proof/{secrets.token_hex(8)}"
    try:
        await signed.put_new(name, b"one")
        await signed.ask(name, lambda: signed.put_once(name, b"another"))
    except Taken:
        return
    except Away:
        raise
    except StorageError as error:
        raise StorageError(f"sign_puts_s: {error}; without sign_puts_s frames of workers pass the plane") from None
    finally:
        await storage.remove([name])
    raise StorageError(
        f"sign_puts_s: {storage.url}: overwrites objects that exist when the URL is signed (If-None-Match is ignored); "
        "use another store, or leave sign_puts_s out: then frames of workers pass the plane"
    )
