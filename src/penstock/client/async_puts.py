"""What bounds puts from asyncio: how many are under way at once, and how many threads encode.

A thousand tasks may put at the same time. Of those of one run, 64 are encoded and sent; the others wait in line with
their samples as they are, so that frames in memory do not grow with the number of tasks. Two threads encode, however
many tasks there are, so that the event loop goes on meanwhile.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from typing import TypeVar
from weakref import WeakKeyDictionary

from penstock.errors import Overloaded

T = TypeVar("T")
UNDER_WAY = 64
THREADS = 2


class AsyncPuts:
    """The places and threads of one plane's puts, for any number of event loops."""

    def __init__(self) -> None:
        self._places: WeakKeyDictionary[asyncio.AbstractEventLoop, defaultdict[tuple[str, bool], asyncio.Semaphore]]
        self._places = WeakKeyDictionary()
        self._pool: ThreadPoolExecutor | None = None
        self._lock = threading.Lock()

    @asynccontextmanager
    async def place(self, run: str, timeout: float | None, *, evaluation: bool) -> AsyncIterator[float | None]:
        """One of the places of a run, for as long as a put is under way, and the seconds that are left then; raises
        `Overloaded` if none is free in time. Evaluation waits for no room, so it has places of its own."""
        began = time.monotonic()
        with self._lock:
            free = self._places.setdefault(
                asyncio.get_running_loop(), defaultdict(lambda: asyncio.Semaphore(UNDER_WAY))
            )[run, evaluation]
        try:
            async with asyncio.timeout(timeout):
                await free.acquire()
        except TimeoutError:
            words = f"put: {UNDER_WAY} puts of this process are under way or wait for room; try again later"
            raise Overloaded(words) from None
        try:
            yield None if timeout is None else max(timeout - (time.monotonic() - began), 0.0)
        finally:
            free.release()

    async def compute(self, act: Callable[[], T]) -> T:
        """What a function returns, from one of the threads."""
        with self._lock:
            if self._pool is None:
                self._pool = ThreadPoolExecutor(THREADS, thread_name_prefix="penstock-encode")
            pool = self._pool
        return await asyncio.get_running_loop().run_in_executor(pool, act)

    def close(self) -> None:
        with self._lock:
            if self._pool is not None:
                self._pool.shutdown(wait=False)  # what a task waits for is still computed; then it hears of it
