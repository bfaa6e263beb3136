"""A rank's side of delivery: a state machine without I/O or a clock of its own.

It joins, requests steps, acknowledges them, waits for their release, commits them, and repeats whatever is not
answered: every message may be lost, duplicated or late, and the plane may die and come back. It ends with one typed
error when the plane sends `Aborted`, `Refused` or `Foreign`, or is silent for too long.

    JOINING   attach             -> attached(run id)              which run is this?
              hello(session 0)   -> welcome(session 4, not ready)
                                 <- welcome(session 4, ready)     all have joined
    READY     request, received, commit, report, beat
              beat               -> unknown                       the plane restarted, or the connection broke
              hello(session 4)   -> welcome(session 4, ready)     back: repeat what is open
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import TypeAlias

import msgspec

from penstock.errors import Fenced, PeerError, PlaneLost, StepAborted
from penstock.protocol.message_header import NO_RUN
from penstock.protocol.messages import (
    MAX_REASON,
    Aborted,
    Attach,
    Attached,
    Beat,
    Bye,
    Commit,
    Committed,
    Damaged,
    Deliver,
    Fail,
    Foreign,
    Frames,
    FromClient,
    FromPlane,
    FromRank,
    Hello,
    Noted,
    Pulse,
    Received,
    Refused,
    Release,
    Report,
    Request,
    Sent,
    Unknown,
    Welcome,
)
from penstock.protocol.retry import Contact, Failed, Out, Pending
from penstock.protocol.timeouts import Timeouts


class Standing(Enum):
    JOINING = "joining"
    READY = "ready"
    FAILED = "failed"
    LEFT = "left"


@dataclass(frozen=True, slots=True)
class Ready:
    """All processes have joined."""

    step: int
    """The first uncommitted step."""


@dataclass(frozen=True, slots=True)
class Arrived:
    """A step arrived: verify it, then call `received`."""

    deliver: Deliver
    frames: Frames


@dataclass(frozen=True, slots=True)
class Released:
    """Every process has the step: it may be trained."""

    step: int


@dataclass(frozen=True, slots=True)
class StepDone:
    """Every process has committed the step and all earlier ones."""

    step: int


Event: TypeAlias = Out | Ready | Arrived | Released | StepDone | Failed


class RankSession:
    """One process of the trainer, as the plane sees it."""

    def __init__(
        self,
        *,
        run: str,
        rank: int,
        world: int,
        step: int | None,
        incarnation: str,
        replica: int = 0,
        replicas: int = 1,
        timeouts: Timeouts | None = None,
        can_read: Callable[[Attached], bool] = lambda _attached: False,
        process: str = "",
        pid: int = 0,
        pid_space: str = "",
        life: str = "",
    ) -> None:
        """`step` is the first one it wants, None for the first uncommitted one. `can_read` returns whether this process
        sees the plane's storage."""
        self._can_read = can_read
        self.timeouts = timeouts or Timeouts()
        self.run_id = NO_RUN
        """The run this process belongs to. Sent with every message."""
        self.standing, self.waiting_for = Standing.JOINING, "the plane to answer"
        self.session = self.epoch = 0
        self.done = (step or 1) - 1
        """The last step known to be committed."""
        self.left = -1
        """A rank that left, or -1. No further step can come then."""
        self._hello_message = Hello(
            run=run,
            rank=rank,
            world=world,
            replica=replica,
            replicas=replicas,
            incarnation=incarnation,
            session=0,
            step=step or 0,
            process=process,
            pid=pid,
            pid_space=pid_space,
            life=life,
        )
        self.was_ready = False
        """Whether it took part in a session that it can return to."""
        self._beat = self._hello = float("-inf")
        self._contact = Contact(self.timeouts.heartbeat_s)
        self._requests: dict[int, Pending] = {}
        self._lost: dict[int, int] = {}
        """Step -> copies known to be lost."""
        self._filling: set[int] = set()
        """Steps that arrived and are neither verified nor lost yet."""
        self._received: dict[int, Pending] = {}
        """Steps this process has that are not committed. Each is reported until its release arrives, and again to a
        restarted plane: it has forgotten which rank has what, and others may still wait for the release."""
        self._released: set[int] = set()
        self._commits: dict[int, Pending] = {}
        self._reports: dict[int, Pending] = {}
        self._report_number = 0
        self._failing: Pending | None = None
        self._leaving = False
        self._beats = self._pulses = 0
        """Beats sent, and the last one answered."""

    # -------------------------------------------------------------- what the rank does

    def start(self, now: float) -> list[Event]:
        self._contact.hear(now)
        return self._say_hello(now)

    def request(self, step: int, now: float) -> list[Event]:
        return self._ask(self._requests, step, Request(session=self.session, step=step), now)

    def altered(self, step: int, now: float) -> list[Event]:
        """Request a step again, because the bytes that arrived are not those that were sent."""
        self._filling.discard(step)
        self._lost[step] = self._lost.get(step, 0) + 1
        return self._ask(self._requests, step, Request(session=self.session, step=step, lost=self._lost[step]), now)

    def damaged(self, step: int, group: str, reason: str, now: float) -> list[Event]:
        """Report a group that cannot be read from storage, until the step arrives again or the session ends."""
        self._filling.discard(step)
        message = Damaged(session=self.session, step=step, group=group, reason=reason[:MAX_REASON])
        return self._ask(self._requests, step, message, now)

    def received(self, step: int, digest: str, now: float) -> list[Event]:
        """Acknowledge a step that was verified."""
        self._filling.discard(step)
        self._lost.pop(step, None)
        return self._ask(self._received, step, Received(session=self.session, step=step, digest=digest), now)

    def commit(self, step: int, policy_version: int | None, now: float) -> list[Event]:
        message = Commit(session=self.session, step=step, policy_version=policy_version)
        return self._ask(self._commits, step, message, now)

    def report(self, step: int, priorities: dict[str, float], metrics: dict[str, float], now: float) -> list[Event]:
        self._report_number += 1
        message = Report(
            session=self.session, step=step, priorities=priorities, metrics=metrics, number=self._report_number
        )
        return self._ask(self._reports, self._report_number, message, now)

    def fail(self, step: int, reason: str, now: float) -> list[Event]:
        """Report a failure of this rank, until the plane has aborted the session for every rank, this one included."""
        if self.has_left:
            return []
        message = Fail(session=self.session, step=step, reason=reason[:MAX_REASON])
        self._failing = self._failing or Pending(message, now, self.timeouts.resend_s)
        if self.run_id == NO_RUN:
            return []  # no message may be sent before the run id is known; it follows our hello
        return [Out(self._failing.message)]

    def leave(self) -> list[Event]:
        """Leave the session. After a failure before first contact it stays until the failure is sent (`has_left`)."""
        if self.has_left:
            return []
        if self.run_id == NO_RUN and self._failing:
            self._leaving = True
            return []
        self.standing = Standing.LEFT
        if self.run_id == NO_RUN:
            return []
        # After a failure, repeat the failure instead of a bye. If the message is lost, the plane must notice our
        # silence and abort the others; a bye would let them wait for a step that never comes.
        return [Out(self._failing.message)] if self._failing else [Out(Bye(session=self.session))]

    @property
    def has_left(self) -> bool:
        return self.standing in (Standing.FAILED, Standing.LEFT)

    def beat_now(self, now: float) -> list[Event]:
        """Send a beat at once, to learn what the plane waits for now."""
        return self._say_beat(now) if self.standing is Standing.READY else []

    @property
    def uncommitted(self) -> list[int]:
        """Steps whose commit the plane has not confirmed."""
        return sorted(self._commits)

    # -------------------------------------------------------------- messages

    def on_message(self, message: FromPlane, frames: Frames, now: float) -> list[Event]:
        if self.has_left:
            return []
        if isinstance(message, Foreign):
            return self._end(Fenced(message.reason))
        epoch = getattr(message, "epoch", 0)
        if epoch < self.epoch:
            return []  # an old plane that does not know it was replaced
        self.epoch = epoch
        self._contact.hear(now)
        if isinstance(message, Attached):
            return self._on_attached(message, now)
        if isinstance(message, Refused):
            return self._on_refused(message, now)
        if isinstance(message, Welcome):
            return self._on_welcome(message, now)
        if isinstance(message, Unknown):
            # Every message of a burst is answered with `Unknown`: one hello is enough for all of them.
            return self._say_hello(now) if now - self._hello > self.timeouts.resend_s / 2 else []
        # Before it was ready, a process may not know its session's number yet.
        if isinstance(message, Aborted) and (message.session == self.session or not self.was_ready):
            return self._end(StepAborted(message.reason, message.step, message.rank))
        if getattr(message, "session", self.session) != self.session:
            return []  # about another session
        if isinstance(message, Pulse):
            self.waiting_for, self.left = message.waiting_for, message.left
            self._pulses = max(self._pulses, message.number)
            if message.probe:
                return self._say_beat(now, message.probe)
        elif isinstance(message, Deliver):
            return self._on_deliver(message, frames, now)
        elif isinstance(message, Sent):
            return self._on_sent(message, now)
        elif isinstance(message, Release):
            return self._on_release(message.step)
        elif isinstance(message, Committed):
            return self._on_committed(message.step)
        elif isinstance(message, Noted):
            self._reports.pop(message.number, None)
        return []

    def on_tick(self, now: float) -> list[Event]:
        """Send beats, repeat requests, detect a silent plane. Call it at least twice per heartbeat."""
        if self.has_left:
            return []
        silent = self._contact.tick(now)
        if silent > self.timeouts.plane_s:
            return self._end(
                PlaneLost(f"heard nothing from the plane for {silent:.1f} s; waited for: {self.waiting_for}")
            )
        if self.standing is Standing.JOINING:
            return self._say_hello(now) if now - self._hello >= self.timeouts.resend_s else []
        events = self._due(now)
        # An unanswered beat is repeated after a quarter of a heartbeat, so that one lost message does not bring this
        # process a full heartbeat closer to `peer_s`, when it counts as dead.
        answered = self._pulses == self._beats
        if now - self._beat >= self.timeouts.heartbeat_s * (1.0 if answered else 0.25):
            events += self._say_beat(now)
        return events

    # -------------------------------------------------------------- inside

    def _say_hello(self, now: float) -> list[Event]:
        self._hello = now
        if self.run_id == NO_RUN:
            return [Out(Attach(ticket=0, run=self._hello_message.run))]
        for pending in self._received.values():  # a plane that does not know us does not know which steps we have
            pending.patience = min(pending.patience, self.timeouts.resend_s)
        session = self.session if self.was_ready else 0  # before all have joined there is no session to return to
        hello = Out(msgspec.structs.replace(self._hello_message, session=session))
        return [hello, Out(self._failing.message)] if self._failing else [hello]

    def _on_attached(self, message: Attached, now: float) -> list[Event]:
        if self.run_id != NO_RUN:
            return []  # a duplicate
        self.run_id = message.run_id
        self._hello_message = msgspec.structs.replace(self._hello_message, direct=self._can_read(message))
        return [*self._say_hello(now), *(self.leave() if self._leaving else [])]

    def _say_beat(self, now: float, probe: int = 0) -> list[Event]:
        self._beat, self._beats = now, self._beats + 1
        filling = tuple(sorted(self._filling))
        return [Out(Beat(session=self.session, number=self._beats, heard=self._pulses, filling=filling, probe=probe))]

    def _on_refused(self, message: Refused, now: float) -> list[Event]:
        if message.session == 0:
            return self._end(PeerError(f"the plane refused: {message.reason}"))
        if message.session != self.session:
            return []  # about another session
        return self._end(Fenced(message.reason)) if self.was_ready else self._say_hello(now)

    def _on_welcome(self, message: Welcome, now: float) -> list[Event]:
        if self.was_ready and message.session != self.session:
            return []
        joined, self.session = message.session != self.session, message.session
        if joined:
            self._restamp()
        if not message.ready:
            return [Out(self._failing.message)] if self._failing else self._say_beat(now)
        self.waiting_for = "the plane's first heartbeat"
        self._reset_copies()
        was_ready, self.standing = self.standing is Standing.READY, Standing.READY
        self.was_ready = True
        events: list[Event] = [] if was_ready else [Ready(message.step)]
        if message.step - 1 > self.done:  # steps were committed while the connection was lost
            events += self._on_committed(message.step - 1)
        return events + self._say_all(now)

    def _restamp(self) -> None:
        """Put the session's number into requests made before it was known."""
        for pending in self._pending():
            pending.message = msgspec.structs.replace(pending.message, session=self.session)

    def _reset_copies(self) -> None:
        """Count copies of steps from 0 again, as a restarted plane does."""
        self._lost.clear()
        for step, pending in self._requests.items():
            pending.message = Request(session=self.session, step=step)

    def _pending(self) -> list[Pending]:
        tables = (self._requests, self._received, self._commits, self._reports)
        found = [pending for table in tables for pending in table.values()]
        return [self._failing, *found] if self._failing else found

    def _ask(self, table: dict[int, Pending], key: int, message: FromRank, now: float) -> list[Event]:
        table[key] = Pending(message, now, self.timeouts.resend_s)
        return [Out(message)] if self.standing is Standing.READY else []

    def _due(self, now: float) -> list[Event]:
        """Repeat the requests that have waited long enough."""
        due = [pending for pending in self._pending() if pending.is_due(now)]
        for pending in due:
            pending.asked(now, self._most_patience(pending.message))
        return [Out(pending.message) for pending in due]

    def _most_patience(self, message: FromClient) -> float:
        """Return the longest pause between repeats. All ranks wait while one has not received a step or its
        acknowledgement is lost, so these repeat every heartbeat. Commits and reports are less urgent."""
        urgent = isinstance(message, (Request, Damaged, Received))
        return self.timeouts.heartbeat_s if urgent else self.timeouts.delivery_s / 4

    def _say_all(self, now: float) -> list[Event]:
        """Repeat everything that is open, because a restarted plane may know none of it."""
        for pending in self._pending():
            pending.restart(now, self.timeouts.resend_s)
        return [Out(pending.message) for pending in self._pending()]

    def _on_deliver(self, message: Deliver, frames: Frames, now: float) -> list[Event]:
        if message.step not in self._requests:
            return []  # a duplicate of a step we already have
        who = self._hello_message
        # Cannot happen with a correct plane. Training another rank's samples would go unnoticed, so check it.
        if (message.rank, message.world) != (who.rank, who.world):
            reason = f"got step {message.step} of rank {message.rank}/{message.world}, is rank {who.rank}/{who.world}"
            return self.fail(message.step, reason, now)
        self._requests.pop(message.step)
        self._filling.add(message.step)
        if self._hello_message.direct and any(len(frame) for frame in frames):
            # The plane sends samples to a process that reads storage itself: it found that storage is fine and this
            # process cannot read it. After a reconnect the process must not claim again that it can.
            self._hello_message = msgspec.structs.replace(self._hello_message, direct=False)
        return [Arrived(message, frames)]

    def _on_sent(self, message: Sent, now: float) -> list[Event]:
        """Request a step again if it is lost. `Sent` travels behind the step: if it arrives first, the step is lost."""
        step = message.step
        if step not in self._requests or message.copies <= self._lost.get(step, 0):
            return []  # the step is here, or this loss is already reported
        self._lost[step] = message.copies
        return self._ask(self._requests, step, Request(session=self.session, step=step, lost=message.copies), now)

    def _on_release(self, step: int) -> list[Event]:
        if step not in self._received:
            return []
        self._received[step].patience = float("inf")  # answered: repeat it only to a restarted plane
        if step in self._released:
            return []
        self._released.add(step)
        return [Released(step)]

    def _on_committed(self, step: int) -> list[Event]:
        for table in (self._commits, self._received):
            for old in [s for s in table if s <= step]:
                table.pop(old)
        self._released = {s for s in self._released if s > step}
        self.done = max(self.done, step)
        return [StepDone(step)]

    def _end(self, error: PeerError) -> list[Event]:
        self.standing = Standing.FAILED
        return [Failed(error)]
