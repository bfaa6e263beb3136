"""What the coordinator decided is done, in order; what needs the disk waits until there is room on it."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable

from penstock.errors import CallerError, DiskFull, PenstockError
from penstock.plane.damage import Damage
from penstock.plane.engine import Engine
from penstock.plane.failures import ends_plane, failure_in_words
from penstock.plane.pipeline import Pipeline
from penstock.plane.remembered import left_name
from penstock.plane.run_logger import RunLogger
from penstock.protocol import (
    Coordinator,
    Detach,
    Effect,
    Frames,
    FromPlane,
    MemberLeft,
    Note,
    Peer,
    Reported,
    Resume,
    Send,
    StepCommitted,
    StepReceived,
    Suspect,
)

logger = logging.getLogger("penstock.plane")


class EffectRunner:
    """Carries effects out."""

    def __init__(
        self,
        engine: Engine,
        coordinator: Coordinator,
        pipeline: Pipeline,
        run_logger: RunLogger,
        send: Callable[[Peer, FromPlane, Frames], None],
        damage: Damage,
    ) -> None:
        self._damage = damage
        self._engine, self._coordinator, self._pipeline, self._run_logger = engine, coordinator, pipeline, run_logger
        self._send = send
        self._deferred: deque[Effect] = deque()
        """What is decided and could not be done for want of disk space."""

    def carry_out(self, effects: list[Effect]) -> None:
        """Do what was decided, in order; what needs the disk waits until there is room on it."""
        if all(isinstance(effect, (Note, Send, Detach)) for effect in effects):
            for effect in effects:
                self.do(effect)
        else:
            self._deferred.extend(effects)
            self.run_deferred()

    def run_deferred(self) -> bool:
        """Do what is still to be done; False if the disk is full."""
        while self._deferred:
            effect = self._deferred.popleft()
            try:
                self.do(effect)
            except DiskFull as error:
                self._deferred.appendleft(effect)
                self._coordinator.waiting_for = f"disk space: {error}"
                return False
            except Exception as error:
                if ends_plane(error):
                    raise
                self._failed(effect, error)
        return True

    def _failed(self, effect: Effect, error: Exception) -> None:
        """End the session, with the reason: what its ranks reported could not be decided."""
        logger.exception("%s could not be decided", effect)
        self._engine.counts["decisions_failed"] += 1
        self._engine.recorder.rebuild()  # memory may hold half of it; what is not in the log did not happen
        reason = f"{type(effect).__name__} could not be decided: {failure_in_words(error)}"
        for told in self._coordinator.fail(reason):
            self.do(told)

    def do(self, effect: Effect) -> None:
        if isinstance(effect, Send):
            self._send(effect.peer, effect.message, effect.frames)
        elif isinstance(effect, Note):
            logger.info("%s", effect.text)
        elif isinstance(effect, Detach):
            assert isinstance(effect.peer, tuple)  # as made in `turn`
            transport, address = effect.peer
            transport.forget(address)
        elif isinstance(effect, MemberLeft):
            with self._engine.log.transaction():
                self._engine.log.set_meta(left_name(effect.session, effect.rank, effect.replica), effect.step)
        elif isinstance(effect, Resume):
            self._resume(effect)
        elif isinstance(effect, StepReceived):
            self._engine.received(effect.step)
        elif isinstance(effect, Suspect):
            self._damage.on_suspect(effect)
        elif isinstance(effect, StepCommitted):
            self._engine.commit(effect.step, effect.policy_version)
            self.carry_out(self._coordinator.committed(effect.session, effect.step))
        else:
            self._report(effect)

    def _resume(self, effect: Resume) -> None:
        try:
            note = self._engine.resume(effect.session, effect.step)
        except Exception as error:
            if isinstance(error, DiskFull) or ends_plane(error):
                raise
            if not isinstance(error, CallerError):
                logger.exception("session %d cannot begin at step %d", effect.session, effect.step)
                self._engine.counts["decisions_failed"] += 1
            self.carry_out(self._coordinator.refuse(effect, self._engine.next_step, failure_in_words(error)))
            return
        self._pipeline.begin_session()
        if note:
            logger.warning("session %d: %s", effect.session, note)

    def _report(self, effect: Reported) -> None:
        try:
            metrics = self._run_logger.metrics(effect.metrics, self._engine.numbers)
            self._engine.report(effect.priorities, metrics, effect.step)
        except PenstockError as error:
            self._run_logger.count("reports_refused", f"step {effect.step}: priorities refused: {error}")
