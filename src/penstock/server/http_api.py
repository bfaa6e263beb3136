"""The HTTP API: producers in other languages or in sandboxes put groups and read the ledger.

    POST /v1/groups     a group as JSON, or a frame, or gzip of one: 201 if it is new and durable, 200 if the plane
                        already had it
    POST /v1/lacking    {"column": "rewards", "groups": 8}: samples of groups that lack a column, leased
    POST /v1/attach     {"column": "rewards", "values": {group: {sample: 1.0}}}: their values
    POST /v1/states     {"groups": [id, ...]}: what became of each, as `plane.has` says it
    GET  /v1/feedback   ?after=CURSOR&limit=N&wait=S: the next events, as `plane.feedback` yields them
    POST /v1/leases     tasks of a list of prompts, and further routes to renew and return them (`http_leases.py`)
    GET  /v1/status     what `plane.status()` returns;  GET /v1/ledger  its ledger
    GET  /openapi.json  the OpenAPI description, without a token

The server runs on its own thread and is a client of the plane like any other: bodies are read and parsed outside the
plane's loop, and a group is answered when it is durable. The bytes of all requests together are bounded. Errors are
those of `penstock.errors`, with the same messages and the status that `STATUS` gives them. While there is no room, a
put waits in the plane's queue for up to `timeout` seconds. Then the answer is 429 with Retry-After, and the producer
sends the group again.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import zlib
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from penstock import errors
from penstock.atomic import replacing
from penstock.client import EncodedGroup, Plane
from penstock.convert import read_json_group
from penstock.errors import ConfigError, InvalidInput, PenstockError
from penstock.extras import require
from penstock.frames import read_head
from penstock.protocol import MAX_ASKED, MAX_PAGE, OVER_LENGTH, Accepted
from penstock.server.http_leases import MAX_BODY_BYTES, answer_tasks, attach, lease, read_body
from penstock.server.http_server import HttpServer, has_token, is_loopback, parse_address, read_token
from penstock.server.openapi import FRAME, AskedGroups, describe, shown
from penstock.transport import trim

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.responses import Response

STATUS: dict[type[PenstockError], int] = {
    errors.Conflict: 409,
    errors.Evicted: 403,
    errors.UnknownKey: 404,
    errors.CallerError: 400,
    errors.CorruptFrame: 400,
    errors.Overloaded: 429,
    errors.DiskFull: 507,
    errors.Away: 503,
    errors.FlowError: 503,
    errors.PeerError: 503,
    errors.PenstockError: 500,
}
"""The status of an error is that of the first class here it is an instance of, so subclasses come first."""
MAX_JSON_BYTES, MAX_FRAME_BYTES = 32 << 20, 256 << 20
MOST_FEEDBACK_S = 5.0
"""Seconds that a request for events may wait for one."""
MAX_STATES_BYTES = 4 << 20
MAX_BYTES_IN_HAND = 512 << 20
"""Limit on all requests together, from the first byte of a body until its group is answered."""
_LARGE_JSON_BYTES = 1 << 20
"""Larger groups in JSON are parsed one at a time."""
_BODY_S = 60.0
WAIT_S, MOST_WAIT_S = 20.0, 300.0
"""How long a put waits for room by default, and at most."""
_THREADS = 8
_LATER_S = 1.0
_BUSY = f"the HTTP API: requests of {MAX_BYTES_IN_HAND} bytes are being handled; send it again"
Answer = Callable[["Request"], Awaitable["Response"]]
T = TypeVar("T")


class HttpApi:
    """Serves a plane over HTTP until closed. `address` is HOST:PORT, port 0 chooses a free port."""

    def __init__(self, address: str, plane: Plane, *, token: str) -> None:
        require("the HTTP API", "starlette", "uvicorn", extra="http")
        host, port = parse_address(address, "http")
        self._plane, self._pool = plane, ThreadPoolExecutor(_THREADS, thread_name_prefix="penstock-http")
        app = make_app(plane, self._pool, token=token)
        self._server = HttpServer(app, host, port, setting="http", extra="http").start()

    @property
    def url(self) -> str:
        return self._server.url

    def close(self) -> None:
        """Accept no further requests. Requests that wait for the plane fail."""
        self._server.stop()
        self._plane.close()
        self._server.close()
        self._pool.shutdown(wait=False, cancel_futures=True)


def make_app(plane: Plane, pool: ThreadPoolExecutor, *, token: str) -> Any:
    """Return the application. All routes but /openapi.json need the token."""
    from starlette.applications import Starlette
    from starlette.exceptions import HTTPException
    from starlette.routing import Route

    async def status(_: Request) -> Response:
        return _json(await _beside(pool, plane.status))

    async def ledger(_: Request) -> Response:
        return _json((await _beside(pool, plane.status))["ledger"])

    async def openapi(_: Request) -> Response:
        return _json(describe(STATUS))

    in_hand = BytesInHand(MAX_BYTES_IN_HAND)
    guarded: dict[str, tuple[str, Answer]] = {
        "/v1/groups": ("POST", partial(_put, plane, pool, in_hand, asyncio.Lock())),
        "/v1/states": ("POST", partial(_ask, partial(_states, plane), MAX_STATES_BYTES, in_hand)),
        "/v1/feedback": ("GET", lambda request: _feedback(plane, request)),
        "/v1/leases": ("POST", partial(_ask, partial(answer_tasks, plane, "lease"), MAX_BODY_BYTES, in_hand)),
        "/v1/leases/renew": ("POST", partial(_ask, partial(answer_tasks, plane, "renew"), MAX_BODY_BYTES, in_hand)),
        "/v1/leases/return": ("POST", partial(_ask, partial(answer_tasks, plane, "return"), MAX_BODY_BYTES, in_hand)),
        "/v1/lacking": ("POST", partial(_ask, partial(lease, plane), MAX_STATES_BYTES, in_hand)),
        "/v1/attach": ("POST", partial(_ask, partial(attach, plane), MAX_STATES_BYTES, in_hand)),
        "/v1/status": ("GET", status),
        "/v1/ledger": ("GET", ledger),
    }
    routes = [Route(path, _safely(_guard(answer, token)), methods=[verb]) for path, (verb, answer) in guarded.items()]
    routes.append(Route("/openapi.json", openapi, methods=["GET"]))
    app = Starlette(routes=routes, exception_handlers={HTTPException: _refused, Exception: _broken})
    app.router.redirect_slashes = False  # a redirect would be an answer without JSON
    return app


async def _put(
    plane: Plane, pool: ThreadPoolExecutor, in_hand: BytesInHand, one_large: asyncio.Lock, request: Request
) -> Response:
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind not in ("application/json", FRAME):
        return _problem(415, "InvalidInput", f"content-type: {kind[:80]!r}; must be application/json or {FRAME}")
    timeout = _number(request, "timeout", WAIT_S, 0.0, MOST_WAIT_S, "seconds")
    limit = MAX_FRAME_BYTES if kind == FRAME else MAX_JSON_BYTES
    with ExitStack() as held:
        body = await _receive(request, limit, in_hand, held, pool)
        if not isinstance(body, bytes):
            return body
        if kind == FRAME:
            evaluation = request.query_params.get("evaluation") == "true"
            samples, encoded = await _beside(pool, _of_frame, body, evaluation)
        else:
            # Parsed, JSON takes ten times its size and more. Parsing several at once would not be faster, either.
            is_large = len(body) > _LARGE_JSON_BYTES
            async with one_large if is_large else nullcontext():
                try:
                    samples, encoded = await _beside(pool, _of_json, plane, body)
                finally:
                    if is_large:  # four bodies of 16 MB left 450 MB with the C library, and leave 110 to 280 MB
                        await _beside(pool, trim)
        answer = await _while_connected(request, plane.adeliver(encoded, timeout))
    found, status = _accepted(samples, encoded, answer)
    return _json(found, status)


async def _refused(request: Request, error: Any) -> Response:
    """Answer a path or verb that the API does not have."""
    path = request.url.path[:80]
    if error.status_code == 405:
        allowed = (error.headers or {}).get("Allow", "")
        return _problem(405, "InvalidInput", f"{request.method} {path}: not allowed; use {allowed}", {"allow": allowed})
    return _problem(error.status_code, "UnknownKey", f"{path}: no such path; see /openapi.json")


async def _broken(request: Request, error: Exception) -> Response:  # noqa: ARG001 - the server logs it
    return _problem(500, "PenstockError", "the HTTP API failed; the plane's log has the reason")


def _of_json(plane: Plane, body: bytes) -> tuple[int, EncodedGroup]:
    """Parse a JSON group. Returns the number of samples and the group to put."""
    group, evaluation = read_json_group(body, lambda: plane.columns)
    return len(group), EncodedGroup.of(group, evaluation=evaluation, columns=lambda: plane.columns)


def _of_frame(body: bytes, evaluation: bool) -> tuple[int, EncodedGroup]:
    """Check a frame's head. Returns the number of samples and the group to put."""
    head = read_head(body)
    groups = sorted(set(head.text.get("group", ())))
    if len(groups) != 1 or not groups[0]:
        raise InvalidInput(f"frame: samples of groups {groups[:3]}; a frame that is put holds one group, with its id")
    return len(head.ids), EncodedGroup.of_frame(groups[0], body, evaluation=evaluation)


