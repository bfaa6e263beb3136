"""Attach late columns: check the values, write them to the log, admit groups that have all of theirs.

All values that arrive in one turn of the loop are one transaction. A group is admitted, with its advantages computed
and its filters applied, in the transaction that completes it. From then on its values cannot change.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import islice, takewhile
from typing import TypeAlias

import msgspec
import numpy as np

from penstock.errors import Conflict, InvalidInput, PenstockError, UnknownKey
from penstock.frames import ERROR_DIGEST, LATE_COLUMNS, NO_DIGEST, GroupMetadata, LateColumns, check_late
from penstock.log import AdmitGroup, AttachColumn, Discard, Record, State
from penstock.plane.acceptance import MAX_ID, Acceptance, put_key
from penstock.plane.intake import summary_of
from penstock.plane.late_admission import Verdict, admit, origins_of
from penstock.plane.late_groups import WaitingGroup
from penstock.plane.recorder import Recorder, ends_plane, failure_text
from penstock.plane.settings import PlaneSettings
from penstock.protocol import MAX_REASON, MAX_SCORED, AttachValues

Value: TypeAlias = float | bytes | None
"""A value, or the digest of values that are in the frame; None: the sample could not be scored."""
Given: TypeAlias = dict[int, Value]
"""Sample -> value."""
MOST_OVERDUE = 64
"""Groups whose deadline is settled in one turn."""
MOST_RESTARTS = 3
"""Restarts of the plane that give a waiting group its full time again."""
_MAX_WHY = 200


@dataclass(slots=True)
class Attachment:
    """The result of an attach, in samples."""

    ticket: object
    new: int = 0
    known: int = 0
    """Samples that had this value already: another worker was faster, or the message is repeated."""
    late: int = 0
    """Samples whose group had been dropped, or was trained without the value."""
    error: PenstockError | None = None
    is_outdated: bool = False
    """Not attached: the group got another frame meanwhile, so its new frame must be made again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NewFrame:
    """A frame with late columns, written to storage to take the place of another one."""

    op: int
    """The group."""
    base: str
    """Location of the frame that it was made from."""
    digest: bytes
    """xxh3-128 of its bytes."""
    metadata: GroupMetadata
    location: str = ""
    """Empty until it is written."""


@dataclass(slots=True)
class Made:
    """The new frames that were made from values per token."""

    digests: dict[str, dict[str, bytes]] = field(default_factory=dict)
    """Group -> sample -> digest of its values."""
    frames: dict[str, NewFrame] = field(default_factory=dict)
    """By group. No frame is made for a group that no longer waits or already has all of these values."""
    error: PenstockError | None = None


class _Outdated(Exception):
    """A new frame was made from a frame that its group no longer has."""


@dataclass(slots=True)
class _Turn:
    """The writes of one transaction."""

    records: list[Record] = field(default_factory=list)
    groups: dict[int, WaitingGroup] = field(default_factory=dict)
    """Groups that get values, with these values."""
    verdicts: dict[int, Verdict] = field(default_factory=dict)
    metadata: dict[int, GroupMetadata] = field(default_factory=dict)
    """Metadata of these groups: from the log, or of their new frames."""
    frames: dict[int, NewFrame] = field(default_factory=dict)
    """New frames of these groups."""


