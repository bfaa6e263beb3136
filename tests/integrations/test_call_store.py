"""Model calls, durable one by one, in a file that processes share."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from penstock.errors import Conflict, CorruptFile, InvalidInput, StorageError
from penstock.integrations.environments.call_store import CallStore


def test_a_rollout_is_frozen_as_it_was_put_and_asked_again_it_is_the_same(tmp_path: Path) -> None:
    store = CallStore(tmp_path)
    assert store.put("r", "a", b"one") and not store.put("r", "a", b"one") and store.put("r", "b", b"two")
    other = CallStore(tmp_path)
    first, again = other.freeze("r"), store.freeze("r")
    assert first == again and first.entries == (b"one", b"two") and first.incomplete is None
    with pytest.raises(Conflict, match="is frozen"):
        store.put("r", "c", b"late")


def test_a_call_with_two_contents_is_refused_and_the_rollout_is_incomplete(tmp_path: Path) -> None:
    store = CallStore(tmp_path)
    store.put("r", "a", b"one")
    with pytest.raises(Conflict, match="was put with other content"):
        store.put("r", "a", b"two")
    found = CallStore(tmp_path).freeze("r")
    assert found.entries == (b"one",) and found.incomplete == "call 'a' was put with two contents"


def test_a_call_that_was_begun_and_never_came_makes_the_rollout_incomplete(tmp_path: Path) -> None:
    store = CallStore(tmp_path)
    store.begin("r", "a")
    store.begin("r", "b")
    store.put("r", "a", b"one")
    assert store.freeze("r").incomplete == "call 'b' was begun and never arrived"


def test_a_snapshot_is_freeing_only_if_nothing_changed_since(tmp_path: Path) -> None:
    store = CallStore(tmp_path)
    store.put("r", "a", b"one")
    stale = store.freeze("r")
    store.mark_incomplete("r", "lost one")
    assert store.drop([("r", stale.id, stale.version)]) == 0
    fresh = store.freeze("r")
    assert fresh.incomplete == "lost one" and fresh.id == stale.id and fresh.version > stale.version
    assert store.drop([("r", fresh.id, fresh.version), ("s", "x", 0)]) == 1
    with pytest.raises(Conflict, match="its calls were dropped"):
        store.freeze("r")
    with pytest.raises(Conflict, match="is frozen"):
        store.put("r", "z", b"very late")
    assert store.sweep(3600) == 0 and store.sweep(-1) == 1
    assert store.put("r", "a", b"a new rollout")


def test_calls_are_read_from_where_the_last_look_ended(tmp_path: Path) -> None:
    store, reader = CallStore(tmp_path), CallStore(tmp_path)
    store.put("r", "a", b"one")
    store.put("other", "a", b"not this")
    ((number, entry),) = reader.after("r", 0)
    store.put("r", "b", b"two")
    assert entry == b"one" == reader.one("r", number)
    assert [text for _, text in reader.after("r", number)] == [b"two"]


def test_threads_and_stores_of_one_folder_put_at_the_same_time(tmp_path: Path) -> None:
    stores = [CallStore(tmp_path) for _ in range(3)]

    def work(number: int) -> None:
        for call in range(10):
            stores[number % 3].put("r", f"{number}-{call}", b"x" * call)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(stores[0].freeze("r").entries) == 60


def test_odd_names_are_only_names(tmp_path: Path) -> None:
    store = CallStore(tmp_path)
    for name in ("../../etc", "a'; DROP TABLE calls; --", "\x00", "ü"):
        store.put(name, name, b"x")
        assert store.freeze(name).entries == (b"x",)
    with pytest.raises(InvalidInput, match="empty"):
        store.put("", "a", b"x")


def test_a_damaged_file_is_named(tmp_path: Path) -> None:
    store = CallStore(tmp_path)
    store.put("r", "a", b"one" * 100)
    store._sql.execute("UPDATE calls SET entry = ?", (b"nothing",))
    with pytest.raises(CorruptFile, match="rollout 'r' call 'a'"):
        store.freeze("r")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "calls.sqlite").write_bytes(
        b"this is no database, but it is long enough to be looked at" * 20
    )
    with pytest.raises(StorageError, match="not a database"):
        CallStore(tmp_path / "other")


WRITER = """
import sys
from penstock.integrations.environments.call_store import CallStore
store = CallStore(sys.argv[1])
for number in range(100_000):
    store.put("r", str(number), b"x" * 500)
    print(number, flush=True)
"""


@pytest.mark.process
def test_killed_writers_lose_no_call_that_they_acknowledged(tmp_path: Path) -> None:
    said: set[int] = set()
    for _ in range(3):
        program = WRITER.replace("range(100_000)", f"range({len(said)}, 100_000)")
        with subprocess.Popen(
            [sys.executable, "-c", program, str(tmp_path)], stdout=subprocess.PIPE, text=True
        ) as writer:
            assert writer.stdout is not None
            said |= {int(writer.stdout.readline()) for _ in range(20)}
            writer.send_signal(signal.SIGKILL)
            said |= {int(line) for line in writer.stdout.read().split()}
    store = CallStore(tmp_path)
    kept = {int(name) for (name,) in store._sql.execute("SELECT name FROM calls")}
    assert kept >= said and len(kept - said) <= 3 and len(store.freeze("r").entries) == len(kept)
