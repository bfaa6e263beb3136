"""Plain HTTP requests with signed URLs, over connections that are kept. Nothing of a URL is shown or logged.

For workers that write to an object store and have no credentials for it. Requests run on threads; each thread has
connections of its own, so nothing is shared with another one or with a forked process.
"""

from __future__ import annotations

import http.client
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from urllib.parse import urlsplit

from penstock.storage.object_requests import Refusal

_TIMEOUT_S = 10.0
"""Without a byte: the caller's own limit is for all of a request."""
_IDLE_S = 4.0
"""Stores close connections that are not used, some after five seconds."""
_MOST_WORDS = 4096


class _Connections(threading.local):
    def __init__(self) -> None:
        self.kept: dict[tuple[str, str], tuple[http.client.HTTPConnection, float]] = {}
        """Scheme and host -> a connection, and when it was last used."""


_connections = _Connections()


def request(method: str, url: str, headers: Mapping[str, str], body: bytes = b"", *, most: int = 0) -> bytes:
    """The body of a good answer: at most `most` bytes and one more. Raises Refusal or TimeoutError.

    Redirects are not followed: a signature is for one host."""
    try:
        return _request(method, url, headers, body, most)
    except TimeoutError:
        raise
    except (OSError, http.client.HTTPException, ValueError):  # their words may hold the URL
        raise Refusal(0) from None


def _request(method: str, url: str, headers: Mapping[str, str], body: bytes, most: int) -> bytes:
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
    """A connection of this thread that is not in use. Those that were not used for long are closed."""
    kept, now = _connections.kept, time.monotonic()
    for old in [one for one, (_, used_at) in kept.items() if now - used_at >= _IDLE_S]:
        kept.pop(old)[0].close()
    if key in kept:
        return kept.pop(key)[0]
    scheme, host = key
    kind = http.client.HTTPSConnection if scheme == "https" else http.client.HTTPConnection
    return kind(host, timeout=_TIMEOUT_S)
