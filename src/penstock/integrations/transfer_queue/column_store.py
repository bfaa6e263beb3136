"""A durable store of columns of any type under numbered rows, in a folder. Acknowledged puts survive a kill.

A *block* is the content of one put: some columns of some rows. Its bytes go to `ColumnFiles`, one entry per column. Its
description (names, types, shapes, sizes, checksums, rows) is one row of an SQLite file, written after the bytes were
synced. Freed blocks are recorded there too, by name, before their bytes are deleted, so that nothing is ever deleted
because it is unknown. A row's column is the one in the newest block that has it:

    put 1: rows 7 8, columns a b        row 7 has a from block 2 and b from block 1
    put 2: row 7, column a              block 1 stays for b, and for row 8

A block is freed when all its rows were cleared, or put again with all its columns. One process owns the folder at a
time. Nothing here is pickled.
"""

from __future__ import annotations

import fcntl
import os
import sqlite3
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

import msgspec
import numpy as np
import xxhash
from numpy.typing import NDArray

from penstock.arrays import offsets_of
from penstock.errors import ConfigError, Conflict, CorruptFile, InvalidInput, StorageError, UnknownKey
from penstock.frames import Buffer
from penstock.integrations.transfer_queue.column_files import ColumnFiles

_OWNER_S = 30.0
_BATCH_BYTES = 64 << 20
_TABLES = """
CREATE TABLE IF NOT EXISTS blocks (id INTEGER PRIMARY KEY AUTOINCREMENT, rows BLOB NOT NULL, columns BLOB NOT NULL);
CREATE TABLE IF NOT EXISTS freed (segment TEXT NOT NULL, location TEXT PRIMARY KEY) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS facts (name TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;
"""


class Cells(msgspec.Struct, frozen=True, kw_only=True):
    """Describes the values of one column. A tuple of one entry applies to all rows."""

    name: str
    kinds: tuple[str, ...]
    """Dtype of each value."""
    shapes: tuple[tuple[int, ...], ...]
    sizes: tuple[int, ...]
    """Bytes of each value; the values are concatenated."""

    def all_sizes(self, rows: int) -> NDArray[np.int64]:
        sizes = np.array(self.sizes, np.int64)
        return np.repeat(sizes, rows) if len(sizes) == 1 else sizes


class Kept(msgspec.Struct, frozen=True, kw_only=True):
    """A column on disk."""

    cells: Cells
    location: str
    checksum: int


class Block(msgspec.Struct, frozen=True, kw_only=True):
    """Some columns of some rows, as put or returned by get."""

    rows: tuple[int, ...]
    """Row numbers; -1 for a cleared row."""
    columns: tuple[Cells, ...]
    data: tuple[Buffer, ...]
    """The bytes of each column."""


class _Held:
    """A stored block: the locations of its columns, and its remaining rows."""

    __slots__ = ("columns", "ends", "live", "rows")

    def __init__(self, rows: NDArray[np.int64], columns: Sequence[Kept]) -> None:
        self.rows = rows
        self.columns = {kept.cells.name: kept for kept in columns}
        self.live = int((rows >= 0).sum())
        self.ends = {name: offsets_of(kept.cells.all_sizes(len(rows))) for name, kept in self.columns.items()}

    @property
    def locations(self) -> list[str]:
        return [kept.location for kept in self.columns.values() if kept.location]


