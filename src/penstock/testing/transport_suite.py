"""A conformance suite for transports: subclass it and run it over yours. Also a client that makes another unreliable.

    class TestMine(RestartableSuite):
        def ends(self, folder): return Ends(plane=lambda: MyPlane(folder), client=lambda: MyClient(folder))

Needs the `pytest` package.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from random import Random

import zmq

from penstock.protocol import Buffer, Frames, Peer
from penstock.transport import ClientTransport, Envelope, PlaneTransport

PATIENCE_S = 20.0
SIZES = (0, 1, 63, 64, 65, 4096, 16_383, 16_384, 65_536, 5_000_001)
"""Around the sizes at which transports align and switch methods."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ends:
    """Makes the two ends of a transport. Called again, `plane` makes one at the same address."""

    plane: Callable[[], PlaneTransport]
    client: Callable[[], ClientTransport]


def hear(plane: PlaneTransport, count: int, patience_s: float = PATIENCE_S) -> list[tuple[Peer, bytes, list[bytes]]]:
    """Receive messages at the plane until there are `count`, or patience ends."""
    got: list[tuple[Peer, bytes, list[bytes]]] = []
    poller, pollable = zmq.Poller(), plane.pollable()
    if pollable is not None:
        poller.register(pollable, zmq.POLLIN)
    deadline = time.monotonic() + patience_s
    while len(got) < count and time.monotonic() < deadline:
        got += [(peer, bytes(header), [bytes(f) for f in frames]) for peer, header, frames in plane.receive()]
        if len(got) < count:
            poller.poll(int((plane.poll_s or 0.05) * 1000) or 1)
    return got


def answer(client: ClientTransport, patience_s: float = PATIENCE_S) -> tuple[bytes, list[bytes]]:
    """Receive the next message at a client."""
    deadline = time.monotonic() + patience_s
    while time.monotonic() < deadline:
        got = client.receive(0.5)
        if got is not None:
            return bytes(got[0]), [bytes(frame) for frame in got[1]]
    raise AssertionError(f"nothing arrived within {patience_s} s")


class TransportSuite:
    """Every transport passes these tests."""

    def ends(self, folder: Path) -> Ends:
        raise NotImplementedError

    def test_order_is_kept_both_ways(self, tmp_path: Path) -> None:
        plane, client = self._pair(tmp_path)
        for number in range(200):
            client.send(b"to plane %d" % number)
        got = hear(plane, 200)
        assert [header for _, header, _ in got] == [b"to plane %d" % n for n in range(200)]
        for number in range(200):
            plane.send(got[0][0], b"to client %d" % number)
        assert [answer(client)[0] for _ in range(200)] == [b"to client %d" % n for n in range(200)]
        client.close()
        plane.close()

    def test_payloads_of_any_size_arrive_to_the_byte(self, tmp_path: Path) -> None:
        plane, client = self._pair(tmp_path)
        rng = Random(1)  # noqa: S311 - repeatable, not secret
        payloads = [rng.randbytes(size) for size in SIZES]
        client.send(b"head", payloads)
        (peer, header, frames), *_ = hear(plane, 1)
        assert (header, frames) == (b"head", payloads)
        plane.send(peer, b"all", payloads)
        assert answer(client) == (b"all", payloads)
        for payload in payloads:
            plane.send(peer, b"one", [payload])
            assert answer(client) == (b"one", [payload])
        client.close()
        plane.close()

    def test_payloads_may_grow_and_shrink(self, tmp_path: Path) -> None:
        plane, client = self._pair(tmp_path)
        client.send(b"hello")
        peer = hear(plane, 1)[0][0]
        rng = Random(2)  # noqa: S311 - repeatable, not secret
        for size in (100_000, 1_000_000, 20_000, 3_000_000, 3_000_000, 50_000) * 2:
            payload = rng.randbytes(size)
            plane.send(peer, b"step", [payload])
            assert answer(client) == (b"step", [payload])
        client.close()
        plane.close()

    def test_each_of_many_clients_gets_its_own(self, tmp_path: Path) -> None:
        ends = self.ends(tmp_path)
        plane = ends.plane()
        clients = [ends.client() for _ in range(20)]
        for number, client in enumerate(clients):
            client.send(b"from %d" % number)
        for peer, header, _ in hear(plane, 20):
            plane.send(peer, header.replace(b"from", b"to"), [header * 5000])
        for number, client in enumerate(clients):
            assert answer(client) == (b"to %d" % number, [b"from %d" % number * 5000])
            client.close()
        plane.close()

    def test_a_client_that_waits_can_be_woken(self, tmp_path: Path) -> None:
        plane, client = self._pair(tmp_path)
        began = time.monotonic()
        timer = threading.Timer(0.05, client.wake)
        timer.start()
        assert client.receive(PATIENCE_S) is None
        assert time.monotonic() - began < PATIENCE_S / 2
        timer.join()
        client.close()
        client.wake()  # too late: does nothing
        plane.close()

    def test_a_client_that_vanished_stops_no_other(self, tmp_path: Path) -> None:
        ends = self.ends(tmp_path)
        plane, gone, stays = ends.plane(), ends.client(), ends.client()
        gone.send(b"gone")
        stays.send(b"stays")
        peers = {header: peer for peer, header, _ in hear(plane, 2)}
        gone.close()
        for _ in range(300):
            plane.send(peers[b"gone"], b"x", [b"y" * 20_000])
        plane.forget(peers[b"gone"])
        plane.send(peers[b"stays"], b"still here", [b"z" * 20_000])
        assert answer(stays) == (b"still here", [b"z" * 20_000])
        stays.close()
        plane.close()

    def test_a_client_that_left_is_noticed_when_it_is_spoken_to(self, tmp_path: Path) -> None:
        plane, client = self._pair(tmp_path)
        client.send(b"hello")
        ((peer, _, _),) = hear(plane, 1)
        assert plane.send(peer, b"hello")
        client.close()
        deadline = time.monotonic() + PATIENCE_S
        while plane.send(peer, b"are you there?"):
            assert time.monotonic() < deadline
            time.sleep(0.01)
        plane.close()

    def test_what_was_sent_before_closing_arrives(self, tmp_path: Path) -> None:
        plane, client = self._pair(tmp_path)
        client.send(b"last message", [b"payload"])
        client.close()
        assert [(header, frames) for _, header, frames in hear(plane, 1)] == [(b"last message", [b"payload"])]
        plane.close()

    def _pair(self, folder: Path) -> tuple[PlaneTransport, ClientTransport]:
        ends = self.ends(folder)
        return ends.plane(), ends.client()


