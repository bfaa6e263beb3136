"""Groups in, steps out: decisions run on the loop's thread, work that grows with the data on worker threads.

    put      offer         ->  [intake: check, make metadata, write, sync]  ->  arrive, flush    answered
    stored   offer         ->  check its metadata                           ->  arrive, flush    answered
    step     draw_step     ->  [steps: plan from metadata]                  ->  record           durable
                           ->  [steps: gather the payloads]                 ->  staged           delivered

`Acceptance` has the decisions about groups, `Engine` those about steps.

The parts in brackets run on a worker thread and touch nothing but storage. So no turn of the loop depends on the size
of a group or a step: heartbeats, puts and answers continue while a step is built.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from enum import Enum
from functools import partial
from itertools import islice

import xxhash

from penstock.errors import Away, CorruptFrame, DiskFull, InvalidInput, PenstockError, StorageError
from penstock.frames import GroupMetadata
from penstock.plane.acceptance import Claim, Outcome
from penstock.plane.engine import Drawn, Engine
from penstock.plane.intake import Incoming, Intake, metadata_for
from penstock.plane.recorder import ends_plane, failure_text
from penstock.plane.settings import PlaneSettings
from penstock.plane.step_builder import Builder, PlannedStep, StepBuilder
from penstock.plane.workers import Job, Then, Workers
from penstock.protocol import NOTHING, Buffer, Put, Staged
from penstock.storage import DamagedFrame, Storage, parse_location

logger = logging.getLogger("penstock.plane")
_BATCH_BYTES = 32 << 20
"""Frames written with one sync, at most. Later ones wait for the next batch."""

_PROBES = 64
"""Groups to try before blaming the planner instead of the groups of a step."""


class Making(Enum):
    """The state of the step that is being made. One step is made at a time, in order."""

    IDLE = "no step is being made"
    PLANNING = "drawn; a worker plans it"
    PROBING = "none of its groups can be planned; a worker tries other groups"
    PLANNED = "planned, and not recorded: the disk may be full"
    BUILDING = "recorded; a worker builds it"


MAKING = {
    (Making.IDLE, "drawn"): Making.PLANNING,
    (Making.PLANNING, "planned"): Making.PLANNED,
    (Making.PLANNING, "unplannable"): Making.PROBING,
    (Making.PLANNING, "undone"): Making.IDLE,
    (Making.PLANNING, "failed"): Making.IDLE,
    (Making.PROBING, "undone"): Making.IDLE,
    (Making.PROBING, "failed"): Making.IDLE,
    (Making.PLANNED, "recorded"): Making.IDLE,
    (Making.PLANNED, "undone"): Making.IDLE,
    (Making.IDLE, "asked for"): Making.BUILDING,
    (Making.BUILDING, "built"): Making.IDLE,
}
"""State and event -> the next state. Any other pair is a bug and raises.

