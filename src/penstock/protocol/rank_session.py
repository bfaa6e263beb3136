"""A rank's side of delivery, as a state machine without I/O or a clock of its own.

It joins, asks for steps, acknowledges them, waits for their release, commits them, and asks again whatever was not
answered: every message may be lost, doubled or late, and the plane may die and come back in between. What it cannot
survive is told to it by the plane (`Aborted`, `Refused`, `Foreign`) or by silence, and ends in one typed error.

    JOINING   attach             -> attached(run id)              which run is this?
              hello(session 0)   -> welcome(session 4, not ready)
                                 <- welcome(session 4, ready)     all have joined
    READY     request, received, commit, report, beat
              beat               -> unknown                       the plane restarted, or the connection was lost
              hello(session 4)   -> welcome(session 4, ready)     we are back: say again what is open
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
    """The first one that is not committed."""


@dataclass(frozen=True, slots=True)
class Arrived:
    """A step came: check it, then say `received`."""

    deliver: Deliver
    frames: Frames


@dataclass(frozen=True, slots=True)
class Released:
    """Every process has the step: it may be trained."""

    step: int


@dataclass(frozen=True, slots=True)
class StepDone:
    """Every process has committed the step, and those before it."""

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
    ) -> None:
        """`step` is the first one it wants; None for the first that is not committed. `can_read` finds out whether
        this process sees the plane's storage."""
        self._can_read = can_read
        self.timeouts = timeouts or Timeouts()
        self.run_id = NO_RUN
        """Of the run this process belongs to; everything it says carries it."""
        self.standing, self.waiting_for = Standing.JOINING, "the plane to answer"
        self.session = self.epoch = 0
        self.done = (step or 1) - 1
        """The last step known to be committed."""
        self.left = -1
        """A rank that left; no further step can come."""
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
        )
        self.was_ready = False
        """Whether it took part in a session, to which it would return."""
        self._beat = self._hello = float("-inf")
        self._contact = Contact(self.timeouts.heartbeat_s)
        self._requests: dict[int, Pending] = {}
        self._lost: dict[int, int] = {}
        """How many copies of a step are known to be lost."""
        self._filling: set[int] = set()
        """Steps that arrived and are neither received nor lost yet."""
        self._received: dict[int, Pending] = {}
        """Steps this process has and that are not committed. Each is said until its release answers, and again to a
        plane that restarted: that forgot who has what, and others may still wait for their release."""
        self._released: set[int] = set()
        self._commits: dict[int, Pending] = {}
        self._reports: dict[int, Pending] = {}
        self._report_number = 0
        self._failing: Pending | None = None
        self._leaving = False
        self._beats = self._pulses = 0
        """Said, and heard of."""

    # -------------------------------------------------------------- what the rank does

    def start(self, now: float) -> list[Event]:
        self._contact.hear(now)
        return self._say_hello(now)

    def request(self, step: int, now: float) -> list[Event]:
        return self._ask(self._requests, step, Request(session=self.session, step=step), now)

    def altered(self, step: int, now: float) -> list[Event]:
        """What came is not what was sent: it is lost, and asked for again."""
        self._filling.discard(step)
        self._lost[step] = self._lost.get(step, 0) + 1
        return self._ask(self._requests, step, Request(session=self.session, step=step, lost=self._lost[step]), now)

    def damaged(self, step: int, group: str, reason: str, now: float) -> list[Event]:
        """A group of a step cannot be read from storage. Said until the step comes again, or the session ends."""
        self._filling.discard(step)
        message = Damaged(session=self.session, step=step, group=group, reason=reason[:MAX_REASON])
        return self._ask(self._requests, step, message, now)

    def received(self, step: int, digest: str, now: float) -> list[Event]:
        """The payload was checked."""
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
        """Something went wrong here; said again until the plane has told everybody, us included."""
        if self.has_left:
            return []
        message = Fail(session=self.session, step=step, reason=reason[:MAX_REASON])
        self._failing = self._failing or Pending(message, now, self.timeouts.resend_s)
        if self.run_id == NO_RUN:
            return []  # no message may go before the plane's run is known; it follows our hello
        return [Out(self._failing.message)]

    def leave(self) -> list[Event]:
        """Say goodbye; or, before the plane was ever heard, wait for it to say what went wrong here (`has_left`)."""
        if self.has_left:
            return []
        if self.run_id == NO_RUN and self._failing:
            self._leaving = True
            return []
        self.standing = Standing.LEFT
        if self.run_id == NO_RUN:
            return []
        # After a failure our silence must be noticed, should the word of it have been lost: so no goodbye then.
        return [Out(self._failing.message)] if self._failing else [Out(Bye(session=self.session))]

    @property
    def has_left(self) -> bool:
        return self.standing in (Standing.FAILED, Standing.LEFT)

    def beat_now(self, now: float) -> list[Event]:
        """Ask what the plane waits for, without waiting for the next heartbeat."""
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
            return self._say_hello(now) if now - self._hello > self.timeouts.resend_s / 2 else []
        if isinstance(message, Aborted) and (message.session == self.session or not self.was_ready):
            return self._end(StepAborted(message.reason, message.step, message.rank))
        if getattr(message, "session", self.session) != self.session:
            return []  # about another life of the trainer
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
        """Beat, ask again, notice silence. Call it at least twice per heartbeat."""
        if self.has_left:
            return []
        silent = self._contact.tick(now)
        if silent > self.timeouts.plane_s:
            return self._end(PlaneLost(f"no word from the plane for {silent:.1f} s; waited for: {self.waiting_for}"))
        if self.standing is Standing.JOINING:
            return self._say_hello(now) if now - self._hello >= self.timeouts.resend_s else []
        events = self._due(now)
        answered = self._pulses == self._beats
        if now - self._beat >= self.timeouts.heartbeat_s * (1.0 if answered else 0.25):  # a lost one must not count
            events += self._say_beat(now)
        return events

    # -------------------------------------------------------------- inside

    def _say_hello(self, now: float) -> list[Event]:
        self._hello = now
        if self.run_id == NO_RUN:
            return [Out(Attach(ticket=0, run=self._hello_message.run))]
        for pending in self._received.values():  # whoever does not know us does not know what we have
            pending.patience = min(pending.patience, self.timeouts.resend_s)
        session = self.session if self.was_ready else 0  # until all had joined, there was no session to return to
        hello = Out(msgspec.structs.replace(self._hello_message, session=session))
        return [hello, Out(self._failing.message)] if self._failing else [hello]

    def _on_attached(self, message: Attached, now: float) -> list[Event]:
        if self.run_id != NO_RUN:
            return []  # said twice
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
            return []  # about another life of the trainer
        return self._end(Fenced(message.reason)) if self.was_ready else self._say_hello(now)

    def _on_welcome(self, message: Welcome, now: float) -> list[Event]:
        if self.was_ready and message.session != self.session:
            return []
        joined, self.session = message.session != self.session, message.session
        if joined:
            self._restamp()
        if not message.ready:
            return [Out(self._failing.message)] if self._failing else self._say_beat(now)
        self.waiting_for = "the plane to say what for"
        self._count_anew()
        was_ready, self.standing = self.standing is Standing.READY, Standing.READY
        self.was_ready = True
        events: list[Event] = [] if was_ready else [Ready(message.step)]
        if message.step - 1 > self.done:
            events += self._on_committed(message.step - 1)
        return events + self._say_all(now)

    def _restamp(self) -> None:
        """Questions asked before the session had a number get it now."""
        for pending in self._pending():
            pending.message = msgspec.structs.replace(pending.message, session=self.session)

    def _count_anew(self) -> None:
        """The plane may have restarted, and counts the copies of a step from 1."""
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
        """What has waited long enough for an answer to be said again."""
        due = [pending for pending in self._pending() if pending.is_due(now)]
        for pending in due:
            pending.asked(now, self._most_patience(pending.message))
        return [Out(pending.message) for pending in due]

    def _most_patience(self, message: FromClient) -> float:
        """All wait for a step that one has not got, or not been heard to have; what comes after is not so urgent."""
        urgent = isinstance(message, (Request, Damaged, Received))
        return self.timeouts.heartbeat_s if urgent else self.timeouts.delivery_s / 4

    def _say_all(self, now: float) -> list[Event]:
        """The plane was lost and may know nothing: tell it everything that is open, and ask patiently from anew."""
        for pending in self._pending():
            pending.ask_anew(now, self.timeouts.resend_s)
        return [Out(pending.message) for pending in self._pending()]

    def _on_deliver(self, message: Deliver, frames: Frames, now: float) -> list[Event]:
        if message.step not in self._requests:
            return []  # a duplicate of what we already have
        who = self._hello_message
        if (message.rank, message.world) != (who.rank, who.world):
            reason = f"got step {message.step} of rank {message.rank}/{message.world}, is rank {who.rank}/{who.world}"
            return self.fail(message.step, reason, now)
        self._requests.pop(message.step)
        self._filling.add(message.step)
        if self._hello_message.direct and any(len(frame) for frame in frames):
            # The plane found that storage is well and this process is not: it must not ask for the same again.
            self._hello_message = msgspec.structs.replace(self._hello_message, direct=False)
        return [Arrived(message, frames)]

    def _on_sent(self, message: Sent, now: float) -> list[Event]:
        """What we asked for was on its way before this. So if it is not here, it is lost."""
        step = message.step
        if step not in self._requests or message.copies <= self._lost.get(step, 0):
            return []
        self._lost[step] = message.copies
        return self._ask(self._requests, step, Request(session=self.session, step=step, lost=message.copies), now)

    def _on_release(self, step: int) -> list[Event]:
        if step not in self._received:
            return []
        self._received[step].patience = float("inf")
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