class LateDecisions:
    """Decides about groups that wait for columns. Runs on the loop's thread."""

    def __init__(self, settings: PlaneSettings, recorder: Recorder, acceptance: Acceptance) -> None:
        self._settings, self._recorder, self._acceptance = settings, recorder, acceptance
        self._asked: dict[object, tuple[AttachValues, Made]] = {}
        """Messages of this turn, by ticket: a repeated one is answered once."""
        self._arrived: deque[tuple[float, int]] = deque()
        """(when, op): groups up to this op arrived by then. Empty after a restart, but see `_resume`."""
        self._seen_op = 0

    def offer(self, ticket: object, message: AttachValues, made: Made | None = None) -> None:
        """Take values, with what was made of those per token. The next `flush` decides about them."""
        self._asked[ticket] = message, made or Made()

    def fail(self, ticket: object, error: PenstockError) -> None:
        """Answer with an error in the next `flush`."""
        self.offer(ticket, AttachValues(ticket=0, column="", values={}), Made(error=error))

    def flush(self) -> list[Attachment]:
        """Write the values of this turn. Results without error are durable."""
        if not self._asked:
            return []
        asked, self._asked = self._asked, {}
        turn, found = _Turn(), []
        for ticket, (message, made) in asked.items():
            found.append(self._check_message(ticket, message, made, turn))
        for op, group in turn.groups.items():
            if group.is_complete:
                self._admit(turn, op, group, overdue=False)
        used = {frame.location for frame in turn.frames.values()}
        try:
            self._write(turn)
        except Exception as error:  # noqa: BLE001 - nothing was written; `_error_of` raises what ends the plane
            known = _error_of(error)
            found = [one if one.is_outdated else Attachment(one.ticket, error=one.error or known) for one in found]
        else:
            for one in found:
                self._recorder.counts.update(values_attached=one.new, values_known=one.known, values_late=one.late)
        for _, made in asked.values():
            for frame in made.frames.values():
                if frame.location not in used:
                    self._recorder.segments.reject(frame.location)
        return found

    def _check_message(self, ticket: object, message: AttachValues, made: Made, turn: _Turn) -> Attachment:
        """Check one message. If anything in it is wrong, nothing of it is attached."""
        result, local = Attachment(ticket), _Turn()
        try:
            if made.error is not None:
                return Attachment(ticket, error=made.error)
            check_values(message, self._settings)
            for name in dict.fromkeys([*message.values, *message.errors, *made.digests]):
                self._check_group(name, message, made, turn, local, result)
        except _Outdated:
            return Attachment(ticket, is_outdated=True)
        except Exception as error:  # noqa: BLE001 - whatever a message provokes, its sender gets the error
            return Attachment(ticket, error=_error_of(error))
        turn.records += local.records
        turn.groups |= local.groups
        turn.metadata |= local.metadata
        turn.frames |= local.frames
        return result

    def _check_group(
        self, name: str, message: AttachValues, made: Made, turn: _Turn, local: _Turn, result: Attachment
    ) -> None:
        """Check the values of one group, and note in `local` what is to be written."""
        errors, column = message.errors.get(name, {}), message.column
        if both := errors.keys() & (message.values.get(name, {}).keys() | made.digests.get(name, {}).keys()):
            raise InvalidInput(f"attach {column}: sample {min(both)!r:.80} has a value and an error")
        values: dict[str, Value] = {
            **message.values.get(name, {}),
            **dict.fromkeys(errors),
            **made.digests.get(name, {}),
        }
        op = self._recorder.state.by_id.get(name, 0)
        group = turn.groups.get(op) or self._recorder.state.late.waiting.get(op)
        if group is None:
            self._compare_with_stored(name, column, values, result)
            return
        metadata = self._metadata(op, turn)
        given = _by_sample(metadata, column, group, values, result)
        if not given:
            return
        digests = {row: value for row, value in given.items() if isinstance(value, bytes)}
        location = ""
        local.groups[op] = after = _with_values(group, column, given)
        if digests:
            frame = made.frames.get(name)
            if frame is None or frame.base != self._location(op, turn):
                raise _Outdated
            local.frames[op], location = frame, frame.location
            late = LateColumns(digests=after.digests(metadata.num_samples))
            local.metadata[op] = msgspec.structs.replace(frame.metadata, late=late)
        local.records.append(
            AttachColumn(
                group=op,
                column=column,
                values={row: v for row, v in given.items() if v is not None and not isinstance(v, bytes)},
                errors={row: errors.get(metadata.ids[row], "")[:_MAX_WHY] for row, v in given.items() if v is None},
                digests=digests,
                location=location,
            )
        )

    def _location(self, op: int, turn: _Turn) -> str:
        return turn.frames[op].location if op in turn.frames else self._recorder.state.rows[op].location

    def _metadata(self, op: int, turn: _Turn) -> GroupMetadata:
        if op not in turn.metadata:
            data = self._recorder.log.metadata(op)
            assert data is not None  # kept for as long as the group waits
            turn.metadata[op] = GroupMetadata.from_bytes(data)
        return turn.metadata[op]

    def _compare_with_stored(self, name: str, column: str, values: Mapping[str, Value], result: Attachment) -> None:
        """Compare values with those of a group that no longer waits. Raises if they differ."""
        found = self._recorder.log.states_of([name[: MAX_ID + 1]]).get(name)
        state = None if found is None else self._recorder.state.state_of(*found)[0]
        if found is None or state is State.EVALUATION:
            what = "it was not accepted" if state is None else "it was put for evaluation"
            raise UnknownKey(f"attach {column}: group {name!r:.80}: {what}; nothing was attached")
        data = None if state is State.DROPPED else self._recorder.log.metadata(found[0])
        if data is None:  # dropped, or trained and freed
            result.late += len(values)
            return
        metadata = GroupMetadata.from_bytes(data)
        for sample, value in values.items():
            row = _row_of(metadata, sample, column)
            if _has_value(metadata, column, row, value, name, sample):
                result.known += 1
            else:
                result.late += 1

    def _admit(self, turn: _Turn, op: int, group: WaitingGroup, *, overdue: bool) -> None:
        metadata = self._metadata(op, turn)
        found = admit(metadata, group, overdue=overdue, drops=self._settings.on_missing == "drop")
        kinds = tuple(sorted(found.metadata.kinds.items()))
        turn.verdicts[op] = found
        turn.records.append(AdmitGroup(group=op, kinds=kinds, reason=found.reason, overdue=overdue))
        turn.records += [Discard(reason=reason, samples=count) for reason, count in found.left_out.items()]

    def _write(self, turn: _Turn) -> None:
        recorder, counts = self._recorder, self._recorder.counts
        if not turn.records:
            return
        numbered = list(enumerate(turn.records, start=recorder.state.op + 1))
        before = {op: recorder.state.rows[op].location for op in turn.frames}
        try:
            with recorder.transaction():
                for op, record in numbered:
                    recorder.log.add_record(op, record)
                self._write_frames(turn, before)
                for op, verdict in turn.verdicts.items():  # dropped ones too, for runs that keep everything
                    kinds = tuple(sorted(verdict.metadata.kinds.items()))
                    recorder.log.set_metadata(op, verdict.metadata.to_bytes(), kinds)
                    recorder.log.add_summaries([(op, summary_of(verdict.metadata))])
        except BaseException:
            # After a failed sync the switch may or may not be on disk, so both frames must stay. The new one is deleted
            # with its segment, once that holds no accepted frame.
            for op, frame in turn.frames.items():
                recorder.state.freeing.keep(before[op])
                recorder.segments.settle(frame.location, accepted=False)
            raise
        for frame in turn.frames.values():
            recorder.segments.settle(frame.location, accepted=True)
        for op, verdict in turn.verdicts.items():
            counts["groups_admitted" if not verdict.reason else "groups_dropped_late"] += 1
            if not verdict.reason:
                self._acceptance.generated.add(verdict.metadata)
                recorder.state.bias.put(recorder.state.rows[op], verdict.metadata.rewards)
        for op, record in numbered:
            recorder.state.redo(op, record)

    def _write_frames(self, turn: _Turn, before: Mapping[int, str]) -> None:
        """Give groups their new frames, inside a transaction, and free the old ones."""
        recorder = self._recorder
        for op in turn.frames:
            recorder.state.freeing.supersede(before[op])
        for op, frame in turn.frames.items():
            metadata, group = turn.metadata[op], recorder.state.late.waiting[op]
            recorder.log.set_metadata(op, metadata.to_bytes(), tuple(sorted(metadata.kinds.items())))
            if not any(isinstance(value, bytes) for given in group.given.values() for value in given.values()):
                # It still has the frame that it was put with. A repeated put of that one must be recognised.
                digest = recorder.log.digest_of(metadata.group)
                assert digest is not None
                recorder.log.add_discard(put_key(metadata.group, digest))
            recorder.log.set_frame(op, frame.location, frame.digest)

    # -------------------------------------------------------------- deadlines

    def tick(self, now: float) -> None:
        """Settle groups that have waited too long. Costs nothing while none has."""
        waiting, limit = self._recorder.state.late.waiting, self._settings.needs_deadline_s
        if not waiting and not self._arrived:
            return
        if not self._seen_op:
            self._resume(now)
        newest = next(reversed(waiting), 0)
        if newest > self._seen_op:
            self._arrived.append((now, newest))
            self._seen_op = newest
        if limit is None or not self._arrived or now - self._arrived[0][0] < limit:
            return
        last = self._arrived[0][1]
        overdue = list(islice(takewhile(lambda op: op <= last, waiting), MOST_OVERDUE))
        if overdue:
            self.settle(overdue)
        if len(overdue) < MOST_OVERDUE:
            self._arrived.popleft()

    def _resume(self, now: float) -> None:
        """Continue after a restart: admit groups that have all columns, because a recovery of the log may have attached
        the last ones, and count the deadline of groups that survived many restarts from their put.

        Other groups get their full time again, because judges could not attach while the plane was away. Without this
        limit a plane that restarts more often than the deadline would keep groups waiting for ever."""
        waiting = self._recorder.state.late.waiting
        if complete := [op for op, group in waiting.items() if group.is_complete]:
            self.settle(complete, overdue=False)
        for op, group in waiting.items():
            put = group.awaited
            if not put.epoch:  # logged by an earlier version; settled with the next group that has an epoch
                continue
            if self._recorder.log.epoch - put.epoch <= MOST_RESTARTS:
                return  # and all that came later
            self._arrived.append((now - max(time.time() - put.at, 0.0), op))
            self._seen_op = op

    def settle(self, ops: Iterable[int], *, overdue: bool = True) -> None:
        """Admit groups. Those whose columns did not come in time are dropped, or trained without, as `on_missing`
        says."""
        turn, state = _Turn(), self._recorder.state
        for op in ops:
            self._admit(turn, op, state.late.waiting[op], overdue=overdue)
        self._write(turn)
        self._recorder.counts["groups_overdue"] += len(turn.verdicts) if overdue else 0


