"""A table's own promises: order, capacity, keys and handles, staleness, exact batches, metrics."""

from __future__ import annotations

import math

import numpy as np
import pytest

from penstock.errors import Closed, ConfigError, InvalidInput, WaitTimeout
from penstock.hold import Fifo, Freshest, Key, MinPriority, MinSize, Prioritized, Reason, Selector, Table, Uniform

ALL: list[Selector] = [Fifo(), Uniform(), Prioritized(0.6), MinPriority(), Freshest(1)]


def replay(capacity: int = 8, sampler: Selector | None = None, **settings: object) -> Table:
    settings = {"remover": Fifo(), "max_times_sampled": None} | settings
    return Table(capacity=capacity, sampler=sampler or Uniform(), **settings)  # type: ignore[arg-type]


# -- the default is a queue ------------------------------------------------------------------------------------


def test_default_hands_out_each_item_once_in_order_and_drops_nothing() -> None:
    table = Table(capacity=4)
    seen: list[Key] = []
    waiting = list(range(40))
    while waiting or len(table):
        while waiting:
            try:
                table.insert(waiting[0], f"item {waiting[0]}", timeout=0)
            except WaitTimeout:
                break
            waiting.pop(0)
        seen += table.sample(min(3, len(table)), timeout=0).keys.tolist()
    assert seen == list(range(40))
    counts = table.metrics()
    assert counts["buffer/evicted/sampled_out"] == 40
    assert counts["buffer/evicted_unsampled"] == 0


def test_batch_of_the_whole_capacity_empties_the_default_table() -> None:
    table = Table(capacity=6, sampler=Uniform())
    for key in range(6):
        table.insert(key, key)
    batch = table.sample(6)
    assert sorted(batch.items.tolist()) == list(range(6))
    assert batch.last_use.all()
    assert len(table) == 0


def test_items_are_the_very_objects_that_were_inserted() -> None:
    table = Table(capacity=2)
    item = {"tokens": np.arange(3)}
    table.insert("a", item)
    assert table.sample(1).items[0] is item


def test_array_items_are_held_as_they_are() -> None:
    table = Table(capacity=2)
    table.insert("a", np.arange(3))
    table.insert("b", [1, 2])
    items = table.sample(2).items
    assert items[0].tolist() == [0, 1, 2]
    assert items[1] == [1, 2]


# -- batches ---------------------------------------------------------------------------------------------------


def test_a_batch_is_never_short() -> None:
    table = replay()
    for key in range(3):
        table.insert(key, key)
    with pytest.raises(WaitTimeout, match=r"sample\(4\): 3 of 8 items"):
        table.sample(4, timeout=0)
    with pytest.raises(WaitTimeout):
        table.sample(4, timeout=0.01)
    assert table.metrics()["train/items"] == 0
    assert len(table.sample(7, replace=True)) == 7


@pytest.mark.parametrize("count", [0, -1, 9])
def test_batches_that_can_never_come_together_are_refused(count: int) -> None:
    with pytest.raises(InvalidInput, match=f"{count} items"):
        replay(8).sample(count)


def test_replacement_is_refused_where_uses_are_limited() -> None:
    with pytest.raises(InvalidInput, match="max_times_sampled=2"):
        replay(max_times_sampled=2).sample(1, replace=True)


@pytest.mark.parametrize("uses", [1, 2, 3])
@pytest.mark.parametrize("sampler", ALL, ids=repr)
def test_every_item_leaves_with_its_last_use_and_not_before(sampler: Selector, uses: int) -> None:
    table = Table(capacity=6, sampler=sampler, max_times_sampled=uses)
    seen: dict[Key, int] = {}
    for key in range(6):
        table.insert(key, key, priority=key + 1.0, policy_version=key)
    while len(table):
        batch = table.sample(min(2, len(table)))
        for key, before, last in zip(batch.keys, batch.times_sampled, batch.last_use, strict=True):
            assert seen.get(key, 0) == before
            seen[key] = seen.get(key, 0) + 1
            assert last == (seen[key] == uses)
            assert (key in table) == (not last)
    assert seen == dict.fromkeys(range(6), uses)


def test_a_batch_does_not_change_when_the_table_does() -> None:
    table = replay(2, Prioritized(1.0))
    table.insert("a", "a", policy_version=3)
    table.insert("b", "b", policy_version=4)
    batch = table.sample(2)
    before = (batch.keys.tolist(), batch.handles.tolist(), batch.probabilities.tolist(), batch.policy_versions.tolist())
    for key in range(5):
        table.insert(key, key, priority=9.0)
        table.sample(2)
    after = (batch.keys.tolist(), batch.handles.tolist(), batch.probabilities.tolist(), batch.policy_versions.tolist())
    assert before == after


def test_ages_and_staleness_are_those_at_sampling_time() -> None:
    table = replay(sampler=Fifo())
    for key in range(3):
        table.insert(key, key, policy_version=key)
    table.advance(5)
    batch = table.sample(3)
    assert batch.ages.tolist() == [2, 1, 0]
    assert batch.staleness.tolist() == [5, 4, 3]


