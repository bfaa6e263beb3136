"""Closes a plane's sockets in forked children. An inherited socket keeps the address in use and connections open.

ZeroMQ tells which address it bound but not which descriptors belong to it. So a child finds them by address: the socket
that listens there and the connections that were accepted. Without `/proc` they stay open.

On a busy machine a child may first run long after its parent has closed a plane and opened it again at the same
address. So closing a plane also shuts the listening socket down, for every process that has it open.
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
    """Make children forked from now on close the sockets this process has at an address it listens at."""
    if not _registered:
        _registered.append(True)
        os.register_at_fork(after_in_child=_close_all)
    _bound.add(_address(url))


@contextmanager
def letting_go(url: str) -> Iterator[None]:
    """Context for closing a listening socket. Afterwards no process listens there, even if a child that has not run yet
    still has the socket open."""
    _bound.discard(_address(url))
    ends = _listening_at(url)
    try:
        yield
    finally:  # not earlier: ZeroMQ aborts if a socket it listens on is shut down
        for end in ends:
            with end, suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)


def _listening_at(url: str) -> list[socket.socket]:
    """Return duplicates of the sockets that listen exactly there."""
    ends = []
    for descriptor in _open_at({_address(url)}):
        with suppress(OSError):
            end = socket.socket(fileno=os.dup(descriptor))
            # Accepted connections are bound to the same port: only the listener is shut down.
            if end.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN) and _url(end.getsockname()) == url:
                ends.append(end)
            else:
                end.close()
    return ends


def _url(name: str | tuple[str, int]) -> str:
    """Return a socket's address in ZeroMQ's notation."""
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
    """Return this process's descriptors that are bound to one of the addresses."""
    found = []
    with suppress(OSError):
        for name in os.listdir("/proc/self/fd"):  # noqa: PTH208 - a child that was just forked does as little as it can
            with suppress(OSError):
                if _local_address(int(name)) in addresses:
                    found.append(int(name))
    return found


def _local_address(descriptor: int) -> int | str | None:
    """Return the port or path a socket is bound to, or None if it is no such socket."""
    if not stat.S_ISSOCK(os.fstat(descriptor).st_mode):
        return None
    end = socket.socket(fileno=descriptor)
    try:
        found = end.getsockname()
    finally:
        end.detach()  # the socket object must not close a descriptor that belongs to ZeroMQ
    if end.family in (socket.AF_INET, socket.AF_INET6):
        return int(found[1])
    return found if isinstance(found, str) and found else None
