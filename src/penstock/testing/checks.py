"""Checks for parts of your own, without pytest: selectors of a replay table, and stores of images.

    from penstock.testing import STORE_CHECKS, check_selector

    def test_my_selector():
        check_selector(MySelector())

    @pytest.mark.parametrize("check", STORE_CHECKS, ids=lambda check: check.__name__)
    def test_my_store(check):
        check(MyStore(...))

`check_selector` drives a selector's indexes through thousands of random inserts, removals, updates, draws and
evictions, and compares them with a plain set. Each check of a store takes an empty `Blobs`. All raise AssertionError,
with the operation that went wrong or the promise that was broken.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import get_args

import numpy as np

from penstock.assets import Blobs
from penstock.errors import CorruptAsset, InvalidInput, MissingAsset
from penstock.replay import Draw, Index, Role, Selector

# ------------------------------------------------------------------ selectors


_CAPACITIES = (1, 2, 7, 33)


def check_selector(selector: Selector, *, seed: int = 0, num_operations: int = 300) -> None:
    """Raise AssertionError unless the selector keeps every promise of `penstock.replay.selector`."""
    assert isinstance(selector, Selector), f"{selector!r} has no method build(capacity, role)"
    roles: tuple[Role, ...] = get_args(Role)
    for role in roles:
        for capacity in _CAPACITIES:
            _Trial(selector, capacity, role, seed).run(num_operations)
    _check_independence(selector)


class _Trial:
    """One index, the set of slots it must hold, and sometimes a twin restored from its state."""

    def __init__(self, selector: Selector, capacity: int, role: Role, seed: int) -> None:
        self.selector, self.capacity, self.role = selector, capacity, role
        self.index = selector.build(capacity, role)
        self.live: set[int] = set()
        self.version = 0
        self.choices = np.random.default_rng([seed, capacity])
        self.rng = np.random.default_rng([seed, capacity, 1])

    def run(self, num_operations: int) -> None:
        operations = (self.insert, self.remove, self.update, self.draw, self.victim, self.continue_from_state)
        for number in range(num_operations):
            operation = operations[self.choices.integers(0, len(operations))]
            try:
                operation()
            except AssertionError as error:
                where = f"{self.selector!r} as {self.role}r, capacity {self.capacity}, operation {number}"
                raise AssertionError(f"{where} ({operation.__name__}): {error}") from error

    def insert(self) -> None:
        dead = sorted(set(range(self.capacity)) - self.live)
        if dead:
            slot = int(self.choices.choice(dead))
            self.version += int(self.choices.integers(0, 2))
            self.index.insert(slot, self._priority(), self.version)
            self.live.add(slot)

    def remove(self) -> None:
        slots = self._some_live()
        self.index.remove(slots)
        self.live -= set(slots)

    def update(self) -> None:
        slots = np.array(self._some_live(), dtype=np.int64)
        priorities = np.array([self._priority() for _ in slots], dtype=np.float64)
        before = slots.copy(), priorities.copy()
        if len(slots):
            self.index.update(slots, priorities)
        same = np.array_equal(slots, before[0]) and np.array_equal(priorities, before[1])
        assert same, "update changed the arrays it was given"

    def draw(self) -> None:
        if not self.live:
            return
        replace = bool(self.choices.integers(0, 2))
        most = 2 * len(self.live) if replace else len(self.live)
        count = int(self.choices.integers(1, most + 1))
        drawn = self.index.draw(count, self.rng, replace=replace)
        _check_draw(drawn, count, self.live, replace=replace)

    def victim(self) -> None:
        if self.live:
            slot = self.index.victim(self.rng)
            assert isinstance(slot, int), f"victim is a {type(slot).__name__}, not an int"
            assert slot in self.live, f"victim {slot} is not live"

    def continue_from_state(self) -> None:
        """Check that a restored index continues exactly as the original, given the same random numbers."""
        twin = self.selector.build(self.capacity, self.role)
        twin.restore(self.index.state())
        if self.live:
            first, second = (_play(index, len(self.live), seed=7) for index in (self.index, twin))
            assert first == second, f"after restore: {second}, the original goes on with {first}"
        self.index = twin

    def _some_live(self) -> list[int]:
        if not self.live:
            return []
        count = int(self.choices.integers(0, min(4, len(self.live)) + 1))
        return [int(slot) for slot in self.choices.choice(sorted(self.live), count, replace=False)]

    def _priority(self) -> float:
        return float(self.choices.choice([0.0, 1e-6, 0.5, 1.0, 1.0, 1e6]))


def _check_draw(drawn: Draw, count: int, live: set[int], *, replace: bool) -> None:
    slots = drawn.slots.tolist()
    assert len(slots) == count, f"{len(slots)} slots drawn, {count} asked for"
    assert set(slots) <= live, f"drew {sorted(set(slots) - live)}, which are not live"
    assert replace or len(set(slots)) == count, f"repeats without replacement: {slots}"
    for name, values, most in (
        ("probabilities", drawn.probabilities, 1.0),
        ("inclusion", drawn.inclusion, float(count) if replace else 1.0),
    ):
        assert values.shape == (count,), f"{name} has shape {values.shape}"
        assert ((values > 0.0) & (values <= most * (1 + 1e-9))).all(), f"{name} outside (0, {most}]: {values}"
    assert 0 <= drawn.num_filled <= count, f"num_filled {drawn.num_filled}"


def _play(index: Index, num_live: int, seed: int) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    draws = [index.draw(1 + i % num_live, rng, replace=False).slots.tolist() for i in range(5)]
    return [*draws, [index.victim(rng)]]


def _check_independence(selector: Selector) -> None:
    """Check that two indexes of one selector share nothing."""
    one, other = selector.build(4, "sample"), selector.build(4, "sample")
    one.insert(0, 1.0, 0)
    other.insert(3, 1.0, 0)
    rng = np.random.default_rng(0)
    drawn = one.draw(1, rng, replace=False).slots.tolist(), other.draw(1, rng, replace=False).slots.tolist()
    assert drawn == ([0], [3]), f"{selector!r}: two indexes share state, drew {drawn}"


# ------------------------------------------------------------------ stores of images


_HOSTILE = (
    "",
    ".",
    "..",
    "/etc/passwd",
    "../outside",
    "a/../../b",
    "a//b",
    "a/",
    "a/.",
    ".hidden",
    "a\0b",
    "a\nb",
    "a b",
    "a\\b",
    "ü",
    "a:b",
    "%2e%2e/x",
    "x" * 300,
    "/".join("abcdefghi"),
)


@contextmanager
def _raises(kind: type[Exception], what: str) -> Iterator[None]:
    try:
        yield
    except kind:
        return
    raise AssertionError(f"{what}: must raise {kind.__name__}")


def reads_back_what_was_put(blobs: Blobs) -> None:
    for name, data in {"a": b"", "b/c": b"\x00\xff" * 10, "b/d.png": bytes(range(256)) * 12_288}.items():
        assert blobs.put_if_absent(name, data)
        assert blobs.get(name, max_bytes=len(data)) == data
        info = blobs.head(name)
        assert info is not None
        assert (info.name, info.size) == (name, len(data))


def a_taken_name_keeps_its_first_content(blobs: Blobs) -> None:
    assert blobs.put_if_absent("a/b", b"first")
    assert not blobs.put_if_absent("a/b", b"second")
    assert blobs.get("a/b", max_bytes=99) == b"first"


def of_many_writers_exactly_one_wins(blobs: Blobs) -> None:
    contents = [bytes([i]) * 10_000 for i in range(8)]
    with ThreadPoolExecutor(8) as pool:
        won = list(pool.map(lambda data: blobs.put_if_absent("race/x", data), contents))
    assert sum(won) == 1, f"{sum(won)} of {len(won)} writers were told that they wrote it"
    assert blobs.get("race/x", max_bytes=10_000) == contents[won.index(True)]


def what_is_absent_is_said_to_be(blobs: Blobs) -> None:
    with _raises(MissingAsset, "get of nothing"):
        blobs.get("no/such", max_bytes=9)
    assert blobs.head("no/such") is None
    assert not blobs.touch("no/such")
    assert not blobs.delete("no/such")
    assert not blobs.move("no/such", "other/name")
    assert list(blobs.list("no")) == []


def lists_what_is_below_a_folder_and_nothing_else(blobs: Blobs) -> None:
    for name in ("images/aa/1", "images/ab/2", "images2/aa/3", "image"):
        blobs.put_if_absent(name, b"x")
    assert sorted(info.name for info in blobs.list("images")) == ["images/aa/1", "images/ab/2"]
    assert sorted(info.name for info in blobs.list("images/ab")) == ["images/ab/2"]
    assert sorted(info.name for info in blobs.list("")) == ["image", "images/aa/1", "images/ab/2", "images2/aa/3"]


def a_touch_changes_the_time_and_nothing_else(blobs: Blobs) -> None:
    blobs.put_if_absent("a", b"content")
    before = blobs.head("a")
    assert blobs.touch("a")
    after = blobs.head("a")
    assert before is not None
    assert after is not None
    assert after.modified >= before.modified
    assert blobs.get("a", max_bytes=99) == b"content"


def a_moved_blob_has_its_new_name_only(blobs: Blobs) -> None:
    blobs.put_if_absent("old/x", b"moved")
    blobs.put_if_absent("new/x", b"replaced")
    assert blobs.move("old/x", "new/x")
    assert blobs.head("old/x") is None
    assert blobs.get("new/x", max_bytes=99) == b"moved"
    assert blobs.put_if_absent("old/x", b"again")


def a_deleted_name_is_free(blobs: Blobs) -> None:
    blobs.put_if_absent("a/b", b"1")
    assert blobs.delete("a/b")
    assert not blobs.delete("a/b")
    assert blobs.put_if_absent("a/b", b"2")
    assert blobs.get("a/b", max_bytes=9) == b"2"


def nothing_larger_than_asked_for_is_read(blobs: Blobs) -> None:
    blobs.put_if_absent("large", b"x" * 1000)
    assert len(blobs.get("large", max_bytes=1000)) == 1000
    with _raises(CorruptAsset, "get of 1000 bytes with max_bytes 999"):
        blobs.get("large", max_bytes=999)


def a_part_is_what_lies_there(blobs: Blobs) -> None:
    blobs.put_if_absent("a/b", bytes(range(100)))
    for start, size in ((0, 10), (40, 20), (90, 10), (90, 50), (0, 500), (100, 5), (200, 5)):
        assert blobs.part("a/b", start=start, size=size) == bytes(range(100))[start : start + size]
    with _raises(MissingAsset, "part of nothing"):
        blobs.part("no/such", start=0, size=9)


def names_that_lead_elsewhere_are_refused(blobs: Blobs) -> None:
    calls: list[Callable[[str], object]] = [
        lambda name: blobs.put_if_absent(name, b"x"),
        lambda name: blobs.get(name, max_bytes=9),
        lambda name: blobs.part(name, start=0, size=9),
        blobs.head,
        blobs.touch,
        blobs.delete,
        blobs.url,
        lambda name: blobs.move(name, "fine"),
        lambda name: blobs.move("fine", name),
    ]
    for name in _HOSTILE:
        for call in calls:
            with _raises(InvalidInput, f"{name!r}"):
                call(name)
    assert list(blobs.list("")) == []


def every_name_has_its_own_url(blobs: Blobs) -> None:
    names = ["images/aa/1.png", "images/aa/1.jpg", "images/ab/1.png"]
    urls = {blobs.url(name) for name in names}
    assert len(urls) == len(names)
    assert all("://" in url and url.isascii() for url in urls)


STORE_CHECKS: tuple[Callable[[Blobs], None], ...] = (
    reads_back_what_was_put,
    a_taken_name_keeps_its_first_content,
    of_many_writers_exactly_one_wins,
    what_is_absent_is_said_to_be,
    lists_what_is_below_a_folder_and_nothing_else,
    a_touch_changes_the_time_and_nothing_else,
    a_moved_blob_has_its_new_name_only,
    a_deleted_name_is_free,
    nothing_larger_than_asked_for_is_read,
    a_part_is_what_lies_there,
    names_that_lead_elsewhere_are_refused,
    every_name_has_its_own_url,
)
