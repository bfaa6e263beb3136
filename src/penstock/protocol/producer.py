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

**A group for which there may be no room stays here.** The plane's answers carry *credit*: the groups and bytes that
may be under way without asking. A put beyond that asks first, and waits for `Room` in the plane's line.

    ask room g      -> rejected g: Overloaded      asked again every heartbeat: that keeps its place
                    <- room g                      a step was committed
    put g (1.5 MB)  -> accepted g, credit
    put h           ->                             on credit, without a question

Credit reserves nothing. A put that was sent on credit and is rejected as `Overloaded` has a place in line and waits
here like one that asked. What is told about a put that is unknown here, because it was cancelled, is answered with
`GiveUp`: so the plane keeps no place for it.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

import msgspec

from penstock.errors import Fenced, PeerError, PenstockError, PlaneLost
from penstock.protocol.message_header import NO_RUN
from penstock.protocol.messages import (
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
    SegmentOpened,
    SignedUrls,
    Status,
    Trace,
)
from penstock.protocol.retry import Contact, Failed, Out, Pending
from penstock.protocol.rooms import NOTHING, Amount
from penstock.protocol.timeouts import Timeouts

Answer: TypeAlias = Accepted | Rejected | Status | Attached | SegmentOpened | SignedUrls | Room


@dataclass(frozen=True, slots=True)
class Answered:
    """What a question was answered. `Room` is no end: write the frame to storage, then say `written`."""

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
    """Whether room was asked for and there is no answer yet."""
    is_on_credit: bool = False
    """Whether it was sent without asking, and there is no answer yet."""
    size: int = 0
    """Bytes of its frame."""
    is_unwritten: bool = False
    """Whether the caller is to write the frame to storage itself, and has not yet."""
    is_granted: bool = False
    """Whether the caller was told to write it."""

    @property
    def put(self) -> Put:
        assert isinstance(self.message, Put)
        return self.message

    def ask_room(self) -> AskRoom:
        put = self.put
        return AskRoom(
            ticket=put.ticket,
            run=self.run(),
            size=self.size,
            waits=self.waits,
            group=put.group,
            digest=put.digest,
        )

    def reminders(self) -> list[Event]:
        """What to say while there is no answer."""
        put = self.put
        if self.refused is not None or self.is_unwritten:  # room that is reserved stays so while it is mentioned
            return [Out(self.ask_room())] if not self.is_on_credit else []
        if put.location:
            return [Out(put)]
        trace = Trace(ticket=put.ticket, group=put.group, digest=put.digest)
        return [Out(trace, BEHIND), Out(trace)]


def _is_written_on_credit(question: Pending) -> bool:
    """Whether the caller still writes the frame of a put that the plane has not heard of."""
    return isinstance(question, _Put) and question.is_unwritten and question.is_on_credit


