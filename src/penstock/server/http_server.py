"""The HTTP server of every page: uvicorn, with a guard that bounds connections.

uvicorn has no deadline for a request's headers and no limit per address: a thousand connections that send nothing, and
need no token for it, would keep everybody else out. The guard adds

- a deadline from the first moment of a connection, or the first byte of a further request, to the end of its headers;
- a deadline for a client that does not read its answer;
- a limit on connections per address and in total. Where it is reached, the connection that has waited longest for a
  request is closed to make room. A connection whose request is being answered is never closed for another one.
"""

from __future__ import annotations

import resource
import socket
import threading
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from penstock.errors import ConfigError
from penstock.extras import require

_END_S = 3.0
_FULL = b'{"error":"Overloaded","message":"too many connections are being answered; send it again","retry_after_s":1.0}'
REJECTION = (
    b"HTTP/1.1 503 Service Unavailable\r\ncontent-type: application/json\r\nretry-after: 1\r\nconnection: close\r\n"
    b"content-length: %d\r\n\r\n%b" % (len(_FULL), _FULL)
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What one server allows its clients."""

    connections: int = 1024
    """In total. Never more than half of the descriptors that the process may open: the plane needs the others."""
    per_address: int = 256
    header_s: float = 10.0
    """From the connection, or the first byte of a further request, to the end of the request's headers."""
    send_s: float = 30.0
    """For a client to read some of an answer that is larger than the buffers on its way."""


@dataclass(slots=True)
class Guard:
    """Counts the connections of one server. Used by the server's thread only."""

    limits: Limits
    by_address: Counter[str] = field(default_factory=Counter)
    waiting: dict[Any, str] = field(default_factory=dict)
    """Connections that wait for a request, with their address, the longest waiting first."""

    @property
    def most(self) -> int:
        soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        return self.limits.connections if soft < 0 else max(min(self.limits.connections, soft // 2), 1)

    def admit(self, address: str) -> bool:
        """Count a new connection. Closes the one that has waited longest where there are too many; False if all are
        being answered."""
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
        """Count a connection that is gone."""
        self.by_address[address] -= 1
        if self.by_address[address] <= 0:
            del self.by_address[address]


def server_config(app: Any, *, limits: Limits | None = None, **options: Any) -> Any:
    """A `uvicorn.Config` behind the guard. It logs no requests: their addresses may hold a token."""
    import uvicorn

    from penstock.server.http_protocol import protocol_of

    settled = {"ws": "none", "lifespan": "off", "access_log": False, "server_header": False, **options}
    return uvicorn.Config(app, http=protocol_of(limits or Limits()), **settled)


class HttpThread:
    """Serves an ASGI app from a thread of its own until closed. Port 0 takes a free one."""

    def __init__(
        self, app: Any, host: str, port: int, *, setting: str, extra: str, limits: Limits | None = None
    ) -> None:
        require(f"{setting}: an HTTP server", "uvicorn", extra=extra)
        import uvicorn

        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        try:
            self._socket = socket.create_server((host, port), family=family, backlog=128)
        except OSError as error:
            address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
            raise ConfigError(
                f"{setting}: {address!r}: {error.strerror}; use another port, or 0 for a free one"
            ) from None
        config = server_config(app, limits=limits, log_config=None, timeout_graceful_shutdown=1)
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._run, name=f"penstock-{setting}", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        self._server.run(sockets=[self._socket])

    @property
    def url(self) -> str:
        host, port = self._socket.getsockname()[:2]
        return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"

    def stop(self) -> None:
        """Take no further requests. Returns at once."""
        self._server.should_exit = True

    def close(self) -> None:
        self.stop()
        self._thread.join(_END_S)
        self._socket.close()
