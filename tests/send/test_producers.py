"""A producer and the plane's admission against each other, without a network: what is asked, sent and told."""

from __future__ import annotations

from collections import deque

import pytest

from penstock.errors import Fenced, Overloaded, PeerError, PlaneLost
from penstock.send.admission import Admission, Decide, Offer
from penstock.send.effects import Send
from penstock.send.message_header import pack_message, read_from_client, read_from_plane, run_of
from penstock.send.messages import (
    Accepted,
    AskRoom,
    Attach,
    Discard,
    Frames,
    FromClient,
    FromPlane,
    Pulse,
    Put,
    Rejected,
    Trace,
)
from penstock.send.producer import Answered, Event, ProducerSession
from penstock.send.retry import Failed, Out
from penstock.send.timeouts import Timeouts

TIMES = Timeouts(heartbeat_s=0.2, peer_s=1.0, delivery_s=3.0, plane_s=5.0, resend_s=0.2)


class Producer:
    """A producer's session, what it said and what it was answered."""

    def __init__(self, world: World, name: str, run: str = "") -> None:
        self.world, self.name = world, name
        self.session = ProducerSession(run=run, timeouts=TIMES)
        self.said: list[FromClient] = []
        self.answers: dict[int, object] = {}
        self.error: Exception | None = None

    def put(self, group: str, frame: bytes, *, waits: bool = True) -> int:
        ticket, events = self.session.put(group, frame, group.encode(), self.world.now, waits=waits)
        self.do(events)
        self.world.settle()
        return ticket

    def do(self, events: list[Event]) -> None:
        for event in events:
            if isinstance(event, Out):
                self.said.append(event.message)
                header = pack_message(event.message, self.session.run_id)
                self.world.up.append((self.name, header, event.frames))
            elif isinstance(event, Answered):
                self.answers[event.ticket] = event.answer
            else:
                assert isinstance(event, Failed)
                self.error = event.error

    def num_said(self, kind: type) -> int:
        return sum(isinstance(message, kind) for message in self.said)


class World:
    """A plane that holds so many bytes, and producers. Messages arrive at once, unless a test loses them."""

    def __init__(self, limit: int = 100) -> None:
        self.now, self.limit = 100.0, limit
        self.held: dict[str, bytes] = {}
        self.up: deque[tuple[str, bytes, Frames]] = deque()
        self.down: deque[tuple[str, FromPlane]] = deque()
        self.producers: dict[str, Producer] = {}
        self.counted = 0
        self.lost: set[type] = set()
        """Messages of these kinds do not arrive."""
        self.start_plane(b"r" * 16)

    def start_plane(self, run_id: bytes) -> None:
        self.run_id = run_id
        self.admission = Admission(
            run="r",
            run_id=run_id,
            epoch=1,
            ranks=1,
            promise_s=1.0,
            pulse=lambda: Pulse(epoch=1, session=0, waiting_for=""),
        )

    def producer(self, name: str = "p", run: str = "") -> Producer:
        found = self.producers[name] = Producer(self, name, run)
        return found

    def table_of(self, run: str) -> str:
        return run

    def no_room(self, table: str, size: int, *, promised_bytes: int, promised_groups: int) -> str:
        used = sum(map(len, self.held.values()))
        return "full" if used + promised_bytes + size > self.limit else ""

    def settle(self) -> None:
        while self.up or self.down:
            self.turn()

    def turn(self) -> None:
        while self.up:
            peer, header, frames = self.up.popleft()
            message = read_from_client(header)
            if type(message) not in self.lost:
                self.hear(peer, message, run_of(header), frames)
        self.send(
            self.admission.answer_traces(lambda _, group, digest: group in self.held and digest == group.encode())
        )
        self.send(self.admission.offer_room(self, self.now))
        while self.down:
            to, answer = self.down.popleft()
            if type(answer) not in self.lost:
                producer = self.producers[to]
                producer.do(producer.session.on_message(read_from_plane(pack_message(answer)), self.now))

    def hear(self, peer: str, message: FromClient, run_id: bytes, frames: Frames) -> None:
        if isinstance(message, Attach):
            self.send([self.admission.on_attach(peer, message)])
        elif run_id != self.run_id:
            self.send([self.admission.on_foreign(peer, run_id)])
        else:
            for effect in self.admission.on_message(peer, message, frames):  # type: ignore[arg-type]
                if isinstance(effect, Offer):
                    self.offer(effect)
                elif isinstance(effect, Decide):
                    self.counted += 1
                    self.send([self.admission.decided(effect.ticket, None)])
                else:
                    self.send([effect])

    def offer(self, offer: Offer) -> None:
        frame = bytes(offer.frame)
        if self.no_room("", len(frame), promised_bytes=0, promised_groups=0):
            self.send([self.admission.answer(offer.ticket, Overloaded("full"))])
            return
        self.held[offer.group] = frame
        self.send([self.admission.answer(offer.ticket, None)])

    def send(self, effects: list[Send]) -> None:
        for effect in effects:
            assert isinstance(effect.peer, str)
            self.down.append((effect.peer, effect.message))

    def pass_time(self, seconds: float) -> None:
        until = self.now + seconds
        while self.now < until:
            self.now += 0.05
            for producer in self.producers.values():
                producer.do(producer.session.on_tick(self.now))
            self.turn()
            self.settle()


