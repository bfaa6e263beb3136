"""Handle frames that cannot be read: check what a rank reports, and plan steps again without lost groups.

A rank reports that it cannot read a group. The plane then reads the frame itself:

    the frame is intact        the rank sees another storage or a bad mount: send it its samples from now on
    the frame is altered       quarantine the group, plan its step again without it
    the frame is gone          count the group as lost, plan its step again without it
    storage does not answer    do nothing: the rank asks again

Planning a step again ends the session, because other ranks may have the step already.

What becomes of a lost group depends on where it is (`lose`):

    waits for training          dropped, and counted: dropped["lost"]
    planned, not delivered      its step and all later ones are planned again without it
    delivered to all ranks      nothing, while their session lasts: they have it
    committed                   the step and all earlier ones cannot be served again: the oldest step moves up
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from typing import TypeAlias

from penstock.arrays import sample_digests
from penstock.errors import CorruptFrame, DiskFull
from penstock.frames import ANY_SIZE, GroupMetadata, describe
from penstock.log import Lose, State
from penstock.plane.engine import Engine
from penstock.plane.pipeline import Pipeline
from penstock.plane.workers import Workers
from penstock.protocol import Coordinator, Effect, Suspect
from penstock.storage import Away, Gone, Storage

logger = logging.getLogger("penstock.plane")
Look: TypeAlias = Callable[[Storage, str, bytes], CorruptFrame | None]
"""Maps storage, location and metadata to what is wrong with the frame. Raises Away."""


class Damage:
    """Decides about groups that ranks could not read."""

    def __init__(
        self, engine: Engine, coordinator: Coordinator, pipeline: Pipeline, workers: Workers, look: Look
    ) -> None:
        self._look = look
        self._engine, self._coordinator, self._pipeline, self._workers = engine, coordinator, pipeline, workers
        self._looking: set[tuple[int, str]] = set()
        """Steps and groups whose frames are being read."""
        self._bad: deque[tuple[Suspect, int, CorruptFrame]] = deque()
        """Unusable groups. They wait here while a step is being planned, which may contain them."""
        self.inline: dict[str, str] = {}
        """Processes that receive their samples because they cannot read storage, with the reason."""

    def on_suspect(self, suspect: Suspect) -> None:
        """Read a frame on a worker thread after a rank of this session could not read it."""
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
        """Decide about unusable groups. Returns the effects to carry out."""
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
        text = f"group {group!r}: {error}"
        if engine.state.rows.get(op) is None or engine.state.states.get(step) is not State.SCHEDULED:
            return []
        if isinstance(error, Gone):
            found = lose(engine, {op: str(error)})
            first = step if found is None else found[0]
        else:
            engine.unplan(step, group, str(error))
            first = step
        self._pipeline.unplanned(first)
        return self._coordinator.fail(f"{text}; planned again without it", step=first)


def look_at_frame(storage: Storage, location: str, metadata: bytes) -> CorruptFrame | None:
    """Return what is wrong with a stored frame, or None. Raises Away while storage does not answer."""
    try:
        _, samples, _ = describe(storage.read(location)[0], limits=ANY_SIZE)
        if sample_digests(samples) != list(GroupMetadata.from_bytes(metadata).digests):
            return CorruptFrame("the stored samples are not those of the group's metadata")
    except Away:
        raise
    except CorruptFrame as error:
        return error
    return None


def lose(engine: Engine, lost: Mapping[int, str]) -> tuple[int, str] | None:
    """Record groups as lost. Returns the first step that must be planned again and the reason, or None."""
    state = engine.state
    assert not state.is_drawing
    record = Lose(groups={op: why[:500] for op, why in lost.items()})
    using = [step for step, manifest in state.steps.items() if lost.keys() & set(manifest.groups)]
    planned = (step for step in using if state.states[step] is State.SCHEDULED and step > engine.maybe_trained)
    first = min(planned, default=None)
    text = ""
    if first is None:
        engine.recorder.decide(record)
    else:
        op = next(op for op in state.steps[first].groups if op in lost)
        text = f"group {state.rows[op].id!r}: {lost[op]}"
        with engine.log.transaction():  # both or neither: a planned step without its group could not be built
            engine.log.remove_steps(first)
            engine.log.add_record(state.op + 1, record)
        engine.recorder.rebuild()
    engine.counts["groups_lost"] += len(lost)
    trained = [s for s, m in engine.state.steps.items() if s < engine.next_step and lost.keys() & set(m.groups)]
    if trained:
        with suppress(DiskFull), engine.recorder.transaction():  # on a full disk it is written with the next decision
            engine.state.retire(max(trained) + 1)
    return None if first is None else (first, text)