class ColumnStore:
    """The columns in one folder. For one thread. `facts` are properties of the folder that must not change."""

    def __init__(self, folder: str | Path, **facts: str) -> None:
        self.folder = Path(folder)
        try:
            self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            self._owner = _own(self.folder / "owner")
        except PermissionError as error:
            raise StorageError(f"{folder}: {error.strerror}; give a folder that can be created and written") from None
        try:
            with self._errors():
                self._sql = sqlite3.connect(self.folder / "blocks.sqlite", isolation_level=None)
                self._sql.execute("PRAGMA journal_mode=WAL")
                self._sql.execute("PRAGMA synchronous=FULL")
                self._sql.executescript(_TABLES)
                self.life = self._begin(facts)
            self._files = ColumnFiles(self.folder / "columns", life=self.life)
            self._blocks: dict[int, _Held] = {}
            self._where: dict[int, list[tuple[int, int]]] = {}
            """Row -> (block, index in it), the newest last."""
            self._checked: set[str] = set()
            self._load()
        except BaseException:
            self._owner.close()
            raise

    # -------------------------------------------------------------- writing

    def put(self, blocks: Sequence[Block]) -> None:
        """Store blocks with one sync. All are durable when this returns; after an error none is stored."""
        for block in blocks:
            _check(block)
        kept = self._keep(blocks)
        with self._unless_kept(kept), self._changing() as sql:
            for block, columns in zip(blocks, kept, strict=True):
                self._add(_insert(sql, block.rows, columns), _Held(np.array(block.rows, np.int64), columns))
            dead = self._shadowed(row for block in blocks for row in block.rows)
            self._write_rows(sql, dead)
        self._free(dead)

    def clear(self, rows: Iterable[int]) -> None:
        """Delete rows. Unknown rows are ignored."""
        touched = set()
        with self._changing() as sql:
            for row in rows:
                for number, place in self._where.pop(row, ()):
                    held = self._blocks[number]
                    held.rows[place] = -1
                    held.live -= 1
                    touched.add(number)
            self._write_rows(sql, touched)
        self._free(touched)

    def replace(self, blocks: Iterable[Block]) -> None:
        """Replace the whole content in one transaction: after a kill, either the old or the new content is there."""
        found: list[tuple[tuple[int, ...], list[Kept]]] = []
        for batch in _batches(blocks):
            found += [(block.rows, columns) for block, columns in zip(batch, self._keep(batch), strict=True)]
        with self._unless_kept(columns for _, columns in found), self._changing() as sql:
            _note_freed(sql, (location for held in self._blocks.values() for location in held.locations))
            sql.execute("DELETE FROM blocks")
            for rows, columns in found:
                _insert(sql, rows, columns)
        self._load()

    def _keep(self, blocks: Sequence[Block]) -> list[list[Kept]]:
        # An empty entry is not written: its location would equal that of the next one.
        locations = iter(self._files.keep([data for block in blocks for data in block.data if len(data)]))
        return [
            [
                Kept(
                    cells=cells,
                    location=next(locations) if len(data) else "",
                    checksum=xxhash.xxh3_64_intdigest(data),
                )
                for cells, data in zip(block.columns, block.data, strict=True)
            ]
            for block in blocks
        ]

    # -------------------------------------------------------------- reading

    def get(self, rows: Sequence[int], names: Sequence[str]) -> Block:
        """Return a copy of these columns of these rows. UnknownKey names the first missing one."""
        columns, data = [], []
        for name in names:
            found = [self._find(row, name) for row in rows]
            pieces, kinds, shapes, sizes = [], [], [], []
            for held, place in found:
                cells, ends = held.columns[name].cells, held.ends[name]
                pieces.append((held.columns[name], int(ends[place]), int(ends[place + 1])))
                kinds.append(cells.kinds[place if len(cells.kinds) > 1 else 0])
                shapes.append(cells.shapes[place if len(cells.shapes) > 1 else 0])
                sizes.append(int(ends[place + 1] - ends[place]))
            columns.append(Cells(name=name, kinds=_alike(kinds), shapes=_alike(shapes), sizes=_alike(sizes)))
            data.append(self._joined(pieces))
        return Block(rows=tuple(rows), columns=tuple(columns), data=tuple(data))

    def blocks(self) -> Iterator[Block]:
        """Yield all blocks, the oldest first."""
        for number in sorted(self._blocks):
            held = self._blocks[number]
            kept = list(held.columns.values())
            data = tuple(bytes(self._read(column)) for column in kept)
            yield Block(rows=tuple(held.rows.tolist()), columns=tuple(column.cells for column in kept), data=data)

    def _find(self, row: int, name: str) -> tuple[_Held, int]:
        for number, place in reversed(self._where.get(row, ())):
            if name in self._blocks[number].columns:
                return self._blocks[number], place
        known = "it was never put, or was cleared" if row not in self._where else f"it has no column {name!r}"
        raise UnknownKey(f"row {row}: {known}")

    def _joined(self, pieces: Sequence[tuple[Kept, int, int]]) -> bytes:
        """Concatenate pieces with one copy. Adjacent pieces are read as one: [0:4] and [4:9] become [0:9]."""
        runs: list[tuple[Kept, int, int]] = []
        for kept, start, stop in pieces:
            if runs and runs[-1][0] is kept and runs[-1][2] == start:
                runs[-1] = (kept, runs[-1][1], stop)
            else:
                runs.append((kept, start, stop))
        return b"".join([memoryview(self._read(kept))[start:stop] for kept, start, stop in runs])

    def _read(self, kept: Kept) -> Buffer:
        if not kept.location:
            return b""
        data = self._files.read(kept.location)
        if kept.location not in self._checked:  # once per opening: mapped bytes do not change
            if xxhash.xxh3_64_intdigest(data) != kept.checksum:
                raise CorruptFile(f"{self.folder}: column {kept.cells.name!r} at {kept.location}: its checksum differs")
            self._checked.add(kept.location)
        return data

    @property
    def rows(self) -> list[int]:
        return sorted(self._where)

    @property
    def num_bytes(self) -> int:
        return self._files.num_bytes

    def sweep(self) -> None:
        """Free the disk space of cleared rows. May take as long as the disk needs."""
        self._files.sweep()
        self._forget_removed()

    def close(self) -> None:
        self._files.close()
        self._forget_removed()
        self._sql.close()
        fcntl.flock(self._owner, fcntl.LOCK_UN)  # closing is not enough: a forked child may have it open
        self._owner.close()

    # -------------------------------------------------------------- bookkeeping

    def _begin(self, facts: dict[str, str]) -> int:
        """Check the folder's facts and count this opening. Returns its number, `life`."""
        known = dict(self._sql.execute("SELECT name, value FROM facts"))
        for name, value in facts.items():
            if known.get(name, value) != value:
                raise ConfigError(
                    f"{self.folder}: {name} is {value}, was {known[name]} at its creation; use that, or another folder"
                )
        life = int(known.get("life", "0")) + 1
        self._sql.executemany("INSERT OR REPLACE INTO facts VALUES (?, ?)", [*facts.items(), ("life", str(life))])
        return life

    def _load(self) -> None:
        self._blocks, self._where = {}, {}
        with self._errors():
            found = self._sql.execute("SELECT id, rows, columns FROM blocks ORDER BY id").fetchall()
        for number, rows, columns in found:
            kept = msgspec.msgpack.decode(columns, type=tuple[Kept, ...])
            self._add(number, _Held(np.frombuffer(rows, np.int64).copy(), kept))
        self._checked = set()
        with self._errors():
            freed = [location for (location,) in self._sql.execute("SELECT location FROM freed")]
        self._files.load((location for held in self._blocks.values() for location in held.locations), freed)
        self._forget_removed()

    def _add(self, number: int, held: _Held) -> None:
        self._blocks[number] = held
        for place, row in enumerate(held.rows.tolist()):
            if row >= 0:
                self._where.setdefault(row, []).append((number, place))

    def _shadowed(self, rows: Iterable[int]) -> set[int]:
        """Remove rows from blocks whose columns are all in newer blocks. Returns the changed blocks.

        Row 7 in block 1 (a b), 2 (a) and 3 (b): from the newest, 3 adds b, 2 adds a, and block 1 has nothing new.
        """
        touched: set[int] = set()
        for row in rows:
            newer: set[str] = set()
            stay = []
            for number, place in reversed(self._where.get(row, ())):
                held = self._blocks[number]
                if held.columns.keys() <= newer:
                    held.rows[place] = -1
                    held.live -= 1
                    touched.add(number)
                else:
                    stay.append((number, place))
                    newer |= held.columns.keys()
            self._where[row] = stay[::-1]
        return touched

    def _write_rows(self, sql: sqlite3.Connection, numbers: Iterable[int]) -> None:
        for number in numbers:
            held = self._blocks[number]
            if held.live:
                sql.execute("UPDATE blocks SET rows = ? WHERE id = ?", (held.rows.tobytes(), number))
            else:
                _note_freed(sql, held.locations)
                sql.execute("DELETE FROM blocks WHERE id = ?", (number,))

    def _free(self, numbers: Iterable[int]) -> None:
        for number in [number for number in numbers if not self._blocks[number].live]:
            locations = self._blocks.pop(number).locations
            self._files.free(locations)
            self._checked -= set(locations)

    def _forget_removed(self) -> None:
        """Delete the records of freed blocks whose segments are gone."""
        while self._files.removed:
            with self._errors():
                self._sql.execute("DELETE FROM freed WHERE segment = ?", (self._files.removed.popleft(),))

    @contextmanager
    def _unless_kept(self, kept: Iterable[Sequence[Kept]]) -> Iterator[None]:
        """Free bytes that were written for a change that failed.

        By then `_changing` has read the database back, so what a commit of unknown outcome did store is not freed.
        """
        written = [column.location for columns in kept for column in columns if column.location]
        try:
            yield
        except BaseException:
            known = {location for held in self._blocks.values() for location in held.locations}
            lost = [location for location in written if location not in known]
            with suppress(sqlite3.Error):
                _note_freed(self._sql, lost)
                self._files.free(lost)
            raise

    @contextmanager
    def _changing(self) -> Iterator[sqlite3.Connection]:
        """Run the block as one transaction. After an error, reload memory from disk."""
        try:
            with self._errors():
                self._sql.execute("BEGIN IMMEDIATE")
                yield self._sql
                self._sql.execute("COMMIT")
        except BaseException:
            if self._sql.in_transaction:
                self._sql.execute("ROLLBACK")
            self._load()
            raise

    @contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except sqlite3.Error as error:
            raise StorageError(f"{self.folder}: {error}") from None


