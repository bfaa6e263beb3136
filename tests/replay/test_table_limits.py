"""What a table holds at most, for how long, and how it counts what left: capacity, staleness, books."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from penstock.errors import Closed, ConfigError, InvalidInput, WaitTimeout
from penstock.replay import Fifo, Key, MinSize, Reason, Selector, Table, Uniform
from tests.replay.test_table import ALL, replay


@pytest.mark.parametrize("sampler", ALL, ids=repr)
@pytest.mark.parametrize("remover", ALL, ids=repr)
def test_no_limit_is_exceeded_even_while_making_room(sampler: Selector, remover: Selector) -> None:
    most = {"items": 5, "bytes": 100, "tokens": 50}
    peak = dict.fromkeys(most, 0.0)

    def watch(key: Key, reason: Reason) -> None:
        assert reason == "overflow"
        peak["items"] = max(peak["items"], len(table) + 1)  # the one just given up, and the one to come

    table = replay(
        5, sampler, remover=remover, capacity_bytes=100, capacity_tokens=50, on_evict=watch, max_times_sampled=None
    )
    rng = np.random.default_rng(0)
    for key in range(200):
        num_bytes, num_tokens = (int(n) for n in rng.integers(0, (60, 40)))
        table.insert(key, key, num_bytes=num_bytes, num_tokens=num_tokens, priority=float(rng.random()))
        counts = table.metrics()
        for name, limit in most.items():
            assert counts[f"buffer/{name}"] <= limit
        assert key in table
    assert peak["items"] <= 5


def test_a_table_full_by_bytes_makes_inserts_wait_without_a_remover() -> None:
    table = Table(capacity=10, capacity_bytes=100)
    table.insert("a", "a", num_bytes=60)
    with pytest.raises(WaitTimeout, match="60 of 100 bytes"):
        table.insert("b", "b", num_bytes=60, timeout=0)
    table.insert("c", "c", num_bytes=40, timeout=0)
    assert table.sample(2).keys.tolist() == ["a", "c"]


@pytest.mark.parametrize("size", [{"num_bytes": 101}, {"num_tokens": 51}, {"num_bytes": -1}, {"num_tokens": -1}])
def test_items_that_can_never_fit_are_refused(size: dict[str, int]) -> None:
    table = replay(4, capacity_bytes=100, capacity_tokens=50)
    table.insert("a", "a", num_bytes=90)
    with pytest.raises(InvalidInput, match="num_"):
        table.insert("b", "b", **size)
    assert table.keys() == ["a"]


def test_a_table_that_can_neither_be_filled_nor_sampled_says_so() -> None:
    table = Table(capacity=10, capacity_tokens=100, limiter=MinSize(4))
    table.insert("a", "a", num_tokens=60)
    with pytest.raises(ConfigError, match="min_size"):
        table.insert("b", "b", num_tokens=60)


@pytest.mark.parametrize(
    "settings",
    [
        {"capacity": 0},
        {"capacity": -3},
        {"capacity": 1.5},
        {"capacity": 4, "capacity_bytes": 0},
        {"capacity": 4, "capacity_tokens": 0},
        {"capacity": 4, "max_times_sampled": 0},
        {"capacity": 4, "max_staleness": -1},
        {"capacity": 4, "seed": -1},
        {"capacity": 4, "max_times_sampled": None},
        {"capacity": 4, "sampler": "best"},
        {"capacity": 4, "remover": Fifo},
        {"capacity": 4, "limiter": 3},
    ],
    ids=str,
)
def test_impossible_settings_are_refused_at_construction(settings: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match="Table"):
        Table(**settings)  # type: ignore[arg-type]


# -- staleness -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sampler", ALL, ids=repr)
def test_items_too_many_versions_behind_are_never_sampled(sampler: Selector) -> None:
    table = replay(32, sampler, max_staleness=2)
    for version in range(30):
        table.advance(version)
        table.insert(version, version, policy_version=version)
        batch = table.sample(min(3, len(table)))
        assert (batch.staleness <= 2).all()
    assert table.keys() == [27, 28, 29]
    assert table.metrics()["buffer/evicted/stale"] == 27


def test_an_item_stale_on_arrival_is_refused_and_counted() -> None:
    table = Table(capacity=1, max_staleness=1)
    table.advance(5)
    assert table.insert("old", "old", policy_version=3) is None
    assert table.insert("edge", "edge", policy_version=4) is not None
    assert table.insert("late", "late", policy_version=3, timeout=0) is None  # although the table is full
    counts = table.metrics()
    assert counts["gen/refused_stale"] == 2
    assert counts["gen/items"] == 1


def test_versions_only_grow() -> None:
    table = replay()
    table.advance(3)
    table.advance(3)
    with pytest.raises(InvalidInput, match="version 2 after 3"):
        table.advance(2)


# -- books -----------------------------------------------------------------------------------------------------


def test_every_departure_is_told_with_its_reason() -> None:
    told: list[tuple[Key, Reason]] = []
    table = Table(capacity=3, remover=Fifo(), max_staleness=1, on_evict=lambda key, reason: told.append((key, reason)))
    for key in ("a", "b", "c", "d", "d"):
        table.insert(key, key, policy_version=1)
    table.sample(1)
    table.remove(["c", "c", "nobody"])
    table.advance(3)
    table.insert("e", "e", policy_version=3)
    table.clear()
    assert told == [
        ("a", "overflow"),
        ("d", "replaced"),
        ("b", "sampled_out"),
        ("c", "removed"),
        ("d", "stale"),
        ("e", "cleared"),
    ]
    assert table.metrics()["buffer/evicted_unsampled"] == 5


def test_a_failing_listener_leaves_the_books_in_order() -> None:
    def fail(key: Key, reason: Reason) -> None:
        raise RuntimeError(key)

    table = replay(2, Uniform(), on_evict=fail)
    table.insert("a", "a")
    table.insert("b", "b")
    with pytest.raises(RuntimeError, match="a"):
        table.insert("c", "c")
    counts = table.metrics()
    assert counts["gen/items"] == counts["buffer/items"] + counts["buffer/evicted/overflow"] == 2
    assert table.sample(1).keys.tolist() == ["b"]


def test_metrics_never_mix_what_arrived_with_what_was_trained_on() -> None:
    table = replay(4, Fifo())
    for key in range(4):
        table.insert(key, key, num_tokens=10 * (key + 1), num_bytes=key, policy_version=key)
    table.advance(4)
    for _ in range(3):
        table.sample(4)
    counts = table.metrics()
    expected = {
        "gen/items": 4,
        "gen/tokens": 100,
        "gen/bytes": 6,
        "buffer/items": 4,
        "buffer/tokens": 100,
        "buffer/age_mean": 1.5,
        "buffer/age_max": 3,
        "buffer/times_sampled_mean": 3,
        "buffer/staleness_mean": 2.5,
        "buffer/staleness_max": 4,
        "train/items": 12,
        "train/batches": 3,
        "train/tokens": 300,
        "train/first_uses": 4,
        "train/reuse_mean": 1.0,
        "train/staleness_mean": 2.5,
        "train/staleness_max": 4,
    }
    assert {name: counts[name] for name in expected} == expected
    assert {name.split("/")[0] for name in counts} == {"gen", "buffer", "train"}


def test_metrics_of_an_empty_table_are_zeros() -> None:
    counts = Table(capacity=3).metrics()
    assert set(counts.values()) == {0.0}


def test_statistics_of_many_batches_are_complete() -> None:
    table = replay(4, Uniform())
    for key in range(4):
        table.insert(key, key, num_tokens=5)
    for _ in range(300):
        table.sample(3)
    assert table.metrics()["train/tokens"] == 300 * 3 * 5


def test_a_closed_table_refuses_at_once_and_can_still_be_read() -> None:
    table = replay(2)
    table.insert("a", "a")
    table.close()
    with pytest.raises(Closed):
        table.insert("b", "b")
    with pytest.raises(Closed):
        table.sample(1)
    assert table.keys() == ["a"]
    assert table.metrics()["gen/items"] == 1


def test_released_items_are_not_kept_alive() -> None:
    import weakref

    class Item:
        pass

    item = Item()
    gone = weakref.ref(item)
    table = Table(capacity=2)
    table.insert("a", item)
    del item
    batch = table.sample(1)
    assert gone() is batch.items[0]
    keys = batch.keys
    del batch
    assert gone() is None, f"keeping the keys {keys} keeps the items"


def test_a_capacity_that_no_machine_has_is_our_error() -> None:
    with pytest.raises(ConfigError, match="capacity"):
        Table(capacity=10**12)


@pytest.mark.parametrize("timeout", ["x", float("nan"), True, [1.0]])
def test_a_timeout_that_is_no_time_is_our_error_before_anything_waits(timeout: Any) -> None:
    table: Table = Table(capacity=1)
    with pytest.raises(InvalidInput, match=r"timeout: .*; give seconds, or None"):
        table.sample(1, timeout=timeout)
    with pytest.raises(InvalidInput, match=r"timeout: .*; give seconds, or None"):
        table.insert("a", 1, timeout=timeout)
    assert len(table) == 0


@pytest.mark.parametrize("number", [2**400, 10**5000], ids=["2**400", "10**5000"])
def test_a_number_that_python_does_not_print_is_our_error(number: int) -> None:
    table: Table = Table(capacity=2)
    with pytest.raises(InvalidInput, match=r"num_bytes: a number of .* bits; give a whole number"):
        table.insert("a", 1, num_bytes=number)
    with pytest.raises(InvalidInput, match=r"sample: n: a number of .* bits"):
        table.sample(number)
    table.insert("a", 1)
    with pytest.raises(InvalidInput, match="priority"):
        table.update_priorities({"a": number})


@pytest.mark.parametrize("priority", ["x", None, [1.0], float("nan")])
def test_a_priority_that_is_no_number_is_our_error(priority: Any) -> None:
    table: Table = Table(capacity=2)
    with pytest.raises(InvalidInput, match=r"priority .*; give a finite number"):
        table.insert("a", 1, priority=priority)
    table.insert("a", 1)
    with pytest.raises(InvalidInput, match=r"has priority .*; give a finite number"):
        table.update_priorities({"a": priority})


@pytest.mark.parametrize(
    "wrong",
    [
        {"num_bytes": 2**70},
        {"num_tokens": 2**63},
        {"num_bytes": 1.5},
        {"num_tokens": "x"},
        {"policy_version": 2**63},
        {"policy_version": "x"},
    ],
    ids=str,
)
def test_a_number_that_no_row_holds_is_an_error_and_takes_no_room(wrong: dict[str, Any]) -> None:
    table = Table(capacity=2)
    with pytest.raises(InvalidInput, match=rf"insert\('a'\): {next(iter(wrong))}: .*; give a whole number from"):
        table.insert("a", 1, **wrong)
    for key in "ab":
        table.insert(key, 1, num_bytes=np.int64(3), policy_version=np.int64(4), timeout=0)  # type: ignore[arg-type]
    assert len(table) == 2
    with pytest.raises(InvalidInput, match="sample: n: 'x'; give a whole number"):
        table.sample("x")  # type: ignore[arg-type]
