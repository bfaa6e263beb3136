"""An engine that does its heavy work inline: for tests of decisions that need no threads."""

from __future__ import annotations

from collections.abc import Mapping

import xxhash

from penstock.arrays import Values
from penstock.errors import InvalidInput
from penstock.frames import encode_values
from penstock.log import Log
from penstock.plane.acceptance import Outcome
from penstock.plane.engine import Engine
from penstock.plane.intake import Intake
from penstock.plane.late_frames import LateFrames
from penstock.plane.late_values import Attachment
from penstock.plane.opening import storage_of
from penstock.plane.pipeline import Pipeline
from penstock.plane.segments import Outside
from penstock.plane.settings import PlaneSettings
from penstock.plane.step_builder import StepBuilder
from penstock.plane.workers import Inline
from penstock.protocol import AttachValues
from penstock.protocol.messages import Buffer
from penstock.protocol.steps import Staged
from penstock.storage import FolderStorage, MemoryStorage, Storage, parse_location


class DirectEngine(Engine):
    """The plane's engine with its pipeline, in one thread."""

    def __init__(
        self, settings: PlaneSettings, log: Log, storage: Storage | None = None, outside: Outside | None = None
    ) -> None:
        super().__init__(settings, log, storage or storage_of(settings, log.folder), outside)
        self._workers = Inline()
        intake = Intake(settings, self.writer)
        self.pipeline = Pipeline(self, intake, StepBuilder(settings.packing, self.storage), self._workers)

    def put(self, ticket: object, group: str, frame: Buffer, *, evaluation: bool = False) -> Outcome | None:
        """Offer, check and keep a group; `flush` accepts it. An outcome is returned if it is known already."""
        found = self.pipeline.put(ticket, group, xxhash.xxh3_128_digest(frame), frame, evaluation=evaluation)
        self.pipeline.begin()
        self._workers.finish()
        refused = self.pipeline.refused()
        return found or (refused[0] if refused else None)

    def flush(self) -> list[Outcome]:
        outcomes = self.acceptance.flush()
        self.segments.tidy([])
        return outcomes

    def attach(self, column: str, values: Mapping[str, Mapping[str, Values]]) -> Attachment:
        """Attach values per token."""
        frame, frames = encode_values(column, values), LateFrames(self, self._workers, lambda _: None)
        digest = xxhash.xxh3_128_digest(frame)
        message = AttachValues(ticket=1, column=column, values={}, groups=tuple(values), digest=digest)
        frames.offer("t", message, [frame], "w")
        self._workers.finish()
        (found,) = self.late.flush()
        assert frames.settled(found)
        self.segments.tidy([])
        return found

    def plan_step(self, step: int) -> Staged | str:
        """Draw, plan, record and build the next step; or say what it waits for."""
        if step != self.last_step + 1:
            raise InvalidInput(f"step {step}: the next one is {self.last_step + 1}")
        return self._step(step)

    def stage_again(self, step: int) -> Staged:
        """Build a step that was planned before."""
        staged = self._step(step)
        assert isinstance(staged, Staged), staged
        return staged

    def _step(self, step: int) -> Staged | str:
        while True:
            found = self.pipeline.step(step)
            if isinstance(found, Staged):
                self.pipeline.handed_over(step)
                return found
            if not self._workers.finish():
                return found


def damage_frame(engine: Engine, group: str) -> None:
    """Overwrite the beginning of a group's frame where it is kept."""
    location = engine.state.rows[engine.state.by_id[group]].location
    if isinstance(engine.storage, MemoryStorage):
        engine.storage.replace(location, bytes(len(engine.storage.read(location)[0])))
        return
    assert isinstance(engine.storage, FolderStorage)
    at = parse_location(location)
    with engine.storage.path(at.segment).open("r+b") as file:
        file.seek(at.offset)
        file.write(bytes(64))


def train_next(engine: DirectEngine) -> list[str] | str:
    """Train the next step. Returns the ids of its groups, or what the step waits for."""
    step = engine.last_step + 1
    staged = engine.plan_step(step)
    if not isinstance(staged, Staged):
        return staged
    names = [next(engine.log.groups_of([op])).id for op in engine.state.steps[step].groups]
    engine.received(step)
    engine.commit(step, None)
    return names
