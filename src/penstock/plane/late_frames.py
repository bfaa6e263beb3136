"""Make the frames of groups that get late columns with values per token.

Values arrive as a payload. The intake thread reads the group's frame, merges the values and writes a new frame. A
worker that sees the storage does this itself and sends the new frame's location and metadata. Then `late_values`
decides in one transaction: the values are attached, the group has the new frame, and the old frame is freed. A process
that is killed in between leaves a frame that the log does not know, as with a put.

    values     [intake: read, check, merge, write, sync]     attached, or the new frame is freed
    stored     [intake: check the metadata, as of a put]     attached, or the new frame is freed

If somebody attached other values meanwhile, the group has another frame, and the work is repeated on that one. The
plane repeats it, also for a worker that wrote frames itself: that worker then sends the values.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial

import xxhash

from penstock.errors import Conflict, CorruptFrame, InvalidInput, PenstockError, StorageError
from penstock.frames import LATE_COLUMNS, GroupMetadata, LateValuesFrame, check_late, metadata_of_pieces, read_group
from penstock.plane.engine import Engine
from penstock.plane.intake import Incoming, Intake, limits_of
from penstock.plane.late_values import Attachment, Made, NewFrame
from penstock.plane.recorder import failure_text
from penstock.plane.settings import PlaneSettings
from penstock.plane.workers import Workers
from penstock.protocol import MAX_SCORED, AttachValues, Buffer, Frames, StoredFrame
from penstock.storage import DamagedFrame, Storage, Writer, parse_location

_SAME = ("prompt", "run", "policy_version", "ids", "modes", "lengths", "loss_tokens", "env", "rewards", "truncated")
"""Metadata that late columns in a frame do not change."""
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


class Outdated(Conflict):
    """A stored frame was made from a frame that its group no longer has."""


class LateFrames:
    """Takes values per token and has the frames made. Runs on the loop's thread."""

    def __init__(self, engine: Engine, workers: Workers, doubt: Callable[[str], None]) -> None:
        """`doubt` is called with groups whose frames could not be read."""
        self._engine, self._workers, self._doubt = engine, workers, doubt
        self._intake = Intake(engine.settings, engine.writer)
        self._at_work: dict[object, tuple[AttachValues, Buffer]] = {}
        """Messages whose frames are being made, by ticket."""

    def is_at_work(self, ticket: object) -> bool:
        return ticket in self._at_work

    def offer(self, ticket: object, message: AttachValues, frames: Frames, writer: str) -> None:
        """Take values, or frames that `writer` wrote. A repeated message is ignored while the first one is at work."""
        if ticket in self._at_work:
            return
        try:
            self._check(message, frames)
            if message.stored:
                self._look_at(ticket, message, self._expected(message, writer))
                return
        except PenstockError as error:
            self._engine.late.fail(ticket, error)
            return
        self._at_work[ticket] = message, frames[0]
        self.begin(ticket)

    # -------------------------------------------------------------- frames that a worker wrote

    def _expected(self, message: AttachValues, writer: str) -> list[Incoming]:
        """Expect stored frames, all or none. Raises Sealed or InvalidInput."""
        segments, found = self._engine.segments, list[Incoming]()
        try:
            for one in message.stored:
                incoming = Incoming(
                    id=one.group,
                    digest=one.digest,
                    size=parse_location(one.location).size,
                    tickets=[],
                    location=one.location,
                    raw_metadata=one.metadata,
                    is_partial=True,
                )
                incoming.read_back = segments.expect(one.location, writer)
                found.append(incoming)
        except PenstockError:
            for incoming in found:
                segments.reject(incoming.location)
            raise
        return found

    def _look_at(self, ticket: object, message: AttachValues, found: list[Incoming]) -> None:
        self._at_work[ticket] = message, b""
        job = partial(self._intake.look_at_all, found)
        self._workers.submit("intake", job, partial(self._looked_at, ticket, found))

    def _looked_at(self, ticket: object, found: list[Incoming], result: object) -> None:
        if isinstance(result, Exception):
            raise result
        message, state = self._at_work[ticket][0], self._engine.state
        made = Made()
        for one, incoming in zip(message.stored, found, strict=True):
            if incoming.error is None and incoming.metadata is not None:
                self._engine.segments.verified(one.location)
                op = state.by_id.get(one.group, 0)
                made.frames[one.group] = NewFrame(
                    op=op, base=one.base, digest=one.digest, metadata=incoming.metadata, location=one.location
                )
                made.digests[one.group] = one.values
                made.error = made.error or self._difference(op, one, incoming.metadata)
            else:
                self._engine.segments.reject(one.location)
                made.error = made.error or incoming.error
        self._engine.late.offer(ticket, message, made)

    def _difference(self, op: int, stored: StoredFrame, metadata: GroupMetadata) -> PenstockError | None:
        """Return what is wrong with a stored frame: all but the late columns must be as it was."""
        row = self._engine.state.rows.get(op)
        data = self._engine.log.metadata(op) if op in self._engine.state.late.waiting else None
        if row is None or data is None or row.location != stored.base:
            return None  # the values are compared with those that it has, and the frame is not used
        before = GroupMetadata.from_bytes(data)
        differs = [name for name in _SAME if getattr(before, name) != getattr(metadata, name)]
        others = [i for i, name in enumerate(before.ids) if name not in stored.values]
        if differs or any(before.digests[i] != metadata.digests[i] for i in others):
            what = ", ".join(differs) or "samples that got no values"
            return InvalidInput(f"attach: group {stored.group!r:.80}: the new frame differs in {what}")
        return None

    # -------------------------------------------------------------- frames that the plane makes

    def _check(self, message: AttachValues, frames: Frames) -> None:
        column = message.column
        check_late(column, is_own=column in self._engine.settings.packing.own)
        if column in LATE_COLUMNS:
            raise InvalidInput(f"attach {column}: values per token; give one number per sample")
        names = [*message.groups, *(one.group for one in message.stored)]
        if len(frames) != bool(message.groups) or message.values or not 0 < len(set(names)) == len(names) <= MAX_SCORED:
            raise InvalidInput(
                f"attach {column}: {len(frames)} frames, {len(message.stored)} stored, of {len(names)} groups, and "
                f"{len(message.values)} groups with numbers; give one frame or stored ones, of 1 to {MAX_SCORED} groups"
            )

    def begin(self, ticket: object) -> None:
        """Start making the frames on the intake thread, from the frames that the groups have now."""
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
        self._workers.submit("intake", job, partial(self._made, ticket, bases))

    def _made(self, ticket: object, bases: Mapping[str, _Base], made: Made | Exception) -> None:
        message, _ = self._at_work[ticket]
        if isinstance(made, Exception):
            made = Made(error=StorageError(f"attach {message.column}: {failure_text(made)}"))
        for frame in made.frames.values():
            self._engine.segments.expect_own(frame.location)
        if isinstance(made.error, DamagedFrame):
            group = made.error.group
            row = self._engine.state.rows.get(bases[group].op)
            if row is None or row.location != bases[group].location:  # deleted, because the group got another frame
                for frame in made.frames.values():
                    self._engine.segments.reject(frame.location)
                self.begin(ticket)
                return
            self._doubt(group)
            made.error = CorruptFrame(f"attach {message.column}: {made.error}")
        self._engine.late.offer(ticket, message, made)

    def settled(self, found: Attachment) -> bool:
        """Note that values were decided about. Returns False if the frames are made again."""
        if found.is_outdated and self._at_work[found.ticket][0].groups:
            self.begin(found.ticket)
            return False
        if found.is_outdated:
            found.error = Outdated("attach: the group got another frame meanwhile; send the values")
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
    try:
        values = LateValuesFrame(payload, message.column, own=settings.packing.own, limits=limits)
    except CorruptFrame as error:  # these are the bytes that were sent: more values than any group has tokens
        raise InvalidInput(f"attach {message.column}: {error} (max_group_tokens); give one value per token") from None
    if values.by_group.keys() != set(message.groups):
        raise InvalidInput(f"attach {message.column}: the frame has other groups than the message")
    return values


def _merge(
    settings: PlaneSettings, storage: Storage, values: LateValuesFrame, name: str, base: _Base, made: Made
) -> list[Buffer]:
    """Return the pieces of a group's new frame, and note its metadata."""
    before = GroupMetadata.from_bytes(base.metadata)
    try:
        samples = read_group(storage.read(base.location)[0], before.digests, name)
    except CorruptFrame as error:
        raise DamagedFrame(name, str(error)) from None
    pieces = values.merged(name, samples)
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