class RestartableSuite(TransportSuite):
    """Transports between processes pass these tests as well."""

    def test_a_client_reaches_the_plane_that_came_back(self, tmp_path: Path) -> None:
        ends = self.ends(tmp_path)
        plane, client = ends.plane(), ends.client()
        client.send(b"first")
        hear(plane, 1)
        plane.close()
        plane = ends.plane()
        deadline = time.monotonic() + PATIENCE_S
        got: list[tuple[Peer, bytes, list[bytes]]] = []
        while not got and time.monotonic() < deadline:
            client.send(b"again")
            got = hear(plane, 1, patience_s=0.2)
        payload = b"p" * 100_000
        plane.send(got[0][0], b"welcome back", [payload])
        assert answer(client) == (b"welcome back", [payload])
        client.close()
        plane.close()

    def test_a_client_may_come_before_the_plane(self, tmp_path: Path) -> None:
        ends = self.ends(tmp_path)
        client = ends.client()
        client.send(b"early")
        plane = ends.plane()
        assert hear(plane, 1)[0][1] == b"early"
        client.close()
        plane.close()


@dataclass(frozen=True, slots=True, kw_only=True)
class Trouble:
    """The fraction of messages, in each direction, to which something happens."""

    drop: float = 0.0
    duplicate: float = 0.0
    delay: float = 0.0
    """Held back until the next message has passed."""
    truncate: float = 0.0
    flip: float = 0.0


class UnreliableClient:
    """A client that loses, repeats, delays and damages messages of another one. Repeatable for a seed."""

    def __init__(self, inner: ClientTransport, trouble: Trouble, seed: int) -> None:
        self._inner, self._trouble, self._rng = inner, trouble, Random(seed)  # noqa: S311 - repeatable, not secret
        self._ready: deque[Envelope] = deque()
        self._late: dict[str, list[Envelope]] = {"out": [], "in": []}

    def send(self, header: bytes, frames: Frames = ()) -> None:
        for head, rest in self._pass("out", (header, frames)):
            self._inner.send(bytes(head), rest)

    def receive(self, timeout_s: float) -> Envelope | None:
        if not self._ready:
            got = self._inner.receive(timeout_s)
            if got is not None:
                self._ready.extend(self._pass("in", got))
        return self._ready.popleft() if self._ready else None

    def wake(self) -> None:
        self._inner.wake()

    def close(self) -> None:
        self._inner.close()

    def _pass(self, direction: str, message: Envelope) -> list[Envelope]:
        trouble, chance = self._trouble, self._rng.random
        late, self._late[direction] = self._late[direction], []
        if chance() < trouble.drop:
            return late
        if chance() < trouble.truncate:
            message = self._damage(message, lambda data: data[: self._rng.randrange(len(data))])
        if chance() < trouble.flip:
            message = self._damage(message, self._flip)
        if chance() < trouble.delay:
            self._late[direction].append(message)
            return late
        return [message] * (2 if chance() < trouble.duplicate else 1) + late

    def _damage(self, message: Envelope, change: Callable[[bytes], bytes]) -> Envelope:
        parts: list[Buffer] = [message[0], *message[1]]
        which = self._rng.randrange(len(parts))
        if len(parts[which]):
            parts[which] = change(bytes(parts[which]))
        return parts[0], parts[1:]

    def _flip(self, data: bytes) -> bytes:
        at = self._rng.randrange(len(data))
        return data[:at] + bytes([data[at] ^ (1 << self._rng.randrange(8))]) + data[at + 1 :]
