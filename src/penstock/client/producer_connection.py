"""A producer's connection to a plane: sends requests and returns each answer to the thread or coroutine that asked.

There is one background thread per connection, however many callers. A request that is abandoned, because its thread was
interrupted or its task cancelled, is forgotten here and withdrawn at the plane if it waits for room there.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from typing import TypeAlias

from penstock import errors
from penstock.client.client_loop import ClientLoop
from penstock.errors import Closed, Overloaded, PenstockError, PlaneLost
from penstock.protocol import Answer, Answered, Event, Frames, FromPlane, Out, ProducerSession, Rejected, Room
from penstock.transport import ClientTransport

Question: TypeAlias = Callable[[float], tuple[int, list[Event]]]
"""Starts a request at the given time. Returns its ticket and the events to handle."""
Written: TypeAlias = tuple[str, bytes, bytes]
"""Location of a frame in storage, its metadata, and what is shown of an evaluation group."""
Write: TypeAlias = Callable[[], Written]
AsyncWrite: TypeAlias = Callable[[], Awaitable[Written]]
_LOOK_S = 1.0
"""How often a waiting call checks that the connection's thread is still alive."""


def error_of(answer: Rejected) -> PenstockError:
    """Return the error that the plane rejected a request with."""
    if answer.kind == "Overloaded":
        return Overloaded(answer.reason, answer.retry_after_s)
    found = getattr(errors, answer.kind, None)
    if isinstance(found, type) and issubclass(found, PenstockError):
        return found(answer.reason)
    return PenstockError(f"{answer.kind}: {answer.reason}")


class ProducerConnection:
    """A producer session, its thread, and the callers that wait for answers."""

    def __init__(self, transport: ClientTransport, session: ProducerSession) -> None:
        self.session = session
        self._futures: dict[int, Future[Answer]] = {}
        self._lock = threading.Lock()
        self._closed: BaseException | None = None
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

    def ask(self, question: Question, timeout: float = math.inf, write: Write | None = None) -> Answer:
        """Send a request and return the answer.

        `timeout` limits only the wait for room. The answer itself is awaited while the plane is alive. `write` is
        called when there is room for a frame that goes to storage.
        """
        ticket, future = self._open(question)
        deadline = time.monotonic() + timeout
        try:
            while True:
                left = deadline - time.monotonic()
                try:
                    answer = future.result(min(max(left, 0.0), _LOOK_S))
                except TimeoutError:
                    if (
                        future.done()
                    ):  # just now; or it holds a TimeoutError of its own, such as a transport's ETIMEDOUT
                        if (error := future.exception()) is not None:
                            raise error from None
                        continue
                else:
                    if not isinstance(answer, Room) or write is None:
                        return answer
                    future = self._go_on(ticket, write())
                    continue
                refused, deadline = self._look(ticket, deadline)
                if refused is not None:
                    return refused
        finally:
            self._forget(ticket)

    async def aask(self, question: Question, timeout: float = math.inf, write: AsyncWrite | None = None) -> Answer:
        """`ask`, without blocking the thread."""
        import asyncio  # 20 ms, and few producers use it

        ticket, future = self._open(question)
        deadline, answer = time.monotonic() + timeout, asyncio.wrap_future(future)
        try:
            while True:
                left = deadline - time.monotonic()
                await asyncio.wait([answer], timeout=min(max(left, 0.0), _LOOK_S))
                if answer.done():
                    found = answer.result()
                    if not isinstance(found, Room) or write is None:
                        return found
                    answer = asyncio.wrap_future(self._go_on(ticket, await write()))
                    continue
                refused, deadline = self._look(ticket, deadline)
                if refused is not None:
                    return refused
        finally:
            self._forget(ticket)
            answer.cancel()  # no other caller has this future

    def _go_on(self, ticket: int, written: Written) -> Future[Answer]:
        """Send the put of a frame that is in storage now."""
        with self._lock:
            self.check_open()
            events = self.session.written(ticket, *written, time.monotonic())
            if events is None:
                raise PlaneLost(f"{self.session.where}: lost while a frame was written to storage; put it again")
            future = self._futures[ticket] = Future()
            self._handle(events)
        return future

    @property
    def is_closed(self) -> bool:
        return self._closed is not None

    def check_open(self) -> None:
        """Raise Closed if the connection was closed, or was opened before a fork."""
        self.check_process()
        if self._closed is not None:
            raise Closed(str(self._closed))

    def _open(self, question: Question) -> tuple[int, Future[Answer]]:
        with self._lock:
            self.check_open()
            ticket, events = question(time.monotonic())
            future = self._futures[ticket] = Future()
            self._handle(events)
        return ticket, future

    def _look(self, ticket: int, deadline: float) -> tuple[Rejected | None, float]:
        """Check a waiting request. Returns the rejection if it still waits for room at the deadline, and how long to
        wait on otherwise."""
        self.check_process()
        if not self._loop.is_alive:
            raise Closed(f"{self.session.where}: the connection's thread has ended")
        if deadline > time.monotonic():
            return None, deadline
        return self._stop_waiting(ticket), math.inf

    def _stop_waiting(self, ticket: int) -> Rejected | None:
        with self._lock:
            refused, events = self.session.stop_waiting(ticket)
            self._handle(events)
        return refused

    def _forget(self, ticket: int) -> None:
        """Forget a request. Withdraws it at the plane if it has no answer yet."""
        with self._lock:
            self._futures.pop(ticket, None)
            self._handle(self.session.abandon(ticket))

    def close(self) -> None:
        """Close the connection. Waiting calls raise `Closed`."""
        with self._lock:
            self._closed = self._closed or Closed("this plane was closed")
            self._give_up(self._closed)
        self._loop.stop()

    # -------------------------------------------------------------- the client loop's side

    def _on_message(self, message: FromPlane, _frames: Frames, now: float) -> None:
        with self._lock:
            self._handle(self.session.on_message(message, now))

    def _on_tick(self, now: float) -> None:
        with self._lock:
            self._handle(self.session.on_tick(now))

    def _on_end(self, error: BaseException) -> None:
        with self._lock:
            self._closed = self._closed or error
            self._give_up(error)

    def _handle(self, events: list[Event]) -> None:
        for event in events:
            if isinstance(event, Out):
                self._loop.send(event.message, event.frames, self.session.run_id)
            elif isinstance(event, Answered):
                future = self._futures.pop(event.ticket, None)
                if future is not None:
                    future.set_result(event.answer)
            else:
                self._give_up(self._loop.explained(event.error))

    def _give_up(self, error: BaseException) -> None:
        lost, self._futures = self._futures, {}
        for future in lost.values():
            future.set_exception(error)
