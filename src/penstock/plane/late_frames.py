"""Make the frames of groups that get late columns with values per token.

Values arrive as a payload. The intake thread reads the group's frame, merges the values and writes a new frame. Then
`late_values` decides in one transaction: the values are attached, the group has the new frame, and the old frame is
freed. A plane that is killed in between leaves a frame that the log does not know, as a put does.

    values arrive    [intake: read, check, merge, write, sync]    attached, or the new frame is freed again

If the group got another frame meanwhile, because somebody attached other values, the work is done again on that one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial

import xxhash

from penstock.errors import CorruptFrame, InvalidInput, PenstockError, StorageError
from penstock.frames import LATE_COLUMNS, GroupMetadata, LateValuesFrame, check_late, metadata_of_pieces, read_group
from penstock.plane.engine import Engine
from penstock.plane.intake import limits_of
from penstock.plane.late_values import Attachment, Made, NewFrame
from penstock.plane.recorder import failure_text
from penstock.plane.settings import PlaneSettings
from penstock.plane.workers import Workers
from penstock.protocol import MAX_SCORED, AttachValues, Buffer, Frames
from penstock.storage import Storage, Writer

_BATCH_BYTES = 32 << 20
"""Frames in memory before they are written, at most."""


@dataclass(frozen=True, slots=True)
class _Base:
    """A group that waits: what the worker needs of it."""

    op: int
    location: str
    metadata: bytes
    known: Mapping[str, bytes] = field(default_factory=dict)
    """Sample -> digest of the values that it has already."""


class LateFrames:
    """Takes values per token and has the frames made. Runs on the loop's thread."""

    def __init__(self, engine: Engine, workers: Workers) -> None:
        self._engine, self._workers = engine, workers
        self._at_work: dict[object, tuple[AttachValues, Buffer]] = {}
        """Messages whose frames are being made, by ticket."""

    def is_at_work(self, ticket: object) -> bool:
        return ticket in self._at_work

    def offer(self, ticket: object, message: AttachValues, frames: Frames) -> None:
        """Take values. A repeated message is ignored while the first one is at work."""
        if ticket in self._at_work:
            return
        try:
            self._check(message, frames)
        except InvalidInput as error:
            self._engine.late.fail(ticket, error)
            return
        self._at_work[ticket] = message, frames[0]
        self.begin(ticket)

    def _check(self, message: AttachValues, frames: Frames) -> None:
        column = message.column
        check_late(column, is_own=column in self._engine.settings.packing.own)
        if column in LATE_COLUMNS:
            raise InvalidInput(f"attach {column}: values per token; give one number per sample")
        if len(frames) != 1 or message.values or len(message.groups) > MAX_SCORED:
            raise InvalidInput(
                f"attach {column}: {len(frames)} frames of {len(message.groups)} groups, and {len(message.values)} "
                f"groups with numbers; give one frame, of at most {MAX_SCORED} groups"
            )

    def begin(self, ticket: object) -> None:
        """Have the frames made, from the frames that the groups have now."""
        message, payload = self._at_work[ticket]
        state, bases = self._engine.state, dict[str, _Base]()
        for name in message.groups:
            op = state.by_id.get(name, 0)
            group, data = state.late.waiting.get(op), self._engine.log.metadata(op)
            if group is not None and data is not None:
                given = group.given.get(message.column, {})
                ids = GroupMetadata.from_bytes(data).ids
                known = {ids[row]: value for row, value in given.items() if isinstance(value, bytes)}
                bases[name] = _Base(op, state.rows[op].location, data, known)
        job = partial(_make, self._engine.settings, self._engine.storage, self._engine.writer, message, payload, bases)
        self._workers.submit("intake", job, partial(self._made, ticket))

    def _made(self, ticket: object, made: Made | Exception) -> None:
        message, _ = self._at_work[ticket]
        if isinstance(made, Exception):
            made = Made(error=StorageError(f"attach {message.column}: {failure_text(made)}"))
        for frame in made.frames.values():
            self._engine.segments.expect_own(frame.location)
        self._engine.late.offer(ticket, message, made)

    def settled(self, found: Attachment) -> bool:
        """Note that values were decided about. Returns False if the frames are made again."""
        if found.is_outdated:
            self.begin(found.ticket)
            return False
        self._at_work.pop(found.ticket, None)
        return True


# ------------------------------------------------------------------ on the intake thread


def _make(
    settings: PlaneSettings,
    storage: Storage,
    writer: Writer,
    message: AttachValues,
    payload: Buffer,
    bases: Mapping[str, _Base],
) -> Made:
    """Make the new frames of groups that wait, and write them. Returns what was written even if something fails."""
    made = Made()
    try:
        values = _read(settings, message, payload)
        made.digests = values.digests
        waiting: list[tuple[_Base, str, list[Buffer]]] = []
        for name, base in bases.items():
            given = values.digests.get(name, {})
            if not given or all(base.known.get(sample) == digest for sample, digest in given.items()):
                continue  # repeated: nothing is written again
            waiting.append((base, name, _merge(settings, storage, values, name, base, made)))
            if sum(len(piece) for _, _, pieces in waiting for piece in pieces) >= _BATCH_BYTES:
                _write(writer, waiting, made)
        _write(writer, waiting, made)
    except PenstockError as error:
        made.error = error
    made.frames = {name: frame for name, frame in made.frames.items() if frame.location}
    return made


def _read(settings: PlaneSettings, message: AttachValues, payload: Buffer) -> LateValuesFrame:
    if xxhash.xxh3_128_digest(payload) != message.digest:
        raise CorruptFrame(f"attach {message.column}: not the bytes that were sent; attach the values again")
    limits = limits_of(settings)
    limits = replace(limits, max_tokens=limits.max_tokens * max(len(message.groups), 1))
    values = LateValuesFrame(payload, message.column, own=settings.packing.own, limits=limits)
    if values.by_group.keys() != set(message.groups):
        raise InvalidInput(f"attach {message.column}: the frame has other groups than the message")
    return values


def _merge(
    settings: PlaneSettings, storage: Storage, values: LateValuesFrame, name: str, base: _Base, made: Made
) -> list[Buffer]:
    """Return the pieces of a group's new frame, and note its metadata."""
    before = GroupMetadata.from_bytes(base.metadata)
    pieces = values.merged(name, read_group(storage.read(base.location)[0], before.digests, name))
    metadata = metadata_of_pieces(
        pieces,
        group=name,
        seq_len=settings.packing.seq_len,
        drop=settings.over_length == "drop",
        is_partial=True,
    )
    made.frames[name] = NewFrame(op=base.op, base=base.location, digest=pieces.digest(), metadata=metadata)
    return pieces.pieces


def _write(writer: Writer, waiting: list[tuple[_Base, str, list[Buffer]]], made: Made) -> None:
    """Write frames with one sync, and forget their bytes."""
    locations = writer.write([pieces for _, _, pieces in waiting]) if waiting else []
    for (_, name, _), location in zip(waiting, locations, strict=True):
        made.frames[name] = replace(made.frames[name], location=location)
    waiting.clear()
