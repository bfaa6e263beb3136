"""Producers that are killed, cancelled and paused, on a network that loses, repeats and reorders: the line drains."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from random import Random

from hypothesis import given
from hypothesis import strategies as st

from penstock.protocol.message_header import read_from_client, read_from_plane, run_of
from penstock.protocol.messages import Accepted, Frames, Put
from penstock.protocol.retry import Out
from tests.protocol.test_producers import TIMES, Producer, World

FAULTS_END_S, SIZE = 4.0, 10


class BadNetwork(World):
    """A table for two groups, whose trainer takes one now and then."""

    def __init__(self, seed: int, *, bad: bool) -> None:
        self.rng, self.bad = Random(seed), bad
        self.queue: list[tuple[float, int, Callable[[], None]]] = []
        self.paused: dict[str, float] = {}
        self.accepted: list[str] = []
        self.trains = True
        super().__init__(limit=2 * SIZE, credit=self.rng.choice([0, 64]))
        self.end = self.now + FAULTS_END_S

    @property
    def is_bad(self) -> bool:
        return self.bad and self.now < self.end

    def travel(self, arrive: Callable[[], None]) -> None:
        copies = self.rng.choice([0, 1, 1, 1, 2]) if self.is_bad else 1
        for _ in range(copies):
            delay = self.rng.expovariate(10.0) if self.is_bad else 0.0
            heapq.heappush(self.queue, (self.now + delay, len(self.queue) + self.rng.randrange(1 << 30), arrive))

    def settle(self) -> None:
        while self.up:
            name, header, frames = self.up.popleft()
            self.travel(lambda n=name, h=header, f=frames: self.arrive(n, h, f))  # type: ignore[misc]

    def arrive(self, name: str, header: bytes, frames: Frames) -> None:
        message = read_from_client(header)
        before = set(self.held)
        self.hear(name, message, run_of(header), frames)
        self.accepted += set(self.held) - before
        assert sum(map(len, self.held.values())) + self.admission.rooms.reserved("").bytes <= self.limit

    def step(self) -> None:
        """A twentieth of a second."""
        self.now += 0.05
        self.settle()
        while self.queue and self.queue[0][0] <= self.now:
            heapq.heappop(self.queue)[2]()
        self.send(self.admission.answer_traces(lambda _, group, __: group in self.held or group in self.accepted))
        self.send(self.admission.offer_room(self.now))
        while self.down:
            name, answer = self.down.popleft()
            self.travel(lambda n=name, a=answer: self.tell(n, a))  # type: ignore[misc]
        for name, producer in self.producers.items():
            if producer.is_alive and self.paused.get(name, 0.0) <= self.now:
                producer.do(producer.session.on_tick(self.now))
        if self.trains and self.held and self.rng.random() < 0.3:
            del self.held[next(iter(self.held))]

    def tell(self, name: str, answer: object) -> None:
        producer = self.producers[name]
        until = self.paused.get(name, 0.0)
        if until > self.now:
            heapq.heappush(self.queue, (until, self.rng.randrange(1 << 30), lambda: self.tell(name, answer)))
        elif producer.is_alive:
            from penstock.protocol.message_header import pack_message

            producer.do(producer.session.on_message(read_from_plane(pack_message(answer)), self.now))  # type: ignore[arg-type]


def trouble(world: BadNetwork, producer: Producer, tickets: list[int]) -> None:
    """Kill it, cancel one of its puts, or let it stand still."""
    rng = world.rng
    what = rng.randrange(60)
    if what == 0:
        producer.is_alive = False
    elif what == 1:
        world.paused[producer.name] = world.now + rng.choice([0.3, 0.8, 2 * TIMES.peer_s])
    elif what == 2 and tickets:
        ticket = tickets.pop(rng.randrange(len(tickets)))
        producer.do(producer.session.abandon(ticket))


@given(st.integers(0, 1 << 32))
def test_every_put_of_a_live_client_is_accepted_and_no_other_waits(seed: int) -> None:
    world = BadNetwork(seed, bad=True)
    open_puts: dict[str, list[int]] = {}
    for name in "abcd":
        producer = world.producer(name)
        open_puts[name] = [producer.put(f"{name}{number}", b"x" * SIZE) for number in range(5)]
    while world.is_bad:
        for name, producer in world.producers.items():
            if producer.is_alive and world.paused.get(name, 0.0) <= world.now:
                trouble(world, producer, open_puts[name])
        world.step()
    deadline = world.now + 2 * TIMES.peer_s + 20.0
    alive = {name: world.producers[name] for name, producer in world.producers.items() if producer.is_alive}
    while any(ticket not in producer.answers for name, producer in alive.items() for ticket in open_puts[name]):
        world.step()
        assert world.now < deadline, world.admission.rooms.num_waiting
        assert not [producer.error for producer in alive.values() if producer.error]
    for name, producer in alive.items():
        assert all(isinstance(producer.answers[ticket], Accepted) for ticket in open_puts[name])
    until = world.now + TIMES.peer_s + 0.5
    while world.now < until:
        world.step()
    rooms = world.admission.rooms
    assert (rooms.num_waiting, rooms.reserved("")) == (0, (0, 0))


@given(st.integers(0, 1 << 32))
def test_on_a_good_network_groups_are_accepted_in_the_order_in_which_they_asked(seed: int) -> None:
    world = BadNetwork(seed, bad=False)
    world.limit = SIZE
    producers = [world.producer(name) for name in "abcd"]
    order = []
    for number in range(12):
        producer = world.rng.choice(producers)
        producer.put(f"g{number}", b"x" * SIZE)
        order.append(f"g{number}")
        for _ in range(3):  # first contact comes first
            world.step()
    for _ in range(400):
        world.step()
    assert world.accepted == order
    assert all(not isinstance(event, Out) for producer in producers for event in producer.session.on_tick(world.now))
    assert sum(producer.num_said(Put) for producer in producers) <= 2 * len(order)
