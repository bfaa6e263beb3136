"""What a hostile client does to a plane's memory: each attack as a function, and the plane's peak while it lasts.

`scripts/attack_memory` runs them all against real planes and prints the table of docs/security.md.
"""

from __future__ import annotations

import contextlib
import http.client
import io
import socket
import sqlite3
import subprocess
import sys
import time
import zipfile
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Self
from urllib.parse import urlsplit

import numpy as np
import zmq

import penstock as ps
from penstock.protocol.message_header import pack_message
from penstock.protocol.messages import Ask, AskRoom, Discard, Put, SettleGroup, SetWeight
from tests.support.groups import named_group

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

    @property
    def now_mb(self) -> float:
        return self._read("VmRSS")

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


def many_bodies(url: str, token: str, body: bytes, *, count: int = 16) -> list[int]:
    """JSON groups, all at once, each over a connection of its own. Returns the statuses."""

    def post(_: int) -> int:
        place = urlsplit(url)
        line = http.client.HTTPConnection(place.hostname or "", place.port or 0, timeout=300)
        with contextlib.closing(line):
            headers = {"Authorization": f"Bearer {token}", "Content-Type": "application/json"}
            try:
                line.request("POST", "/v1/groups", body, headers)
                return line.getresponse().status
            except OSError:  # cut
                return 0

    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(post, range(count)))


# ------------------------------------------------------------------ ZeroMQ


