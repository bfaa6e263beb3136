"""The plane's event loop: one thread that serves all transports and drives engine and coordinator.

Each turn handles every message that has arrived, writes all accepted groups with one sync, answers, plans the steps
that ranks asked for, and checks timeouts. Nothing is polled on a timer that a message could announce.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from typing import Any

import msgspec
import xxhash
import zmq

from penstock.errors import (
    CorruptFrame,
    DiskFull,
    Fenced,
    InvalidInput,
    LogAway,
    Overloaded,
    PenstockError,
    PlaneLost,
)
from penstock.log import Log
from penstock.plane.acceptance import Outcome
from penstock.plane.column_leases import ColumnLeases
from penstock.plane.damage import Damage, Look, look_at_frame
from penstock.plane.effect_runner import EffectRunner, admission_of, coordinator_of, decide, sign_of_life
from penstock.plane.engine import Engine
from penstock.plane.feedback import FeedbackReaders
from penstock.plane.late_frames import LateFrames
from penstock.plane.leases import Leases
from penstock.plane.opening import storage_of
from penstock.plane.pipeline import AlteredOnTheWay, Pipeline, pipeline_of
from penstock.plane.recorder import ends_plane, failure_text, run_at_once
from penstock.plane.segments import Outside
from penstock.plane.settings import PlaneSettings
from penstock.plane.task_lists import Ticket
from penstock.plane.task_service import AboutTasks, TaskService
from penstock.plane.telemetry import Marks, RunLogger, status_of
from penstock.plane.url_signing import UrlSigning
from penstock.plane.workers import Threads, Workers
from penstock.protocol import (
    MAX_ASKED,
    MAX_NAME,
    Accepted,
    Ask,
    AskFeedback,
    AskGroups,
    AskRoom,
    Attach,
    AttachValues,
    Buffer,
    Decide,
    Discard,
    Frames,
    FromPlane,
    GiveUp,
    GroupStates,
    LeaseColumns,
    Missing,
    Offer,
    One,
    OpenSegment,
    Packer,
    Peer,
    Phase,
    Pulse,
    Put,
    Rejected,
    Room,
    Send,
    SettleGroup,
    SetWeight,
    SignFor,
    SignUrls,
    Staged,
    Status,
    Trace,
    answered,
    read_from_client,
    run_of,
    unbundled,
)
from penstock.protocol.admission import Effect as AdmissionEffect
from penstock.storage import Storage
from penstock.transport import PlaneTransport

logger = logging.getLogger("penstock.plane")
_ADMITTED = (
    Put, OpenSegment, SignUrls, Trace, AskRoom, GiveUp, Discard, SettleGroup, SetWeight, AttachValues,
)  # fmt: skip
"""Messages of producers that admission answers."""
_RETRY_S = 1.0
"""Pause after the disk was full, before effects and steps that need it are tried again."""
_CLIENTS = 4096
"""Clients whose names as writers, and whose keys, are remembered."""
_LOOK_S = 1.0
"""Interval of the check whether another plane has taken over the run."""


class PlaneLoop:
    """Runs a plane's event loop. `run` blocks; `stop` may be called from any thread."""

    def __init__(
        self,
        settings: PlaneSettings,
        log: Log,
        transports: Sequence[PlaneTransport],
        *,
        storage: Storage | None = None,
        on_turn: Callable[[], None] = lambda: None,
        workers: Workers | None = None,
        pipeline: Callable[[Engine, Workers], Pipeline] | None = None,
        outside: Outside | None = None,
        look: Look = look_at_frame,
    ) -> None:
        """`storage` holds the frames; the default follows from the settings. `workers`, `pipeline`, `outside` and
        `look` are for simulations."""
        self.settings = settings
        self._storage = storage or storage_of(settings, log.folder)
        self.engine = Engine(settings, log, self._storage, outside)
        self._workers = workers or Threads()
        self.engine.recorder.run_beside = partial(self._workers.submit, "sweep")
        self._spans = None
        if settings.traces:
            from penstock.plane.group_spans import GroupSpans

            self._spans = GroupSpans(settings.run, log.run_id)
            self.engine.recorder.on_stage = self._spans.on_stage
        self._pipeline = (pipeline or pipeline_of)(self.engine, self._workers)
        self.coordinator = coordinator_of(settings, log, self.engine)
        self._log, self._transports, self._on_turn = log, list(transports), on_turn
        self._run_id = bytes.fromhex(log.run_id)
        self._pack = Packer(self._run_id)
        # Cached, because every put asks, and a client's name and key do not change.
        self._writer_of, trusts = lru_cache(maxsize=_CLIENTS)(writer_of), lru_cache(maxsize=_CLIENTS)(may_write)
        self.admission = admission_of(settings, log, self.engine, lambda: self.coordinator.pulse(self._now), trusts)
        self.run_logger = RunLogger(self.engine.counts)
        self.run_logger.started(settings.run, log, self.engine)
        self._poller = poller_of(self._transports, self._workers)
        looks = [transport.poll_s for transport in self._transports if transport.poll_s is not None]
        self._pace_s = min([settings.timeouts.heartbeat_s / 4, 0.25, *looks])
        self._stopping = threading.Event()
        self._early: list[tuple[Peer, Buffer, Frames]] = []
        """Messages that arrived while the log did not answer. The next turn handles them."""
        self._answers: dict[Peer, list[FromPlane]] = {}
        """Answers to puts that are not sent yet."""
        log.while_waiting = self._stay_alive
        self._marks = Marks()
        self.damage = Damage(self.engine, self.coordinator, self._pipeline, self._workers, look)
        self._effects = EffectRunner(
            self.engine, self.coordinator, self._pipeline, self.run_logger, self._send, self.damage
        )
        self._begin_services(look)
        self._retry_at = self._look_at = 0.0
        self._now = self._started = time.monotonic()
        self.failure: BaseException | None = None
        """The exception that ended the loop, if one did."""

    def _begin_services(self, look: Look) -> None:
        """Create the services that answer everything but puts: leases on prompts and columns, events, signed URLs."""
        self.leases = Leases(self.engine.recorder)
        self.tasks = TaskService(
            self.engine,
            self.leases,
            self._reply,
            hold_s=self.settings.timeouts.heartbeat_s,
            is_training=lambda: self.coordinator.is_training,
        )
        self._readers = FeedbackReaders(self.engine)
        self._signing = UrlSigning(self.engine, self._workers, self.admission, self._effects.do)
        self._columns = ColumnLeases(self.engine, self.leases, self._workers, self.admission, self._effects.do, look)
        self._late_frames = LateFrames(self.engine, self._workers, self._columns.doubt)

    @property
    def urls(self) -> list[str]:
        return [transport.url for transport in self._transports]

    def run(self) -> None:
        """Serve until `stop`. An error beyond repair ends the plane; every rank is sent the reason."""
        try:
            while not self._stopping.is_set():
                self._wait()
                started = time.monotonic()
                self.turn(started)
                self.engine.durations.add("turn", time.monotonic() - started, self._marks.longest)
            if self.engine.state.leases.open:  # clients in this process returned theirs when they were closed
                self.turn(time.monotonic())
        except BaseException as error:
            self.failure = error
            self._end_session(error)
            raise
        finally:
            self._close()

    def _end_session(self, error: BaseException) -> None:
        """Send every rank the reason the plane ended, also ranks whose message was not read yet."""
        self._effects.carry_out(self.coordinator.fail(f"the plane ended: {type(error).__name__}: {error}"))
        notice = self.coordinator.failure
        for transport in self._transports:
            for peer, _header, _frames in transport.receive():
                if notice is not None:
                    self._send((transport, peer), notice)

    def last_words(self) -> tuple[bytes, PenstockError] | None:
        """Return the message for ranks that still reach a failed plane and the error for its other callers, or None if
        the plane was stopped in order."""
        notice, error = self.coordinator.failure, self.failure
        if error is None or notice is None:
            return None
        known = type(error) if isinstance(error, PenstockError) else PlaneLost
        return self._pack(notice), known(f"the plane in this process ended: {failure_text(error)}")

    def _close(self) -> None:
        self._log.while_waiting = lambda: None  # no client is left to answer
        for transport in self._transports:
            transport.close()
        self._workers.close()  # before storage: a write in progress must end
        self.engine.recorder.run_beside = run_at_once
        try:
            if self.failure is None:
                self.engine.close()
        except PenstockError as error:
            logger.warning("states were not written at the end; the next start derives them from the log: %s", error)
        finally:
            self._storage.close()
            self._log.close()
            if self._spans is not None:
                self._spans.close()

    def stop(self) -> None:
        """End after this turn. From any thread."""
        self._stopping.set()
        if isinstance(self._workers, Threads):
            self._workers.wake.call()  # the loop may wait for a message, for up to a quarter of a second

    def _wait(self) -> None:
        """Wait for a message or a result of a worker."""
        ready = self._poller.poll(int(self._patience_s() * 1000))
        for found, _ in ready:
            if isinstance(self._workers, Threads) and found == self._workers.wake.descriptor:
                self._workers.wake.clear()  # here, because a turn without results does not look at the workers

    def _patience_s(self) -> float:
        """Return how long to wait for a message: until timeouts or a transport without a descriptor must be checked.
        Messages that arrived while the log was slow are not announced again, so they are not waited for."""
        if self._early or self.tasks.is_opening:
            return 0.0
        return self._pace_s

    def turn(self, now: float) -> None:
        """Run one turn of the loop."""
        self._now = now
        self._marks.begin()
        self._set_version()
        for peer, message, header, frames in self._receive():
            self._on_message(peer, message, header, frames, now)
        self._marks.mark("messages")
        outcomes = self._pipeline.collect()
        for outcome in outcomes:
            self._answer(outcome)
        self._attach(now)
        self._unstage()
        if traced := self.admission.answer_traces(self._is_kept):
            self._admit([*traced])
        self._send_answers()
        self._check_owner(outcomes, now)
        self._marks.mark("accepted groups")
        if now >= self._retry_at:
            self._retry_at = now + _RETRY_S if not (self._effects.run_deferred() and self._plan(now)) else 0.0
        self._marks.mark("planning")
        # Tasks and columns choose what to lease, `leases.turn` writes it in one transaction, then workers are answered.
        self.tasks.hand_out()
        self._columns.turn(now)
        self.leases.turn(now)
        self.tasks.answer_waiting(now)
        self._effects.carry_out(self.damage.turn())
        self._effects.carry_out(self.coordinator.on_tick(now))
        if offered := self.admission.offer_room(now):
            self._admit([*offered])
        for answer in self._readers.turn(now):
            self._effects.do(answer)
        self._send_answers()
        self.run_logger.look()
        self._on_turn()
        self._marks.mark("sessions and answers")

    def _receive(self) -> list[tuple[Peer, One, Buffer, Frames]]:
        """Receive and decode all messages, and query the log once for all groups they name."""
        arrived, self._early = self._early, []
        for transport in self._transports:
            for address, header, frames in transport.receive():
                arrived.append(((transport, address), header, frames))
        found = []
        for peer, header, frames in arrived:
            try:
                for message, payload in unbundled(read_from_client(header), frames):
                    found.append((peer, message, header, payload))
            except CorruptFrame as error:  # same as a lost message: the sender asks again
                self.run_logger.count("messages_corrupt", f"dropped a message: {error}")
        if len(found) >= self._log.least_looked_up:
            named = [message.group for _, message, _, _ in found if isinstance(message, (Put, AskRoom))]
            self.engine.acceptance.look_up(named)
        return found

    def _stay_alive(self) -> None:
        """Send heartbeats while the log does not answer. Decides nothing: messages wait for the next turn."""
        now = self._now = time.monotonic()
        self.coordinator.remark = f"the log is slow or away: {self._log.where}"
        for transport in self._transports:
            for address, header, frames in transport.receive():
                peer = (transport, address)
                sign = sign_of_life(self.coordinator, peer, header, now)
                if sign is not None:
                    # Not `_send`: it seals the segments of a peer that is gone, and the log is being written.
                    transport.send(address, self._pack(sign), ())
                if not isinstance(sign, Pulse) or not sign.number:
                    self._early.append((peer, header, frames))
        self._on_turn()

    def _unstage(self) -> None:
        """Unstage steps that are planned again. Ranks of a running session learn it when they ask for the next step."""
        first, self._pipeline.replanned = self._pipeline.replanned, 0
        if first and self.coordinator.phase is not Phase.RUNNING:
            self.coordinator.unstage(first)

    def _set_version(self) -> None:
        """Set the policy version that every answer carries, and the remark for ranks that wait."""
        self.coordinator.policy_version = self.admission.policy_version = self.engine.recorder.state.policy_version
        self.coordinator.remark = self.run_logger.stale_remark(self.engine)

    def _on_message(self, peer: Peer, message: One, header: Buffer, frames: Frames, now: float) -> None:
        try:
            self._act_on(peer, message, run_of(header), frames, now)
        except Exception as error:
            if ends_plane(error):
                raise
            text = f"a {type(message).__name__} could not be handled: {failure_text(error)}"
            logger.debug("%s", text, exc_info=True)
            self.run_logger.count("messages_failed", text)

    def _act_on(self, peer: Peer, message: One, run_id: bytes, frames: Frames, now: float) -> None:
        if isinstance(message, Put) and run_id == self._run_id:  # first: most messages are puts
            self._admit(self.admission.on_message(peer, message, frames))
        elif isinstance(message, Attach):
            self._effects.do(self.admission.on_attach(peer, message))
        elif run_id != self._run_id:
            self.run_logger.count(
                "messages_foreign", f"rejected a message for run {run_id.hex()[:12]}, an earlier one at this address"
            )
            self._effects.do(self.admission.on_foreign(peer, run_id))
        elif isinstance(message, AskGroups):
            self._effects.do(self._states(peer, message))
        elif isinstance(message, AboutTasks):
            self.tasks.on_message(peer, message, now)
        elif isinstance(message, LeaseColumns):
            self._columns.on_message(peer, message, now)
        elif isinstance(message, AskFeedback):
            self._on_reader(peer, message, now)
        elif isinstance(message, Ask):
            self._send(peer, Status(ticket=message.ticket, text=msgspec.json.encode(self.status())))
        elif isinstance(message, _ADMITTED):
            self._admit(self.admission.on_message(peer, message, frames))
        else:
            self._effects.carry_out(self.coordinator.on_message(peer, message, now))

    def _reply(self, ticket: Ticket, found: FromPlane | PenstockError | None) -> None:
        """Answer a request about tasks."""
        if found is None or isinstance(found, PenstockError):
            self._effects.do(self.admission.answer(ticket, found))
        else:
            self._send(ticket[0], found)

    def _admit(self, effects: Sequence[AdmissionEffect]) -> None:
        for effect in effects:
            if isinstance(effect, Offer):
                self._offer(effect)
            elif isinstance(effect, Decide) and isinstance(effect.message, AttachValues):
                if effect.message.groups or effect.message.stored:
                    self._late_frames.offer(effect.ticket, effect.message, effect.frames, writer_of(effect.ticket[0]))
                else:
                    self.engine.late.offer(effect.ticket, effect.message)
            elif isinstance(effect, Decide):
                self._effects.do(self._decide(effect))
            elif isinstance(effect, SignFor):
                self._signing.sign(effect, writer_of(effect.ticket[0]))
            else:
                self._effects.do(effect)

    def _states(self, peer: Peer, message: AskGroups) -> Send:
        if len(message.groups) > MAX_ASKED:
            error = InvalidInput(f"{len(message.groups):,} groups; ask for at most {MAX_ASKED:,} with one message")
            return self.admission.answer((peer, message.ticket), error)
        states = self.engine.acceptance.states_of(message.groups)
        return Send(peer, GroupStates(ticket=message.ticket, states=tuple(states)))

    def _attach(self, now: float) -> None:
        """Attach the late values of this turn, and settle groups that have waited too long."""
        for one in self.engine.late.flush():
            if not self._late_frames.settled(one):
                continue
            assert isinstance(one.ticket, tuple)  # as made by admission
            self._effects.do(self.admission.attached(one.ticket, one.error, one.new, one.known, one.late))
        try:
            self.engine.late.tick(now)
        except DiskFull:
            return  # the next turn tries again

    def _on_reader(self, peer: Peer, message: AskFeedback, now: float) -> None:
        try:
            answer = self._readers.ask(peer, message, now)
        except InvalidInput as error:
            answer = self.admission.answer((peer, message.ticket), error)
        if answer is not None:
            self._effects.do(answer)

    def _decide(self, effect: Decide) -> Send:
        if isinstance(effect.message, (Discard, SettleGroup, SetWeight)):
            return self.admission.decided(effect.ticket, decide(self.engine, self.run_logger, effect.message))
        try:
            (segment,) = self.engine.segments.register(writer_of(effect.ticket[0]))
        except PenstockError as error:
            return self.admission.answer(effect.ticket, error)
        return self.admission.opened(effect.ticket, segment)

    def _offer(self, offer: Offer) -> None:
        rooms, ticket, put = self.admission.rooms, offer.ticket, offer.put
        claim = partial(rooms.claim, ticket)
        if put.location:
            outcome = self._pipeline.put_stored(ticket, put, self._writer_of(ticket[0]), claim=claim)
        else:
            digest = put.digest or xxhash.xxh3_128_digest(offer.frame)
            outcome = self._pipeline.put(
                ticket,
                put.group,
                digest,
                offer.frame,
                evaluation=put.evaluation,
                priority=put.priority,
                advantage=put.advantage,
                filters=put.filters,
                claim=claim,
            )
        if outcome is not None and isinstance(outcome.error, Overloaded):
            rooms.wait(ticket, outcome.table, outcome.size)
        else:
            rooms.close(ticket)
        if outcome is not None:
            self._answer(outcome)

    def _answer(self, outcome: Outcome) -> None:
        assert isinstance(outcome.ticket, tuple)  # as made by admission
        if isinstance(outcome.error, AlteredOnTheWay):
            self.run_logger.count("messages_corrupt", f"{outcome.error}; asked for again")
            self._effects.do(self.admission.missing(outcome.ticket))
            return
        self.run_logger.put(outcome.error, stale=outcome.stale, over_length=outcome.over_length)
        answer = self.admission.answer(
            outcome.ticket,
            outcome.error,
            duplicate=outcome.duplicate,
            stale=outcome.stale,
            over_length=outcome.over_length.as_tuple(),
            late=outcome.late,
        )
        self._send(answer.peer, answer.message)

    def _is_kept(self, ticket: object, group: str, digest: bytes) -> bool | None:
        """Return whether a group is accepted, or None if it is still being checked and its put will be answered."""
        if self._late_frames.is_at_work(ticket) or self.engine.acceptance.follow(ticket, group, digest):
            return None
        return self.engine.acceptance.digest_of(group, digest) == digest

    def _check_owner(self, outcomes: list[Outcome], now: float) -> None:
        """End a plane that another one has taken over, even if no message makes it write."""
        for outcome in outcomes:
            if isinstance(outcome.error, (Fenced, LogAway)):
                raise outcome.error
        if now >= self._look_at:
            self._look_at = now + _LOOK_S
            self._log.check_epoch()

    def _send(self, peer: Peer, message: FromPlane, frames: Frames = ()) -> None:
        """Send a message. Answers to puts are sent together, by `_send_answers`."""
        if isinstance(message, Accepted | Rejected | Room | Missing):
            self._answers.setdefault(peer, []).append(message)
        else:
            self._send_now(peer, message, frames)

    def _send_answers(self) -> None:
        """Send the answers to puts, those to one client as one message."""
        if not self._answers:
            return
        answers, self._answers = self._answers, {}
        for peer, messages in answers.items():
            for message in answered(messages):
                self._send_now(peer, message)

    def _send_now(self, peer: Peer, message: FromPlane, frames: Frames = ()) -> None:
        assert isinstance(peer, tuple)  # as made in `turn`
        transport, address = peer
        if not transport.send(address, self._pack(message), frames):
            self.admission.rooms.gone(peer)
            self.engine.segments.seal_writer(writer_of(peer))

    def _plan(self, now: float) -> bool:
        """Plan the steps that ranks asked for, in order. Returns False if the disk is full."""
        coordinator, engine = self.coordinator, self.engine
        for part in self._pipeline.take_parts():
            if coordinator.phase is Phase.RUNNING and coordinator.next_step <= part.step:
                self._effects.carry_out(coordinator.stage(part, now))
        for step in range(coordinator.next_step, coordinator.wanted + 1):
            if coordinator.phase is not Phase.RUNNING:
                break
            if coordinator.is_staged(step):
                self._pipeline.handed_over(step)
                continue
            try:
                staged = self._pipeline.step(step, coordinator.inline_ranks)
            except DiskFull as error:
                coordinator.waiting_for = f"disk space: {error}"
                return False
            except Exception as error:  # ends the session with an error, not the plane
                if isinstance(error, (Fenced, LogAway)):
                    raise
                self._effects.carry_out(coordinator.fail(f"cannot be built: {failure_text(error)}", step=step))
                break
            if isinstance(staged, Staged):
                self._pipeline.handed_over(step)
                self._effects.carry_out(coordinator.stage(staged, now))
                coordinator.waiting_for = "the trainer"
                continue
            coordinator.waiting_for = staged
            if engine.is_full and engine.last_step < engine.next_step:
                reason = (
                    f"can never be filled: the plane is full and the step waits for {staged}; "
                    "raise max_held_bytes or capacity"
                )
                self._effects.carry_out(coordinator.fail(reason, step=step))
            break
        return True

    def status(self) -> dict[str, Any]:
        """Return what `penstock top` shows."""
        found = status_of(self.engine, self.coordinator, self.admission)
        more = {
            "tasks": self.tasks.status(),
            "uptime_s": time.monotonic() - self._started,
            "inline_ranks": dict(self.damage.inline),
        }
        return found | more


# ------------------------------------------------------------------ clients: a transport, and an address on it


def writer_of(peer: Peer) -> str:
    """Name a client as the writer of segments, for as long as its connection lasts."""
    assert isinstance(peer, tuple)  # as made in `turn`
    transport, address = peer
    return f"{transport.url} {address!r}"[:MAX_NAME]


def may_write(peer: Peer) -> bool:
    assert isinstance(peer, tuple)  # as made in `turn`
    transport, address = peer
    return bool(transport.is_writer(address))


def poller_of(transports: Sequence[PlaneTransport], workers: Workers) -> zmq.Poller:
    """Make a poller for transports with a descriptor and for results of workers."""
    poller = zmq.Poller()
    for transport in transports:
        pollable = transport.pollable()
        if pollable is not None:
            poller.register(pollable, zmq.POLLIN)
    if isinstance(workers, Threads):
        poller.register(workers.wake.descriptor, zmq.POLLIN)
    return poller