def _own(path: Path) -> IO[bytes]:
    """Lock a file until this process ends. Waits up to 30 s for a previous owner that is still ending."""
    file = path.open("ab")
    deadline = time.monotonic() + _OWNER_S
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > deadline:
                file.close()
                raise Conflict(f"{path.parent}: another process has it open; only one may") from None
            time.sleep(0.05)
        else:
            os.set_inheritable(file.fileno(), False)
            return file


def _note_freed(sql: sqlite3.Connection, locations: Iterable[str]) -> None:
    named = ((location.partition(":")[0], location) for location in locations)
    sql.executemany("INSERT OR IGNORE INTO freed VALUES (?, ?)", named)


def _insert(sql: sqlite3.Connection, rows: Sequence[int], columns: Sequence[Kept]) -> int:
    packed = msgspec.msgpack.encode(tuple(columns))
    values = (np.array(rows, np.int64).tobytes(), packed)
    number = sql.execute("INSERT INTO blocks (rows, columns) VALUES (?, ?)", values).lastrowid
    assert number is not None
    return number


def _batches(blocks: Iterable[Block]) -> Iterator[list[Block]]:
    batch: list[Block] = []
    for block in blocks:
        _check(block)
        batch.append(block)
        if sum(len(data) for one in batch for data in one.data) > _BATCH_BYTES:
            yield batch
            batch = []
    if batch:
        yield batch


def _check(block: Block) -> None:
    """Reject a block that would make a later read wrong. The reader checks types and shapes."""
    count = len(block.rows)
    if not count:
        raise InvalidInput("block: no rows; give at least one")
    names = [cells.name for cells in block.columns]
    if len(set(names)) != len(names) or len(names) != len(block.data):
        raise InvalidInput(
            f"block: columns {names} with {len(block.data)} buffers; give one per column, each name once"
        )
    named = [row for row in block.rows if row >= 0]
    if len(set(named)) != len(named):
        raise InvalidInput("block: a row is repeated; give each once")
    for cells, data in zip(block.columns, block.data, strict=True):
        for what in (cells.kinds, cells.shapes, cells.sizes):
            if len(what) not in (1, count):
                raise InvalidInput(f"column {cells.name!r}: {len(what)} values for {count} rows")
        sizes = cells.all_sizes(count)
        if (sizes < 0).any() or int(sizes.sum()) != len(data):
            raise InvalidInput(f"column {cells.name!r}: {len(data)} bytes; its values need {int(sizes.sum())}")


def _alike(values: list) -> tuple:  # type: ignore[type-arg]
    """Return one value if all are equal."""
    return (values[0],) if values and all(value == values[0] for value in values) else tuple(values)