def _error_of(error: Exception) -> PenstockError:
    """Return the error to answer with. Raises what ends the plane."""
    if ends_plane(error):
        raise error
    return error if isinstance(error, PenstockError) else InvalidInput(f"attach: {failure_text(error)}")


def check_values(message: AttachValues, settings: PlaneSettings) -> None:
    """Raise InvalidInput for values that no group can take."""
    check_late(message.column, is_own=message.column in settings.packing.own)
    if message.values and message.column not in LATE_COLUMNS:
        raise InvalidInput(f"attach {message.column}: a number for each sample; send the values as a frame")
    if len(message.values) + len(message.errors) > MAX_SCORED:
        raise InvalidInput(f"attach {message.column}: more than {MAX_SCORED:,} groups; attach fewer at once")
    for name, values in message.values.items():
        for sample, value in values.items():
            if not abs(value) <= _MAX_FLOAT32:
                raise InvalidInput(
                    f"attach {message.column}: group {name!r:.80} sample {sample!r:.80}: {value}; give a finite "
                    "number, or the sample in `errors`"
                )
    for name, errors in message.errors.items():
        if any(len(why) > MAX_REASON for why in errors.values()):
            raise InvalidInput(f"attach {message.column}: group {name!r:.80}: an error of over {MAX_REASON} characters")


