"""Checkpoints: the continuation is identical, the file is whole or not there, and every altered byte is found."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import xxhash

from penstock.errors import CorruptFile, InvalidInput, StorageError, UnknownKey
from penstock.replay import (
    Fifo,
    Freshest,
    Index,
    Key,
    Lifo,
    MaxPriority,
    MinPriority,
    Prioritized,
    SamplesPerInsert,
    Selector,
    Table,
    Uniform,
)
from penstock.replay.selector import Role
from penstock.replay.table_checkpoint import _TAIL, MAGIC

ALL: list[Selector] = [
    Fifo(), Lifo(), Uniform(), Prioritized(0.6), MinPriority(), MaxPriority(), Freshest(), Freshest(2)
]  # fmt: skip


def use(table: Table, rng: np.random.Generator, num_steps: int) -> list[Any]:
    """Insert, sample, update, advance and remove; everything the table answered."""
    answers: list[Any] = []
    for _ in range(num_steps):
        number = int(rng.integers(0, 10**6))
        version = int(table.metrics()["buffer/policy_version"])
        answers.append(
            table.insert(
                number if number % 2 else f"key {number}",
                f"item {number}".encode(),
                priority=float(rng.choice([0.0, 0.5, 1.0, 7.0])),
                num_bytes=int(rng.integers(0, 9)),
                policy_version=version,
            )
        )
        batch = table.sample(min(4, len(table)))
        answers.append((batch.keys.tolist(), batch.inclusion.tolist(), batch.weights.tolist()))
        answers.append(table.update_handles(batch.handles, rng.random(len(batch))))
        if rng.random() < 0.1:
            answers.append(table.advance(version + 1))
        if rng.random() < 0.1:
            answers.append(table.remove(table.keys()[::3]))
    counts = table.metrics()
    return [*answers, table.keys(), {name: n for name, n in counts.items() if not name.endswith("wait_s")}]


def small_table(**settings: Any) -> Table:
    table = Table(**({"capacity": 4} | settings))
    keys: list[Key] = ["a", 7, "c"]
    for number, key in enumerate(keys):
        table.insert(key, bytes([number]) * (number + 1), priority=number + 1.0)
    return table


@pytest.mark.parametrize("sampler", ALL, ids=repr)
@pytest.mark.parametrize("remover", ALL, ids=repr)
def test_the_continuation_is_identical(tmp_path: Path, sampler: Selector, remover: Selector) -> None:
    limiter = SamplesPerInsert(4.0, 4, 30.0, batch_size=4)
    table = Table(
        capacity=20, sampler=sampler, remover=remover, limiter=limiter, max_times_sampled=None, max_staleness=6, seed=5
    )
    use_limited(table, num_steps=60, seed=1)
    table.checkpoint(tmp_path / "table")
    restored = Table.restore(tmp_path / "table", load=bytes)
    assert restored.settings == table.settings
    table_answers = use_limited(table)
    assert use_limited(restored) == table_answers


def use_limited(table: Table, num_steps: int = 60, seed: int = 2) -> list[Any]:
    """As `use`, at the pace the limiter sets: four samples for each insert."""
    while len(table) < 4:
        table.insert(f"first {len(table)}", b"", timeout=0)
    return use(table, np.random.default_rng(seed), num_steps)


@pytest.mark.deep
@pytest.mark.parametrize("sampler", ALL, ids=repr)
def test_taking_a_checkpoint_does_not_disturb_the_table(tmp_path: Path, sampler: Selector) -> None:
    """An interrupted run must go on like one that never stopped, not only like the one that was saved."""

    def play(path: Path | None) -> list[list[Key]]:
        table = Table(capacity=30, sampler=sampler, remover=Prioritized(0.6), max_times_sampled=None)
        rng, drawn = np.random.default_rng(3), []
        for number in range(1300):  # past the draw at which the largest weight is looked up anew
            table.insert(number, b"", priority=float(rng.choice([1.0, 1.5, 2.0, 50.0], p=[0.4, 0.3, 0.29, 0.01])))
            if path is not None and number % 97 == 0:
                table.checkpoint(path)
                table = Table.restore(path)
            table.update_priorities({number: 1.0})
            drawn.append(table.sample(1 + number % 3, replace=True).keys.tolist())
        return drawn

    assert play(tmp_path / "table") == play(None)


def test_handles_stay_valid_across_a_restore(tmp_path: Path) -> None:
    table = small_table(sampler=Prioritized(1.0), max_times_sampled=None, remover=Fifo())
    handles = table.sample(3).handles
    table.remove(["a"])
    table.checkpoint(tmp_path / "table")
    restored = Table.restore(tmp_path / "table")
    assert restored.update_handles(handles, [9.0, 9.0, 9.0]) == 2
    assert restored.insert("new", b"") not in handles.tolist()


def test_items_come_back_as_views_or_through_load(tmp_path: Path) -> None:
    table = small_table()
    table.checkpoint(tmp_path / "table")
    views = Table.restore(tmp_path / "table").sample(3)
    assert [type(item) for item in views.items] == [memoryview] * 3
    assert [bytes(item) for item in views.items] == [b"\0", b"\1\1", b"\2\2\2"]
    assert Table.restore(tmp_path / "table", load=len).sample(3).items.tolist() == [1, 2, 3]


def test_dump_and_load_carry_any_object(tmp_path: Path) -> None:
    table = Table(capacity=3)
    groups = [{"tokens": [1, 2], "reward": 0.5}, {"tokens": [], "reward": -1.0}]
    for number, group in enumerate(groups):
        table.insert(number, group)
    table.checkpoint(tmp_path / "table", dump=msgspec.msgpack.encode)
    restored = Table.restore(tmp_path / "table", load=msgspec.msgpack.decode)
    assert restored.sample(2).items.tolist() == groups


def test_items_that_are_not_bytes_need_a_dump(tmp_path: Path) -> None:
    table = Table(capacity=1)
    table.insert("a", {"not": "bytes"})
    with pytest.raises(InvalidInput, match="'a' is a dict"):
        table.checkpoint(tmp_path / "table")
    assert list(tmp_path.iterdir()) == []


def test_an_empty_table_and_empty_items_survive(tmp_path: Path) -> None:
    Table(capacity=3, sampler=Prioritized(0.5)).checkpoint(tmp_path / "table")
    assert len(Table.restore(tmp_path / "table")) == 0
    table = Table(capacity=3)
    table.insert("a", b"")
    table.checkpoint(tmp_path / "table")
    assert bytes(Table.restore(tmp_path / "table").sample(1).items[0]) == b""


def test_every_altered_byte_is_found(tmp_path: Path) -> None:
    path = tmp_path / "table"
    small_table(sampler=Prioritized(0.6), remover=MinPriority()).checkpoint(path)
    good = path.read_bytes()
    for position in range(len(good)):
        path.write_bytes(good[:position] + bytes([good[position] ^ 0x10]) + good[position + 1 :])
        with pytest.raises(CorruptFile):
            Table.restore(path)


def test_every_truncation_is_found(tmp_path: Path) -> None:
    path = tmp_path / "table"
    small_table().checkpoint(path)
    good = path.read_bytes()
    for length in range(len(good)):
        path.write_bytes(good[:length])
        with pytest.raises(StorageError):
            Table.restore(path)
    path.write_bytes(good + b"\0")
    with pytest.raises(CorruptFile):
        Table.restore(path)


def test_a_missing_file_is_a_storage_error(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="nowhere"):
        Table.restore(tmp_path / "nowhere")


def test_a_failed_checkpoint_leaves_the_previous_one_and_no_litter(tmp_path: Path) -> None:
    path = tmp_path / "table"
    table = small_table()
    table.checkpoint(path)
    before = path.read_bytes()

    def fail(item: object) -> bytes:
        raise RuntimeError("dump failed")

    with pytest.raises(RuntimeError, match="dump failed"):
        table.checkpoint(path, dump=fail)
    with pytest.raises(StorageError):
        table.checkpoint(tmp_path / "no such folder" / "table")
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


def test_a_checkpoint_can_be_written_over_the_file_the_table_was_restored_from(tmp_path: Path) -> None:
    path = tmp_path / "table"
    small_table().checkpoint(path)
    table = Table.restore(path)
    table.insert("d", b"d")
    table.checkpoint(path)
    assert [bytes(item) for item in Table.restore(path).sample(4).items] == [b"\0", b"\1\1", b"\2\2\2", b"d"]


class Own(Fifo):
    """A selector of somebody else's."""

    def build(self, capacity: int, role: Role) -> Index:
        return super().build(capacity, role)


