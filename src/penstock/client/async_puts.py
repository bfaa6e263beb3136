"""Limits on puts from asyncio: how many run at once, and how many threads encode.

A thousand tasks may put at the same time. At most 64 per tenant are encoded and sent. The others wait before they are
encoded, so memory for frames does not grow with the number of tasks. Only two threads encode, so that the event loop
stays responsive.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar
from weakref import WeakKeyDictionary

from penstock.errors import Overloaded

if TYPE_CHECKING:
    import asyncio

T = TypeVar("T")
UNDER_WAY = 64
THREADS = 2


class AsyncPuts:
    """Semaphores and threads for one plane's puts, shared by any number of event loops."""

    def __init__(self) -> None:
        self._places: WeakKeyDictionary[asyncio.AbstractEventLoop, defaultdict[tuple[str, bool], asyncio.Semaphore]]
        self._places = WeakKeyDictionary()
        self._pool: ThreadPoolExecutor | None = None
        self._lock = threading.Lock()

    def places(self, run: str, timeout: float | None, *, evaluation: bool, most: int = UNDER_WAY) -> TakePlaces:
        """Take places of a tenant: one, and up to `most` if they are free now. Release them afterwards.

        Raises `Overloaded` if none is free in time. Evaluation has its own places: it never waits for room, so it
        must not queue behind puts that do.
        """
        return TakePlaces(self, (run, evaluation), timeout, most)

    def of_loop(self, key: tuple[str, bool]) -> asyncio.Semaphore:
        import asyncio  # here, because it takes 20 ms and few producers use it

        with self._lock:
            return self._places.setdefault(
                asyncio.get_running_loop(), defaultdict(lambda: asyncio.Semaphore(UNDER_WAY))
            )[key]

    async def compute(self, act: Callable[[], T]) -> T:
        """Run a function on one of the encoding threads and return its result."""
        import asyncio

        with self._lock:
            if self._pool is None:
                self._pool = ThreadPoolExecutor(THREADS, thread_name_prefix="penstock-encode")
            pool = self._pool
        return await asyncio.get_running_loop().run_in_executor(pool, act)

    def close(self) -> None:
        with self._lock:
            if self._pool is not None:
                self._pool.shutdown(wait=False)  # running work finishes, and its tasks then get `Closed`


@dataclass(frozen=True, slots=True)
class Places:
    """Places that a put holds."""

    count: int
    release: Callable[[], None] = lambda: None


@dataclass(frozen=True, slots=True)
class TakePlaces:
    """A wait for places (`conversations.Step`). A thread does not wait: there are as many puts as threads."""

    puts: AsyncPuts
    key: tuple[str, bool]
    timeout: float | None
    most: int

    def block(self) -> Places:
        return Places(self.most)

    async def suspend(self, compute: object = None) -> Places:  # noqa: ARG002 - nothing to compute
        import asyncio

        free = self.puts.of_loop(self.key)
        try:
            async with asyncio.timeout(self.timeout):
                await free.acquire()
        except TimeoutError:
            busy = f"put: {UNDER_WAY} puts of this process are running or wait for room; try again later"
            raise Overloaded(busy) from None
        # Further places only if no wait is needed: two batches that each hold some and wait for more would never end.
        count = 1
        while count < self.most and not free.locked():
            await free.acquire()
            count += 1

        def release() -> None:
            for _ in range(count):
                free.release()

        return Places(count, release)
