"""A producer and the plane's admission against each other, without a network: what is asked, sent and told."""

from __future__ import annotations

from collections import deque

import pytest
from msgspec.structs import replace

from penstock.errors import Fenced, Overloaded, PeerError, PlaneLost
from penstock.protocol.admission import Admission, Decide, Offer
from penstock.protocol.effects import Send
from penstock.protocol.lease_messages import AttachValues, StoredFrame
from penstock.protocol.message_header import pack_message, read_from_client, read_from_plane, run_of
from penstock.protocol.messages import (
    Accepted,
    AskRoom,
    Attach,
    Discard,
    Frames,
    FromClient,
    FromPlane,
    GiveUp,
    Pulse,
    Put,
    Rejected,
    Room,
    Trace,
)
from penstock.protocol.producer import Answered, Event, ProducerSession, PutRequest
from penstock.protocol.retry import Failed, Out
from penstock.protocol.rooms import Amount
from penstock.protocol.timeouts import Timeouts

TIMES = Timeouts(heartbeat_s=0.2, peer_s=1.0, delivery_s=3.0, plane_s=5.0, resend_s=0.2)


class Producer:
    """A producer's session, what it said and what it was answered."""

    def __init__(self, world: World, name: str, run: str = "") -> None:
        self.world, self.name = world, name
        self.session = ProducerSession(run=run, timeouts=TIMES)
        self.said: list[FromClient] = []
        self.answers: dict[int, object] = {}
        self.error: Exception | None = None
        self.is_alive = True

    def put(self, group: str, frame: bytes, *, waits: bool = True) -> int:
        request = PutRequest(group=group, frame=frame, digest=group.encode(), waits=waits)
        (ticket,), events = self.session.put([request], self.world.now)
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

    def __init__(self, limit: int = 100, credit: int = 0) -> None:
        self.now, self.limit, self.credit = 100.0, limit, credit
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
            tables=self,
            peer_s=TIMES.peer_s,
            pulse=lambda: Pulse(epoch=1, session=0, waiting_for=""),
        )

    def producer(self, name: str = "p", run: str = "") -> Producer:
        found = self.producers[name] = Producer(self, name, run)
        return found

    def table_of(self, run: str) -> str:
        return run

    def recognises(self, group: str, digest: bytes) -> bool | None:
        return digest == group.encode() if group in self.held else None

    def no_room(self, _table: str, size: int, reserved: Amount) -> str | None:
        used = sum(map(len, self.held.values()))
        return "full" if used + reserved.bytes + size > self.limit else ""

    def spare(self, reserved: Amount) -> Amount:
        return Amount(self.credit, max(self.limit - sum(map(len, self.held.values())) - reserved.bytes, 0))

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
        self.send(self.admission.offer_room(self.now))
        while self.down:
            to, answer = self.down.popleft()
            producer = self.producers[to]
            if type(answer) not in self.lost and producer.is_alive:
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
                    assert isinstance(effect, Send)  # nothing is signed here
                    self.send([effect])

    def offer(self, offer: Offer) -> None:
        frame, rooms = bytes(offer.frame), self.admission.rooms
        reserved = rooms.claim(offer.ticket, "")
        if reserved is None or self.no_room("", len(frame), reserved):
            rooms.wait(offer.ticket, "", len(frame))
            self.send([self.admission.answer(offer.ticket, Overloaded("full"))])
            return
        rooms.close(offer.ticket)
        self.held[offer.put.group] = frame
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
                if producer.is_alive:
                    producer.do(producer.session.on_tick(self.now))
            self.turn()
            self.settle()


# ------------------------------------------------------------------ room


def test_without_credit_a_put_asks_first_and_keeps_its_bytes() -> None:
    world = World(limit=100)
    producer = world.producer()
    first = producer.put("a", b"x" * 80)
    second = producer.put("b", b"x" * 80)
    assert isinstance(producer.answers[first], Accepted)
    world.pass_time(4.0)
    assert producer.num_said(Put) == 1
    assert producer.num_said(AskRoom) > 3  # in case an answer was lost, and to keep its place
    world.held.clear()
    world.pass_time(0.5)
    assert producer.num_said(Put) == 2
    assert isinstance(producer.answers[second], Accepted)
    assert producer.error is None


