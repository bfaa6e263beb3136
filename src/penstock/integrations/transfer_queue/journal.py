"""The journal of a queue: everything that was put, tagged and cleared, as frames in a storage. No server.

Each process of a job appends to segments of its own, rows to one and notes (tags, clears) to another. A row is one
frame, so that it can be deleted alone:

    row     front: partition, key, tag, stamp, columns      body: the bytes of its columns
    note    front: partition, keys, tags or "cleared"

TransferQueue's controller knows where the columns of its rows are, and readers read those byte ranges. After a crash
`read_history` replays all frames, in the order of their stamps, to find which keys exist, with which tag and columns.
A stamp is (start of the job, clock of the controller): every change begins with a question to the controller, so one
clock orders them all, whatever host they were made on. Restarting a job on a storage makes the next start.

A *snapshot* replaces everything before it. It begins the journal of a job that restored an earlier one, whose notes
and cleared rows can then be deleted.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from threading import Lock
from typing import TypeAlias

import msgspec

from penstock.errors import Conflict, CorruptFrame, Fenced
from penstock.frames import PREFIX_SIZE, Buffer, read_sizes, split, wrap
from penstock.integrations.transfer_queue.typed_cells import Cell
from penstock.storage import (
    FolderStorage,
    Gone,
    KeptStorage,
    Location,
    Marker,
    Part,
    Piece,
    Pieces,
    Writer,
    find_frames,
    new_segment_name,
    parse_location,
    read_at,
    read_marker,
)

RUN = "TransferQueue"
"""The run's name in the marker of a storage that holds a queue."""
_ATTEMPTS = 10

Stamp: TypeAlias = tuple[int, float]
"""Number of the job's start, and the controller's clock."""


class RowFront(msgspec.Struct, frozen=True, array_like=True, tag="row"):
    partition: str
    key: str | None
    """None for a row that was put without one, with TransferQueue's low-level client."""
    stamp: Stamp
    tag: bytes
    """A dict, encoded by `encode_value`."""
    columns: dict[str, Cell]


class TagNote(msgspec.Struct, frozen=True, array_like=True, tag="tags"):
    partition: str
    stamp: Stamp
    tags: dict[str, bytes]
    """Key -> tag."""


class ClearNote(msgspec.Struct, frozen=True, array_like=True, tag="clear"):
    partition: str
    stamp: Stamp
    keys: list[str]
    rows: list[str]
    """Locations of the rows, as far as the process that cleared them knew."""


class SnapshotNote(msgspec.Struct, frozen=True, array_like=True, tag="snapshot"):
    """Its body is the state that replaces all before it."""

    stamp: Stamp


class Kept(msgspec.Struct, array_like=True):
    """What exists under a key."""

    tag: bytes = b"\x80"  # msgpack's empty dict
    columns: dict[str, str] = {}
    """Column -> place of its bytes, see `place_text`."""


Rows: TypeAlias = dict[str, dict[str, Kept]]
"""Partition -> key -> what exists under it."""
Front: TypeAlias = RowFront | TagNote | ClearNote | SnapshotNote
_FRONTS = msgspec.msgpack.Decoder(Front)
_ROWS = msgspec.msgpack.Decoder(Rows)


# ------------------------------------------------------------------ where a column's bytes are


@dataclass(frozen=True, slots=True)
class Place:
    """The bytes of one column of one row."""

    location: Location
    """Of the row's frame."""
    start: int
    """Offset in the segment."""
    cell: Cell


def place_text(location: str, start: int, cell: Cell) -> str:
    """Write a place as text. The controller keeps one for each column of each row.

    >>> place_text("3f9c21d07b6a4e58:0:512", 200, Cell("int64", (2, 3), 48, 255, True))
    '3f9c21d07b6a4e58:0:512 200 int64 2x3 48 ff r'
    """
    shape = "x".join(map(str, cell.shape)) or "-"
    return f"{location} {start} {cell.kind} {shape} {cell.size} {cell.checksum:x} {'r' if cell.is_ragged else 'd'}"


def parse_place(text: str) -> Place:
    location, start, kind, shape, size, checksum, form = text.split(" ")
    dims = () if shape == "-" else tuple(map(int, shape.split("x")))
    return Place(parse_location(location), int(start), Cell(kind, dims, int(size), int(checksum, 16), form == "r"))


def places_of(location: str, front_size: int, columns: dict[str, Cell]) -> dict[str, str]:
    """Return the places of a row's columns, which lie end to end after its front."""
    found, at = {}, parse_location(location).offset + front_size
    for name, cell in columns.items():
        found[name] = place_text(location, at, cell)
        at += cell.size
    return found


# ------------------------------------------------------------------ writing


