"""Columns under numbered rows: any sequence of puts, clears and restarts gives what a plain dict would."""

from __future__ import annotations

import os
import shutil
import signal
import sqlite3
import subprocess
import sys
import tempfile
import threading
from collections.abc import Sequence
from pathlib import Path

import pytest
import zmq
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import ConfigError, Conflict, CorruptFile, CorruptFrame, InvalidInput, PlaneLost, UnknownKey
from penstock.integrations.transfer_queue.column_store import Block, Cells, ColumnStore
from penstock.integrations.transfer_queue.column_unit import Clear, Get, Load, Put, Save, Unit, UnitConnection


def block(rows: Sequence[int], **columns: list[bytes]) -> Block:
    cells = [
        Cells(name=name, kinds=("value",), shapes=((),), sizes=tuple(map(len, values)))
        for name, values in columns.items()
    ]
    return Block(rows=tuple(rows), columns=tuple(cells), data=tuple(b"".join(values) for values in columns.values()))


def values(found: Block, column: int = 0) -> list[bytes]:
    sizes = found.columns[column].all_sizes(len(found.rows)).tolist()
    out, at = [], 0
    for size in sizes:
        out.append(bytes(found.data[column][at : at + size]))
        at += size
    return out


ROWS = st.lists(st.integers(0, 6), min_size=1, max_size=4, unique=True)
NAMES = st.sets(st.sampled_from("abc"), min_size=1)
PUTS = st.tuples(st.just("put"), ROWS, NAMES)
NONE: set[str] = set()
OTHERS = st.sampled_from([("reopen", list[int](), NONE), ("copy", list[int](), NONE)])
COMMANDS = st.lists(PUTS | st.tuples(st.just("clear"), ROWS, st.just(NONE)) | OTHERS, max_size=25)


@given(COMMANDS)
def test_any_sequence_gives_what_a_dict_would(commands: list[tuple[str, list[int], set[str]]]) -> None:
    plain: dict[int, dict[str, bytes]] = {}
    folder = Path(tempfile.mkdtemp())
    store = ColumnStore(folder / "0")
    try:
        for number, (what, rows, names) in enumerate(commands):
            if what == "put":
                content = {
                    name: [f"{number}{name}{row}".encode() * (row % 3) for row in rows] for name in sorted(names)
                }
                store.put([block(rows, **content)])
                for place, row in enumerate(rows):
                    plain.setdefault(row, {}).update({name: found[place] for name, found in content.items()})
            elif what == "clear":
                store.clear(rows)
                for row in rows:
                    plain.pop(row, None)
            elif what == "reopen":
                store.close()
                store = ColumnStore(folder / "0")
            else:
                other = ColumnStore(folder / f"copy-{number}")
                other.replace(store.blocks())
                store.replace(other.blocks())
                other.close()
            assert store.rows == sorted(plain)
            for row, columns in plain.items():
                for name, value in columns.items():
                    assert values(store.get([row], [name])) == [value]
        store.clear(list(plain))
        store.sweep()
        assert store.num_bytes == 0, "unreferenced bytes are freed"
    finally:
        store.close()
        shutil.rmtree(folder)


def test_rows_come_back_in_the_order_asked_for_from_several_blocks(tmp_path: Path) -> None:
    store = ColumnStore(tmp_path)
    store.put([block([0, 1, 2], a=[b"x0", b"x1", b"x2"]), block([5], a=[b"long value"], b=[b""])])
    store.put([block([1], b=[b"later"])])
    assert values(store.get([5, 2, 0], ["a"])) == [b"long value", b"x2", b"x0"]
    assert values(store.get([1], ["a", "b"]), 1) == [b"later"]
    with pytest.raises(UnknownKey, match="row 0: it has no column 'b'"):
        store.get([0], ["b"])
    with pytest.raises(UnknownKey, match="row 9: it was never put"):
        store.get([9], ["a"])
    store.close()


def test_a_column_put_again_replaces_the_first_and_frees_it(tmp_path: Path) -> None:
    store = ColumnStore(tmp_path)
    for number in range(50):
        store.put([block([0, 1], a=[bytes([number]) * 1000, b"y" * 1000])])
    assert store.num_bytes == 2000 and values(store.get([0], ["a"])) == [bytes([49]) * 1000]
    store.close()


def test_blocks_that_make_no_sense_are_refused_and_nothing_is_kept(tmp_path: Path) -> None:
    store = ColumnStore(tmp_path)
    good = block([0, 1], a=[b"x", b"y"])
    bad = [
        Block(rows=(), columns=good.columns, data=good.data),
        Block(rows=(0, 0), columns=good.columns, data=good.data),
        Block(rows=(0, 1), columns=good.columns, data=(b"xyz",)),
        Block(rows=(0, 1), columns=good.columns * 2, data=good.data * 2),
        Block(rows=(0, 1, 2), columns=(Cells(name="a", kinds=("v",), shapes=((),), sizes=(1, 1)),), data=(b"xy",)),
    ]
    for one in bad:
        with pytest.raises(InvalidInput):
            store.put([good, one])
    assert store.rows == [] and store.num_bytes == 0
    store.close()