# ------------------------------------------------------------------ room


def test_a_group_that_waits_for_room_is_sent_once_and_then_when_it_is_told() -> None:
    world = World(limit=100)
    producer = world.producer()
    first = producer.put("a", b"x" * 80)
    second = producer.put("b", b"x" * 80)
    world.pass_time(4.0)
    assert producer.num_said(Put) == 2
    assert producer.num_said(AskRoom) > 3  # in case an answer was lost
    world.held.clear()
    world.pass_time(0.1)
    assert producer.num_said(Put) == 3
    assert isinstance(producer.answers[first], Accepted)
    assert isinstance(producer.answers[second], Accepted)
    assert producer.error is None


def test_a_producer_that_knows_there_is_no_room_asks_before_it_sends_another_group() -> None:
    world = World(limit=100)
    producer = world.producer()
    producer.put("a", b"x" * 80)
    producer.put("b", b"x" * 80)
    third = producer.put("c", b"x" * 10, waits=False)
    assert producer.num_said(Put) == 2
    refused = producer.answers[third]
    assert isinstance(refused, Rejected)  # one that waits longer comes first, although this one would fit
    assert refused.kind == "Overloaded"


def test_room_for_one_is_promised_to_one() -> None:
    world = World(limit=100)
    world.held["old"] = b"x" * 80
    producers = [world.producer(f"p{i}") for i in range(10)]
    tickets = [producer.put(f"g{i}", b"x" * 80) for i, producer in enumerate(producers)]
    world.held.clear()
    world.pass_time(0.5)
    assert sum(producer.num_said(Put) for producer in producers) == 10 + 1
    assert [ticket in producer.answers for ticket, producer in zip(tickets, producers, strict=True)] == [True] + 9 * [
        False
    ]


def test_a_promise_to_one_who_is_gone_is_given_to_the_next() -> None:
    world = World(limit=100)
    world.held["old"] = b"x" * 80
    gone, waits = world.producer("gone"), world.producer("waits")
    gone.put("a", b"x" * 80)
    ticket = waits.put("b", b"x" * 80)
    world.producers["gone"] = Producer(world, "gone")  # started again, and knows nothing of it
    world.held.clear()
    world.pass_time(0.5)
    assert ticket not in waits.answers
    world.pass_time(1.5)
    assert isinstance(waits.answers[ticket], Accepted)


