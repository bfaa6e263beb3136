"""Bounds the memory that peers can use before the plane sees their message.

ZeroMQ limits the size of one part of a message (`ZMQ_MAXMSGSIZE`) and the number of complete messages that wait
(`ZMQ_RCVHWM`). It does not limit the number of parts and counts only complete messages: a message whose parts never end
uses all memory. No option of libzmq 4.3 changes that. So a thread compares, for each TCP connection, the bytes that the
kernel has received with the bytes that the plane has taken from the socket. The difference is in memory. If it exceeds
`limit` for all connections together, the connection with the most is cut. An honest client connects and sends again.

    the kernel received 310 MB     taken: 40 MB     pending: 270 MB, the limit is 96 MB: cut

A part takes 64 bytes in ZeroMQ beside its content, and 2 on the wire: a message of empty parts takes 32 times the bytes
that the kernel counts, and nothing says how many parts they are. So while enough bytes are pending for that, what the
process grows beside them counts against the limit as well.

Unix sockets have no such counter. Only the same user may connect to one, and could kill the plane anyway.
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

logger = logging.getLogger("penstock.sockets")
SLACK_BYTES = 64 << 20
"""Bytes allowed beyond one message of the largest size, for messages that other peers are sending."""
_LOOK_S, _QUIET_S, _LAZY_S, _BUSY = 0.02, 0.1, 0.25, 20
"""Look every 20 ms, every 100 ms while little arrives, and never more than a twentieth of the time, up to 250 ms."""
_LITTLE = 1 << 20
"""Fewer bytes than this between two looks count as quiet."""
_PER_PART = 64
"""Bytes that framing and encryption add to a part, at most."""
_PER_S = 16
"""Bytes of ZeroMQ's own heartbeats, at most. Our clients send none."""
_MOST_PER_BYTE = 64
"""Memory that a byte on the wire can cost, at most: twice what empty parts take."""
_TRIM_S = 0.5
_TELL_S = 10.0
_SO_COOKIE = 57
_TCP_INFO_BYTES, _RECEIVED_AT = 136, 128
"""Size of `struct tcp_info` up to, and offset of, `tcpi_bytes_received` (Linux 4.1)."""
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_LIBC = ctypes.CDLL(None, use_errno=True)


@dataclass(slots=True)
class _Connection:
    cookie: int
    """The kernel's number of the socket. Descriptors are reused, cookies are not."""
    taken_before: float
    """Bytes taken under the same descriptor before this connection existed."""
    pending: float = 0
    received: int = 0