_MAX_FLOAT32 = 3.4028234663852886e38


def _row_of(metadata: GroupMetadata, sample: str, column: str) -> int:
    try:
        return metadata.ids.index(sample)
    except ValueError:
        raise UnknownKey(
            f"attach {column}: sample {sample!r:.80}: not in group {metadata.group!r}; nothing was attached"
        ) from None


def _by_sample(
    metadata: GroupMetadata, column: str, group: WaitingGroup, values: Mapping[str, Value], result: Attachment
) -> Given:
    """Return the new values by position, a number for all branches of its rollout. Counts what was known."""
    if column not in group.awaited.columns:
        wanted = ", ".join(group.awaited.columns)
        raise InvalidInput(f"attach {column}: group {metadata.group!r} waits for {wanted}; nothing was attached")
    origins = origins_of(metadata).tolist()
    known, found = group.given.get(column, {}), Given()
    for sample, value in values.items():
        row = _row_of(metadata, sample, column)
        before = found.get(row, known.get(row, ...))  # `...`: nothing yet; None is an error that was attached
        if before is ... and _has_value(metadata, column, row, value, metadata.group, sample):
            result.known += 1
            continue
        if before is not ...:
            _check_same(metadata.group, sample, column, before, value)
            result.known += row not in found
            result.new += row in found
            continue
        result.new += 1
        rows = [k for k, at in enumerate(origins) if at == origins[row]] if column in LATE_COLUMNS else [row]
        found |= {k: value for k in rows if k not in known}
    return found


