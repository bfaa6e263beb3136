"""The cache makes each value once, keeps at most its bytes, and keeps no failure."""

from __future__ import annotations

import threading
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import ConfigError
from penstock.train.materialize import ByteCache


@given(st.integers(0, 30), st.lists(st.tuples(st.integers(0, 5), st.integers(0, 12)), max_size=40))
def test_it_behaves_as_a_plain_least_recently_used_list(max_bytes: int, asks: list[tuple[int, int]]) -> None:
    cache: ByteCache[int, bytes] = ByteCache(max_bytes=max_bytes, size_of=len)
    model: OrderedDict[int, bytes] = OrderedDict()
    for key, size in asks:
        got = cache.get(key, lambda size=size: bytes(size))  # type: ignore[misc]
        if key in model:
            model.move_to_end(key)
            assert got == model[key]
            continue
        assert got == bytes(size)
        if size <= max_bytes:
            model[key] = got
            while sum(map(len, model.values())) > max_bytes:
                model.popitem(last=False)
        assert cache.num_bytes == sum(map(len, model.values())) <= max_bytes


def test_many_threads_make_a_value_once() -> None:
    cache: ByteCache[str, bytes] = ByteCache(max_bytes=100, size_of=len)
    made: list[int] = []
    everyone = threading.Barrier(8)
    waiting = threading.Event()

    def make() -> bytes:
        made.append(1)
        waiting.wait(60)
        return b"value"

    def ask(_: int) -> bytes:
        everyone.wait(60)
        return cache.get("key", make)

    with ThreadPoolExecutor(8) as pool:
        asks = [pool.submit(ask, i) for i in range(8)]
        while cache.hits < 7 and not any(a.done() for a in asks):
            pass
        waiting.set()
        assert {a.result() for a in asks} == {b"value"}
    assert len(made) == 1
    assert cache.hits == 7


def test_a_failure_reaches_everyone_who_waited_and_is_not_kept() -> None:
    cache: ByteCache[str, bytes] = ByteCache(max_bytes=100, size_of=len)
    failing = threading.Event()

    def fail() -> bytes:
        failing.wait(60)
        raise ValueError("no")

    with ThreadPoolExecutor(4) as pool:
        asks = [pool.submit(cache.get, "key", fail) for _ in range(4)]
        while cache.hits < 3:
            pass
        failing.set()
        assert all(isinstance(a.exception(), ValueError) for a in asks)
    assert cache.get("key", lambda: b"now") == b"now"


def test_clearing_frees_everything() -> None:
    cache: ByteCache[str, bytes] = ByteCache(max_bytes=100, size_of=len)
    cache.get("a", lambda: b"123")
    cache.clear()
    assert cache.num_bytes == 0
    assert cache.get("a", lambda: b"again") == b"again"
    with pytest.raises(ConfigError):
        ByteCache(max_bytes=-1, size_of=len)
