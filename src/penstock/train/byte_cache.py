"""A least-recently-used cache bounded in bytes. Concurrent requests for a key compute its value once.

A failure is raised in every thread that waited for it and is not cached. A value larger than the cache is returned but
not cached.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from concurrent.futures import Future
from typing import Generic, TypeVar

from penstock.errors import ConfigError

Key = TypeVar("Key", bound=Hashable)
Value = TypeVar("Value")


class ByteCache(Generic[Key, Value]):
    """Values by key, at most `max_bytes` in total. 0 caches nothing.

    >>> cache = ByteCache(max_bytes=10, size_of=len)
    >>> cache.get("a", lambda: b"12345678"), cache.get("a", lambda: b"never made"), cache.hits
    (b'12345678', b'12345678', 1)
    """

    def __init__(self, *, max_bytes: int, size_of: Callable[[Value], int]) -> None:
        if max_bytes < 0:
            raise ConfigError(f"cache of {max_bytes} bytes: must be 0 or more")
        self._max_bytes = max_bytes
        self._size_of = size_of
        self._lock = threading.Lock()
        self._kept: OrderedDict[Key, Value] = OrderedDict()
        self._making: dict[Key, Future[Value]] = {}
        self.num_bytes = 0
        """Bytes held now."""
        self.hits = 0
        """Requests that computed nothing: the value was cached, or another thread was computing it."""

    def get(self, key: Key, make: Callable[[], Value]) -> Value:
        """Return the value of `key`. The first caller computes it with `make`."""
        with self._lock:
            if key in self._kept:
                self._kept.move_to_end(key)
                self.hits += 1
                return self._kept[key]
            making = self._making.get(key)
            if making is None:
                mine = self._making[key] = Future()
            else:
                self.hits += 1
        if making is not None:
            return making.result()  # outside the lock: other keys must not wait for this one
        return self._make(key, make, mine)

    def clear(self) -> None:
        """Drop all values."""
        with self._lock:
            self._kept.clear()
            self.num_bytes = 0

    def _make(self, key: Key, make: Callable[[], Value], mine: Future[Value]) -> Value:
        try:
            value = make()
        except BaseException as error:
            with self._lock:
                del self._making[key]
            mine.set_exception(error)
            raise
        with self._lock:
            del self._making[key]
            self._keep(key, value)
        mine.set_result(value)
        return value

    def _keep(self, key: Key, value: Value) -> None:
        size = self._size_of(value)
        if size > self._max_bytes:
            return
        self._kept[key] = value
        self.num_bytes += size
        while self.num_bytes > self._max_bytes:
            _, dropped = self._kept.popitem(last=False)
            self.num_bytes -= self._size_of(dropped)