def unfinished_message(url: str, *, mebibytes: int = 2048, empty: bool = False) -> int:
    """Parts of 1 MiB, or empty ones, that never end, of one ZMTP message, without keys. Returns the MiB that could be
    sent."""
    greeting = b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"NULL".ljust(20, b"\0") + b"\x00" + bytes(31)
    body = b"\x05READY" + b"\x0bSocket-Type" + (6).to_bytes(4, "big") + b"DEALER"
    part = b"\x03" + _MIB.to_bytes(8, "big") + bytes(_MIB)  # long, and more follow
    if empty:
        part = b"\x01\x00" * (_MIB // 2)
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


def huge_names(url: str, run_id: str, *, mebibytes: int = 10, count: int = 20) -> None:
    """Requests of a client that does not look how long its names are, all at once."""
    name, run = "x" * (mebibytes * _MIB), bytes.fromhex(run_id)
    kinds = (
        Discard(ticket=1, reason=name, samples=1),
        Discard(ticket=1, reason="x", samples=1, key=name),
        SettleGroup(ticket=1, group=name, drop=True),
        SetWeight(ticket=1, tenant=name, weight=1.0),
        SetWeight(ticket=1, tenant=name, weight=0.0),
    )
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    end = context.socket(zmq.DEALER)
    end.connect(url)
    for _ in range(count):
        for message in kinds:
            end.send(pack_message(message, run))
    end.poll(60_000)  # until one was answered
    end.close(linger=20_000)
    context.term()


def _greeting(mechanism: bytes) -> bytes:
    return b"\xff" + bytes(8) + b"\x7f\x03\x00" + mechanism.ljust(20, b"\0") + bytes(32)


def half_open(url: str, *, peers: int = 200, seconds: float = 10) -> None:
    """Connections that begin a handshake with keys and say nothing more. The oldest makes room for the next."""
    lines: deque[socket.socket] = deque()
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        with contextlib.suppress(OSError):
            line = connect(url)
            line.sendall(_greeting(b"CURVE"))
            lines.append(line)
        if len(lines) > peers:
            lines.popleft().close()
    for line in lines:
        line.close()


def unread_answers(url: str, run_id: str, *, peers: int = 200, seconds: float = 10) -> None:
    """Peers that ask for the status all the time and read no answer."""
    body = b"\x05READY" + b"\x0bSocket-Type" + (6).to_bytes(4, "big") + b"DEALER"
    ask = pack_message(Ask(ticket=1), bytes.fromhex(run_id))
    with contextlib.ExitStack() as stack:
        lines = [stack.enter_context(connect(url)) for _ in range(peers)]
        for line in lines:
            line.sendall(_greeting(b"NULL") + b"\x04" + bytes([len(body)]) + body)
            line.setblocking(False)
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            for line in lines:
                with contextlib.suppress(OSError):
                    line.send((b"\x00" + bytes([len(ask)]) + ask) * 20)
            time.sleep(0.05)


def no_payloads(url: str, run_id: str, *, peers: int = 200, seconds: float = 10) -> None:
    """Producers that announce groups, ask for room and after them, and send no frame."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    ends, run = [context.socket(zmq.DEALER) for _ in range(peers)], bytes.fromhex(run_id)
    for end in ends:
        end.connect(url)
    number, until = 0, time.monotonic() + seconds
    while time.monotonic() < until:
        for end in ends:
            number += 1
            put = Put(ticket=number, group=f"g{number}", digest=bytes(16))
            for message in (put, AskRoom(ticket=number, tenant=f"t{number}", size=1000)):
                with contextlib.suppress(zmq.Again):
                    end.send(pack_message(message, run), zmq.NOBLOCK)
        time.sleep(0.05)
    context.destroy(linger=0)


# ------------------------------------------------------------------ files


def sparse_message(folder: Path, number: int, *, size: int = 3 << 30) -> Path:
    """Make a large file without data under a message's name."""
    path = folder / "plane" / f"c{'0' * 16}-{number:020d}.msg"
    with path.open("wb") as file:
        file.truncate(size)
    return path


def odd_entries(folder: Path, *, count: int = 3000) -> None:
    """Make links, dangling links and folders under messages' names."""
    for i in range(count):
        path = folder / "plane" / f"c{i:016x}-{1:020d}.msg"
        if i % 3 == 0:
            path.symlink_to("/dev/zero")
        elif i % 3 == 1:
            path.symlink_to("/nowhere")
        else:
            path.mkdir()


def expanded_tensor(path: Path, *, values: int = 100_000_000) -> None:
    """Save a `.pt` file of some kilobytes, of a tensor with one value of data."""
    import torch

    experts = torch.zeros(1, dtype=torch.int32).expand(1, values)
    sample = {"tokens": [1, 2], "response_length": 1, "reward": 1.0, "group_index": 0, "index": 0}
    torch.save({"rollout_id": 0, "samples": [sample | {"rollout_routed_experts": experts}]}, path)


def compressed_zeros(path: Path, *, gibibytes: int) -> None:
    """Save a `.npz` file of zeros, a thousandth of what it expands to."""
    head = io.BytesIO()
    np.lib.format.write_array_header_1_0(head, {"descr": "|u1", "fortran_order": False, "shape": (1, gibibytes << 30)})
    with (
        zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as file,
        file.open("input_ids.npy", "w", force_zip64=True) as part,
    ):
        part.write(head.getvalue())
        for _ in range(gibibytes << 4):
            part.write(bytes(1 << 26))


def archive(folder: Path, old: str = "", new: str = "") -> None:
    """Make a run of one step that keeps everything, and change its recorded settings: text for text."""
    with ps.open(folder, ranks=1, seq_len=64, groups_per_step=1, retain="all") as plane:
        plane.put(named_group("a"))
        with plane.source(0) as source:
            source.commit(source.step(timeout=60))
            source.flush()
    with contextlib.closing(sqlite3.connect(folder / "log.sqlite")) as log:
        found = log.execute("UPDATE meta SET value = replace(value, ?, ?) WHERE name LIKE 'settings %'", (old, new))
        assert found.rowcount == 1
        log.commit()


# ------------------------------------------------------------------ commands

_COMMAND = """
import sys
from pathlib import Path
from penstock.cli import main
try:
    code = main(sys.argv[1:])
finally:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    print(line.split()[1], file=sys.stderr)
sys.exit(code)
"""


def command_peak(arguments: Sequence[str]) -> tuple[float, int, str]:
    """Run a command. Returns its peak of resident memory in MB, its exit code, and what it said of an error."""
    done = subprocess.run(
        [sys.executable, "-c", _COMMAND, *arguments], capture_output=True, text=True, check=False, timeout=600
    )
    *said, peak = done.stderr.splitlines()
    return int(peak) / 1024, done.returncode, "\n".join(said)
