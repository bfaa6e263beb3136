"""Many threads: nothing lost or doubled, nobody starves, and close releases everyone."""

from __future__ import annotations

import itertools
import threading
import time
from collections import Counter
from collections.abc import Callable

import numpy as np
import pytest

from penstock.errors import Closed, WaitTimeout
from penstock.replay import Fifo, Key, MinSize, Prioritized, Queue, Reason, SamplesPerInsert, Selector, Table, Uniform
from tests.support.pace import pace

PATIENCE = 60.0
REASONS = {"sampled_out", "removed", "stale"}
"""Seconds after which a thread that should long be done counts as hung."""


class Crew:
    """Threads whose exceptions reach the test."""

    def __init__(self) -> None:
        self.threads: list[threading.Thread] = []
        self.errors: list[BaseException] = []

    def start(self, work: Callable[[], object]) -> None:
        def run() -> None:
            try:
                work()
            except BaseException as error:  # noqa: BLE001
                self.errors.append(error)

        self.threads.append(threading.Thread(target=run, daemon=True))
        self.threads[-1].start()

    def join(self) -> None:
        for thread in self.threads:
            thread.join(PATIENCE)
            assert not thread.is_alive(), "a thread hangs"
        self.threads.clear()
        if self.errors:
            raise self.errors[0]


def wait_until(table: Table, name: str, value: int) -> None:
    """Until so many threads stand in line; the table itself says so."""
    deadline = time.monotonic() + PATIENCE
    while table.metrics()[name] < value:
        assert time.monotonic() < deadline, f"{name} never reached {value}"


