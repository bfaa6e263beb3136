"""The one HTTP server, of the API, the metrics page, the viewer and the demo: uvicorn with limits, addresses, tokens.

uvicorn has no deadline for a request's headers and no limit per address. Anyone, even without a token, could open a
thousand connections that send nothing and so block all other clients. The guard adds

- a deadline from the start of a connection, or the first byte of a further request, to the end of its headers;
- a deadline for a client that does not read its answer;
- a limit on connections per address and in total. When it is reached, the connection that has waited longest for a
  request is closed to make room. A connection whose request is being answered is never closed for another one.
"""

from __future__ import annotations

import ipaddress
import resource
import secrets
import socket
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from penstock.errors import ConfigError
from penstock.extras import require

MIN_TOKEN = 22
"""Characters, which hold 128 bits."""
_END_S = 2.0
"""How long to wait for the server's thread beyond the time that uvicorn gives open requests."""


def _raw(status: bytes, body: bytes, *headers: bytes) -> bytes:
    """Build an answer for a connection that has no request."""
    lines = [b"HTTP/1.1 " + status, b"content-type: application/json", b"connection: close", *headers]
    return b"\r\n".join([*lines, b"content-length: %d" % len(body), b"", body])


REJECTION = _raw(
    b"503 Service Unavailable",
    b'{"error":"Overloaded","message":"too many connections are being answered; send it again","retry_after_s":1.0}',
    b"retry-after: 1",
)
MALFORMED = _raw(b"400 Bad Request", b'{"error":"InvalidInput","message":"not an HTTP request"}')


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Limits on the clients of one server."""

    connections: int = 1024
    """In total. Never more than half of the descriptors that the process may open: the plane needs the others."""
    per_address: int = 256
    header_s: float = 10.0
    """Seconds from the connection, or the first byte of a further request, to the end of the request's headers."""
    send_s: float = 30.0
    """Seconds for a client to read some of an answer that does not fit the send buffers."""


@dataclass(slots=True)
class Guard:
    """Counts the connections of one server. Use it from the server's thread only."""

    limits: Limits
    by_address: Counter[str] = field(default_factory=Counter)
    waiting: dict[Any, str] = field(default_factory=dict)
    """Connections that wait for a request, with their address. The longest waiting comes first."""

    @property
    def most(self) -> int:
        # Read each time: an operator may change the limit of a running process (prlimit).
        soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        return self.limits.connections if soft < 0 else max(min(self.limits.connections, soft // 2), 1)

    def admit(self, address: str) -> bool:
        """Count a new connection. Closes the one that has waited longest if there are too many. Returns False if all
        are being answered."""
        # Connections of the same address come first: one greedy client must not push out the others.
        if self.by_address[address] >= self.limits.per_address:
            oldest = next((one for one, its in self.waiting.items() if its == address), None)
        elif self.by_address.total() >= self.most:
            oldest = next(iter(self.waiting), None)
        else:
            self.by_address[address] += 1
            return True
        if oldest is None:
            return False
        oldest.drop()
        self.by_address[address] += 1
        return True

    def left(self, address: str) -> None:
        """Uncount a closed connection."""
        self.by_address[address] -= 1
        if self.by_address[address] <= 0:
            del self.by_address[address]


class HttpServer:
    """Serves an ASGI app, in a thread of its own (`start`) or in the calling one (`run`). Port 0 chooses a free port.

    The socket listens at once: clients that connect while the server starts wait instead of being rejected. Requests
    are not logged, because their URLs may contain a token. `ending` is called when the server begins to shut down.
    `options` are those of `uvicorn.Config`.
    """

    def __init__(
        self,
        app: Any,
        host: str,
        port: int,
        *,
        setting: str,
        extra: str,
        limits: Limits | None = None,
        ending: Callable[[], None] | None = None,
        **options: Any,
    ) -> None:
        require(f"{setting}: an HTTP server", "uvicorn", extra=extra)
        import uvicorn

        from penstock.server.http_protocol import protocol_of

        class Server(uvicorn.Server):
            async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
                if ending is not None:
                    ending()
                await super().shutdown(sockets)

        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        try:
            self._socket = socket.create_server((host, port), family=family, backlog=128)
        except OSError as error:
            address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
            reason = (error.strerror or str(error)).partition(" (while")[0]  # Python adds the address, which is there
            raise ConfigError(f"{setting}: {address!r}: {reason}; use another port, or 0 for a free one") from None
        settled: dict[str, Any] = {
            "ws": "none",
            "lifespan": "off",
            "access_log": False,
            "server_header": False,
            "log_config": None,
        }
        settled |= {"timeout_graceful_shutdown": 1, **options}
        self._grace_s = settled["timeout_graceful_shutdown"]
        self._server = Server(uvicorn.Config(app, http=protocol_of(limits or Limits()), **settled))
        self._thread = threading.Thread(target=self.run, name=f"penstock-{setting}", daemon=True)

    def start(self) -> Self:
        self._thread.start()
        return self

    def run(self) -> None:
        """Serve until `stop`. In the main thread also until SIGTERM or Ctrl-C, which is raised again."""
        self._server.run(sockets=[self._socket])

    @property
    def url(self) -> str:
        host, port = self._socket.getsockname()[:2]
        return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"

    def stop(self) -> None:
        """Accept no further requests. Returns at once."""
        self._server.should_exit = True

    def close(self) -> None:
        """Stop, and wait for the thread."""
        self.stop()
        if self._thread.ident is not None:
            self._thread.join(self._grace_s + _END_S)
        self._socket.close()


# ------------------------------------------------------------------ addresses and tokens


def parse_address(address: str, setting: str) -> tuple[str, int]:
    """Split HOST:PORT. `setting` names the setting in errors.

    >>> parse_address("localhost:7441", "http"), parse_address("[::1]:80", "http")
    (('127.0.0.1', 7441), ('::1', 80))
    """
    host, _, port = address.rpartition(":")
    host = "127.0.0.1" if host == "localhost" else host.strip("[]")
    try:
        ipaddress.ip_address(host)
        good = port.isdigit() and int(port) <= 65535
    except ValueError:
        good = False
    if not good:
        raise ConfigError(f"{setting}: {address!r}; must be ADDRESS:PORT, such as 127.0.0.1:7441")
    return host, int(port)


def is_loopback(host: str) -> bool:
    """Return whether only this host can reach an address."""
    return ipaddress.ip_address(host).is_loopback


def read_token(path: Path, setting: str) -> str:
    """Read a token from a file. Raises ConfigError if other users may read the file, or the token is too short."""
    try:
        token = path.read_text(encoding="ascii").strip()
        mode = path.stat().st_mode & 0o777
    except (OSError, UnicodeDecodeError) as error:
        problem = getattr(error, "strerror", error)
        raise ConfigError(f"{setting}: {path}: {problem}; give a file with a token") from None
    if mode & 0o077:
        raise ConfigError(f"{setting}: {path}: others may read it (mode {mode:o}); chmod 600 {path}")
    if len(token) < MIN_TOKEN or not token.isprintable() or " " in token:
        raise ConfigError(f"{setting}: {path}: {len(token)} characters; give at least {MIN_TOKEN}, without spaces")
    return token


def has_token(authorization: str, token: str) -> bool:
    """Check the bearer token of an Authorization header in constant time."""
    scheme, _, given = authorization.partition(" ")
    return scheme.lower() == "bearer" and secrets.compare_digest(given.strip().encode(), token.encode())
