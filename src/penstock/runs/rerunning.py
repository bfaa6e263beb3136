"""Decides a recorded run again, with the same groups and decisions in the same order, and compares every step.

A plane is made in a folder of its own with the recorded settings. Groups are checked, drawn and planned by the current
code. The digest of a rank's step covers its plan and every value of every sample the rank gets, so steps with equal
digests would train the same.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import zip_longest
from pathlib import Path

import msgspec
import xxhash

from penstock.config import build
from penstock.errors import CorruptFile, InvalidInput, PenstockError
from penstock.log import (
    AdmitGroup,
    AttachColumn,
    AwaitColumns,
    Awaited,
    DropGroup,
    GroupRow,
    HandOut,
    Lose,
    Quarantine,
    Record,
    ReleaseGroup,
    Report,
    ReturnLeases,
    Shorten,
    SqliteLog,
    State,
    as_corrupt,
    read_record,
)
from penstock.packing import Packing
from penstock.plane import COLUMN, Engine, Incoming, Intake, PlaneSettings, StepBuilder, fitting, storage_of
from penstock.runs.recorded_run import RecordedRun, RecordEntry, StepEntry, recorded_settings
from penstock.storage import Gone


@dataclass(frozen=True, slots=True, kw_only=True)
class Rerun:
    """The first difference, and how much was the same before it."""

    same: bool
    sentence: str
    """The result as a sentence."""
    steps: int = 0
    """Number of steps that are the same."""
    skipped: int = 0
    """Number of steps that could not be compared: the run has freed their plan or some of their frames."""
    step: int | None = None
    rank: int | None = None
    recorded: str | None = None
    replayed: str | None = None


class _Differs(Exception):
    """The first difference."""

    def __init__(self, sentence: str, step: int, rank: int | None = None, pair: tuple[str, str] | None = None) -> None:
        super().__init__(sentence)
        self.step, self.rank, self.pair = step, rank, pair


def rerun(recorded: RecordedRun, folder: Path) -> Rerun:
    """Decide a recorded run again in an empty folder, and compare its steps. Raises CorruptFile if its log holds what
    no plane decides."""
    with as_corrupt(recorded.folder):
        return _rerun(recorded, folder)


def _rerun(recorded: RecordedRun, folder: Path) -> Rerun:
    if not recorded.settings:
        raise InvalidInput(f"{recorded.folder}: its log does not hold the settings it was started with")
    if not recorded.steps:
        raise InvalidInput(f"run {recorded.run!r}: no step was committed yet; there is nothing to compare")
    life = _Life(recorded, folder)
    try:
        for entry in _in_order(recorded):
            life.begin(entry.op)
            if isinstance(entry, GroupRow):
                life.put(entry)
            elif isinstance(entry, RecordEntry):
                life.decide(entry)
            else:
                life.step(entry)
    except _Differs as found:
        pair = found.pair or (None, None)
        return Rerun(
            same=False,
            sentence=str(found),
            steps=life.same,
            skipped=life.skipped,
            step=found.step,
            rank=found.rank,
            recorded=pair[0],
            replayed=pair[1],
        )
    finally:
        life.close()
    left_out = f" {life.skipped} steps could not be compared: not all of them is kept." if life.skipped else ""
    return Rerun(
        same=True,
        sentence=f"No difference in {life.same:,} steps of run {recorded.run!r}.{left_out}",
        steps=life.same,
        skipped=life.skipped,
    )


def _in_order(recorded: RecordedRun) -> Iterator[GroupRow | RecordEntry | StepEntry]:
    """Yield all decisions in order, up to the last committed step."""
    last = max(entry.op for entry in recorded.steps.values())
    groups = [entry for entry in recorded.groups.values() if not entry.is_evaluation]
    entries: list[GroupRow | RecordEntry | StepEntry] = [*groups, *recorded.records.values()]
    yield from sorted([*(e for e in entries if e.op <= last), *recorded.steps.values()], key=lambda entry: entry.op)


class _Life:
    """The plane that decides again. It is restarted where the recorded one was restarted with other settings."""

    def __init__(self, recorded: RecordedRun, folder: Path) -> None:
        self._recorded, self._folder = recorded, folder
        self._to_come = list(recorded.settings)
        self._without: set[int] = set()
        """Ops of groups that were put without a frame."""
        self._leases: dict[int, tuple[str, str]] = {}
        """Kind and key of each recorded lease."""
        self._awaited: dict[str, Awaited] = {}
        """What the groups to come wait for, by id."""
        self._next_step = 1
        self._engine: Engine | None = None
        self.same = self.skipped = 0

    @property
    def engine(self) -> Engine:
        assert self._engine is not None
        return self._engine

    def begin(self, op: int) -> None:
        """Switch to the settings that apply to decision `op`."""
        while self._to_come and (self._engine is None or op >= self._to_come[0][0]):
            _, text = self._to_come.pop(0)
            self.close()
            self._settings = settings_of(text)
            log = SqliteLog(self._folder, disk_reserve_bytes=0)
            self._engine = Engine(self._settings, log, storage_of(self._settings, self._folder))
            self._intake = Intake(self._settings, self._engine.writer)

    def close(self) -> None:
        if self._engine is not None:
            self._engine.close()
            self._engine.log.close()
            self._engine = None

    def put(self, entry: GroupRow) -> None:
        frame = self._frame(entry)
        if frame is not None:
            self._put_frame(entry, frame)
            return
        self._without.add(entry.op)
        if entry.id in self._awaited:
            self.engine.recorder.decide(AwaitColumns(groups={entry.id: self._awaited[entry.id]}))
        # Its samples cannot be trained here, but it must be drawn as it was: as a waiting group without a frame.
        row = replace(entry, op=self.engine.state.op + 1, state=State.HELD, reason="", uses=0, location="")
        with self.engine.recorder.transaction():
            self.engine.log.add_groups([(row, b"")])
        self.engine.state.take_in(row)

    def _frame(self, entry: GroupRow) -> bytes | None:
        """Return a group's frame, or None if it is freed or damaged. Draws depend on the group even then."""
        if not self._recorded.has_frame(entry.op):
            return None
        try:
            return self._recorded.frame(entry.op)
        except (Gone, CorruptFile):
            return None

    def _put_frame(self, entry: GroupRow, frame: bytes) -> None:
        acceptance = self.engine.acceptance
        digest = xxhash.xxh3_128_digest(frame)
        group = Incoming(id=entry.id, digest=digest, size=len(frame), tickets=[None], frame=frame)
        awaited = self._awaited.get(entry.id)
        if awaited is not None:
            group.advantage, group.filters = awaited.advantage, awaited.filters
            group.is_partial = True  # columns that it waited for may be in its frame by now
        outcomes = [acceptance.offer(group, entry.run)]
        if outcomes[0] is True:
            self._intake.take([group])
            group.awaited = awaited
            if group.error is not None:
                self._refused(entry, group.error)
            elif group.is_dropped:
                self._refused(entry, InvalidInput(f"group {group.id!r}: {group.over_length}"))
            else:
                acceptance.arrive(group)
                outcomes = list(acceptance.flush())
        for outcome in outcomes:
            if not isinstance(outcome, bool) and outcome.error is not None:
                self._refused(entry, outcome.error)

    def _refused(self, entry: GroupRow, error: PenstockError) -> None:
        raise _Differs(
            f"Group {entry.id} was accepted when it was recorded, and is refused now: {error}", self._next_step
        )

    def decide(self, entry: RecordEntry) -> None:
        record = read_record(entry.data)
        if isinstance(record, HandOut):
            self._leases |= {number: (record.kind, key) for number, key in enumerate(record.keys, start=entry.op)}
        # A put counts again what it shortens, and reports take effect with a decision of their own. A group without a
        # sample that fits has a key and is not put again.
        if isinstance(record, Report) or (isinstance(record, Shorten) and not record.key):
            return
        if isinstance(record, AwaitColumns):  # a put decides it again
            self._awaited |= record.groups
            return
        if isinstance(record, (AttachColumn, AdmitGroup)):
            self._decide_late(record)
            return
        if isinstance(record, HandOut) and record.kind == COLUMN:  # who scored a group decides nothing
            return
        self.engine.recorder.decide(self._of_today(record))

    def _decide_late(self, record: AttachColumn | AdmitGroup) -> None:
        """Attach the recorded values. What follows from them is computed again, for groups that have a frame."""
        engine, was = self.engine, record.group
        op = engine.state.by_id.get(self._recorded.groups[was].id, 0)
        if op not in engine.state.late.waiting:
            return  # it did not wait here: the steps differ, and are compared
        if isinstance(record, AdmitGroup) and was not in self._without:
            engine.late.settle([op], overdue=record.overdue)
        else:
            changes = {"location": ""} if isinstance(record, AttachColumn) else {}  # the frame has the values already
            engine.recorder.decide(msgspec.structs.replace(record, group=op, **changes))

    def _of_today(self, record: Record) -> Record:
        """Return the same decision with the ops that its groups have here."""
        state = self.engine.state
        set_aside = {row.id: row.op for row in state.quarantined.values()}
        names = {op: entry.id for op, entry in self._recorded.groups.items()}
        if isinstance(record, Quarantine):
            return Quarantine(groups={state.by_id[names[op]]: why for op, why in record.groups.items()})
        if isinstance(record, Lose):
            found = {state.by_id[names[op]]: why for op, why in record.groups.items() if names[op] in state.by_id}
            return Lose(groups=found, reason=record.reason)
        if isinstance(record, (ReleaseGroup, DropGroup)):
            return type(record)(op=set_aside[names[record.op]])
        if isinstance(record, ReturnLeases):
            numbers = [state.leases.number_of(*self._leases[number]) for number in record.leases]
            return msgspec.structs.replace(record, leases=tuple(n for n in numbers if n is not None))
        if isinstance(record, HandOut):  # what was recorded is handed out; events have other numbers here
            return msgspec.structs.replace(record, seen=0)
        return record

    # -------------------------------------------------------------- steps

    def step(self, entry: StepEntry) -> None:
        """Draw and plan a step, and compare it."""
        self._next_step = entry.step
        if entry.step != self.engine.last_step + 1:
            raise CorruptFile(
                f"log: step {entry.step} comes after step {self.engine.last_step}; restore it from a copy"
            )
        if not entry.digests or not self._without.isdisjoint(entry.groups):
            self._draw_only(entry)
            self.skipped += 1
        else:
            self._compare(entry)
            self.same += 1
        self.engine.commit(entry.step, None)

    def _compare(self, entry: StepEntry) -> None:
        drawn = self.engine.draw_step(entry.step)
        if isinstance(drawn, str):
            raise _Differs(
                f"Step {entry.step} was trained when it was recorded, and waits now for {drawn}.", entry.step
            )
        self._compare_groups(entry, [place.group for place in drawn.groups])
        # The version that counted depends on how far ahead the step was drawn, which only the step itself records.
        drawn = replace(drawn, oldest_version=entry.oldest_version)
        try:
            settings = self._planned_with(entry)
            builder = StepBuilder(settings.packing, self.engine.storage)
            planned = builder.plan(fitting(settings, self.engine.storage, drawn), drawn.oldest_version)
        except PenstockError as error:
            raise _Differs(f"Step {entry.step} cannot be planned now: {error}", entry.step) from None
        self.engine.record(drawn, planned)
        for rank, pair in enumerate(zip(entry.digests, planned.digests, strict=False)):
            if pair[0] != pair[1]:
                sentence = (
                    f"The run first differs at step {entry.step}, rank {rank}: recorded {pair[0]}, now {pair[1]}."
                )
                raise _Differs(sentence, entry.step, rank, pair)
        if len(entry.digests) != len(planned.digests):
            ranks = f"{len(entry.digests)} ranks when it was recorded, {len(planned.digests)} now"
            raise _Differs(f"Step {entry.step} is for {ranks}.", entry.step)

    def _planned_with(self, entry: StepEntry) -> PlaneSettings:
        """Return the settings that a step was planned with: newer ones than it was drawn with, if it was planned again
        for another number of ranks."""
        if not entry.packing:
            return self._settings
        where = f"the packing settings of step {entry.step}"
        return replace(self._settings, packing=build(Packing, recorded_settings(entry.packing), where))

    def _compare_groups(self, entry: StepEntry, drawn: list[str]) -> None:
        names = [self._recorded.groups[op].id for op in entry.groups]
        for at, (was, now) in enumerate(zip_longest(names, drawn, fillvalue="none"), start=1):
            if was != now:
                sentence = (
                    f"Step {entry.step} is made of other groups: number {at} was {was} when recorded, and is {now} now."
                )
                raise _Differs(sentence, entry.step, None, (was, now))

    def _draw_only(self, entry: StepEntry) -> None:
        """Draw a step that cannot be planned because frames are missing, so that its groups leave the tables."""
        engine = self.engine
        counts = engine.state.apportion(engine.settings.target)
        if counts is None:
            raise _Differs(f"Step {entry.step} was trained when it was recorded, and lacks groups now.", entry.step)
        op = engine.state.op + 1
        manifest = engine.state.draw(op, entry.step, counts)
        self._compare_groups(entry, [row.id for row in engine.log.groups_of(manifest.groups)])
        with engine.log.transaction():
            engine.log.add_step(entry.step, op, msgspec.msgpack.encode(manifest))
            engine.log.count_uses(manifest.groups)
        engine.state.planned(entry.step, manifest)


def settings_of(text: str) -> PlaneSettings:
    """Return the recorded settings, changed for a plane without clients and without limits."""
    found = build(PlaneSettings, recorded_settings(text), "the recorded settings")
    return replace(
        found,
        # Accepted groups passed the length check then. Runs from before this setting existed truncated.
        over_length="drop" if found.over_length == "drop" else "truncate",
        listen=(),
        keys=None,
        storage=None,
        retain="steps",
        shares={},  # given by the decisions that were recorded
        max_held_bytes=1 << 60,
        max_disk_bytes=None,
        disk_reserve_bytes=0,
        retain_steps=0,
    )