def test_with_credit_a_put_is_sent_at_once() -> None:
    world = World(limit=1000, credit=4)
    producer = world.producer()
    world.admission.offer_room(world.now)
    tickets = [producer.put(f"g{i}", b"x" * 80) for i in range(3)]
    assert all(isinstance(producer.answers[ticket], Accepted) for ticket in tickets)
    assert (producer.num_said(Put), producer.num_said(AskRoom)) == (3, 0)
    tickets += [producer.put(f"g{i}", b"x" * 400) for i in range(3, 5)]  # more than a quarter of the free room
    assert producer.num_said(AskRoom) == 2
    assert isinstance(producer.answers[tickets[3]], Accepted)
    assert tickets[4] not in producer.answers


def test_a_frame_that_takes_long_to_write_does_not_make_the_plane_lost() -> None:
    """On credit nothing was asked of the plane yet, so its silence says nothing."""
    world = World(credit=100)
    producer = world.producer("a")
    producer.put("first", b"x")
    (ticket,), events = producer.session.put([PutRequest(group="b", digest=b"b", size=10)], world.now)
    producer.do(events)
    assert isinstance(producer.answers[ticket], Room)
    for _ in range(200):
        world.now += 0.1
        producer.do(producer.session.on_tick(world.now))
    assert producer.error is None
    assert producer.session.written(ticket, "0" * 16 + ":0:10", b"", b"", world.now) is not None


def test_credit_limits_what_is_under_way_without_an_answer() -> None:
    world = World(limit=8000, credit=8)
    producer = world.producer()
    world.admission.offer_room(world.now)
    world.lost = {Put, Room}
    for number in range(5):
        producer.put(f"g{number}", b"x")
    assert (producer.num_said(Put), producer.num_said(AskRoom)) == (2, 3)  # a quarter of eight


def test_credit_that_is_old_is_not_used() -> None:
    world = World(limit=8000, credit=8)
    producer = world.producer()
    world.admission.offer_room(world.now)
    producer.put("a", b"x")
    world.now += TIMES.peer_s + 0.1
    producer.put("b", b"x")
    assert producer.num_said(AskRoom) == 1


def test_a_put_on_credit_that_finds_no_room_waits_in_order_of_arrival() -> None:
    world = World(limit=1000, credit=64)
    first, second = world.producer("first"), world.producer("second")
    world.admission.offer_room(world.now)
    first.put("a", b"x")
    second.put("b", b"x")  # both have credit now
    world.limit = 0
    tickets = first.put("c", b"x"), second.put("d", b"x")
    assert (first.num_said(Put), second.num_said(Put)) == (2, 2)
    world.pass_time(1.0)
    assert world.admission.rooms.num_waiting == 2
    world.held.clear()
    world.limit = 1
    world.pass_time(0.5)
    assert (tickets[0] in first.answers, tickets[1] in second.answers) == (True, False)


def test_a_put_that_does_not_wait_is_answered_for_now() -> None:
    world = World(limit=100)
    producer = world.producer()
    producer.put("a", b"x" * 80)
    producer.put("b", b"x" * 80)
    third = producer.put("c", b"x" * 10, waits=False)
    refused = producer.answers[third]
    assert isinstance(refused, Rejected)  # one that waits longer comes first, although this one would fit
    assert refused.kind == "Overloaded"
    assert "group 'c'" in refused.reason
    assert world.admission.rooms.num_waiting == 1


def test_a_group_that_is_there_already_needs_no_room() -> None:
    world = World(limit=10)
    first, second = world.producer("first"), world.producer("second")
    first.put("a", b"x" * 10)
    ticket = second.put("a", b"x" * 10)
    assert second.answers[ticket] == Accepted(ticket=ticket, duplicate=True)
    assert second.num_said(Put) == 0


def test_room_for_one_is_reserved_for_one() -> None:
    world = World(limit=100)
    world.held["old"] = b"x" * 80
    producers = [world.producer(f"p{i}") for i in range(10)]
    tickets = [producer.put(f"g{i}", b"x" * 80) for i, producer in enumerate(producers)]
    world.held.clear()
    world.pass_time(0.5)
    assert sum(producer.num_said(Put) for producer in producers) == 1
    assert [ticket in producer.answers for ticket, producer in zip(tickets, producers, strict=True)] == [True] + 9 * [
        False
    ]


def test_room_reserved_for_one_who_died_goes_to_the_next() -> None:
    world = World(limit=100)
    world.held["old"] = b"x" * 80
    dead, waits = world.producer("dead"), world.producer("waits")
    dead.put("a", b"x" * 80)
    ticket = waits.put("b", b"x" * 80)
    dead.is_alive = False
    world.held.clear()
    world.pass_time(0.5)
    assert ticket not in waits.answers
    world.pass_time(TIMES.peer_s)
    assert isinstance(waits.answers[ticket], Accepted)


