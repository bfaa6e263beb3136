"""Lines to many listeners at once, by name: what a keeper has to its plane and its peers, and a rank to keepers.

As `sockets.SocketClient`, two connections to each, one for payloads; but all of them in one poller of one thread.
"""

from __future__ import annotations

from collections.abc import Iterable

import zmq

from penstock.send.keys import ClientKeys
from penstock.send.messages import Buffer, Frames
from penstock.send.sockets import check_url, connected_pair, send_parts

_MOST = 256
"""Messages taken in one go."""


class Lines:
    """Used by one thread."""

    def __init__(self) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._poller = zmq.Poller()
        self._ends: dict[str, tuple[str, zmq.Socket[bytes], zmq.Socket[bytes]]] = {}
        """Name -> (url, end for small messages, end for payloads)."""

    def connect(self, name: str, url: str, keys: ClientKeys | None = None) -> None:
        """Have a line under this name lead to this address; one that leads there already stays."""
        known = self._ends.get(name)
        if known is not None and known[0] == url:
            return
        check_url(url, secured=keys is not None)
        self.disconnect(name)
        small, large = connected_pair(self._context, url, keys)
        for end in (small, large):
            self._poller.register(end, zmq.POLLIN)
        self._ends[name] = (url, small, large)

    def disconnect(self, name: str) -> None:
        for end in self._ends.pop(name, ("",))[1:]:
            assert isinstance(end, zmq.Socket)
            self._poller.unregister(end)
            end.close(linger=200)

    @property
    def names(self) -> Iterable[str]:
        return tuple(self._ends)

    def watch(self, pollable: object) -> None:
        """`poll` returns when this becomes readable too."""
        self._poller.register(pollable, zmq.POLLIN)

    def poll(self, timeout_s: float) -> None:
        """Wait until there is something to receive."""
        self._poller.poll(int(max(timeout_s, 0.0) * 1000))

    def send(self, name: str, header: bytes, frames: Frames = ()) -> None:
        """Hand a message over; it is dropped if there is no such line, or its queue is full."""
        found = self._ends.get(name)
        if found is None:
            return
        try:
            send_parts(found[2] if frames else found[1], [header], frames)
        except zmq.Again:
            return  # the other end is away: it is asked again

    def receive(self) -> list[tuple[str, Buffer, Frames]]:
        """All messages that are there now: (name of the line, header, payload)."""
        got: list[tuple[str, Buffer, Frames]] = []
        for name, (_, *ends) in list(self._ends.items()):
            for end in ends:
                while len(got) < _MOST:
                    try:
                        parts = end.recv_multipart(zmq.NOBLOCK, copy=False)
                    except zmq.Again:
                        break
                    got.append((name, parts[0].buffer, [part.buffer for part in parts[1:]]))
        return got

    def close(self) -> None:
        for name in self.names:
            self.disconnect(name)
        self._context.term()