def test_nothing_is_deleted_because_no_row_names_it(tmp_path: Path) -> None:
    store = ColumnStore(tmp_path)
    store.put([block([0], a=[b"x" * 5000])])
    store.close()
    copy = {path.name: path.read_bytes() for path in tmp_path.iterdir() if path.is_file()}
    store = ColumnStore(tmp_path)
    store.put([block([1], a=[b"y" * 5000])])
    store.close()
    segments = {path.name: path.read_bytes() for path in (tmp_path / "columns").iterdir()}
    assert len(segments) == 2
    for path in [path for path in tmp_path.iterdir() if path.is_file()]:  # the database is restored from a copy
        path.unlink()
    for name, data in copy.items():
        (tmp_path / name).write_bytes(data)
    store = ColumnStore(tmp_path)
    store.clear([0])
    store.close()
    left = {path.name: path.read_bytes() for path in (tmp_path / "columns").iterdir()}
    [unknown] = left.items()
    assert unknown[0] in segments and b"y" * 5000 in unknown[1], "what was freed by name is gone, the other is not"


def test_what_was_freed_and_not_yet_deleted_is_deleted_by_the_next_life(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = ColumnStore(tmp_path)
    store.put([block([0], a=[b"x" * 50_000]), block([1], a=[b"y" * 50_000])])
    with monkeypatch.context() as killed:  # before its sweep
        killed.setattr("penstock.integrations.transfer_queue.column_files.ColumnFiles.sweep", lambda _self: None)
        store.clear([0, 1])
        store.close()
    assert len(list((tmp_path / "columns").iterdir())) == 1
    ColumnStore(tmp_path).close()
    assert list((tmp_path / "columns").iterdir()) == []


def test_a_folder_has_one_owner_and_keeps_what_was_said_of_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.integrations.transfer_queue.column_store._OWNER_S", 0.2)
    store = ColumnStore(tmp_path, units="2")
    with pytest.raises(Conflict, match="another process has it open"):
        ColumnStore(tmp_path, units="2")
    store.close()
    with pytest.raises(ConfigError, match="units is 3, was 2 at its creation"):
        ColumnStore(tmp_path, units="3")
    ColumnStore(tmp_path, units="2").close()


def test_a_folder_is_free_though_a_forked_child_has_it_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.integrations.transfer_queue.column_store._OWNER_S", 0.05)
    store = ColumnStore(tmp_path)
    child = os.dup(store._owner.fileno())
    store.close()
    ColumnStore(tmp_path).close()
    os.close(child)


def test_bytes_that_changed_on_disk_are_not_handed_out(tmp_path: Path) -> None:
    store = ColumnStore(tmp_path)
    store.put([block([0], a=[b"x" * 5000])])
    store.close()
    segment = next((tmp_path / "columns").iterdir())
    segment.write_bytes(segment.read_bytes().replace(b"xxx", b"xyx", 1))
    store = ColumnStore(tmp_path)
    with pytest.raises(CorruptFile, match="its checksum differs"):
        store.get([0], ["a"])
    store.close()


def test_a_write_that_fails_leaves_memory_as_the_disk_is(tmp_path: Path) -> None:
    store = ColumnStore(tmp_path)
    store.put([block([0, 1], a=[b"old", b"old"])])

    class Full:
        """A connection on which nothing can be committed."""

        def __init__(self, sql: sqlite3.Connection) -> None:
            self._sql = sql

        def __getattr__(self, name: str) -> object:
            return getattr(self._sql, name)

        def execute(self, text: str, *rest: object) -> object:
            if text == "COMMIT":
                raise sqlite3.OperationalError("database or disk is full")
            return self._sql.execute(text, *rest)  # type: ignore[arg-type]

    real, store._sql = store._sql, Full(store._sql)  # type: ignore[assignment]
    for what in ("put", "clear"):
        with pytest.raises(OSError, match="disk is full"):
            store.put([block([0], a=[b"new"])]) if what == "put" else store.clear([0])
        assert values(store.get([0, 1], ["a"])) == [b"old", b"old"]
    store._sql = real
    store.put([block([0], a=[b"new"])])
    assert values(store.get([0, 1], ["a"])) == [b"new", b"old"]
    store.close()


SERVER = """
import sys, threading
from penstock.integrations.transfer_queue.column_unit import Unit
unit = Unit(sys.argv[1], host="127.0.0.1")
print(*unit.where, flush=True)
threading.Event().wait()
"""


class Started:
    """A unit in a process of its own."""

    def __init__(self, folder: Path) -> None:
        command = [sys.executable, "-c", SERVER, str(folder)]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        url, life = self.process.stdout.readline().split()
        self.where = (url, int(life))

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()
        assert self.process.stdout is not None
        self.process.stdout.close()


def test_a_killed_unit_loses_nothing_it_acknowledged_and_the_client_finds_the_next(tmp_path: Path) -> None:
    unit = Started(tmp_path)

    def locate(_: float) -> tuple[str, int]:
        nonlocal unit
        if unit.process.poll() is not None:
            unit = Started(tmp_path)
        return unit.where

    line = UnitConnection(locate, timeout_s=120)
    for life in range(1, 4):
        for number in range(5):
            one = block([10 * life + number], a=[bytes([life, number]) * 100])
            line.ask(Put(one.rows, one.columns), one.data)
        unit.kill()
        rows = tuple(10 * old + number for old in range(1, life + 1) for number in range(5))
        columns, data = line.ask(Get(rows, ("a",)))
        found = values(Block(rows=rows, columns=columns, data=tuple(data)))
        assert found == [bytes([row // 10, row % 10]) * 100 for row in rows]
        assert unit.where[1] == life + 1
    line.close()
    unit.kill()


def test_a_unit_that_can_serve_no_more_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    failed = threading.Event()
    monkeypatch.setattr(threading, "excepthook", lambda _: None)
    unit = Unit(tmp_path, host="127.0.0.1", on_failure=failed.set)

    def broken(*_: object) -> None:
        raise RuntimeError("boom")

    monkeypatch.setattr(ColumnStore, "sweep", broken)
    assert failed.wait(60)
    unit.close()
    ColumnStore(tmp_path).close()


def test_a_unit_says_what_is_wrong_and_goes_on(tmp_path: Path) -> None:
    unit = Unit(tmp_path / "live", host="127.0.0.1", saves_under=tmp_path)
    line = UnitConnection(lambda _: unit.where, timeout_s=60)
    one = block([0, 1], a=[b"x", b"y"])
    line.ask(Put(one.rows, one.columns), one.data)
    with pytest.raises(InvalidInput, match="3 bytes; its values need 2"):
        line.ask(Put(one.rows, one.columns), [b"xyz"])
    with pytest.raises(UnknownKey, match="row 7"):
        line.ask(Get((7,), ("a",)))
    line.ask(Save(str(tmp_path / "saved" / "penstock-0-of-1")))
    line.ask(Clear((0,)))
    with pytest.raises(UnknownKey):
        line.ask(Get((0,), ("a",)))
    with zmq.Context() as context, context.socket(zmq.DEALER) as stranger:
        stranger.connect(unit.where[0])
        for parts in ([b""], [b"1"], [b"1", b"\xc1 no request"], [b"1", b"\x81\xa4type\xa3Put", b"x"]):
            stranger.send_multipart(parts)
        stranger.setsockopt(zmq.LINGER, 0)
        assert b"CorruptFrame" in stranger.recv_multipart()[1]
    line.ask(Load(str(tmp_path / "saved" / "penstock-0-of-1")))
    assert bytes(line.ask(Get((1, 0), ("a",)))[1][0]) == b"yx"
    line.close()
    unit.close()


def test_a_unit_that_other_hosts_can_reach_hears_only_who_has_its_keys(tmp_path: Path) -> None:
    unit = Unit(tmp_path, host="127.0.0.1")
    assert len(unit.where) == 2, "loopback needs none"
    unit.close()
    unit = Unit(tmp_path, host="0.0.0.0")
    port = unit.where[0].rpartition(":")[2]
    address = f"tcp://127.0.0.1:{port}"
    one = block([0], a=[b"x"])
    line = UnitConnection(lambda _: (address, *unit.where[1:]), timeout_s=60)
    line.ask(Put(one.rows, one.columns), one.data)
    stranger = UnitConnection(lambda _: (address, unit.where[1]), timeout_s=1)
    with pytest.raises(PlaneLost):
        stranger.ask(Clear((0,)))
    assert bytes(line.ask(Get((0,), ("a",)))[1][0]) == b"x"
    stranger.close()
    line.close()
    unit.close()


def test_no_request_ends_a_unit_or_empties_it_by_mistake(tmp_path: Path) -> None:
    unit = Unit(tmp_path / "live", host="127.0.0.1", saves_under=tmp_path / "checkpoints")
    line = UnitConnection(lambda _: unit.where, timeout_s=60)
    one = block([0], a=[b"x"])
    line.ask(Put(one.rows, one.columns), one.data)
    with pytest.raises(UnknownKey, match="nothing was saved there"):
        line.ask(Load(str(tmp_path / "checkpoints" / "penstock-0-of-1")))
    assert not (tmp_path / "checkpoints").exists()
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints" / "link").symlink_to(tmp_path)
    for outside in ("penstock-0-of-1", "checkpoints/link/penstock-0-of-1", "checkpoints/live", "live/columns"):
        for act in (Save(str(tmp_path / outside)), Load(str(tmp_path / outside))):
            with pytest.raises(InvalidInput, match=r"must be named penstock-K-of-N and be below .*checkpoints"):
                line.ask(act)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoints", "live"]
    for folder in ("relative", f"{tmp_path}/a\0b", f"{tmp_path}/../up"):
        for act in (Save(folder), Load(folder)):
            with pytest.raises(InvalidInput, match="must be absolute"):
                line.ask(act)
    for request in (Put((2**63,), one.columns), Clear((2**63,)), Get((2**64 - 1,), ("a",))):
        with pytest.raises(CorruptFrame):
            line.ask(request, one.data)
    assert bytes(line.ask(Get((0,), ("a",)))[1][0]) == b"x"
    line.close()
    unit.close()
