"""The interface of transports, which move messages between one plane and many clients.

A message is a header and payload buffers. A transport may lose messages when a connection breaks and may deliver one
twice, but never alters one unnoticed. Messages with payloads stay in order, and so do those without. A message without
a payload should overtake large payloads, so that a slow link does not look like a dead one. The protocol does the rest.
`penstock.testing.transport_suite` is the suite that every transport must pass. Read `memory.py` first.
"""

from __future__ import annotations

import os
import threading
from typing import Protocol, TypeAlias

from penstock.protocol import Buffer, Frames, Peer

Envelope: TypeAlias = tuple[Buffer, Frames]
"""(header, payload buffers)."""


class ClientTransport(Protocol):
    """A client's end: used by one thread, except for `wake`."""

    def send(self, header: bytes, frames: Frames = ()) -> None:
        """Queue a message. It may be sent later. Never blocks for long."""

    def receive(self, timeout_s: float) -> Envelope | None:
        """Return the next message, or None after `timeout_s` seconds or a `wake`."""

    def wake(self) -> None:
        """Make a blocked `receive` return. May be called from any thread."""

    def close(self) -> None: ...


class PlaneTransport(Protocol):
    """The plane's end: used by one thread."""

    @property
    def url(self) -> str:
        """The address that clients connect to."""

    @property
    def poll_s(self) -> float | None:
        """The polling interval of a transport that cannot announce messages, or None."""

    def pollable(self) -> object | None:
        """Return a ZeroMQ socket or descriptor that becomes readable when there is something to receive, or None."""

    def receive(self) -> list[tuple[Peer, Buffer, Frames]]:
        """Return the messages that have arrived, without waiting."""

    def send(self, peer: Peer, header: bytes, frames: Frames = ()) -> bool:
        """Queue a message. Returns False if the peer has left: the message is dropped, and a peer that returns asks
        again."""

    def is_writer(self, peer: Peer) -> bool:
        """Return whether this peer's metadata is trusted: it has a writer key, or the plane uses no keys."""

    def forget(self, peer: Peer) -> None:
        """Free what is held for a client that gets no further steps. It may still be sent messages."""

    def close(self) -> None: ...


class Wake:
    """Wakes a thread that polls: a file descriptor that becomes readable when another thread calls `call`."""

    def __init__(self) -> None:
        self.descriptor = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self.closed = False
        self._lock = threading.Lock()

    def call(self) -> None:
        """Make the descriptor readable. May be called from any thread, also after `close`."""
        with self._lock:  # without it, a late call could write to a file that was given the same descriptor
            if not self.closed:
                os.eventfd_write(self.descriptor, 1)

    def clear(self) -> None:
        """Make the descriptor unreadable again."""
        try:
            os.eventfd_read(self.descriptor)
        except BlockingIOError:
            return

    def close(self) -> None:
        with self._lock:
            if not self.closed:
                self.closed = True
                os.close(self.descriptor)