class Inbound:
    """Watches the connections of a socket. Create it before binding. Call `took` from the receiving thread."""

    def __init__(self, end: zmq.Socket[bytes], limit: int) -> None:
        self._end, self._limit = end, limit
        self._monitor = end.get_monitor_socket(zmq.EVENT_ACCEPTED | zmq.EVENT_MONITOR_STOPPED)
        self._connections: dict[int, _Connection] = {}
        self._taken: dict[int, int] = {}
        """Bytes taken per descriptor, summed over all connections that had it."""
        self._seen: dict[int, int] = {}
        """The value of `_taken` at the last look."""
        self._looked_at = time.monotonic()
        self._statm = os.open("/proc/self/statm", os.O_RDONLY | os.O_CLOEXEC)  # now: later there may be no descriptor
        self._resident = self._resident_bytes()
        """Bytes of the process, when too little was pending to matter, or at the last cut."""
        self._trim_at: float | None = None
        self._cuts, self._told_at = 0, -_TELL_S
        """Connections cut since the last line of the log, and when that was."""
        self._thread = threading.Thread(target=self._run, name="penstock-inbound", daemon=True)
        self._thread.start()

    def took(self, parts: Sequence[zmq.Frame], size: int) -> None:
        """Count the bytes of a received message. `size` is that of its parts together."""
        try:
            descriptor = int(parts[-1].get(zmq.SRCFD))
        except zmq.ZMQError:
            return
        self._taken[descriptor] = self._taken.get(descriptor, 0) + size + _PER_PART * len(parts)

    def close(self) -> None:
        self._end.disable_monitor()  # sends EVENT_MONITOR_STOPPED, which ends the thread
        self._thread.join()
        self._monitor.close(linger=0)
        os.close(self._statm)

    # -------------------------------------------------------------- the thread

    def _run(self) -> None:
        from zmq.utils.monitor import recv_monitor_message  # imports asyncio, which clients do not need

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
        """Compare received and taken bytes. Returns the bytes received since the last look."""
        arrived = 0
        forgiven, self._looked_at = _PER_S * (now - self._looked_at), now
        for descriptor, one in list(self._connections.items()):
            received = _received(descriptor) if _cookie(descriptor) == one.cookie else None
            if received is None:
                del self._connections[descriptor]
                continue
            arrived, one.received = arrived + received - one.received, received
            # `taken` counts per descriptor, which the kernel reuses, so what earlier connections sent is subtracted.
            # Example: 310 MB received; taken 100 MB under this descriptor, 60 of them before: 310 - 40 = 270 MB
            # pending.
            taken = self._seen[descriptor] = self._taken.get(descriptor, 0)
            one.taken_before -= forgiven
            one.pending = received - (taken - one.taken_before)
            if one.pending < 0:  # late counts of an earlier connection, or the allowances: these must not become credit
                one.taken_before, one.pending = taken - received, 0
        self._cut()
        if self._trim_at is not None and now >= self._trim_at:
            self._trim_at = None
            trim()
        return arrived

    def _is_over(self) -> bool:
        """Return whether pending messages take more memory than is allowed."""
        pending = sum(one.pending for one in self._connections.values())
        if pending * _MOST_PER_BYTE <= self._limit:
            self._resident = self._resident_bytes()
            return False
        # Beside the bytes themselves: those of large parts are all that these take.
        return max(pending, self._resident_bytes() - self._resident - pending) > self._limit

    def _resident_bytes(self) -> int:
        return int(os.pread(self._statm, 256, 0).split()[1]) * _PAGE_BYTES

    def _cut(self) -> None:
        while self._is_over():
            self._resident = self._resident_bytes()  # what is cut now is freed later
            descriptor, worst = max(self._connections.items(), key=lambda item: item[1].pending)
            del self._connections[descriptor]
            self._tell(worst.pending)
            _shut(descriptor, worst.cookie)
            self._trim_at = time.monotonic() + _TRIM_S

    def _tell(self, num_bytes: float) -> None:
        # Forty peers that come again were cut sixty times a second: their lines must not fill the disk.
        self._cuts += 1
        if (now := time.monotonic()) - self._told_at < _TELL_S:
            return
        logger.warning(
            "cut a connection, %d since the last such line: %d of its bytes are in memory and belong to no complete "
            "message; at most %d are allowed",
            self._cuts,
            num_bytes,
            self._limit,
        )
        self._cuts, self._told_at = 0, now


def trim() -> None:
    """Return freed memory to the system. A peer chose the sizes of the blocks, and the C library may keep them all."""
    if hasattr(_LIBC, "malloc_trim"):  # glibc
        _LIBC.malloc_trim(0)


def is_supported() -> bool:
    """Return whether the kernel and the C library have what this needs."""
    with socket.socket() as probe:
        return (
            hasattr(_LIBC, "malloc_trim")
            and _cookie(probe.fileno()) is not None
            and _received(probe.fileno()) is not None
        )


# ctypes, because a Python socket object closes its descriptor, and these descriptors belong to ZeroMQ.


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
    """Shut a connection down, unless its descriptor belongs to another connection by now."""
    with suppress(OSError):
        held = os.dup(descriptor)  # keeps the descriptor from being reused between the check and the shutdown
        try:
            if _cookie(held) == cookie:
                _LIBC.shutdown(held, socket.SHUT_RDWR)
        finally:
            os.close(held)
