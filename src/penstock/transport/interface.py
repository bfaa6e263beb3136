"""What a transport is: something that moves messages between one plane and many clients.

A message is a header and payload buffers. Transports may lose messages when a connection breaks, and may deliver
one twice; they never alter one unnoticed. They keep the order of those with payloads, and of those without; but one
without should overtake large payloads, so that a slow link does not look like a dead one. The protocol does the rest.
`penstock.testing.transport_suite` is the suite that every transport must pass; `memory.py` is the one to read first.
"""

from __future__ import annotations

from typing import Protocol, TypeAlias

from penstock.protocol import Buffer, Frames, Peer

Envelope: TypeAlias = tuple[Buffer, Frames]
"""(header, payload buffers)."""


class ClientTransport(Protocol):
    """A client's end: used by one thread, except for `wake`."""

    def send(self, header: bytes, frames: Frames = ()) -> None:
        """Hand a message over; it may be on its way for a while. Never blocks for long."""

    def receive(self, timeout_s: float) -> Envelope | None:
        """The next message; None when the time passed or someone called `wake`."""

    def wake(self) -> None:
        """Make a `receive` that waits return; may be called from any thread."""

    def close(self) -> None: ...


class PlaneTransport(Protocol):
    """The plane's end: used by one thread."""

    @property
    def url(self) -> str:
        """Where clients connect."""

    @property
    def poll_s(self) -> float | None:
        """How often to look, for transports that cannot announce a message; None for those that can."""

    def pollable(self) -> object | None:
        """A ZeroMQ socket or file descriptor that becomes readable when there is something to receive."""

    def receive(self) -> list[tuple[Peer, Buffer, Frames]]:
        """All messages that are there now, without waiting."""

    def send(self, peer: Peer, header: bytes, frames: Frames = ()) -> bool:
        """Hand a message over. False if the peer has left: the message is dropped, and who comes back asks again."""

    def is_writer(self, peer: Peer) -> bool:
        """Whether this peer may vouch for metadata: it has a writer's key, or there are no keys."""

    def forget(self, peer: Peer) -> None:
        """Give back what is kept for a client that gets no more steps; it may still be sent messages."""

    def close(self) -> None: ...
