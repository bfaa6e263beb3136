"""Messages as files in a shared folder: for clusters where a filesystem is all that the hosts share.

    FOLDER/plane/<client>/<number>.msg     to the plane
    FOLDER/clients/<client>/<number>.msg   to a client

A file appears under its name only when it is complete (write to a dot-file, rename); it is checked by a
checksum, and removed once read. There is nothing to wait on, so both ends look: every 2 ms while there is
traffic, slowing to 50 ms when there is none.
"""

from __future__ import annotations

import os
import re
import secrets
import shutil
import struct
import threading
import time
from pathlib import Path

import xxhash

from penstock.errors import Closed
from penstock.send.carrier import Envelope
from penstock.send.effects import Peer
from penstock.send.messages import Buffer, Frames

_FAST_S, _SLOW_S = 0.002, 0.05
_NAME = re.compile(r"\d{12}\.msg")
_CLIENT = re.compile(r"c[0-9a-f]{16}")
_HEAD = struct.Struct("<QI")


def write_message(folder: Path, number: int, header: bytes, frames: Frames) -> None:
    """One message as one file, visible only when complete."""
    parts = [header, *frames]
    sizes = struct.pack(f"<{len(parts)}Q", *(len(part) for part in parts))
    digest = xxhash.xxh3_64(sizes)
    for part in parts:
        digest.update(part)
    temporary = folder / f".{number:012d}.{secrets.token_hex(4)}"
    with temporary.open("wb") as file:
        file.write(_HEAD.pack(digest.intdigest(), len(parts)))
        file.write(sizes)
        for part in parts:
            file.write(part)
    temporary.rename(folder / f"{number:012d}.msg")


def read_message(path: Path) -> Envelope | None:
    """The message in a file, or None when it is not whole: then it is as if it had been lost on the way."""
    data = memoryview(path.read_bytes())
    if len(data) < _HEAD.size:
        return None
    digest, count = _HEAD.unpack_from(data)
    start = _HEAD.size + 8 * count
    if count < 1 or start > len(data) or xxhash.xxh3_64_intdigest(data[_HEAD.size :]) != digest:
        return None
    sizes = struct.unpack_from(f"<{count}Q", data, _HEAD.size)
    parts = []
    for size in sizes:
        parts.append(data[start : start + size])
        start += size
    return parts[0], parts[1:]


def _waiting(folder: Path) -> list[Path]:
    try:
        names = os.listdir(folder)  # noqa: PTH208 - names are enough, and this runs every few milliseconds
    except FileNotFoundError:
        return []
    return [folder / name for name in sorted(names) if _NAME.fullmatch(name)]


def _take(folder: Path) -> list[Envelope]:
    got = []
    for path in _waiting(folder):
        try:
            message = read_message(path)
            path.unlink()
        except FileNotFoundError:
            continue  # a stale listing of a network filesystem
        if message is not None:
            got.append(message)
    return got


class FilePlane:
    """The plane's end."""

    def __init__(self, folder: str | Path) -> None:
        self._root = Path(folder).resolve()
        for name in ("plane", "clients"):
            (self._root / name).mkdir(parents=True, exist_ok=True, mode=0o700)
        self._numbers: dict[Peer, int] = {}
        self._idle_s = _FAST_S

    @property
    def url(self) -> str:
        return f"file://{self._root}"

    @property
    def poll_s(self) -> float | None:
        return self._idle_s

    def pollable(self) -> None:
        return None

    def receive(self) -> list[tuple[Peer, Buffer, Frames]]:
        got: list[tuple[Peer, Buffer, Frames]] = []
        for name in sorted(os.listdir(self._root / "plane")):  # noqa: PTH208
            if _CLIENT.fullmatch(name):
                got += [(name, header, frames) for header, frames in _take(self._root / "plane" / name)]
        self._idle_s = _FAST_S if got else min(self._idle_s * 1.5, _SLOW_S)
        return got

    def send(self, peer: Peer, header: bytes, frames: Frames = ()) -> None:
        folder = self._root / "clients" / str(peer)
        number = self._numbers[peer] = self._numbers.get(peer, self._last(folder)) + 1
        try:
            write_message(folder, number, header, frames)
        except FileNotFoundError:
            self._numbers.pop(peer)  # the client left

    @staticmethod
    def _last(folder: Path) -> int:
        """Continue behind what an earlier life of the plane wrote and nobody has read yet."""
        waiting = _waiting(folder)
        return int(waiting[-1].stem) if waiting else int(time.time())

    def forget(self, peer: Peer) -> None:
        """Nothing is kept for a client but what it has not read."""

    def close(self) -> None:
        return None


class FileClient:
    """A client's end."""

    def __init__(self, folder: str | Path) -> None:
        self._name = "c" + secrets.token_hex(8)
        root = Path(folder).resolve()
        self._outbox, self._inbox = root / "plane" / self._name, root / "clients" / self._name
        self._inbox.mkdir(parents=True, mode=0o700)
        self._outbox.mkdir(parents=True, mode=0o700)
        self._number = 0
        self._ready: list[Envelope] = []
        self._woken = threading.Event()
        self._idle_s = _FAST_S

    def send(self, header: bytes, frames: Frames = ()) -> None:
        self._number += 1
        try:
            write_message(self._outbox, self._number, header, frames)
        except FileNotFoundError:
            raise Closed(f"{self._outbox}: the folder is gone; the carrier was removed") from None
        self._idle_s = _FAST_S

    def receive(self, timeout_s: float) -> Envelope | None:
        deadline = time.monotonic() + timeout_s
        while not self._ready:
            self._ready = _take(self._inbox)[::-1]
            if self._ready:
                self._idle_s = _FAST_S
                break
            left = deadline - time.monotonic()
            if self._woken.is_set() or left <= 0:
                self._woken.clear()
                return None
            self._woken.wait(min(left, self._idle_s))
            self._idle_s = min(self._idle_s * 1.5, _SLOW_S)
        return self._ready.pop()

    def wake(self) -> None:
        self._woken.set()

    def close(self) -> None:
        """What was sent stays for the plane to read; nobody reads what comes after this."""
        shutil.rmtree(self._inbox, ignore_errors=True)