async def _ask(
    act: Callable[[bytes], Coroutine[Any, Any, Any]], limit: int, in_hand: BytesInHand, request: Request
) -> Response:
    """Answer a question in JSON of at most `limit` bytes."""
    with ExitStack() as held:
        body = await _counted_body(request, limit, in_hand, held)
        return _json(await _while_connected(request, act(body))) if isinstance(body, bytes) else body


async def _states(plane: Plane, body: bytes) -> dict[str, Any]:
    found = await plane.ahas(_asked(body))
    return {"states": {name: {"state": one.state, "reason": one.reason} for name, one in found.items()}}


async def _feedback(plane: Plane, request: Request) -> Response:
    after = request.query_params.get("after", "")
    most = int(_number(request, "limit", MAX_PAGE, 1, MAX_PAGE))
    wait_s = _number(request, "wait", 0.0, 0.0, MOST_FEEDBACK_S, "seconds")
    events = await plane.afeedback_page(after, most, wait_s)
    cursor = events[-1].cursor if events else after
    return _json({"events": [shown(event) for event in events], "cursor": cursor})


# Made at import: msgspec crashes when two threads are the first to decode a type.
_READ_ASKED = msgspec.json.Decoder(AskedGroups)


def _asked(body: bytes) -> list[str]:
    """Parse a question about groups."""
    groups: list[str] = read_body(_READ_ASKED, body).groups
    if len(groups) > MAX_ASKED:
        raise InvalidInput(f"groups: {len(groups):,} ids; ask for at most {MAX_ASKED:,} at once")
    return groups


