"""What a hostile client does to a plane's memory: each attack as a function, and the plane's peak while it lasts.

`scripts/attack_memory` runs them all against real planes and prints the table of docs/security.md.
"""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Self
from urllib.parse import urlsplit

import zmq

_MIB = 1 << 20


class Peak:
    """The peak of a process's resident memory within a block."""

    def __init__(self, pid: int) -> None:
        self._status, self._clear = Path(f"/proc/{pid}/status"), Path(f"/proc/{pid}/clear_refs")
        self.before_mb = self.mb = self.after_mb = 0.0

    def __enter__(self) -> Self:
        self._clear.write_text("5")  # the peak starts again at what is resident now
        self.before_mb = self._read("VmRSS")
        return self

    def __exit__(self, *_: object) -> None:
        self.mb, self.after_mb = self._read("VmHWM"), self._read("VmRSS")

    @property
    def grown_mb(self) -> float:
        return self.mb - self.before_mb

    def _read(self, name: str) -> float:
        line = next(line for line in self._status.read_text().splitlines() if line.startswith(name))
        return int(line.split()[1]) / 1024


def connect(url: str) -> socket.socket:
    """A plain connection to the host and port of an address."""
    place = urlsplit(url)
    return socket.create_connection((place.hostname or "", place.port or 0), timeout=60)


# ------------------------------------------------------------------ HTTP


def chunked_body(url: str, token: str, *, content_type: str, mebibytes: int = 1200) -> bytes:
    """A body in chunks without an end, beside a content-length. Returns what was answered, if it could be read."""
    head = (
        f"POST /v1/groups HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {token}\r\nContent-Type: {content_type}\r\n"
        "Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n"
    )
    chunk = b"100000\r\n" + bytes(_MIB) + b"\r\n"
    with connect(url) as line:
        line.sendall(head.encode())
        answer = b""
        with contextlib.suppress(OSError):  # the server ends the connection
            for _ in range(mebibytes):
                line.sendall(chunk)
            while more := line.recv(1 << 16):
                answer += more
    return answer


@contextlib.contextmanager
def silent_connections(url: str, said: bytes = b"", count: int = 1030) -> Iterator[None]:
    """Open connections that send `said` and nothing else, while the block runs."""
    with contextlib.ExitStack() as stack:
        for _ in range(count):
            silent = stack.enter_context(connect(url))
            with contextlib.suppress(OSError):  # closed already, to make room for the others
                silent.sendall(said)
        yield


# ------------------------------------------------------------------ ZeroMQ


def unfinished_message(url: str, *, mebibytes: int = 2048) -> int:
    """Parts of 1 MiB that never end, of one ZMTP message, without keys. Returns the MiB that could be sent."""
    greeting = b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"NULL".ljust(20, b"\0") + b"\x00" + bytes(31)
    body = b"\x05READY" + b"\x0bSocket-Type" + (6).to_bytes(4, "big") + b"DEALER"
    part = b"\x03" + _MIB.to_bytes(8, "big") + bytes(_MIB)  # long, and more follow
    with connect(url) as line:
        line.sendall(greeting + b"\x04" + bytes([len(body)]) + body)
        for sent in range(mebibytes):
            try:
                line.sendall(part)
            except OSError:  # cut
                return sent
    return mebibytes


def large_puts(url: str, frame: bytes | bytearray, *, count: int = 6) -> None:
    """Messages of a header and a frame, all at once, each over a connection of its own."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    ends = [context.socket(zmq.DEALER) for _ in range(count)]
    monitors = [end.get_monitor_socket(zmq.EVENT_DISCONNECTED) for end in ends]
    for end in ends:
        end.setsockopt(zmq.RECONNECT_IVL, -1)  # once is enough
        end.connect(url)
        end.send(b"header", zmq.SNDMORE)
        end.send(frame, copy=False)
    for end, monitor in zip(ends, monitors, strict=True):
        monitor.poll(5000)  # until it is cut, or taken
        end.disable_monitor()
        monitor.close(linger=0)
        end.close(linger=0)
    context.term()


# ------------------------------------------------------------------ files


def sparse_message(folder: Path, number: int, *, size: int = 3 << 30) -> Path:
    """Make a large file without data under a message's name."""
    path = folder / "plane" / f"c{'0' * 16}-{number:020d}.msg"
    with path.open("wb") as file:
        file.truncate(size)
    return path
