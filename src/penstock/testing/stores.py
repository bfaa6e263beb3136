"""Conformance checks for blob stores: run them over yours.

Each check takes an empty `Blobs` and raises AssertionError if the store breaks a promise:

    @pytest.mark.parametrize("check", STORE_CHECKS, ids=lambda check: check.__name__)
    def test_my_store(check):
        check(MyStore(...))
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

from penstock.assets import Blobs
from penstock.errors import CorruptAsset, InvalidInput, MissingAsset

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
    assert sum(won) == 1
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
