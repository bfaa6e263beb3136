"""Messages within one process: the simplest transport, and the one that reads as the specification."""

from __future__ import annotations

import itertools
import threading
from collections import deque
from collections.abc import Callable

from penstock.errors import Closed, PenstockError
from penstock.protocol import Buffer, Frames, Peer
from penstock.transport.interface import Envelope
from penstock.transport.wake import Wake


class MemoryPlane:
    """The plane's end; `connect` makes clients."""

    poll_s: float | None = None

    def __init__(self) -> None:
        self._inbox: deque[tuple[Peer, Buffer, Frames]] = deque()
        self._clients: dict[Peer, MemoryClient] = {}
        self._numbers = itertools.count(1)
        self._wake = Wake()
        self.last_words: Callable[[], tuple[bytes, PenstockError] | None] = lambda: None
        """What a plane that ended by a failure answers to who still speaks to it."""

    @property
    def url(self) -> str:
        return "memory:"

    def connect(self) -> MemoryClient:
        client = MemoryClient(self, f"memory-{next(self._numbers)}")
        self._clients[client.name] = client
        return client

    def disconnect(self, peer: Peer) -> None:
        self._clients.pop(peer, None)

    def pollable(self) -> int:
        return self._wake.descriptor

    def deliver(self, peer: Peer, header: bytes, frames: Frames) -> None:
        """A client's message; called from the client's thread."""
        if self._wake.closed:
            words = self.last_words()
            if words is None:
                raise Closed("the plane in this process was closed")
            self.send(peer, words[0])  # what ranks raise
            raise words[1]
        self._inbox.append((peer, header, frames))
        self._wake.call()

    def receive(self) -> list[tuple[Peer, Buffer, Frames]]:
        self._wake.clear()
        return [self._inbox.popleft() for _ in range(len(self._inbox))]

    def send(self, peer: Peer, header: bytes, frames: Frames = ()) -> bool:
        client = self._clients.get(peer)
        if client is not None:
            client.put(header, frames)
        return client is not None

    def is_writer(self, peer: Peer) -> bool:  # noqa: ARG002 - whoever is in this process may be one
        return True

    def forget(self, peer: Peer) -> None:
        """Nothing is kept for a client but what it has not read."""

    def close(self) -> None:
        self._wake.close()


class MemoryClient:
    """A client's end."""

    def __init__(self, plane: MemoryPlane, name: str) -> None:
        self.name = name
        self._plane = plane
        self._inbox: deque[Envelope] = deque()
        self._ready = threading.Condition()
        self._woken = False

    def send(self, header: bytes, frames: Frames = ()) -> None:
        self._plane.deliver(self.name, header, frames)

    def put(self, header: bytes, frames: Frames) -> None:
        with self._ready:
            self._inbox.append((header, frames))
            self._ready.notify()

    def receive(self, timeout_s: float) -> Envelope | None:
        with self._ready:
            self._ready.wait_for(lambda: self._inbox or self._woken, timeout_s)
            self._woken = False
            return self._inbox.popleft() if self._inbox else None

    def wake(self) -> None:
        with self._ready:
            self._woken = True
            self._ready.notify()

    def close(self) -> None:
        self._plane.disconnect(self.name)
