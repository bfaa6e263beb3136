"""Conversations with a plane, written once for threads and for asyncio.

A conversation is a generator. It yields what it waits for and is sent the result:

    arrived = yield inbox.wait(1.0)      answers that have arrived, after at most a second
    encoded = yield Call(encode)         a function's result; asyncio runs it on an encoding thread
    yield Pause(0.5)

`run` drives one in the caller's thread, `arun` in a task. What a wait raises, an interrupt or a cancellation, is raised
inside the conversation, which then cleans up.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Awaitable, Callable, Generator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, TypeVar

from penstock.protocol import Answer

if TYPE_CHECKING:
    import asyncio  # a thread's conversation does without: it takes 20 ms to import

T = TypeVar("T")
Compute: TypeAlias = Callable[[Callable[[], Any]], Awaitable[Any]]
"""Runs a function on an encoding thread."""


class Step(Protocol):
    """Something to wait for."""

    def block(self) -> Any:
        """Wait in this thread."""

    async def suspend(self, compute: Compute) -> Any:
        """Wait without blocking the event loop."""


Conversation: TypeAlias = Generator[Step, Any, T]


def run(steps: Conversation[T]) -> T:
    """Drive a conversation in this thread and return its result."""
    try:
        step = next(steps)
        while True:
            try:
                found = step.block()
            except BaseException as error:  # noqa: BLE001 - the conversation decides
                step = steps.throw(error)
            else:
                step = steps.send(found)
    except StopIteration as done:
        result: T = done.value
        return result


async def arun(steps: Conversation[T], compute: Compute) -> T:
    """Drive a conversation in a task and return its result."""
    try:
        step = next(steps)
        while True:
            try:
                found = await step.suspend(compute)
            except BaseException as error:  # noqa: BLE001 - the conversation decides
                step = steps.throw(error)
            else:
                step = steps.send(found)
    except StopIteration as done:
        result: T = done.value
        return result


@dataclass(frozen=True, slots=True)
class Call:
    """Run a function that computes or writes."""

    act: Callable[[], Any]

    def block(self) -> Any:
        return self.act()

    async def suspend(self, compute: Compute) -> Any:
        return await compute(self.act)


@dataclass(frozen=True, slots=True)
class Pause:
    seconds: float

    def block(self) -> None:
        time.sleep(self.seconds)

    async def suspend(self, compute: Compute) -> None:  # noqa: ARG002 - nothing to compute
        import asyncio

        await asyncio.sleep(self.seconds)


class Inbox:
    """Answers to the requests of one conversation. Another thread fills it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._answers: list[tuple[int, Answer]] = []
        self._error: BaseException | None = None
        # Locked while there is nothing to take. Only one conversation waits, so a lock is enough. A condition would
        # make another lock for each wait, and take its own again before it returns.
        self._nothing = threading.Lock()
        self._nothing.acquire()
        self._is_released = False
        """Whether `put` has released it since the last `_take`."""
        self._wake: Callable[[], object] | None = None
        """Wakes the task that waits, if one does."""

    def put(self, answers: Sequence[tuple[int, Answer]] = (), error: BaseException | None = None) -> None:
        """Add answers by ticket, or the error that ends the connection."""
        with self._lock:
            self._answers += answers
            self._error = self._error or error
            wake, self._wake = self._wake, None
            if self._has_any() and not self._is_released:
                self._is_released = True
                self._nothing.release()
        if wake is not None:
            with suppress(RuntimeError):  # its event loop was closed meanwhile
                wake()

    def wait(self, seconds: float) -> InboxWait:
        """Wait for at least one answer, for at most `seconds`. Raises the error once all answers are taken."""
        return InboxWait(self, max(seconds, 0.0))

    def _take(self) -> list[tuple[int, Answer]]:
        answers, self._answers = self._answers, []
        if self._is_released and self._error is None:
            self._nothing.acquire(blocking=False)  # it is taken already if `block` waited for it
            self._is_released = False
        if not answers and self._error is not None:
            raise self._error
        return answers

    def _has_any(self) -> bool:
        return bool(self._answers) or self._error is not None

    def block(self, seconds: float) -> list[tuple[int, Answer]]:
        if self._error is None:  # an error stays: no wait after it
            self._nothing.acquire(timeout=seconds)
        with self._lock:
            return self._take()

    async def suspend(self, seconds: float) -> list[tuple[int, Answer]]:
        import asyncio

        loop = asyncio.get_running_loop()
        arrived = loop.create_future()
        with self._lock:
            if self._has_any():
                return self._take()
            self._wake = partial(loop.call_soon_threadsafe, _finish, arrived)
        await asyncio.wait([arrived], timeout=seconds)
        with self._lock:
            self._wake = None
            return self._take()


def _finish(arrived: asyncio.Future[None]) -> None:
    if not arrived.done():
        arrived.set_result(None)


@dataclass(frozen=True, slots=True)
class InboxWait:
    """A wait for an inbox."""

    inbox: Inbox
    seconds: float

    def block(self) -> list[tuple[int, Answer]]:
        return self.inbox.block(self.seconds)

    async def suspend(self, compute: Compute) -> list[tuple[int, Answer]]:  # noqa: ARG002 - nothing to compute
        return await self.inbox.suspend(self.seconds)
