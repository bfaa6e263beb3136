"""Work beside the loop that answers: what takes as long as the data is large is done on other threads.

The loop submits a job with what is to be done with its result; the result is handled in the loop's own thread, so
nothing the loop owns is ever touched by two threads. Jobs of one queue are done in order, one at a time.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any, Protocol, TypeAlias

from penstock.transport import Wake

Job: TypeAlias = Callable[[], Any]
Then: TypeAlias = Callable[[Any], None]
"""Is given what the job returned, or the exception it raised."""


class Workers(Protocol):
    """Where jobs are done."""

    def submit(self, queue: str, job: Job, then: Then) -> None:
        """Do a job, and call `then` with its result in a later `finish`."""

    def finish(self) -> bool:
        """Handle the results that are there, in the caller's thread; whether there were any."""

    def close(self) -> None:
        """Let what is being done end; what has not begun is never done."""


class Inline:
    """Every job at once, in the loop's own thread: for simulations, where nothing may depend on timing."""

    def __init__(self) -> None:
        self._done: deque[tuple[Then, Any]] = deque()

    def submit(self, queue: str, job: Job, then: Then) -> None:  # noqa: ARG002 - the queues are for threads
        self._done.append((then, _result(job)))

    def finish(self) -> bool:
        found = bool(self._done)
        while self._done:
            then, result = self._done.popleft()
            then(result)
        return found

    def close(self) -> None:
        self._done.clear()


class Threads:
    """One thread for each queue, begun when it is first needed."""

    def __init__(self) -> None:
        self.wake = Wake()
        """Becomes readable when there is a result."""
        self._queues: dict[str, SimpleQueue[tuple[Job, Then] | None]] = {}
        self._threads: list[threading.Thread] = []
        self._done: deque[tuple[Then, Any]] = deque()
        self._closed = False

    def submit(self, queue: str, job: Job, then: Then) -> None:
        if queue not in self._queues:
            self._queues[queue] = SimpleQueue()
            thread = threading.Thread(target=self._work, args=(self._queues[queue],), name=f"penstock-{queue}")
            thread.daemon = True
            thread.start()
            self._threads.append(thread)
        self._queues[queue].put((job, then))

    def finish(self) -> bool:
        self.wake.clear()
        found = False
        while self._done:
            then, result = self._done.popleft()
            then(result)
            found = True
        return found

    def close(self) -> None:
        self._closed = True
        for queue in self._queues.values():
            queue.put(None)
        for thread in self._threads:
            thread.join()
        self.wake.close()

    def _work(self, queue: SimpleQueue[tuple[Job, Then] | None]) -> None:
        while (found := queue.get()) is not None and not self._closed:
            job, then = found
            self._done.append((then, _result(job)))
            del found, job, then  # what a job holds on to must not live until the next one comes
            self.wake.call()


def _result(job: Job) -> Any:
    try:
        return job()
    except Exception as error:  # noqa: BLE001 - whoever submitted it decides what to make of it
        return error
