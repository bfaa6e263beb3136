"""Messages within one process: the simplest transport, which reads as the specification."""

from __future__ import annotations

import itertools
import threading
from collections import deque
from collections.abc import Callable

from penstock.errors import Closed, PenstockError
from penstock.protocol import Buffer, Frames, Peer
from penstock.transport.interface import Envelope, Wake


class MemoryPlane:
    """The plane's end. `connect` makes clients."""

    poll_s: float | None = None

    def __init__(self) -> None:
        self._inbox: deque[tuple[Peer, Buffer, Frames]] = deque()
        self._clients: dict[Peer, MemoryClient] = {}
        self._numbers = itertools.count(1)
        self._wake = Wake()
        self.last_words: Callable[[], tuple[bytes, PenstockError] | None] = lambda: None
        """Returns why the plane failed, as a message for ranks and an error for producers, or None if it was closed."""

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
        """Pass a client's message to the plane. Called from the client's thread."""
        if self._wake.closed:
            failure = self.last_words()
            if failure is None:
                raise Closed("the plane in this process was closed")
            message, error = failure
            self.send(peer, message)  # ranks raise what the message says, with step and rank
            raise error
        self._inbox.append((peer, header, frames))
        self._wake.call()

    def receive(self) -> list[tuple[Peer, Buffer, Frames]]:
        self._wake.clear()
        # A fixed number of messages: clients may append meanwhile, and the loop must get its turn.
        return [self._inbox.popleft() for _ in range(len(self._inbox))]

    def send(self, peer: Peer, header: bytes, frames: Frames = ()) -> bool:
        client = self._clients.get(peer)
        if client is not None:
            client.put(header, frames)
        return client is not None

    def is_writer(self, peer: Peer) -> bool:  # noqa: ARG002 - code in this process is trusted
        return True

    def forget(self, peer: Peer) -> None:
        """Do nothing: only unread messages are held for a client."""

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
