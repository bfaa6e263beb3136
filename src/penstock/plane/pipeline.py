"""Groups in and steps out: decisions in the loop's thread, everything that weighs as much as the data beside it.

    put      engine.offer    ->  [intake: check, make metadata, keep, sync]  ->  engine.arrive, flush     answered
    stored   engine.offer    ->  look at its metadata                     ->  engine.arrive, flush     answered
    step     engine.draw     ->  [steps: plan from metadata]                 ->  engine.record            durable
                             ->  [steps: gather the payloads]             ->  staged                   delivered

What stands in brackets runs on a worker's thread and touches nothing but storage. So no turn of the loop depends on
the size of a group or of a step: heartbeats, puts and answers go on while a step is built.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import islice

import xxhash

from penstock.errors import Away, CorruptFrame, DiskFull, PenstockError, StorageError
from penstock.frames import GroupMetadata
from penstock.plane.acceptance import Claim, Outcome
from penstock.plane.engine import Drawn, Engine
from penstock.plane.failures import ends_plane, failure_in_words
from penstock.plane.intake import Arrived, Dropped, Incoming, Intake, Refused, Stored
from penstock.plane.over_length import metadata_for
from penstock.plane.step_builder import Builder, PlannedStep, StepBuilder
from penstock.plane.workers import Job, Then, Workers
from penstock.protocol import NOTHING, Buffer, Put, Staged
from penstock.storage import DamagedFrame, parse_location

logger = logging.getLogger("penstock.plane")
_BATCH_BYTES = 32 << 20
"""Frames kept with one sync, at most: those that come later wait for the next."""

_PROBES = 64
"""Groups that are tried before it is planning that is to blame, and not the groups of a step."""


@dataclass(frozen=True, slots=True)
class _Unplannable:
    """A step that cannot be planned, and which groups are to blame."""

    error: Exception
    bad: dict[int, str]


class Pipeline:
    """An engine, and the workers that do the heavy part of what it decides."""

    def __init__(self, engine: Engine, intake: Intake, builder: Builder, workers: Workers) -> None:
        self._engine, self._intake, self._builder, self._workers = engine, intake, builder, workers
        self._incoming: deque[tuple[bytes, Incoming]] = deque()
        """Groups that were offered and wait to be checked, with their digests as they were sent."""
        self._outcomes: list[Outcome] = []
        self._busy = False
        """Whether a step is being planned or built."""
        self._to_record: tuple[Drawn, PlannedStep] | None = None
        """Planned and not written down yet: there may be no room for it now."""
        self._staged: dict[int, Staged] = {}
        self._inline: frozenset[int] = frozenset()
        """Ranks whose samples are sent with a step."""
        self._failure: Exception | None = None
        """What the session that asks next is told."""
        self._session = self._asked_by = 0
        """Counts the sessions that began, and which of them asked for what is being made."""
        self.replanned = 0
        """The first of the steps that were planned anew: what was staged of them is no more; 0 if there is none."""

    # -------------------------------------------------------------- groups

    def put(
        self,
        ticket: object,
        group: str,
        digest: bytes,
        frame: Buffer,
        *,
        evaluation: bool = False,
        claim: Claim = lambda _: NOTHING,
        priority: float = 1.0,
    ) -> Outcome | None:
        """Offer a group; an outcome is returned only if it is known at once."""
        try:
            run = self._run_of(frame)
            found = self._engine.acceptance.offer(
                ticket, group, digest, len(frame), run, evaluation=evaluation, priority=priority, claim=claim
            )
        except CorruptFrame as error:
            return Outcome(ticket, error)
        if isinstance(found, Outcome):
            return found
        if found:
            self._incoming.append((digest, Incoming(group, frame, evaluation)))
            self._workers.submit("intake", self._take_in, self._taken_in)
        return None

    def put_stored(self, ticket: object, put: Put, writer: str, *, claim: Claim = lambda _: NOTHING) -> Outcome | None:
        """Offer a group whose frame its sender has written to storage."""
        segments = self._engine.segments
        try:
            size = parse_location(put.location).size
            run = self._run_in(put.metadata)
        except CorruptFrame as error:
            return Outcome(ticket, error)
        found = self._engine.acceptance.offer(
            ticket, put.group, put.digest, size, run, evaluation=put.evaluation, priority=put.priority, claim=claim
        )
        if isinstance(found, Outcome):
            if found.duplicate:
                self._free_repeat(put, writer)
            return found
        if found:
            try:
                read_back = segments.expect(put.location, writer)
            except PenstockError as error:
                self._outcomes += self._engine.acceptance.refuse(put.group, error)
                return None
            stored = Stored(
                put.group, put.digest, put.location, put.metadata, put.shown, put.evaluation, read_back=read_back
            )
            looked_at = None if read_back else self._intake.look_at(stored, may_read=False)
            if looked_at is None:
                self._workers.submit("intake", lambda: self._intake.look_at(stored), self._looked_at)
            else:  # metadata of a kilobyte: a thread would cost more than looking at it
                self._looked_at(looked_at)
        return None

    def _free_repeat(self, put: Put, writer: str) -> None:
        """A group was put again. Where it was written a second time, those bytes are free; the accepted ones stay."""
        if self._engine.log.location_of(put.group) == put.location:
            return
        with suppress(PenstockError):  # sealed, or not theirs: it goes with its segment
            self._engine.segments.expect(put.location, writer)
            self._engine.segments.reject(put.location)

    def _run_in(self, metadata: bytes) -> str:
        """The run a group belongs to, where that decides whether there is room."""
        if not self._engine.run_tables.members and not self._engine.run_tables.evicted:
            return ""
        return GroupMetadata.from_bytes(metadata).run

    def _looked_at(self, result: Arrived | Dropped | Refused | Exception | None) -> None:
        if isinstance(result, Exception):
            raise result
        assert result is not None, "None is returned only where nothing may be read"
        if isinstance(result, Arrived):
            self._engine.segments.verified(result.location)
            self._engine.counts["groups_direct"] += 1
            self._engine.acceptance.arrive(
                result.group,
                result.metadata,
                result.location,
                result.eval_metadata,
                result.over_length,
                result.raw_metadata,
            )
            return
        self._engine.segments.reject(result.location)
        if isinstance(result, Dropped):
            self._outcomes += self._engine.acceptance.drop(result.group, result.over_length)
            return
        self._outcomes += self._engine.acceptance.refuse(result.group, result.error)

    def _run_of(self, frame: Buffer) -> str:
        """The run a group belongs to, where that decides whether there is room; found without reading the body."""
        if not self._engine.run_tables.members and not self._engine.run_tables.evicted:
            return ""
        return self._intake.run_of(frame)

    def _take_in(self) -> list[Arrived | Dropped | Refused]:
        """On a worker's thread: what has come since the last time, with one sync for all of it."""
        batch: list[Incoming] = []
        refused: list[Arrived | Dropped | Refused] = []
        size = 0
        while self._incoming and size < _BATCH_BYTES:
            digest, incoming = self._incoming.popleft()
            group = incoming.group
            if xxhash.xxh3_128_digest(incoming.frame) != digest:
                refused.append(Refused(group, AlteredOnTheWay(f"group {group!r}: not the bytes that were sent")))
                continue
            batch.append(incoming)
            size += len(incoming.frame)
        try:
            with self._engine.durations.timed("write", f"{len(batch)} groups, {size:,} bytes"):
                return refused + self._intake.take(batch)
        except Exception as error:
            logger.exception("%d groups could not be kept", len(batch))
            words = f"{failure_in_words(error)}; the plane could not keep it"
            return refused + [Refused(one.group, StorageError(f"group {one.group!r}: {words}")) for one in batch]

    def _taken_in(self, results: list[Arrived | Dropped | Refused] | Exception) -> None:
        if isinstance(results, Exception):
            raise results
        for result in results:
            if isinstance(result, Arrived):
                self._engine.segments.expect_own(result.location)
                self._engine.acceptance.arrive(
                    result.group, result.metadata, result.location, result.eval_metadata, result.over_length
                )
            elif isinstance(result, Dropped):
                self._outcomes += self._engine.acceptance.drop(result.group, result.over_length)
            else:
                self._outcomes += self._engine.acceptance.refuse(result.group, result.error)
                if isinstance(result.error, DiskFull):
                    self._engine.acceptance.make_room()

    def collect(self) -> list[Outcome]:
        """Accept what was checked and kept since the last time; what is returned without error is durable."""
        finished = self._engine.segments.take_finished()  # before `finish`: what was written to them is known after it
        self._workers.finish()
        with suppress(DiskFull):  # a step that is planned is written down, whether or not anybody still waits for it
            self._record()
        outcomes = self.refused() + self._engine.acceptance.flush()
        self._engine.tidy(finished)
        return outcomes

    def refused(self) -> list[Outcome]:
        """What became of groups that were not accepted since the last time."""
        refused, self._outcomes = self._outcomes, []
        return refused

    # -------------------------------------------------------------- steps

    def begin_session(self) -> None:
        """Other ranks ask from now on: what failed for those before them is no news to these, and may go well now."""
        self._session += 1
        self._failure = None

    def step(self, step: int, inline: Collection[int] | None = None) -> Staged | str:
        """A step, once it is built; until then, in words, what it waits for. `inline` are the ranks whose samples are
        sent with it; None: all.

        Raises DiskFull while it cannot be written down, and whatever makes it impossible to plan or build."""
        self._inline = frozenset(range(self._engine.settings.packing.ranks) if inline is None else inline)
        self._record()
        staged = self._staged.get(step)
        if staged is not None and staged.serves(self._inline):
            return staged
        self._raise_failure()
        if self._busy:
            return f"step {self._engine.last_step} to be built"
        if step <= self._engine.last_step:
            self._build(step)
            self._raise_failure()
            return f"step {step} to be built"
        drawn = self._engine.draw_step(step)
        if isinstance(drawn, str):
            return drawn
        self._submit(lambda: self._plan(drawn), lambda found: self._planned(drawn, found))
        return f"step {step} to be planned"

    def handed_over(self, step: int) -> None:
        """The step is staged: nothing is kept of it here."""
        self._staged.pop(step, None)

    def _raise_failure(self) -> None:
        if self._failure is not None:
            failure, self._failure = self._failure, None
            raise failure

    def _fail(self, error: Exception) -> None:
        """Tell those who asked, if they are still there."""
        if self._asked_by == self._session:
            self._failure = error

    def _submit(self, job: Job, then: Then) -> None:
        self._busy, self._asked_by = True, self._session

        def done(result: object) -> None:
            self._busy = False
            try:
                then(result)
            except Exception as error:
                if ends_plane(error):
                    raise
                logger.exception("step %d: what became of its plan could not be decided", self._engine.last_step)
                self._fail(error)

        self._workers.submit("steps", job, done)

    def _plan(self, drawn: Drawn) -> PlannedStep | _Unplannable:
        """On a worker's thread."""
        metadata = self._fitting(drawn)
        try:
            return self._builder.plan(metadata)
        except Exception as error:  # noqa: BLE001 - no accepted group may end the plane
            return _Unplannable(error, self._builder.unpackable(metadata))

    def _fitting(self, drawn: Drawn) -> list[GroupMetadata]:
        """Metadata made for another `seq_len`, which cuts some of their samples, are made anew."""
        found: list[GroupMetadata] = []
        for data, at in zip(drawn.metadata, drawn.groups, strict=True):
            found.append(self._fit(data, at.location))
        return found

    def _fit(self, data: bytes, location: str) -> GroupMetadata:
        settings, metadata = self._engine.settings, GroupMetadata.from_bytes(data)
        if metadata.fits(settings.packing.seq_len):
            return metadata
        return metadata_for(settings, metadata, self._engine.storage.read(location)[0])

    def _planned(self, drawn: Drawn, found: PlannedStep | _Unplannable | Exception) -> None:
        if isinstance(found, PlannedStep):
            self._to_record = (drawn, found)
            return
        error, bad = (found.error, found.bad) if isinstance(found, _Unplannable) else (found, {})
        logger.error("step %d cannot be planned: %s: %s", drawn.step, type(error).__name__, error)
        if len(bad) < len(drawn.groups):
            self._blame(drawn, error, bad)
            return
        # Every group of the step fails alone. Either all of them are bad, or planning itself is: another group tells.
        others = _others(self._engine, drawn)
        self._submit(
            lambda: self._plans_any(others), lambda works: self._blame(drawn, error, bad if works is True else {})
        )

    def _plans_any(self, groups: Sequence[tuple[bytes, str]]) -> bool:
        """On a worker's thread: whether a step can be planned of any of these groups alone."""
        for data, location in groups:
            with suppress(Exception):
                if not self._builder.unpackable([self._fit(data, location)]):
                    return True
        return False

    def _blame(self, drawn: Drawn, error: Exception, bad: Mapping[int, str]) -> None:
        """Set the bad groups aside; where no group is to blame it is the plane's failure, and ranks must know. While
        storage is away they wait."""
        self._engine.undo_draw(drawn, bad)
        if not bad and not isinstance(error, Away):
            self._fail(error)

    def _record(self) -> None:
        if self._to_record is not None:
            drawn, planned = self._to_record
            try:
                self._engine.record(drawn, planned)  # raises DiskFull: the next turn tries again
            except Exception as error:
                if isinstance(error, DiskFull) or ends_plane(error):
                    raise
                self._to_record = None
                logger.exception("step %d cannot be recorded", drawn.step)
                self._engine.undo_draw(drawn, {})
                self._fail(error)
                return
            self._to_record = None
            self._build(drawn.step)

    def _build(self, step: int) -> None:
        """Start building a planned step on a worker's thread."""
        try:
            planned, groups = self._engine.planned(step)
        except Exception as error:  # a damaged frame, or whatever its row provokes
            if ends_plane(error):
                raise
            self._asked_by = self._session
            self._built(step, error)
            return

        def built(found: Staged | Exception) -> None:
            if self._engine.is_planned(step, planned):
                self._built(step, found)

        inline = sorted(self._inline)
        self._submit(lambda: self._builder.build(step, planned, groups, inline), built)

    def unplanned(self, first: int) -> None:
        """Steps from this one on are planned again."""
        self._staged = {step: staged for step, staged in self._staged.items() if step < first}

    def _built(self, step: int, found: Staged | Exception) -> None:
        if isinstance(found, Staged):
            self._staged[step] = replace(found, numbers=self._engine.acceptance.generated.of_step(step))
            return
        if isinstance(found, Away):  # ranks wait; whoever asks for the step next has it built again
            logger.warning("step %d cannot be built yet: %s", step, found)
            return
        logger.error("step %d cannot be built: %s: %s", step, type(found).__name__, found)
        last = self._engine.last_step
        try:
            again = isinstance(found, DamagedFrame) and self._engine.unplan(step, found.group, str(found))
        except DiskFull as error:  # of two decisions the second may be missing: then the group is found damaged again
            found, again = error, self._engine.last_step < step
        if not again:
            self._fail(found)
        elif step < last:  # ranks of any session may have those behind it, which are no more
            self._staged.clear()
            self.replanned = step
            self._failure = CorruptFrame(f"{found}; it was set aside, steps {step} to {last} are planned anew")


def _others(engine: Engine, drawn: Drawn) -> list[tuple[bytes, str]]:
    """Metadata and locations of some held groups that are not in a step."""
    taken = {place.group for place in drawn.groups}
    rows = (engine.state.row_of(key) for key in engine.run_tables if key not in taken)
    found = ((engine.log.metadata(row.op), row.location) for row in islice(rows, _PROBES))
    return [(metadata, location) for metadata, location in found if metadata is not None]


class AlteredOnTheWay(CorruptFrame):
    """A frame is not what was sent: it must be sent again."""


def pipeline_of(engine: Engine, workers: Workers) -> Pipeline:
    """The pipeline of a real plane."""
    intake = Intake(engine.settings, engine.writer)
    return Pipeline(engine, intake, StepBuilder(engine.settings.packing, engine.storage), workers)
