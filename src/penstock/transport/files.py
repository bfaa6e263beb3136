"""Messages as files in a shared folder: for clusters where the hosts share only a filesystem.

    FOLDER/plane/<client>-<number>.msg      to the plane, from all clients: one listing finds them all
    FOLDER/clients/<client>/<number>.msg    to a client

A file appears under its name only when it is complete (written as a dot-file, then renamed). It is verified by a
checksum and removed once read. A network filesystem announces nothing, so both ends poll: every 2 ms while there is
traffic, slowing down to 50 ms when there is none.
"""

from __future__ import annotations

import logging
import os
import re
import secrets
import shutil
import stat
import struct
import threading
import time
from pathlib import Path
from typing import BinaryIO

import xxhash

from penstock.atomic import folder_errors
from penstock.protocol import Buffer, Frames, Peer
from penstock.transport.interface import Envelope

logger = logging.getLogger("penstock.files")
MAX_MESSAGE = 1 << 36
MAX_FRAMES = 1 << 16
_FAST_S, _SLOW_S = 0.002, 0.05
_STALE_S = 24 * 3600.0
"""Age after which an unread message or unfinished file counts as abandoned."""
_TO_CLIENT = re.compile(r"(\d{20})\.msg")
_TO_PLANE = re.compile(r"(c[0-9a-f]{16})-(\d{20})\.msg")
_HEAD = struct.Struct("<QI")


def write_message(folder: Path, name: str, header: bytes, frames: Frames) -> None:
    """Write a message as one file, visible only when complete."""
    parts = [header, *frames]
    # Layout: digest (8 bytes), number of parts (4), size of each part (8 each), the parts. The digest covers the sizes
    # too, so that bytes cannot move from one part to the next unnoticed.
    sizes = struct.pack(f"<{len(parts)}Q", *(len(part) for part in parts))
    digest = xxhash.xxh3_64(sizes)
    for part in parts:
        digest.update(part)
    temporary = folder / f".{name}.{secrets.token_hex(4)}"
    try:
        with temporary.open("xb") as file:
            file.write(_HEAD.pack(digest.intdigest(), len(parts)))
            file.write(sizes)
            for part in parts:
                file.write(part)
        temporary.rename(folder / name)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise


def read_message(file: BinaryIO, max_message: int = MAX_MESSAGE) -> Envelope | None:
    """Read a message, or return None if it is incomplete, damaged or too large. Such a message counts as lost.

    The file's size is compared with the sizes in its head before the rest is read: a huge sparse file costs nothing.
    """
    size = os.fstat(file.fileno()).st_size
    head = file.read(_HEAD.size)
    if len(head) < _HEAD.size or size > max_message:
        return None
    digest, count = _HEAD.unpack(head)
    if not 1 <= count <= MAX_FRAMES:
        return None
    described = file.read(8 * count)
    if len(described) < 8 * count:
        return None
    sizes = struct.unpack(f"<{count}Q", described)
    if _HEAD.size + 8 * count + sum(sizes) != size:
        return None
    data = memoryview(file.read(sum(sizes)))
    found = xxhash.xxh3_64(described)
    found.update(data)
    if len(data) != sum(sizes) or found.intdigest() != digest:
        return None
    parts, start = [], 0
    for length in sizes:
        parts.append(data[start : start + length])
        start += length
    return parts[0], parts[1:]


def _take(path: Path, max_message: int = MAX_MESSAGE) -> Envelope | None:
    """Remove a message, then read it: in this order, so that a message that crashes the process is not read again."""
    try:
        # O_NOFOLLOW: a link must not lead the plane to other files. O_NONBLOCK: opening a FIFO must not hang.
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        with os.fdopen(descriptor, "rb") as file:
            if stat.S_ISREG(os.fstat(descriptor).st_mode):
                path.unlink()
                message = read_message(file, max_message)
                if message is None:
                    logger.warning("%s: not a complete message of at most %d bytes; removed", path, max_message)
                return message
        problem = "not a plain file"
    except FileNotFoundError:
        return None  # the listing of a network filesystem was stale
    except OSError as error:
        problem = str(error.strerror)
    _put_aside(path, problem)
    return None


def _put_aside(path: Path, problem: str) -> None:
    """Rename something that has a message's name but is no message, so that it is logged once. `_sweep` removes it."""
    aside = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        path.rename(aside)
    except OSError:
        return  # gone by now, or in a folder that is not ours to change
    logger.warning("%s: not a message: %s; renamed to %s", path, problem, aside.name)


