"""How a handle travels: as the address of its plane, from which it connects anew wherever it arrives.

A `Plane` or a `Source` that is pickled, by Ray, by `multiprocessing`, by a data loader, is pickled as this: an address,
the name of the run, the path of the keys. Nothing of the connection goes along, and no key. Penstock itself pickles
nothing; what it sends are frames and typed messages.
"""

from __future__ import annotations

import ipaddress
import re
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.errors import ConfigError
from penstock.protocol import Timeouts

if TYPE_CHECKING:
    from penstock.client.plane import Plane
    from penstock.client.source import Source

_HOST = re.compile(r"tcp://(?P<host>\[[0-9a-fA-F:.]+\]|\*|[^:/]+):(?P<port>\d+)")
_ELSEWHERE = {socket.AF_INET: "192.0.2.1", socket.AF_INET6: "2001:db8::1"}
"""Addresses of documentation: nothing is sent there, but the kernel says from where it would be."""
_LONGEST_SOCKET = 107
"""Bytes of a path that a socket can have."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Handle:
    """Where a plane is, and how it is reached."""

    url: str
    run: str = ""
    keys: str | None = None
    """A folder, by its absolute path."""
    timeouts: Timeouts | None = None

    @staticmethod
    def of(url: str, run: str, keys: str | Path | None, timeouts: Timeouts | None) -> Handle:
        return Handle(
            url=usable_url(url), run=run, keys=None if keys is None else str(Path(keys).absolute()), timeouts=timeouts
        )

    def plane(self) -> Plane:
        """A line to the plane."""
        from penstock.client.api import open as open_plane  # which makes planes of handles

        settings: dict[str, Any] = {"run": self.run, "keys": self.keys, "timeouts": self.timeouts}
        return open_plane(self.url, **{name: value for name, value in settings.items() if value})

    def source(self, **of_rank: Any) -> Source:
        """A rank's source; `of_rank` is what `connect` takes beside the address."""
        from penstock.client.api import connect

        return connect(self.url, run=self.run, keys=self.keys, timeouts=self.timeouts, **of_rank)


def nowhere(url: str) -> ConfigError:
    """What to raise where a handle should travel and nobody could follow it."""
    return ConfigError(
        f"{url}: this plane lives in this process and listens nowhere, so no other process can reach it; open it with "
        'listen=["tcp://127.0.0.1:*"], or start it with `penstock serve`'
    )


def usable_url(url: str) -> str:
    """An address where a plane listens, as another process can use it: a host instead of "all of them", and paths
    that do not depend on where one stands.

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
        return url  # a name that is no path, or a path that only the short form can say
    return f"{kind}://{path}"


def _host(host: str) -> str:
    """The host of an address that was listened at, by which others reach it."""
    try:
        address = ipaddress.ip_address("0.0.0.0" if host == "*" else host.strip("[]"))  # noqa: S104 - to be replaced
    except ValueError:
        return host
    if not address.is_unspecified:
        return host
    return _own_address(socket.AF_INET6 if address.version == 6 else socket.AF_INET)


def _own_address(family: socket.AddressFamily) -> str:
    """The address that this host has towards others; the loopback's where it has none."""
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((_ELSEWHERE[family], 9))
            found: str = probe.getsockname()[0]
        except OSError:
            found = "::1" if family == socket.AF_INET6 else "127.0.0.1"
    return f"[{found}]" if family == socket.AF_INET6 else found
