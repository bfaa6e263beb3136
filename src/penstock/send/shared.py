"""Payloads through shared memory, for clients on the plane's own host; everything else over its socket.

A payload is copied once into a file under /dev/shm that the client maps: no socket buffer, no second copy. What
travels over the socket is a handle: which segment, which part of it, which generation. The names are made by the
plane under a folder of its own, so a handle can name nothing else. Each client has a few segments that are
reused in turn; the protocol never has more steps under way to one rank than there are segments.
"""

from __future__ import annotations

import mmap
import os
import re
import secrets
import shutil
from pathlib import Path

import msgspec

from penstock.errors import ConfigError, CorruptFrame
from penstock.send.carrier import Envelope
from penstock.send.effects import Peer
from penstock.send.keys import ClientKeys
from penstock.send.messages import Buffer, Frames
from penstock.send.sockets import SocketClient, SocketPlane

ROOT = Path("/dev/shm")  # noqa: S108 - this is shared memory, not a temporary file
SEGMENTS = 4
_MIN_BYTES = 1 << 14
_OWNER = re.compile(r"penstock-(\d+)-(\d+)-[0-9a-f]{8}")
_SEGMENT = re.compile(r"[0-9a-f]{16}-\d")
_MARK = b"penstock-shm"
_ALIGN = 64


class Handle(msgspec.Struct, frozen=True, array_like=True):
    """Where a payload lies."""

    folder: str
    segment: str
    size: int
    """Bytes of the whole segment."""
    sizes: tuple[int, ...]
    """Bytes of each buffer; each begins at a multiple of 64."""


def _started(pid: int) -> str:
    """When a process started, in clock ticks: a pid alone may have been given to another process since."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[19]
    except (OSError, IndexError):
        return ""


def reclaim(root: Path = ROOT) -> list[str]:
    """Remove what planes left behind that are no longer alive; returns the folders removed."""
    removed = []
    for folder in root.glob("penstock-*"):
        match = _OWNER.fullmatch(folder.name)
        if match and _started(int(match[1])) != match[2]:
            shutil.rmtree(folder, ignore_errors=True)
            removed.append(folder.name)
    return removed


class _Segment:
    """One mapped file that grows when needed."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.size = 0
        self._map: mmap.mmap | None = None

    def write(self, frames: Frames) -> tuple[int, ...]:
        places, total = [], 0
        for frame in frames:
            places.append(total)
            total += -(-len(frame) // _ALIGN) * _ALIGN
        if total > self.size:
            self._grow(max(total, self.size * 3 // 2))
        assert self._map is not None
        for place, frame in zip(places, frames, strict=True):
            self._map[place : place + len(frame)] = frame
        return tuple(len(frame) for frame in frames)

    def _grow(self, size: int) -> None:
        # A new file rather than a longer one: a client may still look at the old mapping.
        self.path.unlink(missing_ok=True)
        descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            os.posix_fallocate(descriptor, 0, size)  # no room is an error here, not a SIGBUS later
            self._map, self.size = mmap.mmap(descriptor, size), size
        finally:
            os.close(descriptor)


class SharedPlane(SocketPlane):
    """The plane's end: a socket beside which payloads go through shared memory."""

    def __init__(self, url: str, *, root: Path = ROOT) -> None:
        if not url.startswith("ipc://"):
            raise ConfigError(f"address {url!r}: shared memory is for one host; use ipc://PATH")
        reclaim(root)
        self._folder = root / f"penstock-{os.getpid()}-{_started(os.getpid())}-{secrets.token_hex(4)}"
        self._folder.mkdir(mode=0o700)
        self._segments: dict[tuple[Peer, int], _Segment] = {}
        self._turns: dict[Peer, int] = {}
        self._placed: dict[Peer, list[tuple[Frames, bytes]]] = {}
        super().__init__(url)

    @property
    def url(self) -> str:
        return f"shm+{super().url}"

    def send(self, peer: Peer, header: bytes, frames: Frames = ()) -> None:
        if sum(len(frame) for frame in frames) < _MIN_BYTES:
            super().send(peer, header, frames)
        else:
            super().send(peer, header, [_MARK, self._place(peer, frames)])

    def _place(self, peer: Peer, frames: Frames) -> bytes:
        """Write the payload to the client's next segment; one that is still there is only named again."""
        placed = self._placed.setdefault(peer, [])
        for known, handle in placed:
            if known is frames:
                return handle
        turn = self._turns[peer] = (self._turns.get(peer, -1) + 1) % SEGMENTS
        assert isinstance(peer, bytes)
        name = f"{peer.hex()[2:18]}-{turn}"
        segment = self._segments.setdefault((peer, turn), _Segment(self._folder / name))
        sizes = segment.write(frames)
        handle = msgspec.msgpack.encode(Handle(self._folder.name, name, segment.size, sizes))
        placed.append((frames, handle))
        del placed[:-SEGMENTS]
        return handle

    def close(self) -> None:
        super().close()
        shutil.rmtree(self._folder, ignore_errors=True)


class SharedClient(SocketClient):
    """A client's end."""

    def __init__(self, url: str, *, keys: ClientKeys | None = None, root: Path = ROOT) -> None:
        super().__init__(url, keys=keys)
        self._root = root
        self._maps: dict[tuple[str, str], tuple[int, mmap.mmap]] = {}

    def receive(self, timeout_s: float) -> Envelope | None:
        got = super().receive(timeout_s)
        if got is None or len(got[1]) != 2 or bytes(got[1][0]) != _MARK:
            return got
        return got[0], self._open(got[1][1])

    def _open(self, data: Buffer) -> list[Buffer]:
        try:
            handle = msgspec.msgpack.decode(data, type=Handle)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise CorruptFrame(f"shared memory handle: {error}") from None
        if not (_OWNER.fullmatch(handle.folder) and _SEGMENT.fullmatch(handle.segment)):
            raise CorruptFrame(f"shared memory handle: {handle.segment[:40]!r} is not a segment's name")
        view = memoryview(self._map(handle))
        frames: list[Buffer] = []
        at = 0
        for size in handle.sizes:
            if size < 0 or at + size > len(view):
                raise CorruptFrame(f"shared memory handle: {size} bytes at {at} of {len(view)}")
            frames.append(view[at : at + size])
            at += -(-size // _ALIGN) * _ALIGN
        return frames

    def _map(self, handle: Handle) -> mmap.mmap:
        known = self._maps.get((handle.folder, handle.segment))
        if known is not None and known[0] == handle.size:
            return known[1]
        path = self._root / handle.folder / handle.segment
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
        except OSError as error:
            raise CorruptFrame(f"shared memory {path}: {error.strerror}; is the plane on another host?") from None
        try:
            mapped = mmap.mmap(descriptor, handle.size, prot=mmap.PROT_READ)
        except ValueError as error:
            raise CorruptFrame(f"shared memory {path}: {error}") from None
        finally:
            os.close(descriptor)
        self._maps[handle.folder, handle.segment] = (handle.size, mapped)
        return mapped
