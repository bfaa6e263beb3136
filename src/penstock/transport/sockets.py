"""Messages over ZeroMQ: two point-to-point connections per process, over tcp or ipc.

One connection carries payloads, the other everything else, so that heartbeats and errors do not wait behind a step that
takes seconds on a slow link. The plane has a ROUTER, each client two DEALERs. Never PUB/SUB: it silently drops messages
when a subscriber is slow or late. Payloads are passed to ZeroMQ without a copy. Beyond the loopback interface CURVE
keys are required: see `keys.py` and docs/security.md.
"""

from __future__ import annotations

import errno
import ipaddress
import logging
import math
import os
import re
import secrets
import socket
import struct
from collections.abc import Sequence
from contextlib import nullcontext

import zmq

from penstock.errors import ConfigError, PeerError
from penstock.protocol import Buffer, Frames, Peer
from penstock.transport import forked_sockets
from penstock.transport.inbound import SLACK_BYTES, Inbound, is_supported
from penstock.transport.interface import Envelope, Wake
from penstock.transport.keys import WRITER, ClientKeys, Guard, PlaneKeys, guard, refuse_strangers

logger = logging.getLogger("penstock.sockets")
MAX_MESSAGE = 2**31 - 1
MAX_FRAMES = 16
MAX_PORT = 65535
_NO_COPY_FROM = 1 << 16
"""Below this, copying is cheaper than keeping track of the buffer."""
_URL = re.compile(r"tcp://(?P<host>\[[0-9a-fA-F:]+\]|[^:/]+):(?P<port>\d+|\*)|ipc://(?P<path>.+)")
_NOW, _MORE, _READABLE = int(zmq.NOBLOCK), int(zmq.NOBLOCK | zmq.SNDMORE), int(zmq.POLLIN)
"""As plain numbers, because combining flags makes an object each time."""
_QUEUE = 256
_NOT_ALLOWED = 400
"""Status code of the ZeroMQ Authentication Protocol."""
_REFUSALS = zmq.EVENT_HANDSHAKE_FAILED_AUTH | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
_CLOSED = (errno.EPIPE, errno.ECONNRESET)
_CLOSED_OFTEN = 3
"""Handshakes in a row that the other side ended, before the client suspects its copy of the plane's key."""
_PROBE_S = 1.0
SMALL, LARGE = b"c", b"d"
"""First byte of the names of a client's two connections. The other 15 bytes are the same."""
_WRITER = b"w"
"""First byte of a writer's peer name. Set by the plane from the key, so a client cannot claim it by its own name."""


def check_url(url: str, *, secured: bool) -> None:
    """Raise ConfigError for an invalid address, and for one that other hosts can reach when there are no keys."""
    match = _URL.fullmatch(url)
    if match is None:
        raise ConfigError(f"address {url!r}: must be tcp://HOST:PORT or ipc://PATH")
    if (match["port"] or "*") != "*" and not 1 <= int(match["port"]) <= MAX_PORT:
        raise ConfigError(f"address {url!r}: port {match['port']}; must be from 1 to {MAX_PORT}, or * for a free one")
    host = match["host"]
    if host is None or secured or host == "localhost":
        return
    try:
        loopback = ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        loopback = False
    if not loopback:
        raise ConfigError(
            f"address {url!r}: other hosts can reach it, and there are no keys; make some with "
            "`penstock keys DIR` and pass keys=DIR (a command takes --keys DIR), or use 127.0.0.1"
        )


