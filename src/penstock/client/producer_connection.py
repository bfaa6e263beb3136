"""A producer's connection to a plane: sends requests and returns each answer to the thread or task that asked.

There is one background thread per connection, however many callers. A request that is abandoned, because its thread was
interrupted or its task cancelled, is forgotten here and withdrawn at the plane if it waits for room there.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TypeAlias, TypeVar

import msgspec

from penstock import errors
from penstock.client.client_loop import ClientLoop
from penstock.client.conversations import Call, Conversation, Inbox
from penstock.client.renewals import Renewals
from penstock.errors import Closed, Overloaded, PeerError, PenstockError, PlaneLost
from penstock.protocol import (
    Answer,
    Answered,
    ColumnsLeased,
    Event,
    Frames,
    FromClient,
    FromPlane,
    Out,
    ProducerSession,
    PutRequest,
    Rejected,
    Room,
    bundled,
    check_message,
)
from penstock.transport import ClientTransport

logger = logging.getLogger("penstock.producer")
A = TypeVar("A")
Question: TypeAlias = Callable[[float], tuple[list[int], list[Event]]]
"""Starts requests at the given time. Returns their tickets and the events to handle."""
Written: TypeAlias = tuple[str, bytes, bytes]
"""Location of a frame in storage, its metadata, and what is shown of an evaluation group."""
Write: TypeAlias = Callable[[Sequence[int]], Sequence[Written]]
"""Writes the frames of the puts at these positions."""
_LOOK_S = 1.0
"""How often a waiting call checks that the connection's thread is still alive."""
_LONG_S = 30.0
"""A connection says once why a put waits for room this long: the trainer may be this very program, further down."""


@dataclass(frozen=True, slots=True)
class Lost:
    """No answer: the connection ended first. What was asked for may or may not have happened."""

    error: BaseException


Result: TypeAlias = Answer | Lost | PenstockError
"""The result of a request. An error means that its frame could not be written, and the plane does not have it."""


def error_of(answer: Rejected) -> PenstockError:
    """Return the error that the plane rejected a request with."""
    if answer.kind == "Overloaded":
        return Overloaded(answer.reason, answer.retry_after_s)
    found = getattr(errors, answer.kind, None)
    if isinstance(found, type) and issubclass(found, PenstockError):
        return found(answer.reason)
    return PenstockError(f"{answer.kind}: {answer.reason}")


def expected(answer: object, kind: type[A]) -> A:
    """Return an answer of this kind. Raises PeerError for another: what listens there is no plane."""
    if not isinstance(answer, kind):
        reason = f": {answer.reason}" if isinstance(answer, Rejected) else ""
        raise PeerError(f"the plane answered with {type(answer).__name__}, not {kind.__name__}{reason}")
    return answer


@contextmanager
def reading_answer(what: str) -> Iterator[None]:
    """Report an answer with values that no plane sends as PeerError."""
    try:
        yield
    except (ValueError, TypeError, LookupError, AttributeError, ArithmeticError, msgspec.MsgspecError) as error:
        found = f"{type(error).__name__}: {error}"
        raise PeerError(f"{what}: the plane sent values that no plane sends ({found:.200})") from None


