"""Payloads through shared memory, for clients on the plane's own host; everything else over its socket.

A payload is copied once into a file under /dev/shm that the client maps: no socket buffer, no second copy. What
travels over the socket is a handle: which segment, which part of it. The names are made by the plane under a folder
of its own, so a handle can name nothing else; a name is never used twice. Each client has a few segments that are
filled in turn; the protocol never has more steps under way to one process than there are segments. Better still, a
payload is built where it will be read (`allocate`): then nothing is copied at all, and a segment is used again when
nobody holds its payload any more.
"""

from __future__ import annotations

import fcntl
import itertools
import logging
import mmap
import os
import re
import secrets
import shutil
import sys
import threading
from pathlib import Path

import msgspec

from penstock.errors import ConfigError, CorruptFrame
from penstock.send.carrier import Envelope, Peer
from penstock.send.keys import ClientKeys
from penstock.send.messages import Buffer, Frames
from penstock.send.sockets import MAX_MESSAGE, SocketClient, SocketPlane

logger = logging.getLogger("penstock.shared")
ROOT = Path("/dev/shm")  # noqa: S108 - this is shared memory, not a temporary file
SEGMENTS = 4
_MIN_BYTES = 1 << 14
_FOLDER = re.compile(r"penstock-[0-9a-f]{16}")
_SEGMENT = re.compile(r"\d{1,12}")
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


def reclaim(root: Path = ROOT) -> list[str]:
    """Remove what planes left behind that are no longer alive; returns the folders removed."""
    removed = []
    for folder in root.glob("penstock-*"):
        if not _FOLDER.fullmatch(folder.name):
            continue
        try:
            os.close(_lock(folder))
        except OSError:
            continue  # its plane lives, or it is not ours
        shutil.rmtree(folder, ignore_errors=True)
        removed.append(folder.name)
    return removed


def _lock(folder: Path) -> int:
    """Hold a folder as long as this process lives, however it ends; OSError while another process does."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def _own_folder(root: Path) -> tuple[Path, int]:
    """A new folder, locked before it has a name under which it could be taken for one left behind."""
    token = secrets.token_hex(8)
    hidden, folder = root / f".penstock-{token}", root / f"penstock-{token}"
    hidden.mkdir(mode=0o700)
    descriptor = _lock(hidden)
    hidden.rename(folder)
    return folder, descriptor


class _Segment:
    """One mapped file."""

    def __init__(self, path: Path, size: int) -> None:
        self.path, self.size = path, size
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            os.posix_fallocate(descriptor, 0, size)  # no room is an error here, not a SIGBUS later
            self._map = mmap.mmap(descriptor, size)
        except OSError:
            path.unlink()
            raise
        finally:
            os.close(descriptor)

    @property
    def is_free(self) -> bool:
        """Whether nobody holds a view of it: then it has only the reference that it holds itself, and this call's."""
        return sys.getrefcount(self._map) == 2

    @property
    def memory(self) -> mmap.mmap:
        return self._map

    def write(self, frames: Frames) -> None:
        at = 0
        for frame in frames:
            self._map[at : at + len(frame)] = frame
            at += _aligned(len(frame))

    def remove(self) -> None:
        """A client that still looks at it keeps it; the name is gone."""
        self.path.unlink(missing_ok=True)
        self._map.close()


class _Ring:
    """The segments of one client, and what lies in them."""

    def __init__(self) -> None:
        self.segments: list[_Segment | None] = [None] * SEGMENTS
        self.placed: list[tuple[Frames, bytes] | None] = [None] * SEGMENTS
        self.turn = 0


