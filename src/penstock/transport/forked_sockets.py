"""Sockets that a forked child must not keep: while it has one open, an address is taken and a connection lives.

ZeroMQ says which address it bound and not which descriptors belong to it, so a child looks them up by that address:
the socket that listens there, and the connections that were accepted. Where `/proc` is missing, they stay open.

On a busy machine a child may run long after its parent has closed a plane and opens it again at the same address. So
whoever closes a plane ends the listening itself, for every process that has the socket open.
"""

from __future__ import annotations

import os
import socket
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress

_bound: set[int | str] = set()
"""Ports of tcp, paths of ipc."""
_registered: list[bool] = []


def close_in_children(url: str) -> None:
    """Children that are forked from now on close what this process has open at an address it listens at."""
    if not _registered:
        _registered.append(True)
        os.register_at_fork(after_in_child=_close_all)
    _bound.add(_address(url))


@contextmanager
def letting_go(url: str) -> Iterator[None]:
    """Around closing what listens there: afterwards nobody does, though a child that has not run yet has it open."""
    _bound.discard(_address(url))
    ends = _listening_at(url)
    try:
        yield
    finally:  # not earlier: ZeroMQ would take a listener that was shut down for a bug
        for end in ends:
            with end, suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)


def _listening_at(url: str) -> list[socket.socket]:
    """What listens exactly there, opened once more."""
    ends = []
    for descriptor in _open_at({_address(url)}):
        with suppress(OSError):
            end = socket.socket(fileno=os.dup(descriptor))
            if end.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN) and _url(end.getsockname()) == url:
                ends.append(end)
            else:
                end.close()
    return ends


def _url(name: str | tuple[str, int]) -> str:
    """What a socket says of its address, as ZeroMQ and people write it."""
    if isinstance(name, str):
        return f"ipc://{name}"
    host = name[0].removeprefix("::ffff:")
    return f"tcp://[{host}]:{name[1]}" if ":" in host else f"tcp://{host}:{name[1]}"


def _address(url: str) -> int | str:
    kind, _, rest = url.partition("://")
    return int(rest.rpartition(":")[2]) if kind == "tcp" else rest


def _close_all() -> None:
    if not _bound:
        return
    for descriptor in _open_at(_bound):
        with suppress(OSError):
            os.close(descriptor)
    _bound.clear()


def _open_at(addresses: set[int | str]) -> list[int]:
    """Descriptors of this process that are bound to one of the addresses."""
    found = []
    with suppress(OSError):
        for name in os.listdir("/proc/self/fd"):  # noqa: PTH208 - a child that was just forked does as little as it can
            with suppress(OSError):
                if _local_address(int(name)) in addresses:
                    found.append(int(name))
    return found


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