def _names(folder: Path) -> list[str]:
    try:
        return sorted(os.listdir(folder))  # noqa: PTH208 - names are enough, and this runs every few milliseconds
    except FileNotFoundError:
        return []


class FilePlane:
    """The plane's end."""

    def __init__(self, folder: str | Path, *, max_message: int = MAX_MESSAGE) -> None:
        self._max_message = max_message
        with folder_errors(folder):
            self._root = Path(folder).resolve()
            self._inbox = self._root / "plane"
            for name in ("plane", "clients"):
                (self._root / name).mkdir(parents=True, exist_ok=True, mode=0o700)
        self._idle_s = _FAST_S
        self._sweep()

    def _sweep(self) -> None:
        """Remove messages and folders that earlier processes abandoned."""
        now = time.time()
        for path in [*self._inbox.glob(".*"), *(self._root / "clients").iterdir()]:
            try:
                if now - path.lstat().st_mtime < _STALE_S:
                    continue
                if path.is_dir() and not path.is_symlink():
                    shutil.rmtree(path, ignore_errors=True)
                else:
                    path.unlink()
            except OSError:
                continue  # another process removed it first

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
        room = self._max_message
        for name in _names(self._inbox):
            match = _TO_PLANE.fullmatch(name)
            message = _take(self._inbox / name, self._max_message) if match else None
            if match and message is not None:
                got.append((match[1], *message))
                room -= len(message[0]) + sum(map(len, message[1]))
            if room <= 0:
                break  # the rest stays on disk until the next turn
        self._idle_s = _FAST_S if got else min(self._idle_s * 1.5, _SLOW_S)
        return got

    def send(self, peer: Peer, header: bytes, frames: Frames = ()) -> bool:
        # Numbered by the clock, so that messages of a restarted plane sort after those of the earlier process.
        folder = self._root / "clients" / str(peer)
        try:
            if not stat.S_ISDIR(folder.lstat().st_mode):
                return True  # a link would make the plane write wherever it leads
            write_message(folder, f"{time.time_ns():020d}.msg", header, frames)
        except FileNotFoundError:
            return False
        except OSError as error:
            logger.warning("client %s: %s", peer, error)  # counts as lost: the client asks again
        return True

    def is_writer(self, peer: Peer) -> bool:  # noqa: ARG002 - every process that may write to the folder is trusted
        return True

    def forget(self, peer: Peer) -> None:
        """Do nothing: only unread messages are held for a client."""

    def close(self) -> None:
        return None


class FileClient:
    """A client's end."""

    def __init__(self, folder: str | Path) -> None:
        self._name = "c" + secrets.token_hex(8)
        with folder_errors(folder):
            root = Path(folder).resolve()
            self._outbox, self._inbox = root / "plane", root / "clients" / self._name
            self._make_folders()
        self._number = 0
        self._ready: list[Envelope] = []
        self._woken = threading.Event()
        self._idle_s = _FAST_S

    def _make_folders(self) -> None:
        self._inbox.mkdir(parents=True, mode=0o700, exist_ok=True)
        self._outbox.mkdir(parents=True, mode=0o700, exist_ok=True)

    def send(self, header: bytes, frames: Frames = ()) -> None:
        self._number += 1
        name = f"{self._name}-{self._number:020d}.msg"
        try:
            write_message(self._outbox, name, header, frames)
        except FileNotFoundError:
            self._make_folders()  # the folder was cleaned up while this client was idle
            write_message(self._outbox, name, header, frames)
        self._idle_s = _FAST_S

    def receive(self, timeout_s: float) -> Envelope | None:
        deadline = time.monotonic() + timeout_s
        while not self._ready:
            self._look()
            left = deadline - time.monotonic()
            if self._ready or self._woken.is_set() or left <= 0:
                break
            self._woken.wait(min(left, self._idle_s))
            self._idle_s = min(self._idle_s * 1.5, _SLOW_S)
        self._woken.clear()
        return self._ready.pop() if self._ready else None

    def _look(self) -> None:
        names = [name for name in _names(self._inbox) if _TO_CLIENT.fullmatch(name)]
        found = [_take(self._inbox / name) for name in names]
        # Newest first, because `receive` pops from the end.
        self._ready = [message for message in reversed(found) if message is not None]
        if self._ready:
            self._idle_s = _FAST_S

    def wake(self) -> None:
        self._woken.set()

    def close(self) -> None:
        """Remove the inbox. Sent messages stay for the plane to read."""
        shutil.rmtree(self._inbox, ignore_errors=True)
