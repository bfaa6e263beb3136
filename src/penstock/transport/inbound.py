"""Bounds the memory that peers can take before their message is looked at.

ZeroMQ bounds a part of a message (`ZMQ_MAXMSGSIZE`) and the number of whole messages that wait (`ZMQ_RCVHWM`). It does
not bound the number of parts, and counts a message when it is whole: parts that never end take all memory. No option
of libzmq 4.3 changes that. So a thread compares, for each TCP connection, the bytes that the kernel has received with
the bytes that the plane has taken from the socket. The difference lies in memory. Where it is more than `limit` for
all connections together, the connection with the most is cut; a client that meant no harm connects again and sends
again.

    kernel says: received 310 MB     taken: 40 MB     pending: 270 MB of a limit of 96 MB: cut

Unix sockets have no such counter. Whoever may connect to one is the same user and could end the plane anyway.
"""

from __future__ import annotations

import ctypes
import logging
import os
import socket
import struct
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

import zmq
from zmq.utils.monitor import recv_monitor_message

logger = logging.getLogger("penstock.sockets")
SLACK_BYTES = 64 << 20
"""Beside one message of the largest size: what other peers have on its way."""
_LOOK_S, _QUIET_S, _LAZY_S, _BUSY = 0.02, 0.1, 0.25, 20
"""Every 20 ms, less often while little arrives, and so seldom that looking takes less than a twentieth of the time."""
_LITTLE = 1 << 20
"""Bytes between two looks."""
_PER_PART = 64
"""Bytes that framing and encryption add to a part, at most."""
_PER_S = 16
"""Bytes of ZeroMQ's own heartbeats, at most."""
_TRIM_S = 0.5
_SO_COOKIE = 57
_TCP_INFO_BYTES, _RECEIVED_AT = 136, 128
"""The place of `tcpi_bytes_received` in `struct tcp_info`, since Linux 4.1."""
_LIBC = ctypes.CDLL(None, use_errno=True)


@dataclass(slots=True)
class _Connection:
    cookie: int
    """The kernel's number of the socket: descriptors are used again, this is not."""
    taken_before: float
    """Bytes that were taken under the same descriptor before this connection."""
    pending: float = 0
    received: int = 0


class Inbound:
    """Watches the connections of a socket that is about to be bound. `took` is called by the thread that receives."""

    def __init__(self, end: zmq.Socket[bytes], limit: int) -> None:
        self._end, self._limit = end, limit
        self._monitor = end.get_monitor_socket(zmq.EVENT_ACCEPTED | zmq.EVENT_MONITOR_STOPPED)
        self._connections: dict[int, _Connection] = {}
        self._taken: dict[int, int] = {}
        """By descriptor, over all connections that had it."""
        self._seen: dict[int, int] = {}
        """The same at the last look."""
        self._looked_at = time.monotonic()
        self._trim_at: float | None = None
        self._thread = threading.Thread(target=self._run, name="penstock-inbound", daemon=True)
        self._thread.start()

    def took(self, parts: Sequence[zmq.Frame]) -> None:
        """Count a message that was received."""
        try:
            descriptor = int(parts[-1].get(zmq.SRCFD))
        except zmq.ZMQError:
            return
        size = sum(len(part) + _PER_PART for part in parts)
        self._taken[descriptor] = self._taken.get(descriptor, 0) + size

    def close(self) -> None:
        self._end.disable_monitor()  # the thread is told, and ends
        self._thread.join()
        self._monitor.close(linger=0)

    # -------------------------------------------------------------- the thread

    def _run(self) -> None:
        pause = _LOOK_S
        while True:
            if self._monitor.poll(int(pause * 1000)):
                event = recv_monitor_message(self._monitor)
                if event["event"] == zmq.EVENT_MONITOR_STOPPED:
                    return
                self._accepted(int(event["value"]))
            started = time.monotonic()
            if started - self._looked_at >= pause:
                arrived = self._look(started)
                least = min(pause * 2, _QUIET_S) if arrived < _LITTLE else _LOOK_S
                pause = min(max(_BUSY * (time.monotonic() - started), least), _LAZY_S)

    def _accepted(self, descriptor: int) -> None:
        cookie = _cookie(descriptor)
        if cookie is not None:
            self._connections[descriptor] = _Connection(cookie, self._seen.get(descriptor, 0))

    def _look(self, now: float) -> int:
        """Compare what was received and taken; returns the bytes received since the last look."""
        arrived = 0
        forgiven, self._looked_at = _PER_S * (now - self._looked_at), now
        for descriptor, one in list(self._connections.items()):
            received = _received(descriptor) if _cookie(descriptor) == one.cookie else None
            if received is None:
                del self._connections[descriptor]
                continue
            arrived, one.received = arrived + received - one.received, received
            taken = self._seen[descriptor] = self._taken.get(descriptor, 0)
            one.taken_before -= forgiven
            one.pending = received - (taken - one.taken_before)
            if one.pending < 0:  # an earlier connection's, or the allowances: no credit for later
                one.taken_before, one.pending = taken - received, 0
        self._cut()
        if self._trim_at is not None and now >= self._trim_at:
            self._trim_at = None
            _LIBC.malloc_trim(0)  # freed in blocks of the peer's choice, which the C library would keep
        return arrived

    def _cut(self) -> None:
        while sum(one.pending for one in self._connections.values()) > self._limit:
            descriptor, worst = max(self._connections.items(), key=lambda item: item[1].pending)
            del self._connections[descriptor]
            logger.warning(
                "cut a connection: %d bytes of it are in memory and not part of a message that could be taken; "
                "at most %d are allowed",
                worst.pending,
                self._limit,
            )
            _shut(descriptor, worst.cookie)
            self._trim_at = time.monotonic() + _TRIM_S


def is_supported() -> bool:
    """Whether this kernel and C library say what is needed."""
    with socket.socket() as probe:
        return (
            hasattr(_LIBC, "malloc_trim")
            and _cookie(probe.fileno()) is not None
            and _received(probe.fileno()) is not None
        )


# ctypes, because a socket object closes the descriptor that it was made of, and these belong to ZeroMQ.


def _option(descriptor: int, level: int, option: int, size: int) -> bytes | None:
    buffer, length = ctypes.create_string_buffer(size), ctypes.c_uint32(size)
    if _LIBC.getsockopt(descriptor, level, option, buffer, ctypes.byref(length)) or length.value < size:
        return None
    return buffer.raw


def _cookie(descriptor: int) -> int | None:
    found = _option(descriptor, socket.SOL_SOCKET, _SO_COOKIE, 8)
    return None if found is None else int.from_bytes(found, "little")


def _received(descriptor: int) -> int | None:
    found = _option(descriptor, socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO_BYTES)
    return None if found is None else int(struct.unpack_from("=Q", found, _RECEIVED_AT)[0])


def _shut(descriptor: int, cookie: int) -> None:
    """End a connection, unless its descriptor is another's by now."""
    with suppress(OSError):
        held = os.dup(descriptor)  # so that it cannot become another's between the question and the answer
        try:
            if _cookie(held) == cookie:
                _LIBC.shutdown(held, socket.SHUT_RDWR)
        finally:
            os.close(held)
