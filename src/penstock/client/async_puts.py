"""Limits on puts from asyncio: how many run at once, and how many threads encode.

A thousand tasks may put at the same time. Of each tenant 64 are encoded and sent, and the others wait with their
samples as they are, so that the memory for frames does not grow with the number of tasks. Two threads encode, however
many tasks there are, so that the event loop stays responsive.
"""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
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

    @asynccontextmanager
    async def place(self, run: str, timeout: float | None, *, evaluation: bool) -> AsyncIterator[float | None]:
        """Hold one of a tenant's 64 places while the block runs. Yields the seconds left of `timeout`.

        Raises `Overloaded` if no place is free in time. Evaluation has its own places: it never waits for room, so it
        must not queue behind puts that do.
        """
        import asyncio  # here, because it takes 20 ms and few producers use it

        began = time.monotonic()
        with self._lock:
            free = self._places.setdefault(
                asyncio.get_running_loop(), defaultdict(lambda: asyncio.Semaphore(UNDER_WAY))
            )[run, evaluation]
        try:
            async with asyncio.timeout(timeout):
                await free.acquire()
        except TimeoutError:
            busy = f"put: {UNDER_WAY} puts of this process are running or wait for room; try again later"
            raise Overloaded(busy) from None
        try:
            yield None if timeout is None else max(timeout - (time.monotonic() - began), 0.0)
        finally:
            free.release()

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