A recorded step is asked for and built as often as it must be: after a restart, a rewind, or a failed attempt. If it was
planned with other packing settings, such as another number of ranks, it is planned and recorded again first. Once built
it is staged, and the session delivers and commits it (`protocol.steps`)."""


@dataclass(frozen=True, slots=True)
class _Unplannable:
    """A step that cannot be planned, with the groups that cannot be planned even alone."""

    error: Exception
    bad: dict[int, str]


class Pipeline:
    """Moves groups and steps between the engine, which decides, and the workers, which do the heavy work."""

    def __init__(self, engine: Engine, intake: Intake, builder: Builder, workers: Workers) -> None:
        self._engine, self._intake, self._builder, self._workers = engine, intake, builder, workers
        self._acceptance, self._segments, self._recorder = engine.acceptance, engine.segments, engine.recorder
        self._incoming: deque[Incoming] = deque()
        """Offered groups whose frames wait to be checked."""
        self._has_new = False
        """Whether groups were offered that no job was submitted for."""
        self._to_read: list[Incoming] = []
        """Groups whose stored frames must be read before they count."""
        self._outcomes: list[Outcome] = []
        self.making = Making.IDLE
        self._to_record: tuple[Drawn, PlannedStep] | None = None
        """Planned and not recorded yet, because the disk may be full."""
        self._staged: dict[int, Staged] = {}
        self._parts: list[Staged] = []
        """Steps that are being built, with the samples of some ranks."""
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
        advantage: str = "",
        filters: tuple[str, ...] = (),
    ) -> Outcome | None:
        """Offer a group that came with its frame. Returns an outcome only if the put is decided at once."""
        incoming = Incoming(
            id=group,
            digest=digest,
            size=len(frame),
            tickets=[ticket],
            frame=frame,
            is_evaluation=evaluation,
            priority=priority,
            advantage=advantage,
            filters=filters,
        )
        try:
            names = self._intake.names_of(frame) if self._has_tenants else ("", "")
        except CorruptFrame as error:
            return Outcome(ticket, error)
        found = self._acceptance.offer(incoming, self._recorder.tenant_tables.key_of(*names), claim=claim)
        if isinstance(found, Outcome):
            return found
        if found:
            self._incoming.append(incoming)
            self._has_new = True
        return None

    def put_stored(self, ticket: object, put: Put, writer: str, *, claim: Claim = lambda _: NOTHING) -> Outcome | None:
        """Offer a group whose frame the client has written to storage."""
        try:
            size = parse_location(put.location).size
            run = self._key_of(put.metadata) if self._has_tenants else ""
        except CorruptFrame as error:
            return Outcome(ticket, error)
        group = Incoming(
            id=put.group,
            digest=put.digest,
            size=size,
            tickets=[ticket],
            location=put.location,
            raw_metadata=put.metadata,
            raw_eval_metadata=put.shown,
            is_evaluation=put.evaluation,
            priority=put.priority,
            advantage=put.advantage,
            filters=put.filters,
        )
        found = self._acceptance.offer(group, run, claim=claim)
        if isinstance(found, Outcome):
            if found.duplicate:
                self._free_repeat(put, writer)
            return found
        if found:
            try:
                group.read_back = self._segments.expect(put.location, writer)
            except PenstockError as error:
                self._outcomes += self._acceptance.refuse(group, error)
                return None
            # A kilobyte of metadata: handing it to a thread would cost more than checking it.
            if not group.read_back and self._intake.look_at(group, may_read=False):
                self._looked_at(group)
            else:
                self._to_read.append(group)
        return None

    def begin(self) -> None:
        """Hand the groups that arrived in this turn to the intake thread, together: a batch is written with one sync
        and accepted in one transaction."""
        if self._has_new:
            self._has_new = False
            self._workers.submit("intake", self._take_in, self._taken_in)
        if self._to_read:
            groups, self._to_read = self._to_read, []
            self._workers.submit("intake", partial(self._intake.look_at_all, groups), partial(self._all_read, groups))

    def _all_read(self, groups: Sequence[Incoming], result: object) -> None:
        if isinstance(result, Exception):
            raise result
        for group in groups:
            self._looked_at(group)

    def _free_repeat(self, put: Put, writer: str) -> None:
        """Free the second copy of a group that was written and put again. The accepted copy stays."""
        if self._recorder.log.location_of(put.group) == put.location:
            return
        with suppress(PenstockError):  # sealed, or of another writer: it is deleted with its segment
            self._segments.expect(put.location, writer)
            self._segments.reject(put.location)

    def _key_of(self, metadata: bytes) -> str:
        found = GroupMetadata.from_bytes(metadata)
        return self._recorder.tenant_tables.key_of(found.run, found.env[0])

    @property
    def _has_tenants(self) -> bool:
        """Whether a group's tenant or environment decides if there is room for it."""
        tables = self._recorder.state.tenant_tables
        return bool(tables.members or tables.evicted)

    def _looked_at(self, group: Incoming) -> None:
        """Handle a group that a client wrote to storage, once it is checked."""
        if group.error is None and not group.is_dropped:
            if group.read_back:
                self._segments.verified(group.location)
            self._recorder.counts["groups_direct"] += 1
            self._acceptance.arrive(group)
            return
        self._segments.reject(group.location)
        self._refused(group)

    def _refused(self, group: Incoming) -> None:
        """Drop or reject a group that was checked."""
        if group.error is not None:
            self._outcomes += self._acceptance.refuse(group, group.error)
        else:
            self._outcomes += self._acceptance.drop(group)

    def _take_in(self) -> list[Incoming]:
        """Check and store the groups that wait, with one sync. Runs on the intake thread."""
        taken: list[Incoming] = []
        batch: list[Incoming] = []
        size = 0
        while self._incoming and size < _BATCH_BYTES:
            group = self._incoming.popleft()
            taken.append(group)
            if xxhash.xxh3_128_digest(group.frame) != group.digest:
                group.error = AlteredOnTheWay(f"group {group.id!r}: not the bytes that were sent")
                continue
            batch.append(group)
            size += len(group.frame)
        try:
            self._intake.take(batch)
        except BaseException as error:  # also a panic in an extension: these groups are in no queue any longer
            logger.exception("%d groups could not be stored", len(batch))
            for group in batch:
                text = f"group {group.id!r}: {failure_text(error)}; the plane could not store it"
                group.error = StorageError(text)
        for group in taken:
            group.frame = b""  # it is in storage; the record must not keep it in memory until it is answered
        return taken

    def _taken_in(self, groups: list[Incoming] | Exception) -> None:
        if isinstance(groups, Exception):
            raise groups
        self._has_new |= bool(self._incoming)  # what was too much for one write
        for group in groups:
            if group.error is None and not group.is_dropped:
                self._segments.expect_own(group.location)
                self._acceptance.arrive(group)
                continue
            self._refused(group)
            if isinstance(group.error, DiskFull):
                self._acceptance.make_room()

    def collect(self) -> list[Outcome]:
        """Handle results of workers and accept groups that were checked and stored. Outcomes without error are
        durable."""
        finished = self._segments.take_finished()  # before `finish`, which reports every frame written to them
        self.begin()
        if self._workers.results:
            self._workers.finish()
            self.begin()
        if self._to_record is not None:
            with suppress(DiskFull):  # record a planned step even if no rank waits for it any longer
                self._record()
        outcomes = self.refused() + self._acceptance.flush()
        self._segments.tidy(finished)
        return outcomes

    def refused(self) -> list[Outcome]:
        """Return and clear the outcomes of groups that were rejected or dropped."""
        refused, self._outcomes = self._outcomes, []
        return refused

    # -------------------------------------------------------------- steps

    def begin_session(self) -> None:
        """Begin a session. A failure of the last one does not concern its ranks: building may succeed now."""
        self._session += 1
        self._failure, self._parts = None, []

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
        if self.making is not Making.IDLE:
            return f"step {self._engine.last_step} to be built"
        is_planned = step <= self._engine.last_step
        if is_planned and not self._engine.is_outdated(step):
            self._build(step)
            self._raise_failure()
            return f"step {step} to be built"
        drawn = self._engine.draw_again(step) if is_planned else self._engine.draw_step(step)
        if isinstance(drawn, str):
            return drawn
        self._submit("drawn", lambda: self._plan(drawn), lambda found: self._planned(drawn, found))
        return f"step {step} to be planned"

    def handed_over(self, step: int) -> None:
        """Forget a step that the coordinator has staged, and those before it.

        The coordinator may have staged them from parts, with the samples of all ranks, before they were built as a
        whole. It does not ask for those, so they would stay in memory."""
        self._staged = {built: staged for built, staged in self._staged.items() if built > step}

    def _raise_failure(self) -> None:
        if self._failure is not None:
            failure, self._failure = self._failure, None
            raise failure

    def _fail(self, error: Exception) -> None:
        """Keep an error for the session that asked, unless that session has ended."""
        if self._asked_by == self._session:
            self._failure = error

    def _move(self, event: str) -> None:
        """Apply an event to the step that is being made."""
        found = MAKING.get((self.making, event))
        assert found is not None, f"a step was {event!r} while: {self.making.value}"
        self.making = found

    def _submit(self, event: str, job: Job, then: Then) -> None:
        self._move(event)
        self._asked_by = self._session

        def done(result: object) -> None:
            try:
                then(result)
            except Exception as error:
                if ends_plane(error):
                    raise
                if (self.making, "failed") in MAKING:  # else it moved on before the error
                    self._move("failed")
                logger.exception("step %d: the result of a worker could not be handled", self._engine.last_step)
                self._fail(error)

        self._workers.submit("steps", job, done)

    def _plan(self, drawn: Drawn) -> PlannedStep | _Unplannable:
        """Plan a drawn step. Runs on the steps thread."""
        metadata = fitting(self._engine.settings, self._engine.storage, drawn)
        try:
            return self._builder.plan(metadata, drawn.oldest_version)
        except Exception as error:  # noqa: BLE001 - no accepted group may end the plane
            return _Unplannable(error, self._builder.unpackable(metadata))

    def _planned(self, drawn: Drawn, found: PlannedStep | _Unplannable | Exception) -> None:
        if isinstance(found, PlannedStep):
            self._move("planned")
            self._to_record = (drawn, found)
            return
        error, bad = (found.error, found.bad) if isinstance(found, _Unplannable) else (found, {})
        if drawn.before:
            self._move("undone")
            self._built(drawn.step, _not_again(drawn, error, self._engine.settings.packing.ranks))
            return
        logger.error("step %d cannot be planned: %s: %s", drawn.step, type(error).__name__, error)
        if len(bad) < len(drawn.groups):
            self._blame(drawn, error, bad)
            return
        # Every group fails even alone. Either all are bad or the planner is: trying other groups tells. If those plan,
        # the step's groups are quarantined. If none does, quarantining would empty the tables for a bug of ours.
        others = _others(self._engine, drawn)
        self._submit(
            "unplannable",
            lambda: self._plans_any(others),
            lambda works: self._blame(drawn, error, bad if works is True else {}),
        )

    def _plans_any(self, groups: Sequence[tuple[bytes, str]]) -> bool:
        """Return whether any of these groups can be planned alone. Runs on the steps thread."""
        for data, location in groups:
            with suppress(Exception):
                if not self._builder.unpackable([_fit(self._engine.settings, self._engine.storage, data, location)]):
                    return True
        return False

    def _blame(self, drawn: Drawn, error: Exception, bad: Mapping[int, str]) -> None:
        """Quarantine the bad groups. If there are none the plane failed and ranks get the error, except while storage
        does not answer: then they wait."""
        self._move("undone")
        self._engine.undo_draw(drawn, bad)
        if not bad and not isinstance(error, Away):
            self._fail(error)

    def _record(self) -> None:
        if self._to_record is not None:
            drawn, planned = self._to_record
            try:
                is_recorded = self._engine.record(drawn, planned)  # raises DiskFull: the next turn tries again
            except Exception as error:
                if isinstance(error, DiskFull) or ends_plane(error):
                    raise
                self._move("undone")
                self._to_record = None
                logger.exception("step %d cannot be recorded", drawn.step)
                self._engine.undo_draw(drawn, {})
                self._fail(error)
                return
            self._move("recorded" if is_recorded else "undone")
            self._to_record = None
            if is_recorded:
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
            self._move("built")
            if self._engine.is_planned(step, planned):
                self._built(step, found)

        def ready(part: Staged) -> None:
            if self._engine.is_planned(step, planned) and self._asked_by == self._session:
                self._parts.append(self._with_numbers(part))

        inline = sorted(self._inline)
        post = partial(self._workers.post, ready)
        self._submit("asked for", lambda: self._builder.build(step, planned, groups, inline, post), built)

    def take_parts(self) -> list[Staged]:
        """Return and clear the parts of a step that is being built. Each lacks the samples of some ranks."""
        parts, self._parts = self._parts, []
        return parts

    def _with_numbers(self, staged: Staged) -> Staged:
        return replace(staged, numbers=self._engine.acceptance.generated.of_step(staged.step))

    def unplanned(self, first: int) -> None:
        """Forget staged steps from this one on: they are planned again."""
        self._parts = []
        self._staged = {step: staged for step, staged in self._staged.items() if step < first}

    def _built(self, step: int, found: Staged | Exception) -> None:
        if isinstance(found, Staged):
            self._staged[step] = self._with_numbers(found)
            return
        if isinstance(found, Away):  # ranks wait; the next request builds it again
            logger.warning("step %d cannot be built yet: %s", step, found)
            return
        logger.error("step %d cannot be built: %s: %s", step, type(found).__name__, found)
        last = self._engine.last_step
        try:
            again = isinstance(found, DamagedFrame) and self._engine.unplan(step, found.group, str(found))
        except DiskFull as error:
            # The steps may be removed and the group not quarantined: the next build finds it damaged again.
            found, again = error, self._engine.last_step < step
        if not again:
            self._fail(found)
        elif step < last:  # ranks of any session may have later steps, which no longer exist
            self._staged.clear()
            self._parts = []
            self.replanned = step
            self._failure = CorruptFrame(f"{found}; it was set aside, steps {step} to {last} are planned again")


