"""A rank's side of delivery, as a state machine without I/O or a clock of its own.

It joins, asks for steps, acknowledges them, commits them, and asks again whatever was not answered: every
message may be lost, doubled or late, and the plane may die and come back in between. What it cannot survive
is told to it by the plane (`Aborted`, `Refused`) or by silence, and ends in one typed error.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import TypeAlias

import msgspec

from penstock.errors import Fenced, PeerError, PlaneLost, StepAborted
from penstock.send.coordinator import Timeouts
from penstock.send.messages import (
    Aborted,
    Beat,
    Bye,
    Commit,
    Committed,
    Deliver,
    Fail,
    Frames,
    FromPlane,
    FromRank,
    Hello,
    Pulse,
    Received,
    Refused,
    Report,
    Request,
    Unknown,
    Welcome,
)


class Standing(Enum):
    JOINING = "joining"
    READY = "ready"
    FAILED = "failed"
    LEFT = "left"


@dataclass(frozen=True, slots=True)
class Out:
    """Give this to the carrier."""

    message: FromRank


@dataclass(frozen=True, slots=True)
class Ready:
    step: int


@dataclass(frozen=True, slots=True)
class Arrived:
    deliver: Deliver
    frames: Frames


@dataclass(frozen=True, slots=True)
class StepDone:
    step: int


@dataclass(frozen=True, slots=True)
class Failed:
    error: PeerError


Event: TypeAlias = Out | Ready | Arrived | StepDone | Failed


@dataclass(slots=True)
class _Pending:
    message: FromRank
    sent: float


class Follower:
    """One process of the trainer, as the plane sees it."""

    def __init__(
        self,
        *,
        run: str,
        rank: int,
        world: int,
        step: int,
        incarnation: str,
        replica: int = 0,
        replicas: int = 1,
        timeouts: Timeouts | None = None,
    ) -> None:
        self.timeouts = timeouts or Timeouts()
        self.standing = Standing.JOINING
        self.waiting_for = "the plane to answer"
        self.session = 0
        self.epoch = 0
        self.done = step - 1
        """The last step known to be committed."""
        self._hello_message = Hello(
            run=run,
            rank=rank,
            world=world,
            replica=replica,
            replicas=replicas,
            incarnation=incarnation,
            session=0,
            step=step,
        )
        self._was_ready = False
        self._heard = self._beat = self._hello = float("-inf")
        self._requests: dict[int, _Pending] = {}
        self._received: dict[int, Received] = {}
        self._commits: dict[int, _Pending] = {}

    # -------------------------------------------------------------- what the rank does

    def start(self, now: float) -> list[Event]:
        self._heard = now
        return self._say_hello(now)

    def request(self, step: int, now: float) -> list[Event]:
        self._requests[step] = pending = _Pending(Request(session=self.session, step=step), now)
        return [Out(pending.message)] if self.standing is Standing.READY else []

    def received(self, step: int, digest: str) -> list[Event]:
        """The payload was checked: say so, again and again until the step is committed."""
        self._received[step] = message = Received(session=self.session, step=step, digest=digest)
        return [Out(message)]

    def commit(self, step: int, policy_version: int | None, now: float) -> list[Event]:
        message = Commit(session=self.session, step=step, policy_version=policy_version)
        self._commits[step] = _Pending(message, now)
        return [Out(message)] if self.standing is Standing.READY else []

    def report(self, step: int, priorities: dict[str, float], metrics: dict[str, float]) -> list[Event]:
        return [Out(Report(session=self.session, step=step, priorities=priorities, metrics=metrics))]

    def fail(self, step: int, reason: str) -> list[Event]:
        return [Out(Fail(session=self.session, step=step, reason=reason))]

    def leave(self) -> list[Event]:
        if self.standing in (Standing.FAILED, Standing.LEFT):
            return []
        self.standing = Standing.LEFT
        return [Out(Bye(session=self.session))]

    @property
    def uncommitted(self) -> list[int]:
        """Steps whose commit the plane has not confirmed."""
        return sorted(self._commits)

    # -------------------------------------------------------------- messages

    def on_message(self, message: FromPlane, frames: Frames, now: float) -> list[Event]:
        if self.standing in (Standing.FAILED, Standing.LEFT):
            return []
        epoch = getattr(message, "epoch", 0)
        if epoch < self.epoch:
            return []  # an old plane that does not know it was replaced
        self.epoch = epoch
        self._heard = now
        if isinstance(message, Refused):
            return self._end(
                Fenced(message.reason) if self.session else PeerError(f"the plane refused: {message.reason}")
            )
        if isinstance(message, Welcome):
            return self._on_welcome(message, now)
        if isinstance(message, Unknown):
            return self._say_hello(now) if now - self._hello > self.timeouts.resend_s / 2 else []
        if getattr(message, "session", self.session) != self.session:
            return []  # about another life of the trainer
        if isinstance(message, Pulse):
            self.waiting_for = message.waiting_for
        elif isinstance(message, Aborted):
            return self._end(StepAborted(message.reason, message.step, message.rank))
        elif isinstance(message, Deliver):
            return self._on_deliver(message, frames)
        elif isinstance(message, Committed):
            return self._on_committed(message.step)
        return []

    def on_tick(self, now: float) -> list[Event]:
        """Beat, ask again, notice silence. Call it at least twice per heartbeat."""
        if self.standing in (Standing.FAILED, Standing.LEFT):
            return []
        silent = now - self._heard
        if silent > self.timeouts.plane_s:
            return self._end(PlaneLost(f"no word from the plane for {silent:.1f} s; waited for: {self.waiting_for}"))
        if self.standing is Standing.JOINING:
            return self._say_hello(now) if now - self._hello >= self.timeouts.resend_s else []
        events: list[Event] = []
        if now - self._beat >= self.timeouts.heartbeat_s:
            self._beat = now
            events.append(Out(Beat(session=self.session)))
            events += [Out(message) for message in self._received.values()]
        return events + self._resend(now, self.timeouts.resend_s)

    # -------------------------------------------------------------- inside

    def _say_hello(self, now: float) -> list[Event]:
        self._hello = now
        session = self.session if self._was_ready else 0  # until all had joined, there was no session to return to
        return [Out(msgspec.structs.replace(self._hello_message, session=session))]

    def _on_welcome(self, message: Welcome, now: float) -> list[Event]:
        if self._was_ready and message.session != self.session:
            return []
        joined, self.session = message.session != self.session, message.session
        if joined:
            self._restamp()
        if not message.ready:
            return [Out(Beat(session=self.session))]
        was_ready, self.standing = self.standing is Standing.READY, Standing.READY
        self._was_ready = True
        for step in [s for s in self._commits if s < message.step]:
            self._commits.pop(step)
        return [*([] if was_ready else [Ready(message.step)]), *self._resend(now, 0.0)]

    def _restamp(self) -> None:
        """Questions asked before the session had a number get it now."""
        for step, pending in self._requests.items():
            pending.message = Request(session=self.session, step=step)

    def _resend(self, now: float, older_than: float) -> list[Event]:
        due = [p for p in (*self._requests.values(), *self._commits.values()) if now - p.sent >= older_than]
        for pending in due:
            pending.sent = now
        return [Out(pending.message) for pending in due]

    def _on_deliver(self, message: Deliver, frames: Frames) -> list[Event]:
        if message.step not in self._requests:
            return []  # a duplicate of what we already have
        who = self._hello_message
        if (message.rank, message.world) != (who.rank, who.world):
            reason = f"got step {message.step} of rank {message.rank}/{message.world}, is rank {who.rank}/{who.world}"
            return [*self.fail(message.step, reason), *self._end(PeerError(reason))]
        self._requests.pop(message.step)
        return [Arrived(message, frames)]

    def _on_committed(self, step: int) -> list[Event]:
        for table in (self._commits, self._received):
            for old in [s for s in table if s <= step]:
                table.pop(old)
        self.done = max(self.done, step)
        return [StepDone(step)]

    def _end(self, error: PeerError) -> list[Event]:
        self.standing = Standing.FAILED
        return [Failed(error)]