def test_a_cancelled_put_leaves_the_line_whatever_is_on_its_way() -> None:
    world = World(limit=100)
    world.held["old"] = b"x" * 80
    producer = world.producer()
    ticket = producer.put("a", b"x" * 80)
    producer.do(producer.session.on_tick(world.now + 1.0))  # a reminder, and the give-up in the same turn
    producer.do(producer.session.abandon(ticket))
    assert [type(message) for message in producer.said[-2:]] == [AskRoom, GiveUp]
    world.turn()
    assert world.admission.rooms.num_waiting == 0


def test_a_place_for_a_put_that_its_client_does_not_know_is_given_up_when_it_is_told() -> None:
    world = World(limit=100)
    world.held["old"] = b"x" * 80
    producer = world.producer()
    ticket = producer.put("a", b"x" * 80)
    world.lost = {GiveUp}
    producer.do(producer.session.abandon(ticket))
    world.settle()
    assert world.admission.rooms.num_waiting == 1
    world.lost = set()
    world.held.clear()
    world.pass_time(0.1)
    assert (world.admission.rooms.num_waiting, world.admission.rooms.reserved("")) == (0, (0, 0))
    assert not world.held


def full_after_credit() -> tuple[World, Producer]:
    """A producer with credit, and a table that is full by now."""
    world = World(limit=1000, credit=64)
    producer = world.producer()
    world.admission.offer_room(world.now)
    producer.put("a", b"x")
    world.limit = 0
    return world, producer


def test_a_put_on_credit_that_is_cancelled_before_it_hears_of_its_place_leaves_the_line() -> None:
    world, producer = full_after_credit()
    world.lost = {Rejected}
    ticket = producer.put("b", b"x")
    assert world.admission.rooms.num_waiting == 1
    producer.do(producer.session.abandon(ticket))
    world.settle()
    assert world.admission.rooms.num_waiting == 0


def test_a_put_that_arrives_after_its_give_up_gets_no_place_to_stay() -> None:
    world, producer = full_after_credit()
    (ticket,), events = producer.session.put([PutRequest(group="b", frame=b"x", digest=b"b")], world.now)
    producer.do(producer.session.abandon(ticket))
    producer.do(events)
    world.turn()
    assert world.admission.rooms.num_waiting == 1
    world.settle()  # it was told that it must wait, and does not know of it
    assert world.admission.rooms.num_waiting == 0


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
    assert world.admission.rooms.num_waiting == 1
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
    assert world.admission.rooms.num_waiting == 1
    world.held.clear()
    world.pass_time(0.5)
    assert isinstance(producer.answers[ticket], Accepted)
    assert producer.num_said(Put) == 1


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


def test_values_to_attach_are_asked_after_and_sent_again_only_if_they_are_lost() -> None:
    world = World()
    producer = world.producer()
    world.lost = {AttachValues}
    attach = AttachValues(ticket=0, column="teacher_logprobs", values={}, groups=("g",))
    ticket, events = producer.session.ask(lambda ticket: replace(attach, ticket=ticket), world.now, (b"values",))
    producer.do(events)
    world.pass_time(0.1)
    assert producer.num_said(AttachValues) == 1
    world.lost = {Accepted}  # the answer
    world.pass_time(1.0)
    said = producer.num_said(AttachValues)
    assert (said, world.counted) == (2, 1)
    world.lost = set()
    world.pass_time(1.0)
    assert isinstance(producer.answers[ticket], Accepted)
    assert (producer.num_said(AttachValues), world.counted) == (said, 1)


def test_stored_frames_are_taken_from_writers_only() -> None:
    world = World()
    stored = StoredFrame(group="g", base="a", location="b", metadata=b"", digest=b"", values={})
    message = AttachValues(ticket=1, column="teacher_logprobs", values={}, stored=(stored,))
    world.admission = Admission(
        run="r",
        run_id=world.run_id,
        epoch=1,
        ranks=1,
        tables=world,
        peer_s=TIMES.peer_s,
        pulse=lambda: Pulse(epoch=1, session=0, waiting_for=""),
        may_write=lambda peer: peer == "writer",
    )
    (refused,) = world.admission.on_message("p", message, ())
    assert isinstance(refused, Send) and isinstance(refused.message, Rejected)
    assert "needs a writer key" in refused.message.reason
    (taken,) = world.admission.on_message("writer", message, ())
    assert isinstance(taken, Decide)


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