def begin(storage: KeptStorage) -> int:
    """Take a storage for a new job. Returns the number of this start. Fences processes of earlier starts."""
    for _ in range(_ATTEMPTS):
        old, found = storage.marker(), read_marker(storage)
        if found is None and storage.segments():
            raise Conflict(f"{storage.url}: holds segments and no marker; give the queue an empty storage of its own")
        if found is not None and found.run != RUN:
            raise Conflict(
                f"{storage.url}: holds run {found.run or found.run_id!r}; give the queue a storage of its own"
            )
        run_id, epoch = (secrets.token_hex(16), 0) if found is None else (found.run_id, found.epoch)
        if storage.set_marker(Marker(run_id=run_id, epoch=epoch + 1, commits=0, run=RUN).to_bytes(), old):
            return epoch + 1
    raise Fenced(f"{storage.url}: another job keeps moving the marker; start one job at a time on a storage")


class Journal:
    """This process's end of the journal. Frames that are written at the same time share one sync. Thread-safe."""

    def __init__(self, storage: KeptStorage, epoch: int) -> None:
        self.storage, self.epoch = storage, epoch
        # A segment is finished by its size only: with a clock, small ones would be left whenever puts are rare.
        self._rows, self._notes = (Writer(storage, self._next_segment, clock=lambda: 0.0) for _ in range(2))
        self._pending: list[tuple[bool, Sequence[Pieces], Future[list[str]]]] = []
        self._lock = Lock()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="penstock-queue-write")
        self._sweeper = ThreadPoolExecutor(1, thread_name_prefix="penstock-queue-free")
        self._freed: dict[str, dict[int, int]] = {}
        """Segment -> offset and size of the rows that this process freed."""

    def _next_segment(self) -> str:
        found = read_marker(self.storage)
        if found is None or found.epoch != self.epoch:
            raise Fenced(f"{self.storage.url}: another job started on this storage; this one can no longer write")
        return new_segment_name()

    def write_rows(self, rows: Sequence[tuple[RowFront, Sequence[Buffer]]]) -> Future[list[dict[str, str]]]:
        """Write rows. The result, once they are durable, is where their columns are."""
        frames = [wrap(msgspec.msgpack.encode(front), list(body)) for front, body in rows]
        done: Future[list[dict[str, str]]] = Future()

        def placed(written: Future[list[str]]) -> None:
            if (error := written.exception()) is not None:
                done.set_exception(error)
                return
            done.set_result(
                [
                    places_of(location, len(frame[0]), front.columns)
                    for location, frame, (front, _) in zip(written.result(), frames, rows, strict=True)
                ]
            )

        self._write(frames, is_note=False).add_done_callback(placed)
        return done

    def write_note(self, note: TagNote | ClearNote) -> Future[list[str]]:
        return self._write([wrap(msgspec.msgpack.encode(note), [])], is_note=True)

    def write_snapshot(self, stamp: Stamp, rows: Rows) -> Future[list[str]]:
        """Make `rows` what exists, whatever was written before the stamp."""
        return self._write([_snapshot(stamp, rows)], is_note=True)

    def _write(self, frames: Sequence[Pieces], *, is_note: bool) -> Future[list[str]]:
        done: Future[list[str]] = Future()
        with self._lock:
            self._pending.append((is_note, frames, done))
        self._thread.submit(self._flush)
        return done

    def _flush(self) -> None:
        """Write all that is pending. Called once per write. An earlier call may have written it already."""
        with self._lock:
            pending, self._pending = self._pending, []
        for is_note, writer in ((False, self._rows), (True, self._notes)):
            own = [(frames, done) for kind, frames, done in pending if kind == is_note]
            if not own:
                continue
            try:
                locations = iter(writer.write([frame for frames, _ in own for frame in frames]))
            except Exception as error:  # noqa: BLE001 - raised where the write is awaited
                for _, done in own:
                    done.set_exception(error)
                continue
            for frames, done in own:
                done.set_result([next(locations) for _ in frames])

    def free(self, locations: Iterable[str]) -> Future[None]:
        """Delete the bytes of rows, in the background. A note must say first that they were cleared."""
        return self._sweeper.submit(self._free, list(locations))

    def _free(self, locations: list[str]) -> None:
        self.storage.delete(locations)
        if isinstance(self.storage, FolderStorage):  # an object store deletes an object with its last frame by itself
            for at in map(parse_location, locations):
                self._freed.setdefault(at.segment, {})[at.offset] = at.size
            for segment in {parse_location(location).segment for location in locations}:
                self._remove_if_freed(segment)

    def _remove_if_freed(self, segment: str) -> None:
        """Delete a full segment when all its rows were freed. Needed where the filesystem cannot punch holes."""
        freed = sum(self._freed[segment].values())
        if freed >= self.storage.segment_bytes:
            try:
                self.storage.read(f"{segment}:{freed}:1")
            except Gone:  # it ends where the freed rows end: there are no others
                self.storage.delete([segment])
                del self._freed[segment]

    def close(self) -> None:
        self._thread.shutdown(wait=True)
        self._sweeper.shutdown(wait=True)
        for writer in (self._rows, self._notes):
            writer.finish()


def _snapshot(stamp: Stamp, rows: Rows) -> Pieces:
    return wrap(msgspec.msgpack.encode(SnapshotNote(stamp)), [msgspec.msgpack.encode(rows)])


