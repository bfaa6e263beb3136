"""A producer's side of the protocol, as a state machine without I/O or a clock of its own.

It asks questions (put this group, count these samples, what is the status) and asks again until each is answered. The
first thing it asks is which run it talks to. Two things are not like other questions, because a group is large:

**A group that was sent is not sent again** before the plane says that it did not come: on a slow link it may still be
on its way, and a copy behind it would make every later one later still. What goes out is a `Trace`, which takes the
group's way and arrives after it, or instead of it.

    put g (1.5 MB)  ->
    trace g         ->                 no answer yet: asked behind the group
                    <- missing g       it was lost: now it is sent again
    put g (1.5 MB)  ->
                    <- accepted g

**A group that was refused for want of room stays here** until there is room. `AskRoom` is asked instead, also for
groups put meanwhile; `Room` comes when the trainer has taken something.

    put g (1.5 MB)  -> rejected g: Overloaded
    ask room g      -> rejected g: Overloaded      asked again now and then, in case an answer was lost
                    <- room g                      a step was committed
    put g (1.5 MB)  -> accepted g
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

import msgspec

from penstock.errors import Fenced, PeerError, PenstockError, PlaneLost
from penstock.send.message_header import NO_RUN
from penstock.send.messages import (
    BEHIND,
    Accepted,
    AskRoom,
    Attach,
    Attached,
    Buffer,
    Foreign,
    FromClient,
    FromPlane,
    GiveUp,
    Missing,
    Pulse,
    Put,
    Refused,
    Rejected,
    Room,
    Status,
    Trace,
)
from penstock.send.retry import Contact, Failed, Out, Pending
from penstock.send.timeouts import Timeouts

Answer: TypeAlias = Accepted | Rejected | Status | Attached


@dataclass(frozen=True, slots=True)
class Answered:
    """What a question was answered."""

    ticket: int
    answer: Answer


Event: TypeAlias = Out | Answered | Failed


@dataclass(slots=True, eq=False)
class _Put(Pending):
    """A group that was not acknowledged yet."""

    run: Callable[[], str] = str
    """Of its samples; found when it matters, for that means to look into the frame."""
    waits: bool = True
    """Whether it may wait for room."""
    refused: Rejected | None = None
    """Why it waits here; None while it is on its way."""
    is_unheard: bool = False
    """Whether it was asked about and there is no word yet, of room or of none."""

    @property
    def put(self) -> Put:
        assert isinstance(self.message, Put)
        return self.message

    def ask_room(self) -> AskRoom:
        put = self.put
        size = len(self.frames[0])
        return AskRoom(ticket=put.ticket, run=self.run(), size=size, waits=self.waits, evaluation=put.evaluation)

    def reminders(self) -> list[Event]:
        """What to say while there is no answer."""
        put = self.put
        if self.refused is not None:
            return [Out(self.ask_room())]
        trace = Trace(ticket=put.ticket, group=put.group, digest=put.digest)
        return [Out(trace, BEHIND), Out(trace)]


class ProducerSession:
    """One client that puts groups, or looks on. `where` names the plane in errors."""

    def __init__(
        self,
        *,
        run: str = "",
        where: str = "the plane",
        node: str = "",
        asks_first: bool = False,
        timeouts: Timeouts | None = None,
    ) -> None:
        """`asks_first`: no group is sent before there is room for it, as keepers want it."""
        self.timeouts = timeouts or Timeouts()
        self.run, self.where, self._node, self._asks_first = run, where, node, asks_first
        self.run_id = NO_RUN
        """Of the run this client belongs to; everything it says carries it."""
        self.policy_version: int | None = None
        """The version of the weights that was published last, as far as is known here."""
        self._tickets = itertools.count(1)
        self._open: dict[int, Pending] = {}
        self._full: set[str] = set()
        """Runs (of samples) that the plane has no room for."""
        self._attach: Pending | None = None
        self._contact = Contact(self.timeouts.plane_s / 4)

    # -------------------------------------------------------------- questions

    def ask(self, make: Callable[[int], FromClient], now: float) -> tuple[int, list[Event]]:
        """Ask something small; returns the ticket that comes back with the answer."""
        ticket = self._next_ticket(now)
        question = self._open[ticket] = Pending(make(ticket), now, self.timeouts.resend_s)
        return ticket, self._say(Out(question.message), now)

    def put(
        self,
        group: str,
        frame: Buffer,
        digest: bytes,
        now: float,
        *,
        run: Callable[[], str] = str,
        waits: bool = True,
        evaluation: bool = False,
        priority: float = 1.0,
    ) -> tuple[int, list[Event]]:
        """Hand a group over. `waits`: keep it here while the plane has no room, rather than answer `Overloaded`.
        `evaluation`: no table has to have room for it."""
        ticket = self._next_ticket(now)
        message = Put(ticket=ticket, group=group, digest=digest, evaluation=evaluation, priority=priority)
        question = _Put(message, now, self.timeouts.resend_s, [frame], run=run, waits=waits)
        self._open[ticket] = question
        if self._asks_first or (self._full and not evaluation and run() in self._full):
            words = f"{self.where} has not answered yet" if self._asks_first else "no room"
            question.refused = Rejected(ticket=ticket, kind="Overloaded", reason=f"group {group!r}: {words}")
            question.is_unheard = True
            return ticket, self._say(Out(question.ask_room()), now)
        return ticket, self._say(Out(message, question.frames), now)

    def stop_waiting(self, ticket: int) -> tuple[Rejected | None, list[Event]]:
        """Give a group back that waits for room, with the reason; None if it does not wait for that, or nobody has
        said yet whether there is some: the answer says it."""
        question = self._open.get(ticket)
        if not isinstance(question, _Put):
            return None, []
        question.waits = False
        if question.refused is None or question.is_unheard:
            return None, []
        return question.refused, self.abandon(ticket)

    def abandon(self, ticket: int) -> list[Event]:
        """Nobody waits for this answer any more."""
        question = self._open.pop(ticket, None)
        is_in_line = isinstance(question, _Put) and question.refused is not None and self.run_id != NO_RUN
        return [Out(GiveUp(ticket=ticket))] if is_in_line else []

    def _next_ticket(self, now: float) -> int:
        if not self._open:
            self._contact.hear(now)  # silence begins when something is asked
        return next(self._tickets)

    def _say(self, out: Out, now: float) -> list[Event]:
        """Now, or as soon as it is known which run this is."""
        if self.run_id != NO_RUN:
            return [out]
        if self._attach is not None:
            return []
        self._attach = Pending(Attach(ticket=0, run=self.run, node=self._node), now, self.timeouts.resend_s)
        return [Out(self._attach.message)]

    # -------------------------------------------------------------- messages

    def on_message(self, message: FromPlane, now: float) -> list[Event]:
        self._contact.hear(now)
        if isinstance(message, (Attached, Accepted, Room, Pulse)):
            self.policy_version = message.policy_version
        if isinstance(message, Foreign):
            return self._end(Fenced(f"{self.where}: {message.reason}"))
        if isinstance(message, Refused):
            return self._end(PeerError(f"{self.where}: the plane refused: {message.reason}"))
        if isinstance(message, Missing):
            return self._send_again(message.put, now)
        if isinstance(message, Room):
            return self._on_room(message.ticket, now)
        if isinstance(message, Rejected):
            return self._on_rejected(message, now)
        if isinstance(message, Attached) and message.ticket == 0:
            return self._on_attached(message, now)
        if isinstance(message, (Accepted, Status, Attached)):
            question = self._open.pop(message.ticket, None)
            if self._full and isinstance(question, _Put) and not question.put.evaluation:
                self._full.discard(question.run())
            return [Answered(message.ticket, message)] if question is not None else []
        return []

    def _on_attached(self, message: Attached, now: float) -> list[Event]:
        """Everything that was asked meanwhile goes out now."""
        if self.run_id != NO_RUN:
            return []
        self.run_id, self._attach = message.run_id, None
        for question in self._open.values():
            question.ask_anew(now, self.timeouts.resend_s)
        return [self._first(question) for question in self._open.values()]

    def _first(self, question: Pending) -> Out:
        """What is said of a question at first."""
        if isinstance(question, _Put) and question.refused is not None:
            return Out(question.ask_room())
        return Out(question.message, question.frames)

    def _on_rejected(self, message: Rejected, now: float) -> list[Event]:
        question = self._open.get(message.ticket)
        if question is None:
            return []
        if message.kind != "Overloaded" or not isinstance(question, _Put):
            self._open.pop(message.ticket)
            return [Answered(message.ticket, message)]
        self._full.add(question.run())
        question.is_unheard = False
        if not question.waits:
            return [*self.abandon(message.ticket), Answered(message.ticket, message)]
        if question.refused is not None:  # it was asked about; there will be word when there is room
            reason = f"group {question.put.group!r}: {message.reason}"
            question.refused = msgspec.structs.replace(message, reason=reason)
            return []
        question.refused = message
        question.ask_anew(now, self.timeouts.resend_s)
        return [Out(question.ask_room())]

    def _on_room(self, ticket: int, now: float) -> list[Event]:
        question = self._open.get(ticket)
        if not isinstance(question, _Put) or question.refused is None:
            return []
        self._full.discard(question.run())
        question.refused, question.is_unheard = None, False
        return self._send_again(ticket, now)

    def _send_again(self, ticket: int, now: float) -> list[Event]:
        question = self._open.get(ticket)
        if not isinstance(question, _Put) or question.refused is not None:
            return []
        question.ask_anew(now, self.timeouts.resend_s)
        return [Out(question.message, question.frames)]

    # -------------------------------------------------------------- time

    def on_tick(self, now: float) -> list[Event]:
        """Ask again, notice silence. Call it at least twice per `resend_s`."""
        silent = self._contact.tick(now)
        if not self._open:
            return []
        if silent > self.timeouts.plane_s:
            return self._end(PlaneLost(f"{self.where}: no answer for {silent:.1f} s; is the plane running?"))
        if self._attach is not None:
            return self._remind(self._attach, now)
        return [event for question in self._open.values() for event in self._remind(question, now)]

    def _remind(self, question: Pending, now: float) -> list[Event]:
        if not question.is_due(now):
            return []
        if isinstance(question, _Put):
            waits = question.refused is not None
            question.asked(now, self.timeouts.heartbeat_s if waits else self.timeouts.plane_s / 4)
            return question.reminders()
        question.asked(now, self.timeouts.heartbeat_s)
        return [Out(question.message, question.frames)]

    def _end(self, error: PenstockError) -> list[Event]:
        """Nothing that is open will be answered; what is asked next begins anew."""
        self._open, self._attach = {}, None
        return [Failed(error)]