class SharedPlane(SocketPlane):
    """The plane's end: a socket beside which payloads go through shared memory."""

    def __init__(self, url: str, *, root: Path = ROOT, max_message: int = MAX_MESSAGE) -> None:
        if not url.startswith("ipc://"):
            raise ConfigError(f"address {url!r}: shared memory is for one host; use ipc://PATH")
        reclaim(root)
        super().__init__(url, max_message=max_message)
        self._folder, self._held = _own_folder(root)
        self._rings: dict[Peer, _Ring] = {}
        self._numbers = itertools.count(1)
        self._pool: list[_Segment] = []
        """Segments that payloads are built in."""
        self._lock = threading.Lock()

    @property
    def url(self) -> str:
        return f"shm+{super().url}"

    def allocate(self, size: int) -> memoryview:
        """Memory for a payload, from any thread; of this process alone where shared memory is full."""
        with self._lock:
            fitting = [segment for segment in self._pool if segment.size >= size and segment.is_free]
            if fitting:
                return memoryview(min(fitting, key=lambda segment: segment.size).memory)[:size]
            for segment in [segment for segment in self._pool if segment.is_free]:
                self._pool.remove(segment)  # too small for today's payloads
                segment.remove()
            try:
                self._pool.append(_Segment(self._folder / str(next(self._numbers)), max(size * 5 // 4, _MIN_BYTES)))
            except OSError as error:
                logger.warning("shared memory: %s; a payload of %d bytes goes over the socket", error, size)
                return memoryview(bytearray(size))
            return memoryview(self._pool[-1].memory)[:size]

    def _handle(self, frames: Frames) -> bytes | None:
        """Where a payload lies that was built in a segment; None if it was built elsewhere."""
        first = frames[0]
        if not isinstance(first, memoryview):
            return None
        with self._lock:
            segment = next((segment for segment in self._pool if segment.memory is first.obj), None)
        if segment is None:
            return None
        sizes = tuple(len(frame) for frame in frames)
        return msgspec.msgpack.encode(Handle(self._folder.name, segment.path.name, segment.size, sizes))

    def send(self, peer: Peer, header: bytes, frames: Frames = ()) -> bool:
        built = self._handle(frames) if frames else None
        if built is not None:
            frames = [_MARK, built]
        elif sum(len(frame) for frame in frames) >= _MIN_BYTES:
            try:
                frames = [_MARK, self._place(peer, frames)]
            except OSError as error:
                logger.warning("shared memory: %s; sent over the socket", error)
        return super().send(peer, header, frames)

    def _place(self, peer: Peer, frames: Frames) -> bytes:
        """Write the payload to the client's next segment; one that is still there is only named again."""
        ring = self._rings.setdefault(peer, _Ring())
        for placed in ring.placed:
            if placed is not None and placed[0] is frames:
                return placed[1]
        turn = ring.turn
        total = sum(_aligned(len(frame)) for frame in frames)
        segment = ring.segments[turn]
        if segment is None or segment.size < total:
            # A new one rather than a longer one: a client may still look at the old mapping.
            ring.segments[turn] = ring.placed[turn] = None
            if segment is not None:
                segment.remove()
            segment = ring.segments[turn] = _Segment(self._folder / str(next(self._numbers)), total * 5 // 4)
        segment.write(frames)
        sizes = tuple(len(frame) for frame in frames)
        handle = msgspec.msgpack.encode(Handle(self._folder.name, segment.path.name, segment.size, sizes))
        ring.placed[turn] = (frames, handle)
        ring.turn = (turn + 1) % SEGMENTS
        return handle

    def forget(self, peer: Peer) -> None:
        ring = self._rings.pop(peer, None)
        for segment in ring.segments if ring else ():
            if segment is not None:
                segment.remove()

    def close(self) -> None:
        super().close()
        for peer in list(self._rings):
            self.forget(peer)
        for segment in self._pool:
            segment.path.unlink(missing_ok=True)  # its memory goes with the last payload that lies in it
        shutil.rmtree(self._folder, ignore_errors=True)
        os.close(self._held)


class SharedClient(SocketClient):
    """A client's end."""

    def __init__(self, url: str, *, keys: ClientKeys | None = None, root: Path = ROOT) -> None:
        super().__init__(url, keys=keys)
        self._root = root
        self._maps: dict[tuple[str, str], mmap.mmap] = {}

    def receive(self, timeout_s: float) -> Envelope | None:
        got = super().receive(timeout_s)
        if got is None or len(got[1]) != 2 or bytes(got[1][0]) != _MARK:
            return got
        try:
            return got[0], self._open(got[1][1])
        except CorruptFrame as error:
            # As if it had been lost: it is of a plane that has died since, and will be asked for again. If it is
            # not, because the plane is on another host, the plane notices that nothing arrives, and says so to all.
            logger.warning("%s", error)
            return None

    def _open(self, data: Buffer) -> list[Buffer]:
        try:
            handle = msgspec.msgpack.decode(data, type=Handle)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise CorruptFrame(f"shared memory handle: {error}") from None
        if not (_FOLDER.fullmatch(handle.folder) and _SEGMENT.fullmatch(handle.segment)):
            raise CorruptFrame(f"shared memory handle: {handle.segment[:40]!r} is not a segment's name")
        view = memoryview(self._map(handle))
        frames: list[Buffer] = []
        at = 0
        for size in handle.sizes:
            if size < 0 or at + size > len(view):
                raise CorruptFrame(f"shared memory handle: {size} bytes at {at} of {len(view)}")
            frames.append(view[at : at + size])
            at += _aligned(size)
        return frames

    def _map(self, handle: Handle) -> mmap.mmap:
        key = (handle.folder, handle.segment)
        known = self._maps.get(key)
        if known is not None:
            return known
        path = self._root / handle.folder / handle.segment
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError as error:
            raise CorruptFrame(f"shared memory {path}: {error.strerror}; is the plane on another host?") from None
        try:
            mapped = mmap.mmap(descriptor, handle.size, prot=mmap.PROT_READ)
        except (ValueError, OSError) as error:
            raise CorruptFrame(f"shared memory {path}: {error}") from None
        finally:
            os.close(descriptor)
        self._maps[key] = mapped
        while len(self._maps) > SEGMENTS:  # replaced by larger ones; whoever still looks at one keeps it
            self._maps.pop(next(iter(self._maps)))
        return mapped


def _aligned(size: int) -> int:
    return -(-size // _ALIGN) * _ALIGN
