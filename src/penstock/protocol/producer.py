"""A producer's side of the protocol: a state machine without I/O or a clock of its own.

It sends requests (put this group, count these samples, what is the status) and repeats each until it is answered. Its
first request asks which run this is. Puts differ from other requests in two ways, because a group is large:

**A group is not sent again** until the plane reports that it did not arrive. On a slow link it may still be in transit,
and a second copy would delay everything behind it. Instead the producer sends a `Trace` on the same connection, which
arrives after the group, or instead of it.

    put g (1.5 MB)  ->
    trace g         ->                 no answer yet: ask behind the group
                    <- missing g       it was lost: now it is sent again
    put g (1.5 MB)  ->
                    <- accepted g

**A group stays with the producer until there is room.** The plane's answers carry *credit*: how many groups and bytes
may be unanswered without asking. A put beyond that asks first, and waits for `Room` in the plane's queue.

    ask room g      -> rejected g: Overloaded      repeated every heartbeat, which keeps its place in the queue
                    <- room g                      a step was committed
    put g (1.5 MB)  -> accepted g, credit
    put h           ->                             on credit, without asking

**Puts of one batch stay in order.** All of them go on credit, or all of them ask: one that was sent on credit could
otherwise find no room and be overtaken by a later one that had asked.

Credit reserves nothing. A put that was sent on credit and rejected as `Overloaded` has a place in the queue and waits
like one that asked. A message about a put that was cancelled here is answered with `GiveUp`: the plane then keeps no
place for it.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import msgspec

from penstock.errors import Fenced, PeerError, PenstockError, PlaneLost
from penstock.protocol.lease_messages import (
    AttachValues,
    ColumnsLeased,
    Feedback,
    PromptsOffered,
    Renewed,
    TasksLeased,
    ValuesAttached,
)
from penstock.protocol.message_header import NO_RUN
from penstock.protocol.messages import (
    BEHIND,
    Accepted,
    Answers,
    AskRoom,
    Attach,
    Attached,
    Buffer,
    Foreign,
    Frames,
    FromClient,
    FromPlane,
    GiveUp,
    GroupStates,
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

Answer: TypeAlias = (
    Accepted
    | Rejected
    | Status
    | Attached
    | SegmentOpened
    | SignedUrls
    | GroupStates
    | Room
    | Renewed
    | PromptsOffered
    | TasksLeased
    | ValuesAttached
    | ColumnsLeased
    | Feedback
)
_ANSWERS = (
    Accepted,
    Status,
    Attached,
    SegmentOpened,
    SignedUrls,
    GroupStates,
    Renewed,
    PromptsOffered,
    TasksLeased,
    ValuesAttached,
    ColumnsLeased,
    Feedback,
)
"""Messages that answer a request by its ticket and end it."""


@dataclass(frozen=True, slots=True)
class Answered:
    """The answer to a request. `Room` is not final: write the frame to storage, then call `written`."""

    ticket: int
    answer: Answer


Event: TypeAlias = Out | Answered | Failed


@dataclass(frozen=True, slots=True, kw_only=True)
class PutRequest:
    """A group to put."""

    group: str
    digest: bytes
    frame: Buffer | None = None
    """None if the caller writes it to storage, when it gets `Room` as the first answer."""
    size: int = 0
    """Bytes of the frame, if the caller writes it."""
    run: Callable[[], str] = str
    """Returns the tenant of its samples. Called only if room must be asked for, because it parses the frame's head."""
    env: Callable[[], str] = str
    """Returns the environment of its samples."""
    waits: bool = True
    """Whether to hold the group here while the plane has no room, instead of answering `Overloaded`."""
    evaluation: bool = False
    """An evaluation group needs no room in any table."""
    priority: float = 1.0
    advantage: str = ""
    filters: tuple[str, ...] = ()