def _accepted(samples: int, group: EncodedGroup, answer: Accepted) -> tuple[dict[str, Any], int]:
    is_new = not answer.duplicate
    found: dict[str, Any] = {"group": group.name, "samples": samples, "new": is_new}
    if any(answer.over_length):
        found["over_length"] = dict(zip(OVER_LENGTH, answer.over_length, strict=True))
    return found, 201 if is_new else 200


async def _while_connected(request: Request, putting: Coroutine[Any, Any, T]) -> T:
    """Wait for a put, or another request. Cancels it if the client disconnects, so that it leaves the plane's queue."""
    from starlette.requests import ClientDisconnect

    put, gone = asyncio.ensure_future(putting), asyncio.ensure_future(request.receive())
    try:
        await asyncio.wait([put, gone], return_when=asyncio.FIRST_COMPLETED)
        if not put.done():  # after a complete body, the only further message is the end of the connection
            raise ClientDisconnect
        return put.result()
    finally:
        put.cancel()
        gone.cancel()


async def _beside(pool: ThreadPoolExecutor, work: Callable[..., Any], *arguments: Any) -> Any:
    return await asyncio.get_running_loop().run_in_executor(pool, work, *arguments)


# ------------------------------------------------------------------ requests


class BytesInHand:
    """Counts the bytes of requests in progress. Use it from one thread."""

    def __init__(self, limit: int) -> None:
        self._limit, self.num_bytes = limit, 0

    @contextmanager
    def taking(self, size: int) -> Iterator[bool]:
        """Reserve `size` bytes while the block runs. Yields False if they do not fit."""
        fits = self.num_bytes + size <= self._limit
        self.num_bytes += size * fits
        try:
            yield fits
        finally:
            self.num_bytes -= size * fits