def test_parts_of_ones_own_are_asked_for_and_checked(tmp_path: Path) -> None:
    path = tmp_path / "table"
    small_table(sampler=Own()).checkpoint(path)
    with pytest.raises(UnknownKey, match=r"pass sampler=Own"):
        Table.restore(path)
    with pytest.raises(InvalidInput, match="Own"):
        Table.restore(path, sampler=Uniform())
    assert Table.restore(path, sampler=Own()).sample(3).keys.tolist() == ["a", 7, "c"]


def test_writing_does_not_hold_up_the_table(tmp_path: Path) -> None:
    """While items are being written the table goes on, and the file holds the moment it was asked for."""
    table = small_table(remover=Fifo())
    dumping, resume = threading.Event(), threading.Event()

    def dump(item: bytes) -> bytes:
        dumping.set()
        assert resume.wait(60)
        return item

    writer = threading.Thread(target=lambda: table.checkpoint(tmp_path / "table", dump=dump))
    writer.start()
    assert dumping.wait(60)
    table.insert("later", b"later", timeout=0)
    keys: list[Key] = table.sample(4, timeout=0).keys.tolist()
    resume.set()
    writer.join(60)
    assert keys == ["a", 7, "c", "later"]
    assert Table.restore(tmp_path / "table").keys() == ["a", 7, "c"]


