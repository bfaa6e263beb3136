"""Sockets that a forked child must not keep: while it has one open, an address is taken and a connection lives.

ZeroMQ says which address it bound and not which descriptors belong to it, so a child looks them up by that address:
the socket that listens there, and the connections that were accepted. Where `/proc` is missing, they stay open.
"""

from __future__ import annotations

import os
import socket
import stat
from contextlib import suppress

_bound: set[int | str] = set()
"""Ports of tcp, paths of ipc."""
_registered: list[bool] = []


def close_in_children(url: str) -> None:
    """Children that are forked from now on close what this process has open at an address it listens at."""
    if not _registered:
        _registered.append(True)
        os.register_at_fork(after_in_child=_close_all)
    _bound.add(_address(url))


def forget(url: str) -> None:
    """This process does not listen there any more."""
    _bound.discard(_address(url))


def _address(url: str) -> int | str:
    kind, _, rest = url.partition("://")
    return int(rest.rpartition(":")[2]) if kind == "tcp" else rest


def _close_all() -> None:
    if not _bound:
        return
    with suppress(OSError):
        for name in os.listdir("/proc/self/fd"):  # noqa: PTH208 - a child that was just forked does as little as it can
            with suppress(OSError):
                if _local_address(int(name)) in _bound:
                    os.close(int(name))
    _bound.clear()


def _local_address(descriptor: int) -> int | str | None:
    """Where a socket is bound: a port, or a path; None if it is no such socket."""
    if not stat.S_ISSOCK(os.fstat(descriptor).st_mode):
        return None
    end = socket.socket(fileno=descriptor)
    try:
        found = end.getsockname()
    finally:
        end.detach()
    if end.family in (socket.AF_INET, socket.AF_INET6):
        return int(found[1])
    return found if isinstance(found, str) and found else None