def _number(request: Request, name: str, default: float, least: float, most: float, unit: str = "") -> float:
    """Return a number of the query. Raises InvalidInput if it is out of range, or none."""
    text = request.query_params.get(name, str(default))
    try:
        found = float(text)
    except ValueError:
        found = float("nan")
    if not least <= found <= most:  # false for NaN
        raise InvalidInput(f"{name}: {text[:80]!r}; must be {unit or 'a number'}, from {least:g} to {most:g}")
    return found


def _length(request: Request, limit: int) -> tuple[int, Response | None]:
    """Return the length of the body, and a response if it must be rejected."""
    if "transfer-encoding" in request.headers:
        # It takes precedence over a content-length: the body would have no limit, and a proxy that trusts the length
        # would treat the rest of the body as the next request (request smuggling). So the connection is closed too.
        reason = "transfer-encoding: not supported; send a body with content-length only"
        return 0, _problem(411, "InvalidInput", reason, {"connection": "close"})
    text = request.headers.get("content-length", "")
    if not text.isascii() or not text.isdigit() or len(text) > 18:
        return 0, _problem(411, "InvalidInput", "content-length: missing; send a body of known length")
    return (int(text), None) if int(text) <= limit else (0, _too_large(int(text), limit))


def _too_large(size: int, limit: int) -> Response:
    hint = "smaller groups, or a frame" if limit == MAX_JSON_BYTES else "smaller groups"
    return _problem(413, "InvalidInput", f"body: {size} bytes; at most {limit}; send {hint}")


def claimed_size(body: bytes) -> int:
    """Return the length that a gzip body claims to have when decompressed: its last four bytes."""
    return int.from_bytes(body[-4:], "little")


def gunzip(body: bytes, size: int) -> bytes:
    """Decompress a gzip body of one member, to exactly `size` bytes. Raises InvalidInput at the first byte beyond."""
    reader = zlib.decompressobj(wbits=16 + zlib.MAX_WBITS)
    try:
        found = reader.decompress(body, size + 1)  # one more, to notice a body that is longer than it claims
    except zlib.error as error:
        raise InvalidInput(f"body: not gzip ({error}); send what content-encoding says") from None
    if len(found) != size or not reader.eof or reader.unused_data:
        raise InvalidInput(f"body: gzip of other than the {size} bytes that its end claims; send one complete member")
    return found


async def _receive(
    request: Request, limit: int, in_hand: BytesInHand, held: ExitStack, pool: ThreadPoolExecutor
) -> bytes | Response:
    """Read the body, decompressed, or return the response that rejects it. `held` keeps its bytes reserved."""
    coding = request.headers.get("content-encoding", "identity").strip().lower()
    if coding not in ("identity", "gzip"):
        return _problem(415, "InvalidInput", f"content-encoding: {coding[:80]!r}; must be gzip, or left out")
    body = await _counted_body(request, limit, in_hand, held)
    if coding == "identity" or not isinstance(body, bytes):
        return body
    # The length that the sender claims is reserved before a byte is decompressed, and it is the limit.
    unpacked = claimed_size(body)
    if unpacked > limit:
        return _too_large(unpacked, limit)
    if not held.enter_context(in_hand.taking(unpacked)):
        return _later(_BUSY)
    found: bytes = await _beside(pool, gunzip, body, unpacked)
    return found


