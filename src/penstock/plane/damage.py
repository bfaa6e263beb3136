"""A rank says that it cannot read a group: the plane looks itself, and then knows who is at fault.

    the frame is well          the rank sees another storage, or a bad mount: it is sent its samples from now on
    the frame is altered       the group is quarantined, its step is planned again without it
    the frame is gone          the group is counted as lost, its step is planned again without it
    storage does not answer    nothing is known: the rank asks again

A step that is planned again ends the session: other ranks may have it already.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import TypeAlias

from penstock.arrays import sample_digests
from penstock.errors import CorruptFrame, DiskFull
from penstock.frames import ANY_SIZE, GroupMetadata, describe
from penstock.log import State
from penstock.plane.engine import Engine
from penstock.plane.losses import lose
from penstock.plane.pipeline import Pipeline
from penstock.plane.workers import Workers
from penstock.protocol import Coordinator, Effect, Suspect
from penstock.storage import Away, Gone, Storage

logger = logging.getLogger("penstock.plane")
Look: TypeAlias = Callable[[Storage, str, bytes], CorruptFrame | None]
"""Storage, location and metadata -> what is wrong with the frame. Raises Away."""


class Damage:
    """Judges what ranks report."""

    def __init__(
        self, engine: Engine, coordinator: Coordinator, pipeline: Pipeline, workers: Workers, look: Look
    ) -> None:
        self._look = look
        self._engine, self._coordinator, self._pipeline, self._workers = engine, coordinator, pipeline, workers
        self._looking: set[tuple[int, str]] = set()
        """Steps and groups that the plane is looking at."""
        self._bad: deque[tuple[Suspect, int, CorruptFrame]] = deque()
        """Groups that cannot be used, until no step is being planned."""
        self.inline: dict[str, str] = {}
        """Processes that are sent their samples because they could not read storage, with the reason."""

    def on_suspect(self, suspect: Suspect) -> None:
        """A rank of this session could not read a group."""
        state, key = self._engine.state, (suspect.step, suspect.group)
        manifest = state.steps.get(suspect.step)
        op = state.by_id.get(suspect.group)
        if manifest is None or op is None or op not in manifest.groups or key in self._looking:
            return
        metadata, location = self._engine.log.metadata(op), state.rows[op].location
        if metadata is None or not location:
            return
        self._looking.add(key)
        logger.warning("step %d, rank %d: group %r: %s", suspect.step, suspect.place[0], suspect.group, suspect.reason)
        job = partial(self._look, self._engine.storage, location, metadata)
        self._workers.submit("verify", job, partial(self._looked, suspect, op))

    def _looked(self, suspect: Suspect, op: int, result: CorruptFrame | Exception | None) -> None:
        self._looking.discard((suspect.step, suspect.group))
        if result is None:
            name = self._coordinator.serve_inline(suspect.session, suspect.place)
            if name:
                self.inline[name] = suspect.reason
                self._engine.counts["ranks_served_inline"] += 1
                logger.warning("%s cannot read storage (%s); it is sent its samples from now on", name, suspect.reason)
        elif isinstance(result, CorruptFrame):
            self._bad.append((suspect, op, result))
        else:
            logger.warning("group %r: %s; the rank asks again", suspect.group, result)

    def turn(self) -> list[Effect]:
        """Decide about groups that cannot be used; what ranks must be told."""
        effects: list[Effect] = []
        while self._bad and not self._engine.state.is_drawing:
            suspect, op, error = self._bad[0]
            try:
                effects += self._remove(suspect, op, error)
            except DiskFull:
                break  # the next turn tries again
            self._bad.popleft()
        return effects

    def _remove(self, suspect: Suspect, op: int, error: CorruptFrame) -> list[Effect]:
        engine, step, group = self._engine, suspect.step, suspect.group
        words = f"group {group!r}: {error}"
        if engine.state.rows.get(op) is None or engine.state.states.get(step) is not State.SCHEDULED:
            return []
        if isinstance(error, Gone):
            found = lose(engine, {op: str(error)})
            first = step if found is None else found[0]
        else:
            engine.unplan(step, group, str(error))
            first = step
        self._pipeline.unplanned(first)
        return self._coordinator.fail(f"{words}; planned again without it", step=first)


def look_at_frame(storage: Storage, location: str, metadata: bytes) -> CorruptFrame | None:
    """What is wrong with a stored frame; None if nothing is. Raises Away."""
    try:
        _, samples, _ = describe(storage.read(location)[0], limits=ANY_SIZE)
        if sample_digests(samples) != list(GroupMetadata.from_bytes(metadata).digests):
            return CorruptFrame("the stored samples are not those of the group's metadata")
    except Away:
        raise
    except CorruptFrame as error:
        return error
    return None
