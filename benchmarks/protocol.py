"""What one step costs the plane in messages: the real coordinator and rank sessions, no network, no payloads."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeAlias

from penstock.protocol.admission import Admission
from penstock.protocol.coordinator import Coordinator
from penstock.protocol.effects import Effect, Send, StepCommitted
from penstock.protocol.message_header import Packer, pack_message, read_from_client
from penstock.protocol.messages import Attach
from penstock.protocol.rank_session import Arrived, Event, RankSession
from penstock.protocol.retry import Out
from penstock.protocol.rooms import NOTHING, Amount
from penstock.protocol.steps import Staged

_Sent: TypeAlias = list[tuple[object, Event]]


def protocol_time(ranks: int, *, steps: int = 5, clock: Callable[[], float] = time.perf_counter) -> float:
    """Seconds the plane spends on one step of `ranks` ranks: the best of `steps`.

    Each rank asks, says that it has the step, beats once and commits. Each message is read and handled on its own, as
    if it had arrived alone; each answer is packed.
    """
    bench = _Bench(ranks, clock)
    bench.each(lambda rank: rank.start(bench.now))
    return min(bench.step(number) for number in range(1, steps + 1))


class _NoTables:
    """There are no producers here."""

    def table_of(self, run: str) -> str:
        return run

    def recognises(self, _group: str, _digest: bytes) -> None:
        return None

    def no_room(self, _table: str, _size: int, _reserved: Amount) -> str:
        return ""

    def spare(self, _reserved: Amount) -> Amount:
        return NOTHING


class _Bench:
    def __init__(self, ranks: int, clock: Callable[[], float]) -> None:
        self.now, self._spent, self._clock = 0.0, 0.0, clock
        self._pack = Packer()
        self._plane = Coordinator(run="bench", ranks=ranks, epoch=1)
        self._admission = Admission(
            run="bench",
            run_id=bytes(range(16)),
            epoch=1,
            ranks=ranks,
            tables=_NoTables(),
            peer_s=self._plane.timeouts.peer_s,
            pulse=lambda: self._plane.pulse(self.now),
        )
        self._ranks = [
            RankSession(run="bench", rank=rank, world=ranks, step=1, incarnation=str(rank)) for rank in range(ranks)
        ]

    def step(self, number: int) -> float:
        """One step of everybody; returns the plane's seconds."""
        self._spent, size = 0.0, len(self._ranks)
        self.each(lambda rank: rank.request(number, self.now))
        digests = [f"{number:032d}"] * size
        staged = Staged(step=number, plans=[b"plan"] * size, payloads=[(b"",)] * size, digests=digests)
        self._talk(self._timed(lambda: self._plane.stage(staged, self.now)))
        self.now += self._plane.timeouts.heartbeat_s
        self.each(lambda rank: rank.on_tick(self.now))
        self.each(lambda rank: rank.commit(number, None, self.now))
        return self._spent

    def each(self, act: Callable[[RankSession], list[Event]]) -> None:
        """Every rank does something, and everybody answers until there is nothing left to say."""
        sent: _Sent = [(peer, event) for peer, rank in enumerate(self._ranks) for event in act(rank)]
        self._talk(self._hear(sent))

    def _talk(self, effects: list[Effect]) -> None:
        while effects:
            sent = [
                (effect.peer, event) for effect in effects if isinstance(effect, Send) for event in self._answer(effect)
            ]
            effects = self._hear(sent)

    def _answer(self, effect: Send) -> list[Event]:
        assert isinstance(effect.peer, int)
        rank = self._ranks[effect.peer]
        events = rank.on_message(effect.message, effect.frames, self.now)
        arrived = [event.deliver for event in events if isinstance(event, Arrived)]
        return events + [event for got in arrived for event in rank.received(got.step, got.digest, self.now)]

    def _hear(self, sent: _Sent) -> list[Effect]:
        headers = [(peer, pack_message(event.message)) for peer, event in sent if isinstance(event, Out)]
        return self._timed(lambda: [effect for peer, header in headers for effect in self._handle(peer, header)])

    def _handle(self, peer: object, header: bytes) -> list[Effect]:
        message = read_from_client(header)
        if isinstance(message, Attach):
            return [self._admission.on_attach(peer, message)]
        effects = self._plane.on_message(peer, message, self.now)  # type: ignore[arg-type]
        assert self._plane.wanted >= 0  # as the server looks after every turn
        for effect in effects:
            if isinstance(effect, StepCommitted):
                effects = effects + self._plane.committed(effect.session, effect.step)
        return effects

    def _timed(self, act: Callable[[], list[Effect]]) -> list[Effect]:
        began = self._clock()
        effects = act()
        for effect in effects:
            if isinstance(effect, Send):
                self._pack(effect.message)
        self._spent += self._clock() - began
        return effects