def test_bytes_are_what_a_file_holds(tmp_path: Path) -> None:
    table = Table(capacity=8, sampler=Prioritized(0.6), remover=Fifo(), max_times_sampled=None, seed=3)
    for i in range(6):
        table.insert(f"k{i}", bytes([i]), priority=i + 0.5)
    table.checkpoint(tmp_path / "table")
    data = table.to_bytes()
    assert data == (tmp_path / "table").read_bytes()
    again = Table.restore(data)
    assert again.sample(4).keys.tolist() == table.sample(4).keys.tolist()
    with pytest.raises(CorruptFile, match="bytes of a table"):
        Table.restore(data[:-1])


@pytest.mark.parametrize(
    ("way", "value"),
    [
        (("settings", "sampler"), -1),
        (("settings", "sampler", 0), []),
        (("settings",), {}),
        (("rng", "state"), -1),
        (("rng", "has_uint32"), 2**63 - 1),
        (("sections", 0, "dtype"), "x"),
        (("sections", 0, "dtype"), "i1,,"),
        (("sections", 0, "dtype"), "|O"),
        (("sections", 0, "dtype"), "<M8[s]"),
        (("sections", 0, "shape"), [2**62, 4]),
        (("format",), None),
    ],
)
def test_a_footer_that_says_something_odd_behind_its_checksum_is_corrupt(
    tmp_path: Path, way: tuple[Any, ...], value: Any
) -> None:
    path = tmp_path / "table"
    small_table(sampler=Prioritized(0.6), remover=MinPriority()).checkpoint(path)
    data = path.read_bytes()
    offset, length, _, _ = _TAIL.unpack(data[-_TAIL.size :])
    footer = at = msgspec.msgpack.decode(data[offset : offset + length])
    for name in way[:-1]:
        at = at[name]
    at[way[-1]] = value
    raw = msgspec.msgpack.encode(footer)
    path.write_bytes(data[:offset] + raw + _TAIL.pack(offset, len(raw), xxhash.xxh3_64_intdigest(raw), MAGIC))
    with pytest.raises(CorruptFile, match="table: "):
        Table.restore(path)