def _not_again(drawn: Drawn, error: Exception, ranks: int) -> Exception:
    """Return the error of a step that cannot be planned with today's packing settings. The log keeps its plan."""
    if isinstance(error, (Away, DamagedFrame)):
        return error
    return InvalidInput(
        f"step {drawn.step} was planned for {len(drawn.before)} ranks and cannot be planned again for {ranks}: "
        f"{failure_text(error)}; open the run with its former packing settings until this step is committed"
    )


def fitting(settings: PlaneSettings, storage: Storage, drawn: Drawn) -> list[GroupMetadata]:
    """Return the metadata of a step's groups, made again where another `seq_len` cut their samples."""
    pairs = zip(drawn.metadata, drawn.groups, strict=True)
    return [_fit(settings, storage, data, at.location) for data, at in pairs]


def _fit(settings: PlaneSettings, storage: Storage, data: bytes, location: str) -> GroupMetadata:
    metadata = GroupMetadata.from_bytes(data)
    if metadata.fits(settings.packing.seq_len):
        return metadata
    return metadata_for(settings, metadata, storage.read(location)[0])


def _others(engine: Engine, drawn: Drawn) -> list[tuple[bytes, str]]:
    """Return metadata and locations of some held groups that are not in a step."""
    taken = {place.group for place in drawn.groups}
    rows = (engine.state.row_of(key) for key in engine.tenant_tables if key not in taken)
    found = ((engine.log.metadata(row.op), row.location) for row in islice(rows, _PROBES))
    return [(metadata, location) for metadata, location in found if metadata is not None]


class AlteredOnTheWay(CorruptFrame):
    """A frame arrived altered. The client must send it again."""


def pipeline_of(engine: Engine, workers: Workers) -> Pipeline:
    """Make the pipeline of a real plane."""
    intake = Intake(engine.settings, engine.writer)
    return Pipeline(engine, intake, StepBuilder(engine.settings.packing, engine.storage), workers)
