"""Transports that pass a step's bytes to other processes on one host: ours, and what one would write without it.

Each is a pair of ends. The plane's end sends every rank its bytes and waits until all have answered; a rank's
end takes them, reads every byte (xxh3) and answers with the digest, so that nothing can look fast by not arriving.
"""

from __future__ import annotations

from collections.abc import Sequence
from multiprocessing.connection import Connection, wait
from multiprocessing.queues import Queue
from typing import Protocol

import xxhash
import zmq

from penstock.protocol.messages import Buffer
from penstock.transport.interface import ClientTransport, PlaneTransport

PATIENCE_S = 60.0
_PATIENCE_MS = 60_000
_HEADER = b"a header as small as the protocol's own, which is about this long; it is not looked at"


class Link(Protocol):
    """The plane's end."""

    def join(self) -> None:
        """Wait until every rank is there."""

    def step(self, frames: Sequence[bytes]) -> list[bytes]:
        """Give each rank its frame; the digests of all ranks, in order. An empty frame is a message without one."""

    def close(self) -> None: ...


class RankLink(Protocol):
    """A rank's end."""

    def join(self) -> None: ...

    def take(self) -> None:
        """Receive one frame, read it, answer."""

    def close(self) -> None: ...


def digest(frame: Buffer) -> bytes:
    return xxhash.xxh3_128_digest(frame)


class OurLink:
    """A transport of ours."""

    def __init__(self, transport: PlaneTransport, ranks: int) -> None:
        self.transport, self._ranks = transport, ranks
        self._peers: dict[int, object] = {}
        self._poller = zmq.Poller()
        self._poller.register(transport.pollable(), zmq.POLLIN)

    def join(self) -> None:
        while len(self._peers) < self._ranks:
            assert self._poller.poll(_PATIENCE_MS), "a rank did not join"
            self._peers |= {int(bytes(header)): peer for peer, header, _ in self.transport.receive()}

    def step(self, frames: Sequence[bytes]) -> list[bytes]:
        for rank, frame in enumerate(frames):
            self.transport.send(self._peers[rank], _HEADER, [frame] if frame else [])
        answers: dict[object, bytes] = {}
        while len(answers) < self._ranks:
            assert self._poller.poll(_PATIENCE_MS), "a rank did not answer"
            answers |= {peer: bytes(header) for peer, header, _ in self.transport.receive()}
        return [answers[self._peers[rank]] for rank in range(self._ranks)]

    def close(self) -> None:
        self.transport.close()


class OurRankLink:
    def __init__(self, transport: ClientTransport, rank: int) -> None:
        self._transport, self._rank = transport, rank

    def join(self) -> None:
        self._transport.send(str(self._rank).encode())

    def take(self) -> None:
        got = self._transport.receive(PATIENCE_S)
        assert got is not None
        self._transport.send(digest(got[1][0] if got[1] else b""))

    def close(self) -> None:
        self._transport.close()


class RawZmqLink:
    """ROUTER and DEALER without anything of ours, payloads without a copy: as fast as ZeroMQ goes."""

    def __init__(self, url: str, ranks: int) -> None:
        self._ranks = ranks
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.RCVTIMEO, _PATIENCE_MS)
        self._socket.bind(url)
        self.url = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)

    def join(self) -> None:
        for _ in range(self._ranks):
            self._socket.recv_multipart()

    def step(self, frames: Sequence[bytes]) -> list[bytes]:
        for rank, frame in enumerate(frames):
            parts = [str(rank).encode(), _HEADER, *([frame] if frame else [])]
            self._socket.send_multipart(parts, copy=not frame)
        answers = dict(self._socket.recv_multipart() for _ in range(self._ranks))
        return [answers[str(rank).encode()] for rank in range(self._ranks)]

    def close(self) -> None:
        self._socket.close(linger=0)
        self._context.term()


class RawZmqRankLink:
    def __init__(self, url: str, rank: int) -> None:
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.IDENTITY, str(rank).encode())
        self._socket.setsockopt(zmq.RCVTIMEO, _PATIENCE_MS)
        self._socket.connect(url)

    def join(self) -> None:
        self._socket.send(b"")

    def take(self) -> None:
        parts = self._socket.recv_multipart(copy=False)
        self._socket.send(digest(parts[1].buffer if len(parts) > 1 else b""))

    def close(self) -> None:
        self._socket.close(linger=200)
        self._context.term()


class QueueLink:
    """A multiprocessing.Queue per rank: what Python offers by itself."""

    def __init__(self, pipes: Sequence[Connection], queues: Sequence[Queue[bytes]]) -> None:
        self._pipes, self._queues = pipes, queues

    def join(self) -> None:
        for pipe in self._pipes:
            pipe.recv_bytes()

    def step(self, frames: Sequence[bytes]) -> list[bytes]:
        for queue, frame in zip(self._queues, frames, strict=True):
            queue.put(frame)
        return _answers(self._pipes)

    def close(self) -> None:
        for queue in self._queues:
            queue.close()


class QueueRankLink:
    def __init__(self, pipe: Connection, queue: Queue[bytes]) -> None:
        self._pipe, self._queue = pipe, queue

    def join(self) -> None:
        self._pipe.send_bytes(b"here")

    def take(self) -> None:
        self._pipe.send_bytes(digest(self._queue.get(timeout=PATIENCE_S)))

    def close(self) -> None:
        self._queue.close()


def _answers(pipes: Sequence[Connection]) -> list[bytes]:
    found: dict[Connection, bytes] = {}
    while len(found) < len(pipes):
        ready = wait([pipe for pipe in pipes if pipe not in found], PATIENCE_S)
        assert ready, "a rank did not answer"
        found |= {pipe: pipe.recv_bytes() for pipe in ready if isinstance(pipe, Connection)}
    return [found[pipe] for pipe in pipes]