def test_who_gives_up_makes_way() -> None:
    world = World(limit=100)
    world.held["old"] = b"x" * 80
    impatient, waits = world.producer("impatient"), world.producer("waits")
    first = impatient.put("a", b"x" * 80)
    second = waits.put("b", b"x" * 80)
    refused, events = impatient.session.stop_waiting(first)
    assert refused is not None
    assert refused.kind == "Overloaded"
    impatient.do(events)
    world.settle()
    assert world.admission.num_waiting == 1
    world.held.clear()
    world.pass_time(0.1)
    assert isinstance(waits.answers[second], Accepted)


def test_a_plane_that_restarts_learns_again_who_waits() -> None:
    world = World(limit=100)
    world.held["old"] = b"x" * 80
    producer = world.producer()
    ticket = producer.put("a", b"x" * 80)
    world.start_plane(world.run_id)
    world.pass_time(1.0)
    assert world.admission.num_waiting == 1
    world.held.clear()
    world.pass_time(0.5)
    assert isinstance(producer.answers[ticket], Accepted)
    assert producer.num_said(Put) == 2


# ------------------------------------------------------------------ lost messages


def test_a_group_that_is_lost_is_sent_again_when_the_plane_says_so() -> None:
    world = World()
    producer = world.producer()
    world.lost = {Put}
    ticket = producer.put("a", b"x")
    assert producer.num_said(Put) == 1
    world.lost = {Trace}
    world.pass_time(1.0)
    assert producer.num_said(Put) == 1  # nobody said that it did not come
    world.lost = set()
    world.pass_time(1.0)
    assert producer.num_said(Put) == 2
    assert isinstance(producer.answers[ticket], Accepted)


def test_an_acknowledgement_that_is_lost_does_not_cost_the_group_again() -> None:
    world = World()
    producer = world.producer()
    world.lost = {Accepted}
    ticket = producer.put("a", b"x")
    world.pass_time(1.0)
    world.lost = set()
    world.pass_time(1.0)
    assert producer.num_said(Put) == 1
    assert producer.answers[ticket] == Accepted(ticket=ticket, duplicate=True)


def test_a_decision_whose_answer_is_lost_is_counted_once() -> None:
    world = World()
    producer = world.producer()
    world.lost = {Accepted}
    ticket, events = producer.session.ask(lambda ticket: Discard(ticket=ticket, reason="x", samples=1), world.now)
    producer.do(events)
    world.pass_time(2.0)
    world.lost = set()
    world.pass_time(2.0)
    assert isinstance(producer.answers[ticket], Accepted)
    assert (producer.num_said(Discard) > 3, world.counted) == (True, 1)


def test_a_plane_that_is_silent_is_an_error_with_a_bound() -> None:
    world = World()
    producer = world.producer()
    world.lost = {Attach}
    producer.put("a", b"x")
    world.pass_time(TIMES.plane_s - 0.5)
    assert not producer.error
    world.pass_time(1.0)
    assert isinstance(producer.error, PlaneLost)
    assert producer.num_said(Attach) > 5


# ------------------------------------------------------------------ which run


def test_nothing_is_put_before_it_is_known_which_run_this_is() -> None:
    world = World()
    producer = world.producer(run="other")
    producer.put("a", b"x")
    assert isinstance(producer.error, PeerError)
    assert "run: this process says 'other', the plane has 'r'" in str(producer.error)
    assert (producer.num_said(Put), world.held) == (0, {})


@pytest.mark.parametrize("question", ["put", "discard"])
def test_a_producer_of_an_earlier_run_is_told_so(question: str) -> None:
    world = World()
    producer = world.producer()
    producer.put("a", b"x")
    world.held.clear()
    world.start_plane(b"s" * 16)
    if question == "put":
        producer.put("b", b"x")
    else:
        producer.do(producer.session.ask(lambda t: Discard(ticket=t, reason="x", samples=1), world.now)[1])
        world.settle()
    assert isinstance(producer.error, Fenced)
    assert "belongs to run 727272727272 of an earlier plane, here is run 737373737373 ('r')" in str(producer.error)
    assert (world.held, world.counted) == ({}, 0)
