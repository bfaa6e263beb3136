"""Attach late columns: check the values, write them to the log, admit groups that have all of theirs.

All values that arrive in one turn of the loop are one transaction. A group is admitted, with its advantages computed
and its filters applied, in the transaction that completes it. From then on its values cannot change.
"""

from __future__ import annotations

import math
import time
from collections import Counter, deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import islice, takewhile
from typing import TypeAlias

import numpy as np

from penstock.errors import Conflict, InvalidInput, PenstockError, UnknownKey
from penstock.frames import LATE_COLUMNS, GroupMetadata
from penstock.log import AdmitGroup, AttachColumn, Discard, Record, State
from penstock.plane.acceptance import MAX_ID, Acceptance
from penstock.plane.late_admission import Verdict, admit, origins_of
from penstock.plane.late_groups import WaitingGroup
from penstock.plane.outcomes import summary_of
from penstock.plane.recorder import Recorder, ends_plane, failure_text
from penstock.plane.settings import PlaneSettings
from penstock.protocol import MAX_REASON, MAX_SCORED, AttachValues

Given: TypeAlias = dict[int, float | None]
"""Sample -> value; None: it could not be scored."""
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
    """Had this value already: somebody was faster, or this is a repeated message."""
    late: int = 0
    """Came after the group was dropped, or trained without."""
    error: PenstockError | None = None


@dataclass(slots=True)
class _Turn:
    """What a transaction will write."""

    records: list[Record] = field(default_factory=list)
    groups: dict[int, WaitingGroup] = field(default_factory=dict)
    """Groups that get values, as they will be."""
    verdicts: dict[int, Verdict] = field(default_factory=dict)
    metadata: dict[int, GroupMetadata] = field(default_factory=dict)
    """Of these groups, as the log has it."""


class LateDecisions:
    """Decides about groups that wait for columns. Runs on the loop's thread."""

    def __init__(self, settings: PlaneSettings, recorder: Recorder, acceptance: Acceptance) -> None:
        self._settings, self._recorder, self._acceptance = settings, recorder, acceptance
        self._asked: dict[object, AttachValues] = {}
        """Messages of this turn, by ticket: a repeated one is answered once."""
        self._arrived: deque[tuple[float, int]] = deque()
        """(when, op): groups up to this op arrived by then. Begins again with a restart, but see `_go_on`."""
        self._seen_op = 0

    def offer(self, ticket: object, message: AttachValues) -> None:
        """Take values. The next `flush` decides about them."""
        self._asked[ticket] = message

    def flush(self) -> list[Attachment]:
        """Write the values of this turn. Results without error are durable."""
        asked, self._asked = self._asked, {}
        if not asked:
            return []
        turn, found = _Turn(), []
        for ticket, message in asked.items():
            found.append(self._look(ticket, message, turn))
        for op, group in turn.groups.items():
            if group.is_complete:
                self._admit(turn, op, group, overdue=False)
        try:
            self._write(turn)
        except Exception as error:  # noqa: BLE001 - nothing was written; `_error_of` raises what ends the plane
            known = _error_of(error)
            return [Attachment(one.ticket, error=one.error or known) for one in found]
        for one in found:
            self._recorder.counts.update(values_attached=one.new, values_known=one.known, values_late=one.late)
        return found

    def _look(self, ticket: object, message: AttachValues, turn: _Turn) -> Attachment:
        """Check one message. If anything in it is wrong, nothing of it is attached."""
        result = Attachment(ticket)
        records: list[AttachColumn] = []
        groups: dict[int, WaitingGroup] = {}
        try:
            check_values(message)
            for name in dict.fromkeys([*message.values, *message.errors]):
                values: dict[str, float | None] = dict(message.values.get(name, {}))
                errors = message.errors.get(name, {})
                op = self._recorder.state.by_id.get(name, 0)
                group = turn.groups.get(op) or self._recorder.state.late.waiting.get(op)
                if group is None:
                    self._compare(name, message.column, values | dict.fromkeys(errors), result)
                    continue
                metadata = self._metadata(op, turn)
                given = _by_sample(metadata, message.column, group, values | dict.fromkeys(errors), result)
                if given:
                    why = {row: errors.get(metadata.ids[row], "")[:_MAX_WHY] for row, v in given.items() if v is None}
                    numbers = {row: value for row, value in given.items() if value is not None}
                    records.append(AttachColumn(group=op, column=message.column, values=numbers, errors=why))
                    groups[op] = _with(group, message.column, given)
        except Exception as error:  # noqa: BLE001 - whatever a message provokes, its sender gets the error
            return Attachment(ticket, error=_error_of(error))
        turn.records += records
        turn.groups |= groups
        return result

    def _metadata(self, op: int, turn: _Turn) -> GroupMetadata:
        if op not in turn.metadata:
            data = self._recorder.log.metadata(op)
            assert data is not None  # kept for as long as the group waits
            turn.metadata[op] = GroupMetadata.from_bytes(data)
        return turn.metadata[op]

    def _compare(self, name: str, column: str, values: Mapping[str, float | None], result: Attachment) -> None:
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
            if _had(metadata, column, row, value, name, sample):
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
        with recorder.transaction():
            for op, record in numbered:
                recorder.log.add_record(op, record)
            for op, verdict in turn.verdicts.items():  # dropped ones too, for runs that keep everything
                kinds = tuple(sorted(verdict.metadata.kinds.items()))
                recorder.log.set_metadata(op, verdict.metadata.to_bytes(), kinds)
                recorder.log.add_summaries([(op, summary_of(verdict.metadata))])
        for op, verdict in turn.verdicts.items():
            counts["groups_admitted" if not verdict.reason else "groups_dropped_late"] += 1
            if not verdict.reason:
                self._acceptance.generated.add(verdict.metadata)
                recorder.state.bias.put(recorder.state.rows[op], verdict.metadata.rewards)
        for op, record in numbered:
            recorder.state.redo(op, record)

    # -------------------------------------------------------------- deadlines

    def tick(self, now: float) -> None:
        """Settle groups that have waited too long. Costs nothing while none has."""
        waiting, limit = self._recorder.state.late.waiting, self._settings.needs_deadline_s
        if not self._seen_op:
            self._go_on(now)
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

    def _go_on(self, now: float) -> None:
        """Let groups that saw many planes come and go wait by the time of their put.

        A restart gives a group its full time again, because judges could not attach while the plane was away. Without
        a bound, groups would wait for ever for a plane that restarts more often than their deadline."""
        for op, group in self._recorder.state.late.waiting.items():
            put = group.awaited
            if not put.epoch or self._recorder.log.epoch - put.epoch <= MOST_RESTARTS:
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


