"""Connect the protocol's state machines to the engine: build them from the settings, carry out their effects.

Effects are carried out in order. One that needs the disk waits until there is room, and later ones wait behind it.
Only a batch of nothing but messages does not wait.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable

from penstock.arrays import check_count
from penstock.errors import CallerError, CorruptFrame, DiskFull, InvalidInput, PenstockError
from penstock.log import Log, is_gone
from penstock.plane.damage import Damage
from penstock.plane.engine import Engine
from penstock.plane.outcomes import discarded
from penstock.plane.pipeline import Pipeline
from penstock.plane.recorder import ends_plane, failure_text
from penstock.plane.remembered import left_name, members_left
from penstock.plane.settings import PlaneSettings
from penstock.plane.telemetry import RunLogger
from penstock.protocol import (
    Admission,
    AskRoom,
    Beat,
    Buffer,
    Bundle,
    Coordinator,
    Detach,
    Discard,
    Effect,
    Frames,
    FromPlane,
    LeaseTasks,
    MemberLeft,
    Note,
    Peer,
    Pulse,
    Put,
    Renew,
    Reported,
    Resume,
    Send,
    SettleGroup,
    SetWeight,
    StepCommitted,
    StepReceived,
    Suspect,
    Trace,
    check_decision,
    read_from_client,
)
from penstock.storage import KeptStorage, address_of

logger = logging.getLogger("penstock.plane")
_LEASES = (Renew, LeaseTasks)
"""Requests of workers. They get a heartbeat while the log does not answer."""


class EffectRunner:
    """Carries out effects of the coordinator and of admission."""

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
        """Effects that wait for disk space."""

    def carry_out(self, effects: list[Effect]) -> None:
        """Carry out effects in order. Effects that need the disk wait until there is room."""
        if not effects:
            return
        # Messages need no disk. They must not queue behind effects that wait for it, or heartbeats would stop too.
        if all(isinstance(effect, (Note, Send, Detach)) for effect in effects):
            for effect in effects:
                self.do(effect)
        else:
            self._deferred.extend(effects)
            self.run_deferred()

    def run_deferred(self) -> bool:
        """Carry out waiting effects. Returns False if the disk is still full."""
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
        """End the session with a reason: what its ranks reported could not be decided."""
        logger.exception("%s could not be decided", effect)
        self._engine.counts["decisions_failed"] += 1
        self._engine.recorder.rebuild()  # memory may hold half of it; only what is in the log happened
        reason = f"{type(effect).__name__} could not be decided: {failure_text(error)}"
        for answer in self._coordinator.fail(reason):
            self.do(answer)

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
            note = self._engine.resume(effect.session, effect.step, effect.after)
        except Exception as error:
            if isinstance(error, DiskFull) or ends_plane(error):
                raise
            if not isinstance(error, CallerError):
                logger.exception("session %d cannot begin at step %d", effect.session, effect.step)
                self._engine.counts["decisions_failed"] += 1
            self.carry_out(self._coordinator.refuse(effect, self._engine.next_step, failure_text(error)))
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


def coordinator_of(settings: PlaneSettings, log: Log, engine: Engine) -> Coordinator:
    """Make the state machine for ranks. Continues the session in the log."""
    return Coordinator(
        run=settings.run,
        ranks=settings.packing.ranks,
        replicas=settings.replicas,
        epoch=log.epoch,
        session=log.meta("session", 0),
        next_step=engine.next_step,
        last_step=engine.last_step,
        left=members_left(settings, log),
        timeouts=settings.timeouts,
        is_gone=is_gone,
    )


def sign_of_life(coordinator: Coordinator, peer: Peer, header: Buffer, now: float) -> Pulse | None:
    """Return the heartbeat to send while nothing can be decided, or None.

    A rank's beat gets a numbered one, which is its full answer. A producer gets one without credit; its message
    waits."""
    try:
        message = read_from_client(header)
    except CorruptFrame:
        return None
    if isinstance(message, Beat):
        return coordinator.on_beat(peer, message, now)
    return coordinator.pulse(now) if isinstance(message, (Put, Trace, AskRoom, Bundle, *_LEASES)) else None


def admission_of(
    settings: PlaneSettings, log: Log, engine: Engine, pulse: Callable[[], Pulse], may_write: Callable[[Peer], bool]
) -> Admission:
    """Make the state machine for producers. `pulse` makes a heartbeat; `may_write` says whose metadata is trusted."""
    storage = engine.storage
    return Admission(
        run=settings.run,
        run_id=bytes.fromhex(log.run_id),
        epoch=log.epoch,
        ranks=settings.packing.ranks,
        tables=engine.acceptance,
        peer_s=settings.timeouts.peer_s,
        pulse=pulse,
        storage=address_of(storage.url) if isinstance(storage, KeptStorage) and settings.direct else "",
        seq_len=settings.packing.seq_len,
        may_write=may_write,
        max_frame=settings.max_message_bytes,
        drops_long=settings.over_length == "drop",
        signs=settings.direct and settings.sign_puts_s is not None,
        by_env=bool(settings.env_weights),
    )


def decide(engine: Engine, run_logger: RunLogger, message: Discard | SettleGroup | SetWeight) -> PenstockError | None:
    """Make a decision that a producer or operator asked for: discards, quarantine, shares. Returns the error, if
    any."""
    try:
        check_decision(message)
        if isinstance(message, Discard):
            reason = run_logger.discarded(message.reason, engine)
            count = check_count(message.samples, f"discard of {reason!r}")
            engine.discard(reason, count, message.key, discarded(message))
        elif isinstance(message, SettleGroup):
            engine.settle(message.group, drop=message.drop)
        elif message.weight:
            _check_tenants(engine, message.tenant)
            engine.share(message.tenant, message.weight)
        else:
            _check_tenants(engine, message.tenant)
            engine.evict(message.tenant, message.reason[:200])
    except PenstockError as refused:
        return refused
    except Exception as error:
        if ends_plane(error):
            raise
        # Memory may hold half of it. Rebuild it from the log: what is not there was not decided.
        logger.exception("%s could not be decided", type(message).__name__)
        engine.counts["decisions_failed"] += 1
        engine.recorder.rebuild()
        return InvalidInput(f"{type(message).__name__}: {failure_text(error)}; the plane could not decide it")
    return None


def _check_tenants(engine: Engine, tenant: str) -> None:
    if envs := engine.settings.env_weights:
        raise InvalidInput(
            f"share of {tenant!r}: this plane shares its steps among environments, by env_weights {envs}; change that "
            "setting and start it again"
        )