@pytest.mark.parametrize("sampler", ALL, ids=repr)
def test_same_seed_and_operations_give_the_same_samples(sampler: Selector) -> None:
    def run(seed: int) -> list[list[Key]]:
        table = replay(10, sampler, remover=Uniform(), seed=seed)
        drawn = []
        for number in range(60):
            table.insert(f"key {number}", number, priority=1.0 + number % 5, policy_version=number // 9)
            batch = table.sample(min(4, len(table)))
            table.update_handles(batch.handles, np.arange(len(batch)) + 0.5)
            drawn.append(batch.keys.tolist())
        return drawn

    assert run(1) == run(1)
    assert run(1) != run(2)  # the remover is random in each case


# -- keys, handles, priorities ---------------------------------------------------------------------------------


@pytest.mark.parametrize("priority", [-1.0, -1e-300, math.nan, math.inf, -math.inf, 1e101])
def test_bad_priorities_are_refused_everywhere_and_change_nothing(priority: float) -> None:
    table = replay(sampler=Prioritized(1.0))
    handle = table.insert("a", "a", priority=2.0)
    with pytest.raises(InvalidInput, match="priority"):
        table.insert("b", "b", priority=priority)
    with pytest.raises(InvalidInput, match="'a'"):
        table.update_priorities({"a": priority})
    with pytest.raises(InvalidInput, match=r"priorities\[1\]"):
        table.update_handles(np.array([handle, handle]), [1.0, priority])
    assert table.keys() == ["a"]
    assert table.sample(1).probabilities.tolist() == [1.0]
    assert table.metrics()["train/priority_updates"] == 0


def test_a_stale_handle_never_reaches_the_item_that_took_its_slot() -> None:
    table = replay(2, Prioritized(1.0))
    for key in "ab":
        table.insert(key, key)
    old = table.sample(2).handles
    for key in "cd":  # evicts a and b, reuses their slots
        table.insert(key, key)
    assert table.update_handles(old, [50.0, 50.0]) == 0
    assert table.update_priorities({"a": 50.0, "d": 3.0}) == 1
    assert table.metrics()["train/priority_updates_stale"] == 3
    probabilities = dict(zip(*(lambda b: (b.keys, b.probabilities))(table.sample(2)), strict=True))
    assert probabilities == {"c": 0.25, "d": 0.75}


def test_handles_tell_a_key_that_came_again_from_the_item_it_was() -> None:
    table = replay(2, Prioritized(1.0))
    first = table.insert("a", 1)
    second = table.insert("a", 2)
    assert first is not None and second is not None and first != second
    assert table.update_handles(np.array([first]), [9.0]) == 0
    assert table.update_handles(np.array([second]), [9.0]) == 1


@pytest.mark.parametrize("handle", [-1, -(2**62), 0, 1, 2**62, 2**63 - 1])
def test_made_up_handles_are_stale_and_nothing_else(handle: int) -> None:
    for capacity in (1, 3, 5, 8):
        table = replay(capacity, Prioritized(1.0))
        assert table.update_handles(np.array([handle]), [9.0]) == 0
        table.insert("a", "a")
        assert table.update_handles(np.array([handle]), [9.0]) == 0


def test_of_a_repeated_handle_the_last_priority_counts() -> None:
    table = replay(2, Prioritized(1.0))
    a, b = table.insert("a", 1), table.insert("b", 1)
    table.update_handles(np.array([a, b, a, a]), [7.0, 1.0, 0.0, 3.0])
    batch = table.sample(2)
    assert dict(zip(batch.keys, batch.probabilities, strict=True)) == {"a": 0.75, "b": 0.25}


def test_minus_zero_is_zero_and_the_largest_priority_is_accepted() -> None:
    table = replay(2, Prioritized(1.0))
    a, b = table.insert("a", 1, priority=-0.0), table.insert("b", 1, priority=1e100)
    assert table.update_handles(np.array([a, b]), [-0.0, 1e100]) == 2
    assert set(table.sample(50, replace=True).keys.tolist()) == {"b"}
    assert table.sample(2).num_filled == 1


def test_handles_and_priorities_must_be_aligned() -> None:
    table = replay()
    with pytest.raises(InvalidInput, match="one per handle"):
        table.update_handles(np.array([1, 2]), [1.0])


def test_inserting_a_key_again_replaces_the_item() -> None:
    table = replay(2, Fifo(), capacity_bytes=10)
    table.insert("a", "old", num_bytes=6)
    table.insert("b", "b", num_bytes=4)
    table.insert("a", "new", num_bytes=6)
    assert table.keys() == ["b", "a"]
    assert table.sample(2).items.tolist() == ["b", "new"]
    counts = table.metrics()
    assert counts["buffer/evicted/replaced"] == 1
    assert counts["buffer/evicted/overflow"] == 0
    assert counts["buffer/bytes"] == 10


def test_a_key_can_be_replaced_in_a_full_queue() -> None:
    table = Table(capacity=1)
    table.insert("a", "old", timeout=0)
    table.insert("a", "new", timeout=0)
    assert table.sample(1).items.tolist() == ["new"]


@pytest.mark.parametrize("key", [None, 1.5, ("a", 1), b"a"])
def test_keys_are_strings_or_integers(key: object) -> None:
    with pytest.raises(InvalidInput, match="key"):
        replay().insert(key, "a")  # type: ignore[arg-type]


# -- capacity --------------------------------------------------------------------------------------------------


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
        {"capacity": 4, "sampler": "uniform"},
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
