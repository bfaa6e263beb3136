"""Groups in, steps out: decisions run on the loop's thread, work that grows with the data on worker threads.

    put      engine.offer  ->  [intake: check, make metadata, write, sync]  ->  engine.arrive, flush    answered
    stored   engine.offer  ->  check its metadata                           ->  engine.arrive, flush    answered
    step     engine.draw   ->  [steps: plan from metadata]                  ->  engine.record           durable
                           ->  [steps: gather the payloads]                 ->  staged                  delivered

The parts in brackets run on a worker thread and touch nothing but storage. So no turn of the loop depends on the size
of a group or a step: heartbeats, puts and answers continue while a step is built.
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
from penstock.plane.intake import Arrived, Dropped, Incoming, Intake, Refused, Stored, metadata_for
from penstock.plane.recorder import ends_plane, failure_text
from penstock.plane.step_builder import Builder, PlannedStep, StepBuilder
from penstock.plane.workers import Job, Then, Workers
from penstock.protocol import NOTHING, Buffer, Put, Staged
from penstock.storage import DamagedFrame, parse_location

logger = logging.getLogger("penstock.plane")
_BATCH_BYTES = 32 << 20
"""Frames written with one sync, at most. Later ones wait for the next batch."""

_PROBES = 64
"""Groups to try before blaming the planner instead of the groups of a step."""


@dataclass(frozen=True, slots=True)
class _Unplannable:
    """A step that cannot be planned, with the groups that cannot be planned even alone."""

    error: Exception
    bad: dict[int, str]


class Pipeline:
    """Moves groups and steps between the engine, which decides, and the workers, which do the heavy work."""

    def __init__(self, engine: Engine, intake: Intake, builder: Builder, workers: Workers) -> None:
        self._engine, self._intake, self._builder, self._workers = engine, intake, builder, workers
        self._incoming: deque[tuple[bytes, Incoming]] = deque()
        """Offered groups that wait to be checked, with the digests that were sent."""
        self._outcomes: list[Outcome] = []
        self._busy = False
        """Whether a step is being planned or built on a worker thread."""
        self._to_record: tuple[Drawn, PlannedStep] | None = None
        """Planned and not recorded yet, because the disk may be full."""
        self._staged: dict[int, Staged] = {}
        self._inline: frozenset[int] = frozenset()
        """Ranks whose samples are sent with the step."""
        self._failure: Exception | None = None
        """Raised when a step is asked for next."""
        self._session = self._asked_by = 0
        """The number of the current session, and of the one that asked for what is being made."""
        self.replanned = 0
        """The first step that must be planned and staged again; 0 if there is none."""

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
        """Offer a group that came with its frame. Returns an outcome only if the put is decided at once."""
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
        """Offer a group whose frame the client has written to storage."""
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
            else:  # a kilobyte of metadata: handing it to a thread would cost more than checking it
                self._looked_at(looked_at)
        return None

    def _free_repeat(self, put: Put, writer: str) -> None:
        """Free the second copy of a group that was written and put again. The accepted copy stays."""
        if self._engine.log.location_of(put.group) == put.location:
            return
        with suppress(PenstockError):  # sealed, or of another writer: it is deleted with its segment
            self._engine.segments.expect(put.location, writer)
            self._engine.segments.reject(put.location)

    def _run_in(self, metadata: bytes) -> str:
        """Return the tenant of a group, or "" where there are no tenants."""
        if not self._engine.run_tables.members and not self._engine.run_tables.evicted:
            return ""
        return GroupMetadata.from_bytes(metadata).run

    def _looked_at(self, result: Arrived | Dropped | Refused | Exception | None) -> None:
        if isinstance(result, Exception):
            raise result
        assert result is not None, "None is returned only with may_read=False"
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
        """Return the tenant of a group, or "" where there are no tenants. Does not read the frame's body."""
        if not self._engine.run_tables.members and not self._engine.run_tables.evicted:
            return ""
        return self._intake.run_of(frame)

    def _take_in(self) -> list[Arrived | Dropped | Refused]:
        """Check and store the groups that wait, with one sync. Runs on the intake thread."""
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
            text = f"{failure_text(error)}; the plane could not store it"
            return refused + [Refused(one.group, StorageError(f"group {one.group!r}: {text}")) for one in batch]

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
        """Handle results of workers and accept groups that were checked and stored. Outcomes without error are
        durable."""
        finished = self._engine.segments.take_finished()  # before `finish`, which reports every frame written to them
        self._workers.finish()
        with suppress(DiskFull):  # record a planned step even if no rank waits for it any longer
            self._record()
        outcomes = self.refused() + self._engine.acceptance.flush()
        self._engine.tidy(finished)
        return outcomes

    def refused(self) -> list[Outcome]:
        """Return and clear the outcomes of groups that were rejected or dropped."""
        refused, self._outcomes = self._outcomes, []
        return refused

    # -------------------------------------------------------------- steps

    def begin_session(self) -> None:
        """Begin a session. A failure of the last one does not concern its ranks: building may succeed now."""
        self._session += 1
        self._failure = None

    def step(self, step: int, inline: Collection[int] | None = None) -> Staged | str:
        """Return a step once it is built, and what it waits for until then. `inline` are the ranks whose samples are
        sent with it; None: all.

        Raises DiskFull while the step cannot be recorded, and any error that keeps it from being planned or built."""
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
        """Forget a step that the coordinator has staged."""
        self._staged.pop(step, None)

    def _raise_failure(self) -> None:
        if self._failure is not None:
            failure, self._failure = self._failure, None
            raise failure

    def _fail(self, error: Exception) -> None:
        """Raise an error to the session that asked, if it has not ended."""
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
                logger.exception("step %d: the result of a worker could not be handled", self._engine.last_step)
                self._fail(error)

        self._workers.submit("steps", job, done)

    def _plan(self, drawn: Drawn) -> PlannedStep | _Unplannable:
        """Plan a drawn step. Runs on the steps thread."""
        metadata = self._fitting(drawn)
        try:
            return self._builder.plan(metadata)
        except Exception as error:  # noqa: BLE001 - no accepted group may end the plane
            return _Unplannable(error, self._builder.unpackable(metadata))

    def _fitting(self, drawn: Drawn) -> list[GroupMetadata]:
        """Return the metadata of a step's groups, made again where another `seq_len` cut their samples."""
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
        # Every group fails even alone. Either all are bad or the planner is: trying other groups tells. If those plan,
        # the step's groups are quarantined. If none does, quarantining would empty the tables for a bug of ours.
        others = _others(self._engine, drawn)
        self._submit(
            lambda: self._plans_any(others), lambda works: self._blame(drawn, error, bad if works is True else {})
        )

    def _plans_any(self, groups: Sequence[tuple[bytes, str]]) -> bool:
        """Return whether any of these groups can be planned alone. Runs on the steps thread."""
        for data, location in groups:
            with suppress(Exception):
                if not self._builder.unpackable([self._fit(data, location)]):
                    return True
        return False

    def _blame(self, drawn: Drawn, error: Exception, bad: Mapping[int, str]) -> None:
        """Quarantine the bad groups. If there are none the plane failed and ranks get the error, except while storage
        does not answer: then they wait."""
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
        """Start building a planned step on the steps thread."""
        try:
            planned, groups = self._engine.planned(step)
        except Exception as error:  # a damaged frame, or anything else its row provokes
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
        """Forget staged steps from this one on: they are planned again."""
        self._staged = {step: staged for step, staged in self._staged.items() if step < first}

    def _built(self, step: int, found: Staged | Exception) -> None:
        if isinstance(found, Staged):
            self._staged[step] = replace(found, numbers=self._engine.acceptance.generated.of_step(step))
            return
        if isinstance(found, Away):  # ranks wait; the next request builds it again
            logger.warning("step %d cannot be built yet: %s", step, found)
            return
        logger.error("step %d cannot be built: %s: %s", step, type(found).__name__, found)
        last = self._engine.last_step
        try:
            again = isinstance(found, DamagedFrame) and self._engine.unplan(step, found.group, str(found))
        except (
            DiskFull
        ) as error:  # the steps are removed, the group is not quarantined: the next build finds it damaged again
            found, again = error, self._engine.last_step < step
        if not again:
            self._fail(found)
        elif step < last:  # ranks of any session may have later steps, which no longer exist
            self._staged.clear()
            self.replanned = step
            self._failure = CorruptFrame(f"{found}; it was set aside, steps {step} to {last} are planned again")


def _others(engine: Engine, drawn: Drawn) -> list[tuple[bytes, str]]:
    """Return metadata and locations of some held groups that are not in a step."""
    taken = {place.group for place in drawn.groups}
    rows = (engine.state.row_of(key) for key in engine.run_tables if key not in taken)
    found = ((engine.log.metadata(row.op), row.location) for row in islice(rows, _PROBES))
    return [(metadata, location) for metadata, location in found if metadata is not None]


class AlteredOnTheWay(CorruptFrame):
    """A frame arrived altered. The client must send it again."""


def pipeline_of(engine: Engine, workers: Workers) -> Pipeline:
    """Make the pipeline of a real plane."""
    intake = Intake(engine.settings, engine.writer)
    return Pipeline(engine, intake, StepBuilder(engine.settings.packing, engine.storage), workers)
