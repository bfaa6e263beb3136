"""A table's own promises: order, capacity, keys and handles, staleness, exact batches, metrics."""

from __future__ import annotations

import math

import numpy as np
import pytest

from penstock.errors import InvalidInput, WaitTimeout
from penstock.replay import Fifo, Freshest, Key, MinPriority, Prioritized, Selector, Table, Uniform

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