def check_values(message: AttachValues) -> None:
    """Raise InvalidInput for values that no group can take."""
    if message.column not in LATE_COLUMNS:
        raise InvalidInput(f"attach {message.column!r:.60}: only {', '.join(LATE_COLUMNS)} may come after the put")
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
        if both := errors.keys() & message.values.get(name, {}).keys():
            raise InvalidInput(f"attach {message.column}: sample {min(both)!r:.80} has a value and an error")
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
    metadata: GroupMetadata, column: str, group: WaitingGroup, values: Mapping[str, float | None], result: Attachment
) -> Given:
    """Return the new values by position, those of a rollout for all its branches. Counts what was known."""
    if column not in group.awaited.columns:
        wanted = ", ".join(group.awaited.columns)
        raise InvalidInput(f"attach {column}: group {metadata.group!r} waits for {wanted}; nothing was attached")
    origins = origins_of(metadata).tolist()
    known, found = group.given.get(column, {}), Given()
    for sample, value in values.items():
        row = _row_of(metadata, sample, column)
        before = found.get(row, known.get(row, ...))
        if before is ... and _had(metadata, column, row, value, metadata.group, sample):
            result.known += 1
            continue
        if before is not ...:
            _check_same(metadata.group, sample, column, before, value)
            result.known += row not in found
            result.new += row in found
            continue
        result.new += 1
        found |= {k: value for k, at in enumerate(origins) if at == origins[row] and k not in known}
    return found


def _had(metadata: GroupMetadata, column: str, row: int, value: float | None, group: str, sample: str) -> bool:
    """Return whether a sample has this value, in its frame or attached. Raises Conflict if it has another."""
    data = metadata.rewards if column == "rewards" else metadata.late.values.get(column, b"")
    before: float | None = float(np.frombuffer(data, "<f4")[row]) if data else math.nan
    if metadata.late.left_out and metadata.late.left_out[row] and before != before:
        before = None
    if before is not None and before != before:
        return False
    _check_same(group, sample, column, before, None if value is None else float(np.float32(value)))
    return True


def _check_same(group: str, sample: str, column: str, before: float | None, value: float | None) -> None:
    if before is None or value is None:
        same = before is value
    else:
        same = before == value and math.copysign(1, before) == math.copysign(1, value)
    if not same:
        had, now = ("an error" if one is None else f"{one:g}" for one in (before, value))
        raise Conflict(
            f"attach {column}: group {group!r} sample {sample!r:.80} has {had}, now {now}; a value is given once"
        )


def _with(group: WaitingGroup, column: str, given: Given) -> WaitingGroup:
    """Return a group as it will be."""
    return WaitingGroup(
        awaited=group.awaited,
        given=group.given | {column: group.given.get(column, {}) | given},
        priority=group.priority,
    )


def counts_of(waiting: Iterable[WaitingGroup]) -> Counter[str]:
    """Return how many groups wait for each column."""
    return Counter(name for group in waiting for name in group.awaited.columns if group.lacks(name))