class SocketPlane:
    """The plane's end."""

    poll_s: float | None = None
    _url = ""

    def __init__(
        self, url: str = "tcp://127.0.0.1:*", *, keys: PlaneKeys | None = None, max_message: int = MAX_MESSAGE
    ) -> None:
        """`max_message`: bytes of the largest message. ZeroMQ cuts off a peer that sends a larger part, `Inbound` one
        that sends more parts."""
        self.keys = keys
        """The plane's keys, and those of the clients it accepts."""
        check_url(url, secured=keys is not None)
        self._max_message = min(max_message, MAX_MESSAGE)
        if url.startswith("ipc://"):
            _check_free(url.removeprefix("ipc://"))
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._inbound: Inbound | None = None
        self._guard: Guard | None = None
        try:
            self._listen(url)
        except BaseException:
            self.close()
            raise

    def _listen(self, url: str) -> None:
        configure(self._socket, payloads=True, max_message=self._max_message)
        self._inbound = self._watch() if url.startswith("tcp://") else None
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)  # an error for an unknown peer, instead of a silent drop
        self._socket.setsockopt(zmq.ROUTER_HANDOVER, 1)  # a process that reconnects keeps its address
        self._guard = guard(self._context, self._socket, self.keys) if self.keys else None
        try:
            self._socket.bind(url)
        except zmq.ZMQError as error:
            busy = error.errno == zmq.EADDRINUSE
            remedy = "is another plane running there?" if busy else "give an address that this host has"
            raise ConfigError(f"address {url!r}: {zmq.strerror(error.errno or 0)}; {remedy}") from None
        endpoint = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)
        self._url = re.sub(r"\[::ffff:([\d.]+)\]", r"\1", endpoint)  # IPv4 in its usual notation
        forked_sockets.close_in_children(self._url)
        if self._url.startswith("ipc://"):
            os.chmod(self._url[len("ipc://") :], 0o600)  # noqa: PTH101
        if self.keys and self._guard:
            refuse_strangers(self._url, self.keys, self._guard)

    def _watch(self) -> Inbound | None:
        if not is_supported():
            logger.warning("this kernel does not count received bytes: memory of unfinished messages is not bounded")
            return None
        return Inbound(self._socket, self._max_message + SLACK_BYTES)

    @property
    def url(self) -> str:
        return self._url

    def pollable(self) -> zmq.Socket[bytes]:
        return self._socket

    def receive(self) -> list[tuple[Peer, Buffer, Frames]]:
        got: list[tuple[Peer, Buffer, Frames]] = []
        room = self._max_message  # per turn; the rest waits in ZeroMQ, where `Inbound` counts it
        while len(got) < _QUEUE and room > 0 and int(self._socket.getsockopt(zmq.EVENTS)) & _READABLE:
            try:
                parts, size = receive_parts(self._socket)
            except zmq.Again:
                break
            room -= size
            if self._inbound is not None:
                self._inbound.took(parts, size)
            if 2 <= len(parts) <= MAX_FRAMES:
                # Both connections of a client appear as one peer: drop the first byte, which tells them apart.
                kind = _WRITER if self._guard and _user_of(parts[1]) == WRITER else SMALL
                got.append((kind + parts[0].bytes[1:], parts[1].buffer, [part.buffer for part in parts[2:]]))
        return got

    def is_writer(self, peer: Peer) -> bool:
        assert isinstance(peer, bytes)
        return self._guard is None or peer.startswith(_WRITER)

    def send(self, peer: Peer, header: bytes, frames: Frames = ()) -> bool:
        assert isinstance(peer, bytes)
        names = [SMALL + peer[1:], LARGE + peer[1:]]
        # Falls back to the client's other connection if this one is not (yet) open: the two connect independently.
        for name in reversed(names) if frames else names:
            try:
                send_parts(self._socket, [name, header], frames)
            except zmq.ZMQError as error:
                if error.errno == zmq.EHOSTUNREACH:
                    continue
                if error.errno != zmq.EAGAIN:  # its queue is full: dropped, and it asks again when it can
                    raise
            return True
        return False

    def forget(self, peer: Peer) -> None:
        """Do nothing: only unread messages are held for a client."""

    def close(self) -> None:
        with forked_sockets.letting_go(self._url) if self._url else nullcontext():
            if self._inbound is not None:
                self._inbound.close()
            if self._guard is not None:
                self._guard.stop()
            self._socket.close(linger=200)
            self._context.term()


def connected_pair(
    context: zmq.Context[zmq.Socket[bytes]], url: str, keys: ClientKeys | None
) -> tuple[zmq.Socket[bytes], zmq.Socket[bytes]]:
    """Connect a client's two sockets, for messages without and with payloads, under a new random name."""
    name = secrets.token_bytes(15)
    small, large = context.socket(zmq.DEALER), context.socket(zmq.DEALER)
    for kind, end in ((SMALL, small), (LARGE, large)):
        configure(end, payloads=kind == LARGE)
        end.setsockopt(zmq.IDENTITY, kind + name)
        if keys is not None:
            keys.apply(end)
        end.connect(url)
    return small, large


