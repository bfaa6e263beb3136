"""Producers of a simulated run: they put several groups at once, give up, are cancelled, crash and restart."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from functools import partial
from typing import TYPE_CHECKING

import msgspec
import xxhash

from penstock.errors import PenstockError, PlaneLost
from penstock.protocol.message_header import read_from_plane
from penstock.protocol.messages import Accepted, Frames, Rejected
from penstock.protocol.producer import Answered, ProducerSession, PutRequest
from penstock.protocol.producer import Event as ProducerEvent
from penstock.protocol.retry import Out
from tests.support.plain_groups import run_of_group
from tests.support.simulated import Process

if TYPE_CHECKING:
    from tests.support.simulation import Simulation


class Producer(Process):
    """Puts numbered groups, `at_once` at a time, each until it is accepted. Restarts after a crash."""

    passing: Collection[str] = ("Overloaded", "DiskFull")
    """What may be answered to a put while there are faults."""

    def __init__(
        self, world: Simulation, number: int, groups: Iterator[int], *, evaluation: bool = False, at_once: int = 1
    ) -> None:
        super().__init__(world, f"producer{number}")
        self._groups, self._evaluation, self._at_once = groups, evaluation, at_once
        self._frames: dict[str, bytes] = {}
        """Groups at hand: made, and not accepted yet."""
        self._session: ProducerSession
        self._tickets: dict[int, str] = {}
        """Puts under way."""

    def start(self) -> None:
        if not self.may_start:
            return
        self.up, self.life = True, self.life + 1
        self._session = self._new_session()
        self._tickets = {}
        for _ in range(self._at_once):
            self.put()
        self.tick()

    def _new_session(self) -> ProducerSession:
        return ProducerSession(run="simulated", timeouts=self.world.timeouts)

    def tick(self) -> None:
        life = self.life

        def look() -> None:
            if self.life == life:
                self.handle(self._session.on_tick(self.world.clock.now))
                self.world.clock.after(self.world.timeouts.resend_s / 2, lambda: self.hears(look))

        self.hears(look)

    def put(self) -> None:
        """Return a group at hand that has no put under way, or the next one."""
        if not self.up or len(self._tickets) >= self._at_once:
            return
        under_way = set(self._tickets.values())
        group = next((group for group in self._frames if group not in under_way), None) or self._make()
        if group is not None:
            self._put(group)
        elif not self._frames:
            self.stop()

    def _make(self) -> str | None:
        number = next(self._groups, None)
        if number is None:
            return None
        group = f"{'e' if self._evaluation else 'g'}{number}"
        self._frames[group] = msgspec.msgpack.encode((group, 1 + number % 3, self.world.published))
        return group

    def _put(self, group: str) -> None:
        frame, run, now = self._frames[group], run_of_group(group), self.world.clock.now
        waits = self.world.rng.random() < 0.8
        request = PutRequest(
            group=group,
            frame=frame,
            digest=xxhash.xxh3_128_digest(frame),
            run=lambda: run,
            waits=waits,
            evaluation=self._evaluation,
        )
        (ticket,), events = self._session.put([request], now)
        self._tickets[ticket] = group
        if self.world.happens(self.world.faults.give_up):
            self.world.clock.after(0.3, lambda: self.hears(partial(self.give_up, ticket)))
        if self.world.cancels():
            self.world.clock.after(self.world.cancel_s(), lambda: self.hears(partial(self.cancel, ticket)))
        self.handle(events)

    def give_up(self, ticket: int) -> None:
        """As a put with a timeout does; and then it puts the same group again."""
        if ticket in self._tickets:
            refused, events = self._session.stop_waiting(ticket)
            self.handle(events)
            if refused is not None:
                self.again(ticket)

    def cancel(self, ticket: int) -> None:
        """Cancel as a cancelled task does, whatever its put waits for."""
        if ticket in self._tickets:
            self.world.oracle.left(self.peer, ticket)
            self.handle(self._session.abandon(ticket))
            self.again(ticket)

    def again(self, ticket: int) -> None:
        self._tickets.pop(ticket, None)
        self.world.clock.after(self.world.rng.random() * 0.2, lambda: self.hears(self.put))

    def receive(self, header: bytes, _frames: Frames) -> None:
        self.handle(self._session.on_message(read_from_plane(header), self.world.clock.now))

    def handle(self, events: list[ProducerEvent]) -> None:
        for event in events:
            if isinstance(event, Out):
                self.world.oracle.sent(self, event)
                self.say(event.message, event.frames, self._session.run_id)
            elif isinstance(event, Answered):
                self.answered(event)
            else:
                self.world.note(f"{self.name} raised {type(event.error).__name__}: {event.error}")
                self.failed(event.error)

    def failed(self, error: PenstockError) -> None:
        assert isinstance(error, PlaneLost), error
        for ticket in list(self._tickets):
            self.world.oracle.left(self.peer, ticket)
            self.again(ticket)

    def answered(self, event: Answered) -> None:
        group = self._tickets.get(event.ticket)
        if group is None:
            return
        if isinstance(event.answer, Accepted):
            self.world.oracle.acknowledged(group)
            del self._frames[group]
        else:
            assert isinstance(event.answer, Rejected), event.answer
            assert event.answer.kind in self.passing, event.answer
        self.again(event.ticket)

    def crash(self) -> None:
        self.world.oracle.left(self.peer)
        self.stop()
        self.world.clock.after(0.05 + self.world.rng.random(), self.start)
