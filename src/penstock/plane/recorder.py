"""The only code that changes the plane's state: write a decision to the log, then apply it to memory.

After a failure or a restart, memory is rebuilt from the log: the last snapshot, then every later decision in order.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, TypeAlias

from penstock.errors import (
    ConfigError,
    CorruptFile,
    DiskFull,
    Fenced,
    LogAway,
    PenstockError,
    StorageError,
    WaitTimeout,
)
from penstock.frames import EvalMetadata
from penstock.log import AdmitGroup, Discard, GroupOutcome, GroupRow, Log, Record, Shorten, State, numbers_taken
from penstock.plane.evaluations import Evaluations
from penstock.plane.manifest import read_manifest
from penstock.plane.outcomes import events_between
from penstock.plane.remembered import keeps_all
from penstock.plane.segments import Segments
from penstock.plane.settings import PlaneSettings, Replay, Unit
from penstock.plane.snapshot import Saved
from penstock.plane.state import PlaneState
from penstock.plane.telemetry import COUNTS
from penstock.plane.tenant_tables import TenantTables
from penstock.storage import Away

logger = logging.getLogger("penstock.plane")
Job: TypeAlias = Callable[[], Any]
Then: TypeAlias = Callable[[Any], None]
"""Receives what the job returned, or the exception it raised."""


class Recorder:
    """The log, and the state in memory that follows from it."""

    def __init__(self, settings: PlaneSettings, log: Log, segments: Segments) -> None:
        self._settings, self.log, self.segments = settings, log, segments
        self.keeps_all = log.disk.keeps_all = keeps_all(settings, log)
        """Whether the run never frees a frame, metadata or plan (`retain="all"`)."""
        self.counts: Counter[str] = Counter(dict.fromkeys(COUNTS, 0))
        """Counters since this plane started, for `penstock top`."""
        self.run_beside: Callable[[Job, Then], None] = run_at_once
        """Runs a job and passes on its result. The event loop sets this to a worker thread."""
        self.on_stage: Callable[[str, Iterable[GroupRow], int], None] = lambda *_: None
        """Called with groups that were put, planned, delivered or committed, and their step. See `group_spans`."""
        self.state: PlaneState
        self.saved_op = 0
        """The last decision in the snapshot."""
        self._load()

    @property
    def tenant_tables(self) -> TenantTables:
        return self.state.tenant_tables

    def rebuild(self) -> None:
        """Rebuild memory from the log. What is not in the log did not happen.

        If that fails, raises an error that ends the plane: memory may hold half of a decision, such as a step that is
        drawn and has no plan, and every later session would fail on it."""
        try:
            self._load()
        except (Fenced, LogAway):
            raise
        except Exception as error:
            text = failure_text(error)
            raise LogAway(f"memory cannot be rebuilt from the log: {text}; start the plane again") from error

    def _load(self) -> None:
        settings = self._settings
        self.state = rebuild(
            self.log,
            settings.replay,
            retain_steps=settings.retain_steps,
            keeps_all=self.keeps_all,
            env_unit=settings.env_unit,
        )
        self.state.free_evaluations(settings.retain_eval_bytes)
        found = self.log.snapshot()
        self.saved_op = 0 if found is None else found[0]

    def decide(self, record: Record, event: GroupOutcome | None = None) -> None:
        """Record a decision, with the event that it is, then apply it."""
        op = self.state.op + 1
        with self.transaction():
            self.log.add_record(op, record)
            if isinstance(record, (Discard, Shorten)) and record.key:
                self.log.add_discard(record.key)
            if event is not None:
                self.state.outcomes.add(event)
        self.state.redo(op, record)

    def decide_all(self, records: Sequence[Record], events: Iterable[GroupOutcome] = ()) -> list[int]:
        """Record several decisions and events in one transaction, then apply them in order. Returns their numbers."""
        ops, op = [], self.state.op + 1
        for record in records:
            ops.append(op)
            op += numbers_taken(record)
        with self.transaction():
            for number, record in zip(ops, records, strict=True):
                self.log.add_record(number, record)
            for event in events:
                self.state.outcomes.add(event)
        for number, record in zip(ops, records, strict=True):
            self.state.redo(number, record)
        return ops

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """Run a block as one transaction, which also writes what earlier decisions left to be written.

        In this order: the log forgets frames, the transaction is durable, storage deletes them. A crash in between
        leaves bytes that the log still lists as free; the other order could delete what the log still needs."""
        try:
            with self.log.transaction():
                yield
                self.state.write(self.log)
                freed = self.state.freeing.locations
                self.segments.write(freed)
        except BaseException:
            self.state.outcomes.undo()
            raise
        self.state.written()
        self.segments.written(freed)
        self.state.freeing.done()
        self.delete_freed()

    def delete_freed(self) -> None:
        """Let storage delete what the log lists as free. A failed deletion stays listed and is tried again."""
        names = self.segments.take_deletions()
        if names:
            op = self.log.commits
            self.run_beside(lambda: self.segments.delete(names, op), partial(self._deleted, names))

    def _deleted(self, names: list[str], result: tuple[list[str], dict[str, int]] | Exception) -> None:
        if not isinstance(result, Exception):
            self.segments.deleted(*result)
            return
        self.segments.not_deleted(names)
        if isinstance(result, Fenced) or not isinstance(result, (PenstockError, OSError)):
            raise result
        self.counts["deletions_failed"] += 1
        logger.warning("%d frames or segments are not deleted yet: %s", len(names), result)


def run_at_once(job: Job, then: Then) -> None:
    """Run a job in this thread and pass on its result."""
    try:
        result = job()
    except Exception as error:  # noqa: BLE001 - the receiver handles it
        then(error)
    else:
        then(result)


def rebuild(
    log: Log, replay: Replay, *, retain_steps: int, keeps_all: bool = False, env_unit: Unit | None = None
) -> PlaneState:
    """Restore the last snapshot and apply the decisions recorded since, in order."""

    def empty() -> PlaneState:
        state = PlaneState(replay, retain_steps=retain_steps, keeps_all=keeps_all, env_unit=env_unit)
        state.tasks.events = partial(events_between, log)
        return state

    state = empty()
    found = log.snapshot()
    saved = None if found is None else Saved.from_bytes(found[1], repr(replay))
    try:
        rows = {} if saved is None else state.load(saved, log)
    except CorruptFile:  # the snapshot is of another version: start from the beginning
        state, rows = empty(), {}
    since, recorded = state.op, list(log.steps(first=state.oldest_step))
    records = dict(log.records(after=since))
    steps = {op: (step, manifest, at) for step, op, manifest, at in recorded if op > since}
    rows |= {row.op: row for row in log.groups(after=since)}
    put: list[GroupRow] = []
    for op in sorted([*(op for op in rows if op > since), *records, *steps]):
        if op in rows and rows[op].state is State.EVALUATION:
            state.take_evaluation(rows[op], None)
        elif op in rows:
            row = rows[op]
            if row.id not in state.late.expected:
                put.append(row)
            # Most rows are held: building each again took a fifth of the restart of a plane with 100,000 of them.
            is_held = row.state in (State.HELD, State.WAITING) and not row.reason
            state.take_in(row if is_held else replace(row, state=State.HELD, reason=""))
        elif op in records:
            record = records[op]
            if isinstance(record, AdmitGroup) and not record.reason:
                put.append(state.rows[record.group])
            state.redo(op, record)
        else:
            _draw_again(state, op, *steps[op])
    state.bias.put_before(log, put)
    evaluated = log.groups_in(State.EVALUATION)
    metadata = log.metadata_of([row.op for row in evaluated])
    state.evaluations = Evaluations((row, _eval_metadata(metadata.get(row.op))) for row in evaluated)
    # Commits and retirements have no number among the decisions: the log has only where they end.
    state.begin_at(log.meta("next_step", 1))
    state.retire(log.meta("oldest_step", 1))
    # A run with retain="all" frees nothing. Do not read the list of its frames, which grows with the run.
    frames = set() if keeps_all else log.with_frames()
    state.outcomes.load(log)
    state.keep_differences(rows.values(), {step: at for step, _, _, at in recorded}, frames)
    _free_left(state, log, frames)
    return state


def _free_left(state: PlaneState, log: Log, frames: set[int]) -> None:
    """Free frames of ended groups. A run that kept everything until `penstock storage forget` has them."""
    known = state.freeing.ops
    for row in log.groups_of(sorted(frames.difference(state.rows, state.quarantined, state.evaluations.ops, known))):
        state.freeing.add(row)


def _eval_metadata(data: bytes | None) -> EvalMetadata | None:
    return None if data is None else EvalMetadata.from_bytes(data)


def _draw_again(state: PlaneState, op: int, step: int, data: bytes, recorded: State) -> None:
    manifest = read_manifest(data)
    try:
        counts = Counter(state.rows[group].run for group in manifest.groups)
        drawn = state.draw(op, step, counts, one_by_one=manifest.one_by_one).groups
    except (WaitTimeout, KeyError):
        drawn = ()
    if drawn != manifest.groups:
        raise ConfigError(
            f"step {step}: drawing it again takes other groups than were recorded; the replay settings (sampler, "
            "seed, capacity, max_times_sampled, max_staleness) are not those the run began with"
        )
    state.planned(step, manifest)
    state.set_step(step, recorded)


def ends_plane(error: BaseException) -> bool:
    """Return whether the plane must end: another plane has taken over the run, or the log failed or is closed.

    A full volume does not end it: training makes room again. Unreachable storage does not either: it comes back."""
    return isinstance(error, (Fenced, StorageError)) and not isinstance(error, (Away, DiskFull))


def failure_text(error: BaseException) -> str:
    return str(error) if isinstance(error, PenstockError) else f"{type(error).__name__}: {error}"
