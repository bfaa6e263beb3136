"""Handles: what a pickled `Plane` or `Source` consists of. Unpickling connects to the same plane again.

Ray, `multiprocessing` and data loaders pickle objects. A `Plane` or `Source` is pickled as an address, the name of the
run and the path of the keys: no connection, and no key. Penstock itself pickles nothing. It sends frames and typed
messages.
"""

from __future__ import annotations

import ipaddress
import re
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.errors import ConfigError
from penstock.protocol import MAX_NAME, Timeouts

if TYPE_CHECKING:
    from penstock.client.plane import Plane
    from penstock.client.source import Source

_HOST = re.compile(r"tcp://(?P<host>\[[0-9a-fA-F:.]+\]|\*|[^:/]+):(?P<port>\d+)")
_ELSEWHERE = {socket.AF_INET: "192.0.2.1", socket.AF_INET6: "2001:db8::1"}
"""Addresses reserved for documentation. Nothing is sent: connecting a UDP socket only makes the kernel choose a
route."""
_LONGEST_SOCKET = 107
"""Longest path of a Unix socket, in bytes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Handle:
    """The address of a plane, and how to connect to it."""

    url: str
    run: str = ""
    keys: str | None = None
    """Absolute path of the key folder."""
    timeouts: Timeouts | None = None

    def __post_init__(self) -> None:
        # The plane drops a message with such a value unread, so the client would wait without an answer.
        run: object = self.run
        if not isinstance(run, str) or len(run) > MAX_NAME:
            raise ConfigError(f"run: {run!r:.60}; give the run's name, of at most {MAX_NAME} characters")
        if not isinstance(self.timeouts, Timeouts | None):
            raise ConfigError(f"timeouts: {self.timeouts!r:.60}; give ps.Timeouts(plane_s=60), or leave it out")

    @staticmethod
    def of(url: str, run: str, keys: str | Path | None, timeouts: Timeouts | None) -> Handle:
        if keys == "" or not isinstance(keys, str | Path | None):
            raise ConfigError(f"keys: {keys!r:.60}; give the folder with the keys")
        return Handle(
            url=usable_url(url), run=run, keys=None if keys is None else str(Path(keys).absolute()), timeouts=timeouts
        )

    def plane(self) -> Plane:
        """Connect to the plane."""
        from penstock.client.api import open as open_plane  # a cycle: `api` makes handles

        settings: dict[str, Any] = {"run": self.run, "keys": self.keys, "timeouts": self.timeouts}
        return open_plane(self.url, **{name: value for name, value in settings.items() if value})

    def source(self, **of_rank: Any) -> Source:
        """Connect a rank. `of_rank` are the other arguments of `connect`."""
        from penstock.client.api import connect

        return connect(self.url, run=self.run, keys=self.keys, timeouts=self.timeouts, **of_rank)


def nowhere(url: str) -> ConfigError:
    """Return the error for pickling a plane that no other process can reach."""
    return ConfigError(
        f"{url}: this plane runs in this process and listens nowhere, so no other process can reach it; open it with "
        'listen=["tcp://127.0.0.1:*"], or start it with `penstock serve`'
    )


def usable_url(url: str) -> str:
    """Return a listening address in a form other processes can use: a host instead of "all interfaces", and absolute
    paths.

    >>> usable_url("tcp://127.0.0.1:7440"), usable_url("ipc:///run/plane.sock")
    ('tcp://127.0.0.1:7440', 'ipc:///run/plane.sock')
    """
    kind, _, rest = url.partition("://")
    if kind == "tcp":
        match = _HOST.fullmatch(url)
        return f"tcp://{_host(match['host'])}:{match['port']}" if match else url
    if kind not in ("ipc", "file"):
        return url
    path = str(Path(rest).absolute())
    if rest.startswith("@") or (kind != "file" and len(path.encode()) > _LONGEST_SOCKET):
        return url  # an abstract socket, or a path that fits a socket only in its relative form
    return f"{kind}://{path}"


def _host(host: str) -> str:
    """Return the host by which others reach a listening address."""
    try:
        address = ipaddress.ip_address("0.0.0.0" if host == "*" else host.strip("[]"))  # noqa: S104 - to be replaced
    except ValueError:
        return host
    if not address.is_unspecified:
        return host
    return _own_address(socket.AF_INET6 if address.version == 6 else socket.AF_INET)


def _own_address(family: socket.AddressFamily) -> str:
    """Return this host's outgoing address, or the loopback address if it has none."""
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((_ELSEWHERE[family], 9))
            found: str = probe.getsockname()[0]
        except OSError:
            found = "::1" if family == socket.AF_INET6 else "127.0.0.1"
    return f"[{found}]" if family == socket.AF_INET6 else found