class KeyRefused(PeerError):
    """The plane does not accept this client's keys, or requires keys and the client has none."""


class SocketClient:
    """A client's end."""

    def __init__(self, url: str, *, keys: ClientKeys | None = None) -> None:
        self.keys = keys
        """The keys it connects with."""
        check_url(url, secured=keys is not None)
        self._context = zmq.Context()
        try:
            self._small, self._large = connected_pair(self._context, url, keys)
        except zmq.ZMQError as error:
            self._context.destroy(0)  # one that is collected with open sockets waits for them without limit
            raise ConfigError(f"address {url!r}: {zmq.strerror(error.errno or 0)}") from None
        self._wake = Wake()
        self._poller = zmq.Poller()
        self._poller.register(self._wake.descriptor, zmq.POLLIN)
        for end in (self._small, self._large):
            self._poller.register(end, zmq.POLLIN)
        self._url = url
        # ZeroMQ retries silently with keys that are refused, which looks like a plane that is not running. The monitor
        # reports the refusals. If the first one is missed here, the next one comes after 50 ms.
        self._monitor = self._small.get_monitor_socket(_REFUSALS)
        self._poller.register(self._monitor, zmq.POLLIN)
        self._ended = 0
        """Handshakes that the other side ended without a reason, since the last message."""

    def send(self, header: bytes, frames: Frames = ()) -> None:
        end = self._large if frames else self._small
        try:
            send_parts(end, [header], frames)
        except zmq.Again:
            # ZeroMQ notices at most once per millisecond that messages have left the queue, so it may only seem full.
            # Reading EVENTS makes it look now. If it is full, the plane is away, and the protocol repeats the message.
            if int(end.getsockopt(zmq.EVENTS)) & zmq.POLLOUT:
                send_parts(end, [header], frames)

    def receive(self, timeout_s: float) -> Envelope | None:
        # Only sockets that are ready are read: an attempt that finds nothing costs more than the message itself.
        ready = dict(self._poller.poll(math.ceil(max(timeout_s, 0) * 1000)))
        if self._wake.descriptor in ready:
            self._wake.clear()
        for end in (self._small, self._large):  # small ones first: a heartbeat must not wait behind a payload
            if end in ready:
                self._ended = 0
                parts, _ = receive_parts(end)
                return parts[0].buffer, [part.buffer for part in parts[1:]]
        if self._monitor in ready:
            self._check_refusal(*struct.unpack("=HI", self._monitor.recv_multipart()[0]))
        return None

    def _check_refusal(self, event: int, value: int) -> None:
        """Raise KeyRefused if a handshake failed for a reason that waiting does not change."""
        mechanism = b""
        if event == zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL and value == zmq.PROTOCOL_ERROR_ZMTP_MECHANISM_MISMATCH:
            mechanism = b"NULL" if self.keys else b"CURVE"  # whichever this client does not speak
        elif event == zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL and self.keys and value in _CLOSED:
            # A plane closes the connection if it cannot read what was encrypted for another plane's key. So does a
            # proxy whose plane is away, but that sends no greeting.
            self._ended = (self._ended + 1) % _CLOSED_OFTEN
            mechanism = b"" if self._ended else _mechanism_at(self._url)
        # 400 means that the plane looked the key up. Other codes are temporary, such as that of a plane that is ending.
        refused = event == zmq.EVENT_HANDSHAKE_FAILED_AUTH and value == _NOT_ALLOWED
        if self.keys is None:
            if mechanism == b"CURVE":
                reason = "the plane requires keys; pass keys=DIR (a command takes --keys DIR)"
                raise KeyRefused(f"{self._url}: {reason}")
        elif mechanism or refused:
            reason = f"the plane refused the key {self.keys.public.decode()}; add it to the allowed/ or writers/ "
            reason += "folder of the plane's keys and restart the plane, or pass keys= of a client it knows"
            if mechanism == b"NULL":
                reason = "the plane there uses no keys; start it with keys, or connect without keys="
            elif mechanism:
                reason = f"the plane has another key than {self.keys.plane.decode()}; copy its plane.key to this client"
            raise KeyRefused(f"{self._url}: {reason}")

    def wake(self) -> None:
        self._wake.call()

    def close(self) -> None:
        self._small.disable_monitor()
        self._monitor.close(linger=0)
        for end in (self._small, self._large):
            end.close(linger=500)
        self._context.term()
        self._wake.close()