@dataclass(slots=True, eq=False)
class _Put(Pending):
    """A group that is not acknowledged yet."""

    run: Callable[[], str] = str
    """Returns what decides where it waits: the tenant of its samples, or their environment."""
    waits: bool = True
    """Whether it may wait for room."""
    refused: Rejected | None = None
    """Why it waits for room, or None once it was sent."""
    is_unheard: bool = False
    """Whether it asked for room and has no answer yet."""
    is_on_credit: bool = False
    """Whether it was sent on credit and has no answer yet."""
    size: int = 0
    """Bytes of its frame."""
    is_unwritten: bool = False
    """Whether the caller has still to write the frame to storage."""
    is_granted: bool = False
    """Whether the caller was asked to write it."""

    @property
    def put(self) -> Put:
        assert isinstance(self.message, Put)
        return self.message

    def ask_room(self) -> AskRoom:
        put = self.put
        return AskRoom(
            ticket=put.ticket,
            tenant=self.run(),
            size=self.size,
            waits=self.waits,
            group=put.group,
            digest=put.digest,
        )

    def reminders(self) -> list[Event]:
        """Return what to send while there is no answer."""
        put = self.put
        if self.refused is not None or self.is_unwritten:  # repeating the ask keeps the place or the reservation
            return [Out(self.ask_room())] if not self.is_on_credit else []
        if put.location:
            return [Out(put)]
        return _traced(Trace(ticket=put.ticket, group=put.group, digest=put.digest))


def _traced(trace: Trace) -> list[Event]:
    """Ask after a payload twice: behind it on the payload connection, answered when it has arrived, and on the small
    connection, answered at once by a pulse, so that a slow transfer does not look like a dead plane."""
    return [Out(trace, BEHIND), Out(trace)]


def _is_written_on_credit(question: Pending) -> bool:
    """Return whether the caller is still writing a frame that the plane has no message about."""
    return isinstance(question, _Put) and question.is_unwritten and question.is_on_credit


