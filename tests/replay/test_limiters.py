"""Limiters: who waits, and that no accepted setting makes both sides wait for each other."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from penstock.errors import ConfigError, InvalidInput, WaitTimeout
from penstock.replay import Fifo, Limiter, MinSize, Queue, SamplesPerInsert, Table, Uniform


def may_insert(table: Table, key: int) -> bool:
    try:
        table.insert(key, key, timeout=0)
    except WaitTimeout:
        return False
    return True


def may_sample(table: Table, count: int) -> bool:
    try:
        table.sample(count, timeout=0)
    except WaitTimeout:
        return False
    return True


@pytest.mark.parametrize(
    ("limiter", "others", "message"),
    [
        (MinSize(5), {"capacity": 4}, "min_size 5"),
        (Queue(5), {"capacity": 4}, "size 5"),
        (Queue(4), {"capacity": 4, "max_times_sampled": None, "remover": Fifo()}, "for ever"),
        (SamplesPerInsert(1.0, 5, 4.0), {"capacity": 4}, "min_size 5"),
        (SamplesPerInsert(1.0, 2, 4.0, batch_size=4), {"capacity": 8}, "below batch_size"),
        (SamplesPerInsert(1.0, 4, 4.0, batch_size=6), {"capacity": 4}, "can never be filled"),
        (SamplesPerInsert(4.0, 2, 8.0), {"capacity": 8, "max_times_sampled": 2}, "above max_times_sampled"),
        (SamplesPerInsert(1.0, 2, 8.0), {"capacity": 8, "max_times_sampled": 2}, "without a remover"),
        (SamplesPerInsert(4.0, 10, 7.0, batch_size=10), {"capacity": 10, "max_times_sampled": 4}, "full table"),
    ],
    ids=lambda value: str(value) if not isinstance(value, dict) else "",
)
def test_settings_that_would_stop_both_sides_are_refused(
    limiter: Limiter, others: dict[str, object], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        Table(limiter=limiter, **others)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "arguments",
    [
        {"ratio": 0.0, "min_size": 1, "error_buffer": 4.0},
        {"ratio": float("nan"), "min_size": 1, "error_buffer": 4.0},
        {"ratio": 1.0, "min_size": 1, "error_buffer": 0.5},
        {"ratio": 8.0, "min_size": 1, "error_buffer": 7.0},
        {"ratio": 1.0, "min_size": 8, "error_buffer": 4.0, "batch_size": 8},
        {"ratio": 1.0, "min_size": 8, "error_buffer": 4.0, "batch_size": 0},
    ],
    ids=str,
)
def test_a_buffer_too_small_for_the_batch_is_refused(arguments: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match="SamplesPerInsert"):
        SamplesPerInsert(**arguments)  # type: ignore[arg-type]


def test_batches_the_limiter_was_not_built_for_are_refused_at_once() -> None:
    table = Table(capacity=8, limiter=SamplesPerInsert(1.0, 4, 4.0, batch_size=4))
    with pytest.raises(InvalidInput, match="batch"):
        table.sample(5)
    with pytest.raises(InvalidInput, match="batch"):
        Table(capacity=8, limiter=Queue(4)).sample(5)


def test_min_size_holds_back_samples_and_never_inserts() -> None:
    table = Table(capacity=4, remover=Fifo(), limiter=MinSize(3))
    assert [may_insert(table, key) for key in range(2)] == [True, True]
    assert not may_sample(table, 1)
    assert all(may_insert(table, key) for key in range(2, 20))
    assert may_sample(table, 1)


def test_queue_holds_back_inserts_until_something_left() -> None:
    table = Table(capacity=10, limiter=Queue(2))
    assert [may_insert(table, key) for key in range(3)] == [True, True, False]
    assert table.sample(1).keys.tolist() == [0]
    assert may_insert(table, 3)
    assert table.sample(2).keys.tolist() == [1, 3]


def test_queue_does_not_lose_room_when_items_leave_unsampled() -> None:
    table = Table(capacity=2, limiter=Queue(2))
    for key in range(10):
        assert may_insert(table, key)
        assert table.remove([key]) == 1


def test_samples_per_insert_follows_reverbs_arithmetic() -> None:
    """Ratio 2, min_size 3, buffer 4: the balance 2 * inserted - sampled stays within 6 - 4 and 6 + 4."""
    limiter = SamplesPerInsert(2.0, 3, 4.0)
    table = Table(capacity=100, sampler=Uniform(), remover=Fifo(), max_times_sampled=None, limiter=limiter)
    assert [may_insert(table, key) for key in range(7)] == [True] * 5 + [False] * 2  # 5 * 2 - 0 = 10
    assert [may_sample(table, 1) for _ in range(10)] == [True] * 8 + [False] * 2  # 10 - 8 = 2
    assert may_insert(table, 7)


def test_balance_stays_within_its_bounds_and_reaches_the_ratio() -> None:
    limiter = SamplesPerInsert(3.0, 8, 10.0, batch_size=4)
    table = Table(capacity=32, sampler=Uniform(), remover=Fifo(), max_times_sampled=None, limiter=limiter)
    rng = np.random.default_rng(0)
    for key in range(4000):
        if rng.random() < 0.7:
            may_insert(table, key)
        else:
            may_sample(table, 4)
        counts = table.metrics()
        balance = counts["gen/items"] * 3 - counts["train/items"]
        assert balance <= 24 + 10
        assert balance >= min(24 - 10, counts["gen/items"] * 3)
    assert counts["train/items"] / counts["gen/items"] == pytest.approx(3.0, rel=0.05)


@st.composite
def tables(draw: st.DrawFn) -> tuple[Table, int]:
    """A table near the edge of what is accepted, and the batch size its limiter was told."""
    uses = draw(st.sampled_from([None, 1, 2, 3]))
    evicts = uses is None or draw(st.booleans())
    ratios = [r for r in (0.1, 0.3, 0.5, 1.0, 1.5, 2.0, 3.0) if uses is None or r <= uses]
    ratio = draw(st.sampled_from(ratios)) if evicts else float(uses or 1)
    batch_size = draw(st.integers(1, 8))
    min_size = batch_size + draw(st.integers(0, 4))
    buffer = max(1.0, ratio, (batch_size + ratio) / 2) + draw(st.sampled_from([0.0, 0.2, 1.0, 4.0, 20.0]))
    try:
        table = Table(
            capacity=min_size + draw(st.integers(0, 6)),
            sampler=Uniform(),
            remover=Uniform() if evicts else None,
            limiter=SamplesPerInsert(ratio, min_size, buffer, batch_size),
            max_times_sampled=uses,
        )
    except ConfigError:
        assume(False)
    return table, batch_size


@settings(max_examples=120)
@given(tables(), st.sampled_from([0.1, 0.5, 0.9]), st.integers(0, 99))
def test_no_accepted_setting_can_stop_both_sides(pair: tuple[Table, int], eagerness: float, seed: int) -> None:
    table, batch_size = pair
    rng = np.random.default_rng(seed)
    for key in range(150):
        if rng.random() < 0.03:
            table.remove(table.keys()[:1])  # items may leave unsampled at any time
        if rng.random() < eagerness:
            moved = may_insert(table, key) or may_sample(table, batch_size)
        else:
            moved = may_sample(table, batch_size) or may_insert(table, key)
        assert moved, f"stuck: {table.metrics()}"