def copy_rows(history: History, source: KeptStorage, target: FolderStorage) -> None:
    """Copy all rows that exist to another folder, to the same places."""
    live = sorted(map(parse_location, history.live()), key=lambda at: (at.segment, at.offset))
    for segment, places in groupby(live, key=lambda at: at.segment):
        target.restore(segment, ((at, source.read(str(at))[0]) for at in places))


def save_copy(history: History, source: KeptStorage, folder: Path) -> None:
    """Save a journal's state into an empty folder, to be read by `read_history`."""
    target = FolderStorage(folder)
    copy_rows(history, source, target)
    last = max((one.front.stamp[0] for frames in history.segments.values() for one in frames), default=0)
    Writer(target, new_segment_name).write([_snapshot((last + 1, 0.0), history.rows)])


# ------------------------------------------------------------------ reading back


@dataclass(frozen=True, slots=True)
class Found:
    """A frame of the journal."""

    location: str
    front: Front
    front_size: int
    body: bytes
    """Of a snapshot. Bodies of other frames are not read."""


@dataclass(slots=True)
class History:
    """All frames of a journal, and the state that they lead to."""

    segments: dict[str, list[Found]]
    """Segment -> its frames, without deleted ones."""
    damaged: list[str]
    """Broken pieces: where, and why. A process that was killed while it wrote may leave one at the end of a segment."""
    rows: Rows = field(default_factory=dict)
    keyless: set[str] = field(default_factory=set)
    """Locations of rows without a key."""
    unread: set[str] = field(default_factory=set)
    """Segments with broken pieces. Those pieces may be rows that exist, so these segments are not deleted."""

    def replayed(self, before: float = math.inf) -> History:
        """Return the state after all changes, of jobs before a start if one is given."""
        state = History(self.segments, self.damaged, unread=self.unread)
        changes = [one for frames in self.segments.values() for one in frames if one.front.stamp[0] < before]
        for one in sorted(changes, key=lambda one: one.front.stamp):
            state._apply(one)
        return state

    def _apply(self, one: Found) -> None:
        front = one.front
        if isinstance(front, SnapshotNote):
            self.rows = _ROWS.decode(one.body)
            return
        keys = self.rows.setdefault(front.partition, {})
        if isinstance(front, ClearNote):
            for key in front.keys:
                keys.pop(key, None)
            self.keyless -= set(front.rows)
        elif isinstance(front, TagNote):
            for key, tag in front.tags.items():
                keys.setdefault(key, Kept()).tag = tag
        elif front.key is None:
            self.keyless.add(one.location)
        else:
            kept = keys.setdefault(front.key, Kept())
            kept.tag = front.tag
            kept.columns |= places_of(one.location, one.front_size, front.columns)

    def live(self) -> set[str]:
        """Return the locations of all rows that exist."""
        kept = [one for keys in self.rows.values() for one in keys.values()]
        return {place.split(" ", 1)[0] for one in kept for place in one.columns.values()} | self.keyless

    def dead(self, before: int) -> list[str]:
        """Return what of earlier jobs than the given start can be deleted once a snapshot is written: rows that do not
        exist, and segments that hold nothing else.

        A segment without frames is named only if a clear in an earlier job deleted rows of it. Any other may be one
        that a process of this job has just created.
        """
        fronts = [one.front for frames in self.segments.values() for one in frames]
        clears = [front for front in fronts if isinstance(front, ClearNote) and front.stamp[0] < before]
        emptied = {location.split(":")[0] for note in clears for location in note.rows}
        live, found = self.live(), []
        for segment, frames in self.segments.items():
            if any(one.front.stamp[0] >= before for one in frames) or not (frames or segment in emptied):
                continue
            rows = {one.location for one in frames if isinstance(one.front, RowFront)}
            found += sorted(rows - live) if rows & live or segment in self.unread else [segment]
        return found


def read_history(storage: KeptStorage) -> History:
    """Read a journal and replay it. Verifies every frame, so it takes as long as reading all of the storage."""
    history = History({}, [])
    for segment, parts in storage.parts().items():
        frames = history.segments.setdefault(segment, [])
        for part in parts:
            with suppress(FileNotFoundError), part.opened() as file:
                for piece in find_frames(file):
                    try:
                        frames.append(_read(file, part, piece))
                    except CorruptFrame as error:
                        history.damaged.append(f"{part.name} at {piece.offset}: {error}")
                        history.unread.add(segment)
    return history.replayed()


def _read(file: int, part: Part, piece: Piece) -> Found:
    if piece.problem:
        raise CorruptFrame(piece.problem)
    offset, size = piece.offset, piece.size
    header, head, _ = read_sizes(read_at(file, offset, PREFIX_SIZE))
    front_size = PREFIX_SIZE + header + head
    sections = split(read_at(file, offset, front_size), whole=False)
    try:
        front = _FRONTS.decode(sections.header)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise CorruptFrame(f"not a row or note of a queue: {error}") from None
    is_snapshot = isinstance(front, SnapshotNote)
    body = read_at(file, offset + front_size, size - front_size) if is_snapshot else b""
    return Found(f"{part.segment}:{part.start + offset}:{size}", front, front_size, body)
