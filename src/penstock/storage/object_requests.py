"""Requests to an object store, with our own retries and our own errors. `obstore` speaks S3, Google Cloud and Azure.

The client's own retries are switched off. They repeat a create-only write whose answer was lost and then report that
the object exists, and they know nothing of a put's deadline. The client's messages are never passed on: they hold
headers, signed addresses and whatever text a server sent. Only the status and the error code are used.

    gone      404, or fewer bytes than were written           `Missing`, `Gone`
    away      no connection, 5xx, 429, a time-out             repeated until the deadline, then `Away`
    refused   403, a wrong region, a clock that is off        `StorageError` at once, with what to do
"""

from __future__ import annotations

import asyncio
import os
import random
import re
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

from penstock.errors import Away, ConfigError, PenstockError, StorageError
from penstock.extras import require
from penstock.storage.interface import SCHEMES

T = TypeVar("T")
PATIENCE_S = 10.0
"""How long a request is repeated if the caller gave no deadline."""
_JITTER = random.SystemRandom()  # has no state: a program's own `random` stays as it is, forked processes differ
_CONNECT_S = 5.0
_ATTEMPT_S = 10.0
_SLOW_LINK = 2_000_000
"""Bytes per second. A request's time limit grows by the time its bytes take on such a link."""
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.1, 2.0
_BUCKET = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{1,221}")
_PREFIX = re.compile(r"[A-Za-z0-9_=.-]{1,200}(/[A-Za-z0-9_=.-]{1,200}){0,15}")
_STATUS = re.compile(r"status code: (\d{3})")
_CODE = re.compile(r"<Code>(\w{1,60})</Code>|\"(?:code|reason)\": ?\"(\w{1,60})\"")
_NO_BUCKET = ("NoSuchBucket", "ContainerNotFound", "notFoundBucket")
_REGION = (
    "PermanentRedirect",
    "AuthorizationHeaderMalformed",
    "IllegalLocationConstraintException",
    "TemporaryRedirect",
)
_METADATA = ("169.254.169.254", "169.254.170.2", "metadata.google.internal")


class Missing(Exception):
    """There is no such object."""


class Taken(Exception):
    """The object exists, or is not the version that was expected."""


class Refusal(Exception):
    """A plain HTTP request failed. The store's message is only searched for error codes, never passed on."""

    def __init__(self, status: int, message: str = "") -> None:
        super().__init__(message)
        self.status = status
        """0 if there was no answer."""


@dataclass(frozen=True, slots=True)
class ObjectUrl:
    """Address of an object storage: `s3://bucket/prefix`, `gs://...`, `az://container/...`."""

    scheme: str
    bucket: str
    prefix: str

    def __str__(self) -> str:
        return f"{self.scheme}://{self.bucket}" + (f"/{self.prefix}" if self.prefix else "")


def parse_object_url(text: str) -> ObjectUrl:
    """Parse the address of an object storage. An address with credentials in it is rejected, and never shown.

    >>> str(parse_object_url("azure://frames/runs/mine/"))
    'az://frames/runs/mine'
    """
    scheme, _, rest = text.partition("://")
    if SCHEMES.get(scheme.lower()) is None:
        raise ConfigError(
            f"storage {scheme[:20]!r}://...: give a folder, or s3://BUCKET/PREFIX, gs://BUCKET/PREFIX, "
            "az://CONTAINER/PREFIX"
        )
    if "@" in rest or "?" in rest or "#" in rest:
        raise ConfigError(
            f"storage {scheme.lower()}://...: credentials and options do not belong in the address, which is shown "
            "and logged; give them in the environment (AWS_ACCESS_KEY_ID, GOOGLE_APPLICATION_CREDENTIALS, "
            "AZURE_STORAGE_ACCOUNT_KEY) or by the instance's role"
        )
    bucket, _, prefix = rest.rstrip("/").partition("/")
    if not _BUCKET.fullmatch(bucket) or (prefix and not _PREFIX.fullmatch(prefix)) or ".." in prefix.split("/"):
        raise ConfigError(
            f"storage {text[:120]!r}: must be {scheme.lower()}://BUCKET/PREFIX, of letters, digits, - _ . ="
        )
    return ObjectUrl(SCHEMES[scheme.lower()], bucket, prefix)


def make_store(url: ObjectUrl) -> Any:
    """Make the client. Credentials, endpoint and region come from the environment or the instance."""
    require(f"storage {url.scheme}://", "obstore")
    from obstore.store import AzureStore, GCSStore, S3Store

    names = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT")
    endpoint = next((os.environ[name] for name in names if os.environ.get(name)), "") if url.scheme == "s3" else ""
    given: dict[str, Any] = {"endpoint": endpoint} if endpoint else {}
    options: dict[str, Any] = {
        "connect_timeout": timedelta(seconds=_CONNECT_S),
        "timeout": timedelta(hours=1),  # `persist` limits each attempt, depending on its size
        "pool_idle_timeout": timedelta(seconds=30),
    }
    if endpoint.startswith("http://"):
        options["allow_http"] = True
    retries: Any = {"max_retries": 0, "retry_timeout": timedelta(seconds=1)}
    kind: Any = {"s3": S3Store, "gs": GCSStore, "az": AzureStore}[url.scheme]
    try:
        return kind(url.bucket, prefix=url.prefix or None, client_options=options, retry_config=retries, **given)
    except Exception as error:  # noqa: BLE001 - the client's message may hold credentials
        raise ConfigError(
            f"{url}: the client cannot be set up ({type(error).__name__}); look at the AWS_, GOOGLE_ or AZURE_ "
            "variables of the environment"
        ) from None


