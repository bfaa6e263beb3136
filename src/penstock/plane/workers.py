"""Worker threads for jobs that grow with the data, so that the loop always answers quickly.

The loop submits a job and a callback for its result. The callback runs on the loop's thread, so nothing that the loop
owns is touched by two threads. Jobs of one queue run in order, one at a time.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sized
from queue import SimpleQueue
from typing import Any, Protocol, TypeAlias

from penstock.transport import Wake

Job: TypeAlias = Callable[[], Any]
Then: TypeAlias = Callable[[Any], None]
"""Receives what the job returned, or the exception it raised."""


class Workers(Protocol):
    """Runs jobs. Planes use `Threads`, simulations `Inline`."""

    results: Sized
    """Empty while `finish` would do nothing."""

    def submit(self, queue: str, job: Job, then: Then) -> None:
        """Run a job, and call `then` with its result in a later `finish`."""

    def post(self, then: Then, found: object) -> None:
        """Call `then` in a later `finish`. For a job that has something to pass on before it ends."""

    def finish(self) -> bool:
        """Handle finished jobs on the caller's thread. Returns whether there were any."""

    def close(self) -> None:
        """Wait for running jobs. Jobs that have not begun are dropped."""


class Inline:
    """Runs every job immediately on the loop's thread: for simulations, where nothing may depend on timing."""

    def __init__(self) -> None:
        self._done: deque[tuple[Then, Any]] = deque()
        self.results: Sized = self._done

    def submit(self, queue: str, job: Job, then: Then) -> None:  # noqa: ARG002 - the queues are for threads
        self._done.append((then, _result(job)))

    def post(self, then: Then, found: object) -> None:
        self._done.append((then, found))

    def finish(self) -> bool:
        found = bool(self._done)
        while self._done:
            then, result = self._done.popleft()
            then(result)
        return found

    def close(self) -> None:
        self._done.clear()


class Threads:
    """One thread per queue, started on first use."""

    def __init__(self) -> None:
        self.wake = Wake()
        """Becomes readable when a job has finished."""
        self._queues: dict[str, SimpleQueue[tuple[Job, Then] | None]] = {}
        self._threads: list[threading.Thread] = []
        self._done: deque[tuple[Then, Any]] = deque()
        self.results: Sized = self._done
        self._closed = False

    def submit(self, queue: str, job: Job, then: Then) -> None:
        if queue not in self._queues:
            self._queues[queue] = SimpleQueue()
            thread = threading.Thread(target=self._work, args=(self._queues[queue],), name=f"penstock-{queue}")
            thread.daemon = True
            thread.start()
            self._threads.append(thread)
        self._queues[queue].put((job, then))

    def post(self, then: Then, found: object) -> None:
        self._done.append((then, found))
        self.wake.call()

    def finish(self) -> bool:
        self.wake.clear()
        found = bool(self._done)
        while self._done:
            then, result = self._done.popleft()
            then(result)
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
            try:
                result = _result(job)
            except BaseException as error:  # noqa: BLE001 - a panic in an extension; without a result all would wait
                result = RuntimeError(f"{type(error).__name__}: {error}")
                result.__cause__ = error
            self.post(then, result)
            del found, job, then, result  # a frame that a job holds must not live until the next job arrives


def _result(job: Job) -> Any:
    try:
        return job()
    except Exception as error:  # noqa: BLE001 - the callback handles it
        return error
