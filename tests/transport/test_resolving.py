"""A client that is told where its plane is: the transport suite over planes that come back somewhere else."""

from __future__ import annotations

import threading
import time
from contextlib import closing
from pathlib import Path

import pytest

from penstock.errors import PlaneLost
from penstock.testing.transport_suite import Ends, RestartableSuite, answer, hear
from penstock.transport.resolving import Address, ResolvingClient
from penstock.transport.sockets import SocketPlane


class MovingPlane:
    """Planes at an address that is new each time, and who knows the last one."""

    def __init__(self) -> None:
        self.places: list[Address] = []
        self.asked = threading.Semaphore(0)

    def plane(self) -> SocketPlane:
        plane = SocketPlane()
        self.places.append(Address(url=plane.url))
        return plane

    def where(self) -> Address:
        self.asked.release()
        if not self.places:
            raise PlaneLost("no plane yet")
        return self.places[-1]

    def client(self, silence_s: float = 0.05) -> ResolvingClient:
        return ResolvingClient(self.where, first=self.places[-1] if self.places else None, silence_s=silence_s)


class TestResolving(RestartableSuite):
    def ends(self, folder: Path) -> Ends:
        moving = MovingPlane()
        return Ends(plane=moving.plane, client=moving.client)


@pytest.mark.deep
def test_a_client_that_is_answered_does_not_ask_where_the_plane_is(pace: float) -> None:
    moving, silence_s = MovingPlane(), 0.5 * pace
    with closing(moving.plane()) as plane, closing(moving.client(silence_s)) as client:
        for _ in range(2):
            client.send(b"beat")
            plane.send(hear(plane, 1)[0][0], b"pulse")
            assert answer(client)[0] == b"pulse"
            assert client.receive(1.5 * silence_s) is None  # silent, but nothing was asked
        assert not moving.asked.acquire(blocking=False)


def test_a_silent_client_keeps_asking_at_the_same_pace() -> None:
    """A plane may be started long after the one before it died: it is found as soon as one that followed at once."""
    moving = MovingPlane()
    plane = moving.plane()
    client = ResolvingClient(moving.where, first=moving.places[-1], silence_s=0.1)
    plane.close()
    asked, began = 0, time.monotonic()
    while asked < 10:
        client.send(b"beat")
        client.receive(0.01)
        asked += moving.asked.acquire(blocking=False)
        assert time.monotonic() - began < 60
    assert time.monotonic() - began < 10  # doubled each time it would take 100 s
    client.close()


def test_a_resolver_that_hangs_stops_nobody() -> None:
    moving, go = MovingPlane(), threading.Event()
    plane = moving.plane()

    def hangs() -> Address:
        go.wait(60)
        return moving.places[-1]

    client = ResolvingClient(hangs, first=moving.places[-1], silence_s=0.01)
    began = time.monotonic()
    for _ in range(50):
        client.send(b"beat")
        client.receive(0.01)
    assert time.monotonic() - began < 30
    assert len(hear(plane, 50)) == 50
    go.set()
    client.close()
    plane.close()