async def _counted_body(request: Request, limit: int, in_hand: BytesInHand, held: ExitStack) -> bytes | Response:
    """Read the body, or return the response that rejects it. `held` keeps its bytes reserved."""
    size, refusal = _length(request, limit)
    if refusal is not None:
        return refusal
    if not held.enter_context(in_hand.taking(size)):
        return _later(_BUSY)
    body = await _body(request, size)
    if body is None:
        return _problem(408, "WaitTimeout", f"body: did not arrive within {_BODY_S:g} s; send it again")
    return body


async def _body(request: Request, size: int) -> bytes | None:
    """Read the body, or return None if it is too slow. Raises InvalidInput at the first byte beyond `size`."""
    body = bytearray()

    async def read() -> None:
        async for chunk in request.stream():
            if len(body) + len(chunk) > size:
                raise InvalidInput(f"body: more than the {size} bytes of its content-length")
            body.extend(chunk)

    try:
        await asyncio.wait_for(read(), _BODY_S)
    except TimeoutError:
        return None
    return bytes(body)


def _guard(answer: Answer, token: str) -> Answer:
    """Answer only requests with the token."""

    async def guarded(request: Request) -> Response:
        if not has_token(request.headers.get("authorization", ""), token):
            reason = "authorization: no token, or a wrong one; send the header Authorization: Bearer TOKEN"
            return _problem(401, "InvalidInput", reason, {"www-authenticate": "Bearer"})
        return await answer(request)

    return guarded


def _safely(answer: Answer) -> Answer:
    """Turn Penstock's errors into responses. The server reports all others as 500."""
    from starlette.requests import ClientDisconnect
    from starlette.responses import Response

    async def answering(request: Request) -> Response:
        try:
            return await answer(request)
        except errors.Overloaded as error:
            return _later(str(error), error.retry_after_s)
        except PenstockError as error:
            return _problem(status_of(error), type(error).__name__, str(error))
        except ClientDisconnect:
            return Response(status_code=400)  # never sent: the client is gone

    return answering


def status_of(error: PenstockError) -> int:
    """Return the HTTP status of an error."""
    return next(status for kind, status in STATUS.items() if isinstance(error, kind))


def _later(message: str, seconds: float = _LATER_S) -> Response:
    wait = max(seconds, _LATER_S)
    headers = {"retry-after": str(-int(-wait // 1))}
    return _json({"error": "Overloaded", "message": message, "retry_after_s": wait}, 429, headers)


def _problem(status: int, error: str, message: str, headers: dict[str, str] | None = None) -> Response:
    return _json({"error": error, "message": message}, status, headers)


def _json(found: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    from starlette.responses import Response

    more = {"x-content-type-options": "nosniff", "cache-control": "no-store", **(headers or {})}
    return Response(msgspec.json.encode(found), status, more, "application/json")


# ------------------------------------------------------------------ address and token


def find_token(address: str, file: str | None, folder: str) -> tuple[str, bool]:
    """Return the token, and whether it was generated here. A generated one is stored in the run's folder for the next
    start."""
    host, _ = parse_address(address, "http")
    if file is not None:
        return read_token(Path(file), "http_token"), False
    if not is_loopback(host):
        raise ConfigError(
            f"http: {address!r} can be reached by other hosts; give http_token, a file with a token of your own, and "
            "put a proxy with TLS in front"
        )
    if folder in ("", "memory:"):
        return secrets.token_urlsafe(32), True
    kept = Path(folder) / "http-token"
    if not kept.exists():
        with replacing(kept) as made:  # atomic: a token truncated by a kill would prevent every later start
            os.fchmod(made.fileno(), 0o600)
            made.write(secrets.token_urlsafe(32).encode() + b"\n")
    return read_token(kept, "http_token"), True