class ProducerSession:
    """One client that puts groups, or looks on. `where` names the plane in errors."""

    def __init__(
        self,
        *,
        run: str = "",
        where: str = "the plane",
        timeouts: Timeouts | None = None,
    ) -> None:
        self.timeouts = timeouts or Timeouts()
        self.run, self.where = run, where
        self.run_id = NO_RUN
        """Of the run this client belongs to; everything it says carries it."""
        self.policy_version: int | None = None
        """The version of the weights that was published last, as far as is known here."""
        self._tickets = itertools.count(1)
        self._open: dict[int, Pending] = {}
        self._credit, self._credit_until = NOTHING, 0.0
        """What may be under way without asking, as last heard, and until when that counts."""
        self._on_credit = NOTHING
        """What is."""
        self._max_frame = 0
        """Bytes of the largest frame that can be sent to the plane; 0: not known."""
        self._attach: Pending | None = None
        self._contact = Contact(self.timeouts.plane_s / 4)

    # -------------------------------------------------------------- questions

    def ask(self, make: Callable[[int], FromClient], now: float) -> tuple[int, list[Event]]:
        """Ask something small; returns the ticket that comes back with the answer."""
        ticket = self._next_ticket(now)
        question = self._open[ticket] = Pending(make(ticket), now, self.timeouts.resend_s)
        return ticket, self._begin(question, now)

    def put(
        self,
        group: str,
        frame: Buffer | None,
        digest: bytes,
        now: float,
        *,
        size: int = 0,
        run: Callable[[], str] = str,
        waits: bool = True,
        evaluation: bool = False,
        priority: float = 1.0,
    ) -> tuple[int, list[Event]]:
        """Hand a group over. `waits`: keep it here while the plane has no room, rather than answer `Overloaded`.
        `evaluation`: no table has to have room for it. Without a frame it is answered with `Room` first: then the
        caller writes the frame, of `size` bytes, to storage and says `written`."""
        ticket = self._next_ticket(now)
        message = Put(ticket=ticket, group=group, digest=digest, evaluation=evaluation, priority=priority)
        frames = [] if frame is None else [frame]
        size = size if frame is None else len(frame)
        question = _Put(
            message, now, self.timeouts.resend_s, frames, run=run, waits=waits, size=size, is_unwritten=frame is None
        )
        self._open[ticket] = question
        too_large = self._too_large(question)
        if too_large is not None:
            return ticket, [too_large]
        return ticket, self._begin(question, now)

    def written(self, ticket: int, location: str, metadata: bytes, shown: bytes, now: float) -> list[Event] | None:
        """The frame of a put is in storage. None if the plane was lost meanwhile."""
        question = self._open.get(ticket)
        if not isinstance(question, _Put):
            return None
        question.is_unwritten = False
        question.message = msgspec.structs.replace(question.put, location=location, metadata=metadata, shown=shown)
        question.ask_anew(now, self.timeouts.resend_s)
        return [Out(question.message)]

    def _too_large(self, question: Pending) -> Event | None:
        """The answer to a group that cannot be sent: the plane would end the connection, time and again."""
        size = sum(len(frame) for frame in question.frames)
        if not isinstance(question, _Put) or not 0 < self._max_frame < size:
            return None
        put = question.put
        self._close(put.ticket)
        reason = (
            f"group {put.group!r}: {size:,} bytes; {self.where} takes at most {self._max_frame:,} (max_held_bytes and "
            "max_group_bytes bound it); put smaller groups"
        )
        return Answered(put.ticket, Rejected(ticket=put.ticket, kind="InvalidInput", reason=reason))

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
        """Forget a question. The plane is told if it may keep a place in line, or room, for it."""
        question = self._close(ticket)
        may_wait = isinstance(question, _Put) and not question.put.evaluation and self.run_id != NO_RUN
        return [Out(GiveUp(ticket=ticket))] if may_wait else []

    def _close(self, ticket: int) -> Pending | None:
        question = self._open.pop(ticket, None)
        if isinstance(question, _Put):
            self._refund(question)
        return question

    def _next_ticket(self, now: float) -> int:
        if not self._open:
            self._contact.hear(now)  # silence begins when something is asked
        return next(self._tickets)

    def _begin(self, question: Pending, now: float) -> list[Event]:
        """Say it now, or as soon as it is known which run this is."""
        if self.run_id != NO_RUN:
            return self._first(question, now)
        if self._attach is not None:
            return []
        self._attach = Pending(Attach(ticket=0, run=self.run), now, self.timeouts.resend_s)
        return [Out(self._attach.message)]

    # -------------------------------------------------------------- credit

    def _hear_credit(self, message: Attached | Accepted | Pulse, now: float) -> None:
        self._credit = Amount(message.credit_groups, message.credit_bytes)
        self._credit_until = now + self.timeouts.peer_s

    def _spend(self, put: _Put, now: float) -> bool:
        """Whether a put may be sent without asking."""
        groups, size = self._on_credit.groups + 1, self._on_credit.bytes + put.size
        if now > self._credit_until or groups > self._credit.groups or size > self._credit.bytes:
            return False
        self._on_credit, put.is_on_credit = Amount(groups, size), True
        return True

    def _refund(self, put: _Put) -> None:
        """A put was answered, or is forgotten."""
        if put.is_on_credit:
            put.is_on_credit = False
            self._on_credit = Amount(self._on_credit.groups - 1, self._on_credit.bytes - put.size)

    # -------------------------------------------------------------- messages

    def on_message(self, message: FromPlane, now: float) -> list[Event]:
        self._contact.hear(now)
        if isinstance(message, (Attached, Accepted, Room, Pulse)):
            self.policy_version = message.policy_version
        if isinstance(message, (Attached, Accepted, Pulse)):
            self._hear_credit(message, now)
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
        if isinstance(message, (Accepted, Status, Attached, SegmentOpened, SignedUrls)):
            question = self._close(message.ticket)
            return [Answered(message.ticket, message)] if question is not None else []
        return []

    def _on_attached(self, message: Attached, now: float) -> list[Event]:
        """Everything that was asked meanwhile goes out now."""
        if self.run_id != NO_RUN:
            return []
        self.run_id, self._attach, self._max_frame = message.run_id, None, message.max_frame
        rejected = [event for question in list(self._open.values()) if (event := self._too_large(question))]
        for question in self._open.values():
            question.ask_anew(now, self.timeouts.resend_s)
        sent = [event for question in self._open.values() for event in self._first(question, now)]
        return [*rejected, *sent]

    def _first(self, question: Pending, now: float) -> list[Event]:
        """What is said of a question at first."""
        if isinstance(question, _Put) and not question.put.evaluation and not self._spend(question, now):
            words = f"group {question.put.group!r}: {self.where} has not answered yet"
            question.refused = Rejected(ticket=question.put.ticket, kind="Overloaded", reason=words)
            question.is_unheard = True
            return [Out(question.ask_room())]
        return self._send_or_write(question)

    def _send_or_write(self, question: Pending) -> list[Event]:
        """Send what there is to send; or have the caller write the frame first."""
        if not isinstance(question, _Put) or not question.is_unwritten:
            return [Out(question.message, question.frames)]
        if question.is_granted:
            return []
        question.is_granted = True
        return [Answered(question.put.ticket, Room(ticket=question.put.ticket, policy_version=self.policy_version))]

    def _on_rejected(self, message: Rejected, now: float) -> list[Event]:
        question = self._open.get(message.ticket)
        if question is None:
            return [Out(GiveUp(ticket=message.ticket))] if message.kind == "Overloaded" else []
        if message.kind != "Overloaded" or not isinstance(question, _Put):
            self._close(message.ticket)
            return [Answered(message.ticket, message)]
        self._credit = NOTHING
        self._refund(question)
        has_asked, question.is_unheard = question.refused is not None, False
        if has_asked:  # the plane knows its size only
            message = msgspec.structs.replace(message, reason=f"group {question.put.group!r}: {message.reason}")
        if not question.waits:
            return [*self.abandon(message.ticket), Answered(message.ticket, message)]
        question.refused = message
        if has_asked:
            return []
        question.ask_anew(now, self.timeouts.resend_s)
        return [Out(question.ask_room())]

    def _on_room(self, ticket: int, now: float) -> list[Event]:
        question = self._open.get(ticket)
        if question is None:
            return [Out(GiveUp(ticket=ticket))]
        if not isinstance(question, _Put) or question.refused is None:
            return []
        question.refused, question.is_unheard = None, False
        return self._send_again(ticket, now)

    def _send_again(self, ticket: int, now: float) -> list[Event]:
        question = self._open.get(ticket)
        if not isinstance(question, _Put) or question.refused is not None:
            return []
        question.ask_anew(now, self.timeouts.resend_s)
        return self._send_or_write(question)

    # -------------------------------------------------------------- time

    def on_tick(self, now: float) -> list[Event]:
        """Ask again, notice silence. Call it at least twice per `resend_s`."""
        silent = self._contact.tick(now)
        if not self._open:
            return []
        if all(map(_is_written_on_credit, self._open.values())):
            self._contact.hear(now)  # nothing was asked yet: silence means nothing, however long a write takes
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
            # The plane keeps room reserved for a put that is under way while it is reminded of it.
            least_s = self.timeouts.heartbeat_s if waits else min(self.timeouts.plane_s / 4, self.timeouts.peer_s / 3)
            question.asked(now, least_s)
            return question.reminders()
        question.asked(now, self.timeouts.heartbeat_s)
        return [Out(question.message, question.frames)]

    def _end(self, error: PenstockError) -> list[Event]:
        """Nothing that is open will be answered; what is asked next begins anew."""
        self._open, self._attach, self._on_credit = {}, None, NOTHING
        return [Failed(error)]
