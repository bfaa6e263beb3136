"""What an archive still lacks of a run: read from its log, a segment at a time, beside the plane that writes it.

Two things move on. Every group and every other decision is recorded in order, by op. Frames follow when their step is
committed, step by step; those of evaluation groups at once. Nothing is written here: how far an archive has come, the
archive itself says (`Cursor`), so that what is not in it is sent, whoever was killed when.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

import msgspec
import xxhash

from penstock.archive.segment import FrameEntry, Front, GroupEntry, RecordEntry, StepEntry
from penstock.encode.layout import Buffer
from penstock.errors import ConfigError, CorruptFrame
from penstock.serve.decisions.log import State
from penstock.serve.decisions.manifest import Manifest, read_manifest
from penstock.serve.decisions.read_log import LOG, reading

SEGMENT_BYTES = 32 << 20
"""A segment ends with the frame that makes it this large: so much is in memory, or one frame if that is larger."""
_ROWS = 4096
"""Decisions read at a time."""

Read = Callable[[str, str], Buffer]
"""Gives a frame by its location and its group; CorruptFrame: it is gone for good, StorageError: try again later."""


@dataclass(frozen=True, slots=True)
class Cursor:
    """How far an archive has come; as its last front says."""

    op: int = 0
    step: int = 0
    step_op: int = 0
    part: int = 0
    """Groups of the next step whose frames are in it."""

    @staticmethod
    def of(front: Front) -> Cursor:
        return Cursor(front.through_op, front.through_step, front.step_op, front.through_part)


@dataclass(slots=True)
class Gathered:
    """What the next segment will hold."""

    cursor: Cursor
    groups: list[GroupEntry] = field(default_factory=list)
    records: list[RecordEntry] = field(default_factory=list)
    steps: list[StepEntry] = field(default_factory=list)
    frames: list[FrameEntry] = field(default_factory=list)
    missing: list[int] = field(default_factory=list)
    bodies: list[bytes] = field(default_factory=list)
    ops: set[int] = field(default_factory=set)
    """Groups whose frames are in it, or missing."""
    num_bytes: int = 0

    def __bool__(self) -> bool:
        return bool(self.groups or self.records or self.steps or self.frames or self.missing)

    @property
    def is_full(self) -> bool:
        return self.num_bytes >= SEGMENT_BYTES

    def add_frame(self, op: int, digest: bytes, frame: bytes | None) -> None:
        self.ops.add(op)
        if frame is None:
            self.missing.append(op)
            return
        self.frames.append(FrameEntry(op=op, offset=self.num_bytes, size=len(frame), digest=digest))
        self.bodies.append(frame)
        self.num_bytes += len(frame)


class ToArchive:
    """A run's log, as its archive needs it. Used by one thread."""

    def __init__(self, folder: Path, read: Read, *, once: bool) -> None:
        """`once`: no group is used by two steps, so none is looked for."""
        self._log, self._read = folder / LOG, read
        self._done: set[int] | None = None if once else set()
        """Groups whose frames are archived, as far as a later step may use them."""

    def gather(self, cursor: Cursor) -> Gathered:
        """The next segment behind a cursor; false if there is nothing to send."""
        with reading(self._log) as log:
            found = Gathered(self._checked(log, cursor))
            self._decisions(log, found)
            if not found.is_full and len(found.groups) < _ROWS:
                self._steps(log, found)
            return found

    def sent(self, found: Gathered) -> None:
        """It is in the archive."""
        if self._done is not None:
            self._done.update(found.ops)

    def check_ahead(self, cursor: Cursor, where: str) -> None:
        """Raise ConfigError where the archive has decisions that this log has not: it is that of another copy."""
        with reading(self._log) as log:
            tables = ("groups", "records")
            last = max(log.execute(f"SELECT MAX(op) FROM {name}").fetchone()[0] or 0 for name in tables)  # noqa: S608
        if cursor.op > last:
            raise ConfigError(
                f"archive {where}: has decisions up to {cursor.op}, the run's folder up to {last}: the folder is an "
                "earlier copy; give the run an archive of its own from here on"
            )

    def remember(self, cursor: Cursor) -> None:
        """After a restart: which frames are archived."""
        if self._done is None:
            return
        with reading(self._log) as log:
            for step, _, manifest in _steps_from(log, 1):
                if step <= cursor.step:
                    self._done.update(manifest.groups)
                elif step == cursor.step + 1:
                    self._done.update(manifest.groups[: cursor.part])

    def _checked(self, log: sqlite3.Connection, cursor: Cursor) -> Cursor:
        """A step that was archived and then planned anew, after a rewind, is archived again; so are those behind it."""
        row = log.execute("SELECT op FROM steps WHERE step = ?", (cursor.step,)).fetchone()
        if not cursor.step or (row is not None and row[0] == cursor.step_op):
            return cursor
        first = log.execute("SELECT value FROM meta WHERE name = 'oldest_step'").fetchone()
        return replace(cursor, step=max(0 if first is None else int(first[0]) - 1, 0), step_op=0, part=0)

    # -------------------------------------------------------------- decisions

    def _decisions(self, log: sqlite3.Connection, found: Gathered) -> None:
        after = found.cursor.op
        rows = log.execute(
            "SELECT op, id, digest, policy_version, samples, tokens, size, run, prompt, kinds, at, state, location "
            "FROM groups WHERE op > ? ORDER BY op LIMIT ?",
            (after, _ROWS),
        ).fetchall()
        through = None
        for op, name, digest, version, samples, tokens, size, run, prompt, kinds, at, state, location in rows:
            evaluation = state == State.EVALUATION
            found.groups.append(
                GroupEntry(
                    op=op,
                    id=name,
                    digest=digest,
                    policy_version=version,
                    samples=samples,
                    tokens=tokens,
                    size=size,
                    run=run,
                    prompt=prompt,
                    kinds=msgspec.msgpack.decode(kinds, type=tuple[tuple[str, str], ...]),
                    evaluation=evaluation,
                    at=at,
                )
            )
            if evaluation:
                found.add_frame(op, digest, self._frame(location, name, digest))
            through = op
            if found.is_full:
                break
        else:
            through = None if len(rows) < _ROWS else through
        self._records(log, found, after, through)

    def _records(self, log: sqlite3.Connection, found: Gathered, after: int, through: int | None) -> None:
        """Up to the last group of this segment; None: all there are."""
        query = "SELECT op, data FROM records WHERE op > ? AND op <= ? ORDER BY op"
        for op, data in log.execute(query, (after, 2**62 if through is None else through)):
            found.records.append(RecordEntry(op=op, data=data))
        last = [*(entry.op for entry in found.groups[-1:]), *(entry.op for entry in found.records[-1:])]
        found.cursor = replace(found.cursor, op=max([after, *last]) if through is None else through)

    # -------------------------------------------------------------- steps

    def _steps(self, log: sqlite3.Connection, found: Gathered) -> None:
        row = log.execute("SELECT value FROM meta WHERE name = 'next_step'").fetchone()
        next_step = 1 if row is None else int(row[0])
        for step, op, manifest in _steps_from(log, found.cursor.step + 1):
            if step >= next_step or found.is_full:
                return
            if not self._frames_of(log, found, manifest):
                return
            found.steps.append(
                StepEntry(
                    step=step,
                    op=op,
                    groups=manifest.groups,
                    digests=manifest.digests,
                    policy_version=manifest.policy_version,
                    samples=manifest.samples,
                    tokens=manifest.tokens,
                    loss_tokens=manifest.loss_tokens,
                )
            )
            found.cursor = replace(found.cursor, step=step, step_op=op, part=0)

    def _frames_of(self, log: sqlite3.Connection, found: Gathered, manifest: Manifest) -> bool:
        """Frames of a step that are not archived yet; False if the segment is full before all of them are in it."""
        for number in range(found.cursor.part, len(manifest.groups)):
            if found.is_full:
                return False
            op = manifest.groups[number]
            if op not in found.ops and (self._done is None or op not in self._done):
                row = log.execute("SELECT location, id, digest FROM groups WHERE op = ?", (op,)).fetchone()
                found.add_frame(op, row[2], self._frame(*row))
            found.cursor = replace(found.cursor, part=number + 1)
        return True

    def _frame(self, location: str, group: str, digest: bytes) -> bytes | None:
        """A frame, copied; None if it was given back, be it while it was read."""
        if not location:
            return None
        try:
            frame = bytes(self._read(location, group))
        except CorruptFrame:
            return None
        return frame if xxhash.xxh3_128_digest(frame) == digest else None


def _steps_from(log: sqlite3.Connection, first: int) -> Iterator[tuple[int, int, Manifest]]:
    for step, op, data in log.execute("SELECT step, op, manifest FROM steps WHERE step >= ? ORDER BY step", (first,)):
        yield step, op, read_manifest(data)