def _mechanism_at(url: str) -> bytes:
    """Return the security mechanism in the greeting at an address: b"CURVE", b"NULL", or b"" if ZeroMQ is not there.

    A greeting is a signature of 10 bytes, a version of 2, and the mechanism in 20. ZeroMQ sends its signature at once,
    and the rest in reply to ours.
    """
    match = _URL.fullmatch(url)
    assert match is not None, url
    end = socket.socket(socket.AF_UNIX) if match["path"] else None
    try:
        if end is None:
            end = socket.create_connection((match["host"].strip("[]"), int(match["port"])), timeout=_PROBE_S)
        else:
            end.settimeout(_PROBE_S)
            end.connect(match["path"])
        end.sendall(b"\xff" + bytes(8) + b"\x7f\x03")
        with end.makefile("rb") as reader:
            greeting = reader.read(32)
    except OSError:
        return b""
    finally:
        if end is not None:
            end.close()
    return greeting[12:].rstrip(b"\0") if greeting[:1] == b"\xff" else b""


def _user_of(part: zmq.Frame) -> str:
    """Return the user id that the guard gave the connection."""
    try:
        return str(part.get("User-Id"))
    except zmq.ZMQError:
        return ""


def _check_free(path: str) -> None:
    """Raise ConfigError if a plane listens at the path. ZeroMQ would silently take the path over."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        try:
            probe.connect(path)
        except OSError:
            return
    raise ConfigError(f"address 'ipc://{path}': another plane is running there; stop it or use another path")


def configure(end: zmq.Socket[bytes], *, payloads: bool, max_message: int = MAX_MESSAGE) -> None:
    end.setsockopt(zmq.SNDHWM, _QUEUE)
    end.setsockopt(zmq.RCVHWM, _QUEUE)
    end.setsockopt(zmq.MAXMSGSIZE, max_message)
    end.setsockopt(zmq.HANDSHAKE_IVL, 5000)
    end.setsockopt(zmq.RECONNECT_IVL, 50)
    end.setsockopt(zmq.RECONNECT_IVL_MAX, 1000)
    # An idle connection must stay open, and one whose other end vanished silently must be detected. Otherwise messages
    # would wait until TCP gives up, a quarter of an hour later. TCP does both: keepalive while nothing is sent, and a
    # limit for data that is not acknowledged, which is short enough to connect again before `plane_s` is over.
    # ZeroMQ's own heartbeats stay off: libzmq 4.3.5 aborts the process (`!_io_error`, libzmq issue 4841) when it sends
    # one on a connection that was closed while more than `_QUEUE` of its messages wait here. A flood brings that about
    # in seconds, on either side. They would also wait behind a payload, and cut off one that a slow link delays.
    end.setsockopt(zmq.HEARTBEAT_IVL, 0)
    end.setsockopt(zmq.TCP_MAXRT, 30_000 if payloads else 15_000)
    end.setsockopt(zmq.TCP_KEEPALIVE, 1)
    end.setsockopt(zmq.TCP_KEEPALIVE_IDLE, 5)
    end.setsockopt(zmq.TCP_KEEPALIVE_INTVL, 5)
    end.setsockopt(zmq.TCP_KEEPALIVE_CNT, 3)
    end.setsockopt(zmq.IPV6, 1)


# Part by part, in both directions: `send_multipart` and `recv_multipart` check every part again, which triples what a
# message of a few small parts takes.


def receive_parts(end: zmq.Socket[bytes]) -> tuple[list[zmq.Frame], int]:
    """Receive a message that has arrived. Returns its parts and their bytes."""
    part = end.recv(_NOW, copy=False)
    parts, size = [part], len(part)
    while part.more:
        part = end.recv(_NOW, copy=False)
        parts.append(part)
        size += len(part)
    return parts, size


def send_parts(end: zmq.Socket[bytes], head: Sequence[bytes], frames: Frames) -> None:
    last = len(head) - 1
    for i, part in enumerate(head):
        end.send(part, _MORE if i < last or frames else _NOW)
    for i, frame in enumerate(frames):
        more = i + 1 < len(frames)
        # `copy` is a choice per part: small ones are cheaper to copy than to track.
        end.send(frame, _MORE if more else _NOW, copy=len(frame) < _NO_COPY_FROM)