def test_a_queue_hands_every_item_of_every_producer_to_exactly_one_consumer() -> None:
    table = Table(capacity=7)
    crew, lock, seen = Crew(), threading.Lock(), Counter[Key]()
    num_producers, num_items = 4, 300

    def produce(name: int) -> None:
        for number in range(num_items):
            table.insert(f"{name}/{number}", (name, number), timeout=PATIENCE)

    def consume() -> None:
        for _ in range(num_producers * num_items // 3 // 2):
            keys = table.sample(2, timeout=PATIENCE).keys.tolist()
            with lock:
                seen.update(keys)

    for name in range(num_producers):
        crew.start(lambda name=name: produce(name))  # type: ignore[misc]
    for _ in range(3):
        crew.start(consume)
    crew.join()
    assert len(seen) == num_producers * num_items
    assert set(seen.values()) == {1}
    counts = table.metrics()
    assert counts["gen/items"] == counts["train/items"] == counts["buffer/evicted/sampled_out"] == 1200
    assert counts["buffer/evicted_unsampled"] == 0


@pytest.mark.parametrize("sampler", [Fifo(), Uniform(), Prioritized(0.6)], ids=repr)
def test_the_books_balance_under_concurrent_use_of_everything(sampler: Selector) -> None:
    told: Counter[Reason] = Counter()
    limiter = SamplesPerInsert(1.0, 8, 40.0, batch_size=8)
    table = Table(
        capacity=40,
        capacity_tokens=500,
        sampler=sampler,
        remover=Uniform(),
        limiter=limiter,
        max_times_sampled=2,
        max_staleness=3,
        on_evict=lambda _, reason: told.update([reason]),
    )
    crew, stop, lock = Crew(), threading.Event(), threading.Lock()
    accepted, used = [0], Counter[int]()
    deadline = time.monotonic() + PATIENCE

    def produce(name: int) -> None:
        rng = np.random.default_rng(name)
        for number in itertools.count():
            # On a busy machine 500 inserts may meet no consumer, or none of the removals.
            if number >= 500 and (told.keys() >= REASONS or time.monotonic() > deadline):
                return
            version = int(table.metrics()["buffer/policy_version"]) - int(rng.integers(0, 6))
            try:
                handle = table.insert(
                    f"{name}/{rng.integers(0, 400)}",
                    number,
                    priority=float(rng.random()),
                    num_tokens=int(rng.integers(0, 30)),
                    policy_version=max(0, version),
                    timeout=PATIENCE,
                )
            except Closed:
                return
            with lock:
                accepted[0] += handle is not None

    def consume() -> None:
        while True:
            try:
                batch = table.sample(8, timeout=PATIENCE)
            except Closed:
                return
            table.update_handles(batch.handles, np.random.default_rng(1).random(8))
            with lock:
                used.update(batch.handles.tolist())

    def disturb() -> None:
        version = 0
        # Removing everything at once would keep consumers from taking any item twice, for half a minute at load 25.
        while not stop.is_set() and not (accepted[0] > 300 and told.keys() >= {"removed", "stale"}):
            version += 1
            table.advance(version // 10)
            table.remove(table.keys()[:1])
            if version % 50 == 0:
                table.clear()

    for name in range(3):
        crew.start(lambda name=name: produce(name))  # type: ignore[misc]
    producers = crew.threads[:]
    for _ in range(3):
        crew.start(consume)
    crew.start(disturb)
    for thread in producers:
        thread.join(2 * PATIENCE)
    stop.set()
    table.close()
    crew.join()

    counts = table.metrics()
    evicted = {name.rsplit("/")[-1]: n for name, n in counts.items() if name.startswith("buffer/evicted/")}
    assert counts["gen/items"] == accepted[0]
    assert counts["gen/items"] == counts["buffer/items"] + sum(evicted.values())
    assert {reason: n for reason, n in evicted.items() if n} == dict(told)
    assert counts["train/items"] == sum(used.values())
    assert max(used.values()) <= 2
    assert evicted["sampled_out"] == sum(uses == 2 for uses in used.values())
    assert told.keys() >= REASONS, "or nothing was tested"


def test_close_releases_every_waiter_within_a_second() -> None:
    full, empty = Table(capacity=1), Table(capacity=1)
    full.insert("a", "a")
    results: list[str] = []

    def wait(call: Callable[[], object]) -> None:
        try:
            call()
        except Closed as error:
            results.append(str(error))

    crew = Crew()
    for number in range(8):
        crew.start(lambda number=number: wait(lambda: full.insert(number, number)))  # type: ignore[misc]
        crew.start(lambda: wait(lambda: empty.sample(1)))
    wait_until(full, "buffer/waiting_inserts", 8)
    wait_until(empty, "buffer/waiting_samples", 8)
    started = time.monotonic()
    full.close()
    empty.close()
    crew.join()
    assert time.monotonic() - started < 5.0 * pace()
    assert len(results) == 16
    assert all("closed" in message for message in results)


def test_waiters_are_served_in_the_order_they_came() -> None:
    table = Table(capacity=1)
    crew, order = Crew(), list[int]()

    def consume(number: int) -> None:
        order.append(table.sample(1, timeout=PATIENCE).items[0] * 100 + number)

    for number in range(6):
        crew.start(lambda number=number: consume(number))  # type: ignore[misc]
        wait_until(table, "buffer/waiting_samples", number + 1)
    for number in range(6):
        table.insert(number, number, timeout=PATIENCE)
    crew.join()
    assert sorted(order) == [number * 101 for number in range(6)]


def test_a_large_batch_is_not_starved_by_small_ones() -> None:
    """Small batches that come later could take every item as it arrives; they have to line up behind."""
    table = Table(capacity=8)
    crew, sizes = Crew(), list[int]()

    def consume(count: int) -> None:
        sizes.append(len(table.sample(count, timeout=PATIENCE)))

    crew.start(lambda: consume(8))
    wait_until(table, "buffer/waiting_samples", 1)
    for _ in range(4):
        crew.start(lambda: consume(1))
    wait_until(table, "buffer/waiting_samples", 5)
    for number in range(4):
        table.insert(number, number, timeout=0)
    with pytest.raises(WaitTimeout):
        table.sample(1, timeout=0)  # nor may one that does not wait jump the line
    assert len(table) == 4
    for number in range(4, 8):
        table.insert(number, number, timeout=0)
    for number in range(4):
        table.insert(f"more/{number}", number, timeout=PATIENCE)
    crew.join()
    assert sorted(sizes) == [1, 1, 1, 1, 8]


@pytest.mark.parametrize("limiter", [Queue(2), MinSize(1), SamplesPerInsert(1.0, 1, 1.0)], ids=repr)
def test_a_waiting_insert_goes_ahead_when_a_sample_makes_room(limiter: Queue | MinSize | SamplesPerInsert) -> None:
    table = Table(capacity=2, limiter=limiter)
    table.insert(0, 0)
    table.insert(1, 1)
    crew = Crew()
    crew.start(lambda: table.insert(2, 2, timeout=PATIENCE))
    wait_until(table, "buffer/waiting_inserts", 1)
    assert table.sample(1).keys.tolist() == [0]
    crew.join()
    assert table.keys() == [1, 2]
    assert table.metrics()["gen/wait_s"] > 0


@pytest.mark.parametrize("make_room", [lambda t: t.remove([0]), lambda t: t.clear(), lambda t: t.advance(9)])
def test_a_waiting_insert_goes_ahead_when_items_leave_otherwise(make_room: Callable[[Table], object]) -> None:
    table = Table(capacity=1, max_staleness=1)
    table.insert(0, 0)
    crew = Crew()
    crew.start(lambda: table.insert(1, 1, policy_version=9, timeout=PATIENCE))
    wait_until(table, "buffer/waiting_inserts", 1)
    make_room(table)
    crew.join()
    assert table.keys() == [1]


def test_an_item_that_grew_stale_while_waiting_is_refused() -> None:
    table = Table(capacity=1, max_staleness=1)
    table.insert(0, 0, policy_version=9)
    crew, answers = Crew(), list[object]()
    crew.start(lambda: answers.append(table.insert(1, 1, policy_version=1, timeout=PATIENCE)))
    wait_until(table, "buffer/waiting_inserts", 1)
    table.advance(9)
    crew.join()
    assert answers == [None]
    assert table.metrics()["gen/refused_stale"] == 1


def test_one_who_gives_up_lets_the_next_in_line_pass() -> None:
    table = Table(capacity=4)
    crew, outcomes = Crew(), list[str]()

    def impatient() -> None:
        with pytest.raises(WaitTimeout):
            table.sample(4, timeout=0.5 * pace())
        outcomes.append("gave up")

    crew.start(impatient)
    wait_until(table, "buffer/waiting_samples", 1)
    table.insert(0, 0)
    crew.start(lambda: outcomes.append(str(table.sample(1, timeout=PATIENCE).keys[0])))
    crew.join()
    assert sorted(outcomes) == ["0", "gave up"]