def _has_value(metadata: GroupMetadata, column: str, row: int, value: Value, group: str, sample: str) -> bool:
    """Return whether a sample has this value, in its frame or attached. Raises Conflict if it has another."""
    before = _stored(metadata, column, row)
    if before is not None and before != before:  # NaN: it has no value yet
        return False
    _check_same(
        group, sample, column, before, value if value is None or isinstance(value, bytes) else float(np.float32(value))
    )
    return True


def _stored(metadata: GroupMetadata, column: str, row: int) -> Value:
    """Return a sample's value, or the digest of its values; NaN = none. b"" if it was put with values."""
    if column in LATE_COLUMNS:
        data = metadata.rewards if column == "rewards" else metadata.late.values.get(column, b"")
        value = float(np.frombuffer(data, "<f4")[row]) if data else math.nan
        is_error = bool(metadata.late.left_out and metadata.late.left_out[row]) and value != value
        return None if is_error else value
    size = len(NO_DIGEST)
    digest = metadata.late.digests.get(column, b"")[row * size : (row + 1) * size] or NO_DIGEST
    if digest != NO_DIGEST:
        return None if digest == ERROR_DIGEST else digest
    table = np.frombuffer(metadata.has, np.bool_).reshape(metadata.num_samples, -1)
    return b"" if column in metadata.columns and table[row, metadata.columns.index(column)] else math.nan


def _check_same(group: str, sample: str, column: str, before: Value, value: Value) -> None:
    if isinstance(before, float) and isinstance(value, float):
        same = before == value and math.copysign(1, before) == math.copysign(1, value)
    else:
        same = before == value
    if not same:
        raise Conflict(
            f"attach {column}: group {group!r} sample {sample!r:.80} has {_shown(before)}, now {_shown(value)}; a "
            "value is given once"
        )


def _shown(value: Value) -> str:
    if value is None:
        return "an error"
    if isinstance(value, bytes):
        return f"values of digest {value.hex()[:12]}" if value else "the values it was put with"
    return f"{value:g}"


def _with_values(group: WaitingGroup, column: str, given: Given) -> WaitingGroup:
    """Return a copy of a group with these values."""
    return WaitingGroup(
        awaited=group.awaited,
        given=group.given | {column: group.given.get(column, {}) | given},
        priority=group.priority,
    )