class ProducerConnection:
    """A producer session, its thread, and the callers that wait for answers."""

    def __init__(self, transport: ClientTransport, session: ProducerSession) -> None:
        self.session = session
        self._inboxes: dict[int, Inbox] = {}
        """Where the answer of each open request goes."""
        self._payloads: dict[int, Frames] = {}
        """Payloads of answers, by ticket, until `payload` takes them."""
        self.renewals = Renewals()
        """Keeps the leases of this client."""
        self._lock = threading.Lock()
        self._closed: BaseException | None = None
        self._has_told = False
        timeouts = session.timeouts
        self._loop = ClientLoop(
            transport,
            on_message=self._on_message,
            on_tick=self._on_tick,
            on_end=self._on_end,
            # Well below `plane_s / 4`, the gap between ticks that counts as a pause of this process: with longer ticks
            # every gap would be excused, and a lost plane would never be noticed.
            tick_s=min(timeouts.resend_s / 2, timeouts.plane_s / 8, 0.5),
            name="plane-connection",
        )
        self.check_process = self._loop.check_process
        self._loop.start()

    @property
    def is_mine(self) -> bool:
        """Whether this process, and not its parent before a fork, opened it."""
        return self._loop.is_mine

    def ask(self, make: Callable[[int], FromClient], frames: Frames = ()) -> Conversation[Answer]:
        """Send a request and return the answer, which is awaited while the plane is alive."""
        check_message(make(0))

        def question(now: float) -> tuple[list[int], list[Event]]:
            ticket, events = self.session.ask(make, now, frames)
            return [ticket], events

        (found,) = yield from self._converse(question, math.inf, None)
        if isinstance(found, Lost):
            raise found.error
        assert not isinstance(found, PenstockError)
        return found

    def payload(self, ticket: int) -> Frames:
        """Return and forget the payload that came with an answer."""
        with self._lock:
            return self._payloads.pop(ticket, ())

    def put(self, puts: Sequence[PutRequest], deadline: float, write: Write) -> Conversation[list[Result]]:
        """Put groups, in order. Returns what became of each.

        `deadline` limits only the wait for room. `write` is called with the positions of puts whose frames go to
        storage, when there is room for them.
        """
        return (yield from self._converse(lambda now: self.session.put(puts, now), deadline, write))

    def _converse(self, question: Question, deadline: float, write: Write | None) -> Conversation[list[Result]]:
        inbox = Inbox()
        tickets = self._open(question, inbox)
        places = {ticket: place for place, ticket in enumerate(tickets)}
        found: dict[int, Result] = {}
        began = time.monotonic()
        try:
            while len(found) < len(tickets):
                arrived = yield inbox.wait(min(deadline - time.monotonic(), _LOOK_S))
                found |= {ticket: answer for ticket, answer in arrived if not isinstance(answer, Room)}
                granted = [ticket for ticket, answer in arrived if isinstance(answer, Room)]
                if granted and write is not None:
                    try:
                        written = yield Call(partial(write, [places[ticket] for ticket in granted]))
                    except PenstockError as error:
                        self._forget(granted)
                        found |= dict.fromkeys(granted, error)
                    else:
                        self._go_on(zip(granted, written, strict=True), inbox)
                elif not arrived:
                    self._tell(tickets, began)
                    refused, deadline = self._look([ticket for ticket in tickets if ticket not in found], deadline)
                    found |= refused
        except Exception as error:  # noqa: BLE001 - the connection ended: what has no answer by now gets none
            found = dict.fromkeys(tickets, Lost(error)) | found
        finally:
            self._forget([ticket for ticket in tickets if isinstance(found.get(ticket), Lost | None)])
        return [found[ticket] for ticket in tickets]

    def _go_on(self, written: Iterable[tuple[int, Written]], inbox: Inbox) -> None:
        """Send the puts of frames that are in storage now."""
        with self._lock:
            self.check_open()
            events: list[Event] = []
            for ticket, (location, metadata, shown) in written:
                more = self.session.written(ticket, location, metadata, shown, time.monotonic())
                if more is None:
                    raise PlaneLost(f"{self.session.where}: lost while a frame was written to storage; put it again")
                self._inboxes[ticket] = inbox
                events += more
            self._handle(events)

    @property
    def is_closed(self) -> bool:
        return self._closed is not None

    def check_open(self) -> None:
        """Raise Closed if the connection was closed or opened before a fork, and PeerError if the plane refused it."""
        self.check_process()
        if isinstance(self._closed, PeerError):
            raise self._closed  # what a call that was waiting raised
        if self._closed is not None:
            raise Closed(str(self._closed))

    def _open(self, question: Question, inbox: Inbox) -> list[int]:
        with self._lock:
            self.check_open()
            tickets, events = question(time.monotonic())
            self._inboxes |= dict.fromkeys(tickets, inbox)
            self._handle(events)
        return tickets

    def _look(self, tickets: Sequence[int], deadline: float) -> tuple[dict[int, Rejected], float]:
        """Check waiting requests. Returns the rejections of those that wait for room at the deadline, and how long to
        wait on for the others."""
        self.check_process()
        if not self._loop.is_alive:
            raise Closed(f"{self.session.where}: the connection's thread has ended")
        if deadline > time.monotonic():
            return {}, deadline
        refused: dict[int, Rejected] = {}
        with self._lock:
            events: list[Event] = []
            for ticket in tickets:
                why, more = self.session.stop_waiting(ticket)
                events += more
                if why is not None:
                    refused[ticket] = why
            self._handle(events)
        return refused, math.inf

    def _tell(self, tickets: Sequence[int], began: float) -> None:
        if self._has_told or time.monotonic() - began < _LONG_S:
            return
        with self._lock:
            reason = self.session.why_waiting(tickets)
        if reason is None:
            return
        self._has_told = True
        if reason:
            logger.warning("a put waits for room: %s; `timeout` limits the wait (said once)", reason)
        else:
            logger.warning(
                "%s: the plane is alive and has not answered a put for %.0f s; its group may be accepted, so the put "
                "waits for the answer; see the plane's log (said once)",
                self.session.where,
                time.monotonic() - began,
            )

    def _forget(self, tickets: Sequence[int]) -> None:
        """Forget requests. Withdraws those at the plane that have no answer yet."""
        if not tickets:
            return
        with self._lock:
            for ticket in tickets:
                self._inboxes.pop(ticket, None)
                self._payloads.pop(ticket, None)
            self._handle([event for ticket in tickets for event in self.session.abandon(ticket)])

    def close(self) -> None:
        """Close the connection. Waiting calls raise `Closed`."""
        with self._lock:
            if self._closed is None:
                for message in self.renewals.close():
                    self._loop.send(message, (), self.session.run_id)
            self._closed = self._closed or Closed("this plane was closed")
            self._give_up(self._closed)
        self._loop.stop()

    # -------------------------------------------------------------- the client loop's side

    def _on_message(self, message: FromPlane, frames: Frames, now: float) -> None:
        with self._lock:
            if isinstance(message, ColumnsLeased) and message.ticket in self._inboxes:
                self._payloads[message.ticket] = frames
            self._handle(self.session.on_message(message, now))

    def _on_tick(self, now: float) -> None:
        with self._lock:
            self._handle(self.session.on_tick(now))
            for make, inbox in self.renewals.questions(now):
                ticket, events = self.session.ask(make, now)
                self._inboxes[ticket] = inbox
                self._handle(events)

    def _on_end(self, error: BaseException) -> None:
        with self._lock:
            self._closed = self._closed or error
            self._give_up(error)

    def _handle(self, events: list[Event]) -> None:
        answers: dict[Inbox, list[tuple[int, Answer]]] = {}
        for out in bundled([event for event in events if isinstance(event, Out)]):
            self._loop.send(out.message, out.frames, self.session.run_id)
        for event in events:
            if isinstance(event, Answered):
                inbox = self._inboxes.pop(event.ticket, None)
                if inbox is not None:
                    answers.setdefault(inbox, []).append((event.ticket, event.answer))
            elif not isinstance(event, Out):
                self._give_up(self._loop.explained(event.error))
        for inbox, found in answers.items():
            inbox.put(found)

    def _give_up(self, error: BaseException) -> None:
        lost, self._inboxes = self._inboxes, {}
        for inbox in dict.fromkeys(lost.values()):
            inbox.put(error=error)