# ------------------------------------------------------------------ errors


def failure_of(error: BaseException, where: str) -> PenstockError | Missing | Taken:
    """Return our error for one of the client's, without its message."""
    if isinstance(error, (PenstockError, Missing, Taken)):
        return error
    if isinstance(error, (TimeoutError, Refusal)):  # not the client's, which need not be installed here
        status = error.status if isinstance(error, Refusal) else 0
        return Taken() if status == 412 else _judged(error, where, status, is_missing=status == 404)
    from obstore.exceptions import AlreadyExistsError, NotFoundError, PreconditionError

    if isinstance(error, (AlreadyExistsError, PreconditionError)):
        return Taken()
    found = _STATUS.search(str(error))
    is_missing = isinstance(error, (NotFoundError, FileNotFoundError))
    return _judged(error, where, int(found[1]) if found else 0, is_missing=is_missing)


def _judged(error: BaseException, where: str, status: int, *, is_missing: bool) -> PenstockError | Missing | Taken:
    text = str(error)
    code = _code_in(text)
    if code in _NO_BUCKET or (status == 404 and "bucket does not exist" in text):
        return StorageError(f"{where}: no such bucket; create it, or correct the address")
    if any(host in text for host in _METADATA):
        return Away(
            f"{where}: no credentials: none in the environment, and the instance gives none; set AWS_ACCESS_KEY_ID and "
            "AWS_SECRET_ACCESS_KEY (or those of your store), or give the instance a role"
        )
    if is_missing:
        return Missing()
    if status == 409:  # two conditional writes at the same time: one of them may have succeeded
        return Taken()
    return _refusal(where, status, code, text) or _away(where, status, code, error)


def _code_in(text: str) -> str:
    found = _CODE.search(text)
    return "" if found is None else found[1] or found[2]


def _refusal(where: str, status: int, code: str, text: str) -> StorageError | None:
    """Return the error for an answer that a retry would not change, or None."""
    shown = f"{status} {code}".strip()
    if code in ("RequestTimeTooSkewed", "RequestExpired"):
        return StorageError(f"{where}: the clock of this host is off ({shown}); set it (NTP), then start again")
    if code in _REGION or status in (301, 307) or "incorrectly configured region" in text:
        return StorageError(f"{where}: the bucket is in another region ({shown or 301}); set AWS_REGION to its region")
    if code in ("ExpiredToken", "InvalidToken", "TokenRefreshRequired"):
        return StorageError(f"{where}: the session token has expired or is wrong ({shown}); get a new one")
    if status in (401, 403):
        return StorageError(
            f"{where}: access denied ({shown}); the credentials of this process lack a right on it: docs/storage.md "
            "lists what planes, producers and ranks need"
        )
    if status == 416:
        return StorageError(f"{where}: shorter than asked for ({shown})")
    if 400 <= status < 500 and status not in (408, 429):
        return StorageError(f"{where}: refused ({shown}); see the log of the object store")
    return None


def _away(where: str, status: int, code: str, error: BaseException) -> Away:
    if status:
        return Away(f"{where}: does not answer now ({f'{status} {code}'.strip()})")
    if isinstance(error, TimeoutError):
        return Away(f"{where}: did not answer in time")
    return Away(f"{where}: no connection, or it was cut")


# ------------------------------------------------------------------ running requests

_loops: dict[int, asyncio.AbstractEventLoop] = {}
_lock = threading.Lock()


def _loop() -> asyncio.AbstractEventLoop:
    """Return the event loop that runs all requests, on a thread of its own. A forked process starts its own."""
    with _lock:
        found = _loops.get(os.getpid())
        if found is None:
            found = _loops[os.getpid()] = asyncio.new_event_loop()
            threading.Thread(target=found.run_forever, name="penstock-objects", daemon=True).start()
        return found


def run(work: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine and return its result. Call it from any thread but the loop's own."""
    future = asyncio.run_coroutine_threadsafe(work, _loop())
    try:
        return future.result()
    except BaseException:
        future.cancel()  # the caller was interrupted and does not need the result
        raise


async def at_once(work: Sequence[Callable[[], Awaitable[T]]], most: int) -> list[T]:
    """Run requests, at most `most` at a time. Returns results in order. A failure cancels the others."""
    places = asyncio.Semaphore(most)

    async def one(act: Callable[[], Awaitable[T]]) -> T:
        async with places:
            return await act()

    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(one(act)) for act in work]
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from None
    return [task.result() for task in tasks]


async def persist(
    act: Callable[[], Awaitable[T]], where: str, *, size: int = 0, deadline: float | None, patience_s: float
) -> T:
    """Make a request and repeat it while the store does not answer, until the deadline. Returns its result.

    Raises Missing, Taken, StorageError or Away. The first attempt is made however little time is left."""
    longer = size / _SLOW_LINK
    end = time.monotonic() + patience_s + longer
    if deadline is not None:
        end = min(end, deadline)
    pause = _FIRST_PAUSE_S
    while True:
        # At least a second, also past the deadline: the first attempt should have a chance.
        left = max(end - time.monotonic(), 1.0)
        try:
            return await asyncio.wait_for(act(), min(_ATTEMPT_S + longer, left))
        except Exception as error:  # noqa: BLE001 - whatever the client raises becomes ours
            found = failure_of(error, where)
        wait = pause * _JITTER.uniform(0.5, 1.0)  # so that many clients do not come back at once
        if not isinstance(found, Away) or time.monotonic() + wait >= end:
            raise found from None
        await asyncio.sleep(wait)
        pause = min(2 * pause, _LONGEST_PAUSE_S)