class ProducerSession:
    """One client that puts groups or observes the plane. `where` names the plane in errors."""

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
        """The run this client belongs to. Sent with every message."""
        self.by_env = False
        """Whether groups wait for room by their environment, not by their tenant."""
        self.policy_version: int | None = None
        """The last published version of the weights that this client knows of."""
        self._tickets = itertools.count(1)
        self._open: dict[int, Pending] = {}
        self._credit, self._credit_until = NOTHING, 0.0
        """The credit last received, and when it expires."""
        self._on_credit = NOTHING
        """The credit in use."""
        self._max_frame = 0
        """Bytes of the largest frame the plane takes, or 0 if unknown."""
        self._attach: Pending | None = None
        self._contact = Contact(self.timeouts.plane_s / 4)

    @property
    def is_attached(self) -> bool:
        """Whether the plane has answered once. From then on this client knows the run."""
        return self.run_id != NO_RUN

    # -------------------------------------------------------------- questions

    def ask(self, make: Callable[[int], FromClient], now: float, frames: Frames = ()) -> tuple[int, list[Event]]:
        """Send a request, with its payload if it has one. Returns the ticket that the answer will carry."""
        ticket = self._next_ticket(now)
        question = self._open[ticket] = Pending(make(ticket), now, self.timeouts.resend_s, frames)
        too_large = self._too_large(question)
        return ticket, self._begin([question], now) if too_large is None else [too_large]

    def put(self, puts: Sequence[PutRequest], now: float) -> tuple[list[int], list[Event]]:
        """Put groups, in order. Returns their tickets. Each is answered by itself."""
        tickets: list[int] = []
        events: list[Event] = []
        questions: list[Pending] = []
        for one in puts:
            question = self._question_of(one, now)
            tickets.append(question.put.ticket)
            too_large = self._too_large(question)
            if too_large is not None:
                events.append(too_large)
            else:
                questions.append(question)
        return tickets, events + self._begin(questions, now)

    def _question_of(self, put: PutRequest, now: float) -> _Put:
        ticket = self._next_ticket(now)
        question = _Put(
            Put(
                ticket=ticket,
                group=put.group,
                digest=put.digest,
                evaluation=put.evaluation,
                priority=put.priority,
                advantage=put.advantage,
                filters=put.filters,
            ),
            now,
            self.timeouts.resend_s,
            [] if put.frame is None else [put.frame],
            run=lambda: put.env() if self.by_env else put.run(),
            waits=put.waits,
            size=put.size if put.frame is None else len(put.frame),
            is_unwritten=put.frame is None,
        )
        self._open[ticket] = question
        return question

    def written(self, ticket: int, location: str, metadata: bytes, shown: bytes, now: float) -> list[Event] | None:
        """Send a put whose frame is in storage. Returns None if the plane was lost meanwhile."""
        question = self._open.get(ticket)
        if not isinstance(question, _Put):
            return None
        question.is_unwritten = False
        question.message = msgspec.structs.replace(question.put, location=location, metadata=metadata, shown=shown)
        question.restart(now, self.timeouts.resend_s)
        return [Out(question.message)]

    def _too_large(self, question: Pending) -> Event | None:
        """Return the rejection of a frame that is too large to send, or None. If it were sent, the plane would cut the
        connection, and again at every retry."""
        size = sum(len(frame) for frame in question.frames)
        message = question.message
        if not 0 < self._max_frame < size or not isinstance(message, Put | AttachValues):
            return None
        what, fewer = "values to attach", "attach those of fewer samples at once"
        if isinstance(message, Put):
            what, fewer = f"group {message.group!r}", "put smaller groups"
        ticket = message.ticket
        self._close(ticket)
        reason = (
            f"{what}: {size:,} bytes; {self.where} takes at most {self._max_frame:,} (limited by max_held_bytes and "
            f"max_group_bytes); {fewer}"
        )
        return Answered(ticket, Rejected(ticket=ticket, kind="InvalidInput", reason=reason))

    def stop_waiting(self, ticket: int) -> tuple[Rejected | None, list[Event]]:
        """Take back a group that waits for room. Returns the plane's reason why it waits.

        Returns None if the group does not wait for room, or if the plane has not answered yet: its answer will decide.
        """
        question = self._open.get(ticket)
        if not isinstance(question, _Put):
            return None, []
        question.waits = False
        if question.refused is None or question.is_unheard:
            return None, []
        return question.refused, self.abandon(ticket)

    def why_waiting(self, tickets: Sequence[int]) -> str | None:
        """Return why the first of these groups that waits for room does so, "" if they all wait for an answer, or None
        if none of them is a group."""
        puts = [question for ticket in tickets if isinstance(question := self._open.get(ticket), _Put)]
        return next((put.refused.reason for put in puts if put.refused is not None), "") if puts else None

    def abandon(self, ticket: int) -> list[Event]:
        """Forget a request. Tells the plane if it may hold a place in its queue, or a reservation, for it."""
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
            self._contact.hear(now)  # an idle client sends nothing, so silence counts only from the first request
        return next(self._tickets)

    def _begin(self, questions: Sequence[Pending], now: float) -> list[Event]:
        """Send requests now, or as soon as the run id is known."""
        if self.run_id != NO_RUN:
            return self._first(questions, now)
        if self._attach is not None or not questions:
            return []
        self._attach = Pending(Attach(ticket=0, run=self.run), now, self.timeouts.resend_s)
        return [Out(self._attach.message)]

    # -------------------------------------------------------------- credit

    def _hear_credit(self, message: Attached | Accepted | Pulse, now: float) -> None:
        # Credit is absolute, not added up: the plane sends what may be unanswered in total. A lost or repeated message
        # then does no harm. It expires: what was free a while ago may be taken by other clients.
        self._credit = Amount(message.credit_groups, message.credit_bytes)
        self._credit_until = now + self.timeouts.peer_s

    def _spend(self, puts: Sequence[_Put], now: float) -> bool:
        """Use credit for puts. Returns False if there is not enough for all of them."""
        groups = self._on_credit.groups + len(puts)
        size = self._on_credit.bytes + sum(put.size for put in puts)
        if now > self._credit_until or groups > self._credit.groups or size > self._credit.bytes:
            return False
        self._on_credit = Amount(groups, size)
        for put in puts:
            put.is_on_credit = True
        return True

    def _refund(self, put: _Put) -> None:
        """Return a put's credit, once it is answered or forgotten."""
        if put.is_on_credit:
            put.is_on_credit = False
            self._on_credit = Amount(self._on_credit.groups - 1, self._on_credit.bytes - put.size)

    # -------------------------------------------------------------- messages

    def on_message(self, message: FromPlane, now: float) -> list[Event]:
        self._contact.hear(now)
        if isinstance(message, Answers):
            return [event for answer in message.answers for event in self.on_message(answer, now)]
        if isinstance(message, (Attached, Accepted, Room, Pulse, Renewed, TasksLeased)):
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
        if isinstance(message, _ANSWERS):
            question = self._close(message.ticket)
            return [Answered(message.ticket, message)] if question is not None else []
        return []

    def _on_attached(self, message: Attached, now: float) -> list[Event]:
        """Learn the run id, and send everything that waited for it."""
        if self.run_id != NO_RUN:
            return []
        self.run_id, self._attach, self._max_frame = message.run_id, None, message.max_frame
        self.by_env = message.by_env
        rejected = [event for question in list(self._open.values()) if (event := self._too_large(question))]
        for question in self._open.values():
            question.restart(now, self.timeouts.resend_s)
        return [*rejected, *self._first(list(self._open.values()), now)]

    def _first(self, questions: Sequence[Pending], now: float) -> list[Event]:
        """Return the first messages of requests: puts without credit ask for room instead."""
        puts = [one for one in questions if isinstance(one, _Put) and not one.put.evaluation]
        asking = set(() if self._spend(puts, now) else map(id, puts))
        events: list[Event] = []
        for question in questions:
            if isinstance(question, _Put) and id(question) in asking:
                reason = f"group {question.put.group!r}: {self.where} has not answered yet"
                question.refused = Rejected(ticket=question.put.ticket, kind="Overloaded", reason=reason)
                question.is_unheard = True
                events.append(Out(question.ask_room()))
            else:
                events += self._send_or_write(question)
        return events

    def _send_or_write(self, question: Pending) -> list[Event]:
        """Send a request, or ask the caller to write the frame to storage first."""
        if not isinstance(question, _Put) or not question.is_unwritten:
            return [Out(question.message, question.frames)]
        if question.is_granted:
            return []
        question.is_granted = True
        return [Answered(question.put.ticket, Room(ticket=question.put.ticket, policy_version=self.policy_version))]

    def _on_rejected(self, message: Rejected, now: float) -> list[Event]:
        question = self._open.get(message.ticket)
        if question is None:  # cancelled here; `Overloaded` means that the plane keeps a place for it
            return [Out(GiveUp(ticket=message.ticket))] if message.kind == "Overloaded" else []
        if message.kind != "Overloaded" or not isinstance(question, _Put):
            self._close(message.ticket)
            return [Answered(message.ticket, message)]
        self._credit = NOTHING  # the credit was too generous: ask for room until an answer brings new credit
        self._refund(question)
        has_asked, question.is_unheard = question.refused is not None, False
        if has_asked:  # the plane answered a question about a size: add the group's name to its reason
            message = msgspec.structs.replace(message, reason=f"group {question.put.group!r}: {message.reason}")
        if not question.waits:
            return [*self.abandon(message.ticket), Answered(message.ticket, message)]
        question.refused = message
        if has_asked:
            return []
        question.restart(now, self.timeouts.resend_s)
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
        if question is None or not (question.frames or isinstance(question, _Put)):
            return []
        if isinstance(question, _Put) and question.refused is not None:
            return []
        question.restart(now, self.timeouts.resend_s)
        return self._send_or_write(question)

    # -------------------------------------------------------------- time

    def on_tick(self, now: float) -> list[Event]:
        """Repeat requests and detect a silent plane. Call it at least twice per `resend_s`."""
        silent = self._contact.tick(now)
        if not self._open:
            return []
        if all(map(_is_written_on_credit, self._open.values())):
            # Nothing was sent yet, so the plane has nothing to answer, however long the writes to storage take.
            self._contact.hear(now)
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
            # A reservation at the plane expires after peer_s without a reminder, so a put in transit reminds it three
            # times in that period: two of three reminders may be lost.
            least_s = self.timeouts.heartbeat_s if waits else min(self.timeouts.plane_s / 4, self.timeouts.peer_s / 3)
            question.asked(now, least_s)
            return question.reminders()
        question.asked(now, self.timeouts.heartbeat_s)
        if isinstance(question.message, AttachValues) and question.frames:
            # The values may be in transit for long: ask after them, as for a group.
            return _traced(Trace(ticket=question.message.ticket, group="", digest=b""))
        return [Out(question.message)]

    def _end(self, error: PenstockError) -> list[Event]:
        """Fail all open requests. The next request starts over."""
        self._open, self._attach, self._on_credit = {}, None, NOTHING
        return [Failed(error)]
