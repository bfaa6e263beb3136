"""The plane's side of delivery, as a state machine without I/O or a clock of its own.

A *session* is one life of the trainer: all its processes joined, and none of them died since. Every process of a
session gets the same steps, or all of them get the same error. Three phases:

    FORMING   waiting until every process has said hello
    RUNNING   steps are requested, delivered, received, released, committed
    FAILED    the session is over; every process was told why; a fresh hello starts the next session

A step is released, and only then trained, when every process has it and found it whole: whatever goes wrong on the
way to one of them stops all of them before the forward pass. `steps.py` does that; this is about who takes part.
`phases.py` lists what moves one phase to another. Feed it messages with `on_message` and time with `on_tick`; it
answers with effects.
"""

from __future__ import annotations

from collections.abc import Mapping

from penstock.send.effects import (
    Detach,
    Effect,
    MemberLeft,
    Peer,
    Resume,
    Send,
    Staged,
)
from penstock.send.liveness import overdue
from penstock.send.members import Member, Members, Place
from penstock.send.messages import (
    MAX_REASON,
    Aborted,
    Beat,
    Bye,
    Commit,
    Fail,
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
from penstock.send.progress import Progress
from penstock.send.session import Phase
from penstock.send.steps import Outcome, Session, Steps, Violation
from penstock.send.timeouts import Timeouts
from penstock.send.tombstones import Tombstones


class Coordinator:
    """Delivers each step to all processes of a session, or tells all of them why not."""

    def __init__(
        self,
        *,
        run: str,
        ranks: int,
        replicas: int = 1,
        epoch: int,
        session: int = 0,
        next_step: int = 1,
        last_step: int = 0,
        left: Mapping[Place, int] | None = None,
        timeouts: Timeouts | None = None,
    ) -> None:
        """`left` is what `MemberLeft` said of this session, to an earlier life of the plane."""
        self.run, self.ranks, self.replicas, self.epoch = run, ranks, replicas, epoch
        self._life = Session(
            run=run, ranks=ranks, epoch=epoch, number=session, next_step=next_step, last_step=last_step
        )
        self.timeouts = timeouts or Timeouts()
        self.waiting_for = "the first step"
        """What the plane waits for, in words; ranks see it while they wait."""
        self._fresh = session == 0
        self._forming_since = 0.0
        self._ticked: float | None = None
        self._members = Members(run, ranks, replicas)
        self._progress = Progress(ranks * replicas, left or {})
        self._steps = Steps(self._life, self._members, self._progress)
        self._failure: Aborted | None = None
        self._tombstones = Tombstones(epoch)

    # -------------------------------------------------------------- what the engine asks

    @property
    def session(self) -> int:
        """The session that is forming, running or failed; 0 before the first."""
        return self._life.number

    @property
    def phase(self) -> Phase:
        return self._life.phase

    @property
    def next_step(self) -> int:
        """The first step that is not committed."""
        return self._life.next_step

    @property
    def last_step(self) -> int:
        """The last step that was planned, possibly by an earlier life of the plane."""
        return self._life.last_step

    @property
    def wanted(self) -> int:
        """The highest step any process asked for or says it has; 0 when there is none."""
        asked = (step for member in self._members.members for step in member.wants)
        return max((*asked, *self._progress.received), default=0)

    def is_staged(self, step: int) -> bool:
        return step in self._progress.digests

    @property
    def missing(self) -> list[Place]:
        """Processes that have not joined, and have not left either."""
        return [place for place in self._members.free if place not in self._progress.left]

    def stage(self, staged: Staged, now: float) -> list[Effect]:
        """A step is packed and durable: deliver it to whoever asked for it."""
        assert len(staged.payloads) == self.ranks
        return self._judge(self._steps.stage(staged, now))

    def committed(self, session: int, step: int) -> list[Effect]:
        """The engine has written down that a step is trained: now the ranks may hear of it."""
        return self._steps.committed(session, step)

    def fail(self, reason: str, *, step: int | None = None, rank: int = -1) -> list[Effect]:
        """End the session for everybody; rank -1 is the plane itself."""
        return self._abort(step or self.next_step, rank, reason)

    # -------------------------------------------------------------- messages

    def on_message(self, peer: Peer, message: FromRank, now: float) -> list[Effect]:
        if isinstance(message, Hello):
            return self._on_hello(peer, message, now)
        place = self._members.place_of(peer)
        session = message.session
        if session == 0 and place is not None:  # it said hello and has not heard our answer yet
            session = self.session
        if 0 < session < self.session:
            return [Send(peer, self._tombstones.of_session(session, self.session))]
        if self._failure is not None and session == self.session:
            return [Send(peer, self._failure)]
        if place is None or session > self.session:  # the plane restarted, or the peer's address changed
            return [Send(peer, Unknown(epoch=self.epoch))]
        self._members[place].heard = now
        return self._on_word(place, message, now)

    def _on_word(self, place: Place, message: FromRank, now: float) -> list[Effect]:
        """Somebody who takes part says something."""
        if isinstance(message, Request):
            return self._judge(self._steps.on_request(place, message, now))
        if isinstance(message, Received):
            return self._judge(self._steps.on_received(place, message))
        if isinstance(message, Commit):
            return self._judge(self._steps.on_commit(place, message))
        if isinstance(message, Report):
            return self._steps.on_report(place, message)
        if isinstance(message, Fail):
            return self._abort(message.step, place[0], message.reason)
        if isinstance(message, Bye):
            return self._on_bye(place)
        assert isinstance(message, Beat)
        self._members[place].beat(message.number, message.heard, now)
        return [self._pulse(self._members[place].peer, message.number)]

    def on_tick(self, now: float) -> list[Effect]:
        """Notice silence. Call it at least once per heartbeat."""
        last, pace = self._ticked, self.timeouts.heartbeat_s
        if last is not None and now - last < pace / 8:
            return []
        self._ticked = now
        if self.phase is Phase.FAILED:
            return []
        if last is not None and now - last > pace:
            # The plane itself stood still so long; what was said meanwhile may not have been read yet.
            self._forming_since += now - last
            self._members.excuse(now - last)
        if self.phase is Phase.FORMING and self._fresh:
            self._members.drop_silent(now - self.timeouts.peer_s)
            return []
        return self._notice_silence(now)

    def _notice_silence(self, now: float) -> list[Effect]:
        waited = now - self._forming_since
        if self.phase is Phase.FORMING and self._members and waited > self.timeouts.peer_s:
            return self._abort(self.next_step, self.missing[0][0], f"did not come back within {waited:.1f} s")
        late = overdue(self._members, self.timeouts, now)
        return [] if late is None else self._abort(late.step or self.next_step, late.place[0], late.reason)

    # -------------------------------------------------------------- joining

    def _on_hello(self, peer: Peer, hello: Hello, now: float) -> list[Effect]:
        problem = self._members.mismatch(hello)
        if problem:
            return [Send(peer, Refused(epoch=self.epoch, reason=problem))]
        if self._tombstones.knows(hello.incarnation):
            ending = self._tombstones.of_process(hello.incarnation)
            return [Send(peer, ending)] if ending else []
        place = (hello.rank, hello.replica)
        if hello.session:
            return self._rejoin(peer, place, hello, now)
        known = self._members.get(place)
        if known is not None and known.incarnation == hello.incarnation:  # the same hello again: our answer was lost
            return self._come_back(place, peer, now)
        effects: list[Effect] = []
        if self._members and not self._fresh:
            effects += self._abort(self.next_step, hello.rank, "restarted while the session was running")
        if self.phase is Phase.FAILED or not self._fresh or self.session == 0:
            self._new_session()
        self._members.join(place, Member(peer=peer, incarnation=hello.incarnation, start=hello.step, heard=now))
        other = next((m.start for m in self._members.members if m.start != hello.step), hello.step)
        if other != hello.step:
            reason = f"wants to resume at step {hello.step}, others at {other}; resume all from one checkpoint"
            return [*effects, *self._abort(hello.step, hello.rank, reason)]
        return [*effects, *self._admit(peer, now)]

    def _rejoin(self, peer: Peer, place: Place, hello: Hello, now: float) -> list[Effect]:
        """A process of this session comes back after its connection, or the plane, was lost."""
        if hello.session != self.session or self._fresh:
            return [Send(peer, self._tombstones.of_session(hello.session, self.session))]
        if self._failure is not None:
            return [Send(peer, self._failure)]
        known = self._members.get(place)
        if known is None:
            if place in self._progress.left:  # who left does not come back: this is an old one
                return [Send(peer, self._tombstones.of_session(hello.session, self.session))]
            if not self._members:
                self._forming_since = now
            self._members.join(place, Member(peer=peer, incarnation=hello.incarnation, start=hello.step, heard=now))
            return self._admit(peer, now)
        if known.incarnation != hello.incarnation:
            return [Send(peer, self._tombstones.of_session(hello.session, self.session))]
        return self._come_back(place, peer, now)

    def _come_back(self, place: Place, peer: Peer, now: float) -> list[Effect]:
        self._members.move(place, peer, now)
        return [Send(peer, self._welcome())]

    def _admit(self, peer: Peer, now: float) -> list[Effect]:
        if self.missing or self.phase is Phase.RUNNING:
            return [Send(peer, self._welcome())]
        self._life.phase = Phase.RUNNING
        effects: list[Effect] = []
        if self._fresh:
            self._fresh = False
            self._life.next_step = start = self._members.members[0].start
            self._progress.begin_at(start)
            effects.append(Resume(self.session, start))
        effects += [Send(member.peer, self._welcome()) for member in self._members.members]
        return effects + self._steps.deliver_all(list(self._progress.staged), now)

    def _new_session(self) -> None:
        self._life.number += 1
        self._life.phase, self._fresh, self._failure = Phase.FORMING, True, None
        self._members.clear()
        self._steps.new_session()

    # -------------------------------------------------------------- ends

    def _on_bye(self, place: Place) -> list[Effect]:
        """Leaving is no failure; when all have left, the next hello begins a session of its own."""
        member = self._members.leave(place)
        self._tombstones.left(member.incarnation)
        if not self._members:
            self._new_session()
            return [Detach(member.peer)]
        if self._fresh:
            return [Detach(member.peer), *self._abort(self.next_step, place[0], "left before all had joined")]
        last = self._progress.leave(place, self.next_step)
        return [Detach(member.peer), MemberLeft(self.session, *place, last)]

    def _judge(self, outcome: Outcome) -> list[Effect]:
        return self._abort(outcome.step, outcome.rank, outcome.reason) if isinstance(outcome, Violation) else outcome

    def _abort(self, step: int, rank: int, reason: str) -> list[Effect]:
        if self.phase is Phase.FAILED:
            return []
        who = "the plane" if rank < 0 else f"rank {rank}"
        self._life.phase = Phase.FAILED
        self._failure = failure = Aborted(
            epoch=self.epoch,
            session=self.session,
            step=step,
            rank=rank,
            reason=f"step {step}: {who}: {reason}"[:MAX_REASON],
        )
        members = self._members.members
        self._tombstones.failed(failure, [member.incarnation for member in members])
        return [effect for member in members for effect in (Send(member.peer, failure), Detach(member.peer))]

    def _welcome(self) -> Welcome:
        ready = self.phase is Phase.RUNNING
        return Welcome(epoch=self.epoch, session=self.session, ready=ready, step=self.next_step)

    def _pulse(self, peer: Peer, number: int) -> Send:
        waiting = self.waiting_for
        if self.phase is Phase.FORMING:
            waiting = f"{self._members.names(self.missing)} to join"
        elif late := self._late():
            waiting = late
        left = next((rank for rank, _ in reversed(self._progress.left)), -1)
        pulse = Pulse(epoch=self.epoch, session=self.session, waiting_for=waiting, left=left, number=number)
        return Send(peer, pulse)

    def _late(self) -> str:
        """Whom a step waits for that some have received, in words."""
        for step, have in self._progress.received.items():
            late = [place for place in self._members if place not in have]
            if late and self.is_staged(step):
                return f"{self._members.names(late)} to receive step {step}"
        return ""
