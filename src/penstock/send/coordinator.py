"""The plane's side of delivery, as a state machine without I/O or a clock of its own.

A *session* is one life of the trainer: all its processes joined, and none of them died since. Every process of a
session gets the same steps, or all of them get the same error. Three phases:

    FORMING   waiting until every process has said hello
    RUNNING   steps are requested, delivered, received, released, committed
    FAILED    the session is over; every process was told why; a fresh hello starts the next session

A step is released, and only then trained, when every process has it and found it whole: whatever goes wrong on the
way to one of them stops all of them before the forward pass. `phases.py` lists what moves one phase to another. Feed
it messages with `on_message` and time with `on_tick`; it answers with effects.
"""

from __future__ import annotations

from penstock.send.effects import (
    Effect,
    Parted,
    Peer,
    Reported,
    Resume,
    Send,
    Staged,
    StepCommitted,
    StepReceived,
)
from penstock.send.endings import Endings
from penstock.send.messages import (
    MAX_REASON,
    Aborted,
    Beat,
    Bye,
    Commit,
    Committed,
    Deliver,
    Fail,
    FromRank,
    Hello,
    Noted,
    Pulse,
    Received,
    Refused,
    Release,
    Report,
    Request,
    Unknown,
    Welcome,
)
from penstock.send.phases import Phase
from penstock.send.roster import Member, Place, Roster
from penstock.send.timeouts import Timeouts

AHEAD = 4
"""Steps beyond the last planned one that may be asked for; no source asks for more than three."""


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
        timeouts: Timeouts | None = None,
    ) -> None:
        self.run, self.ranks, self.replicas, self.epoch = run, ranks, replicas, epoch
        self.session = session
        """The session that is forming, running or failed; 0 before the first."""
        self.next_step = next_step
        """The first step that is not committed."""
        self.last_step = last_step
        """The last step that was planned, possibly by an earlier life of the plane."""
        self.timeouts = timeouts or Timeouts()
        self.phase = Phase.FORMING
        self.waiting_for = "the first step"
        """What the plane waits for, in words; ranks see it while they wait."""
        self._fresh = session == 0
        self._forming_since = 0.0
        self._ticked: float | None = None
        self._roster = Roster(run, ranks, replicas)
        self._staged: dict[int, Staged] = {}
        """Steps that somebody may still have to be sent."""
        self._digests: dict[int, list[str]] = {}
        self._received: dict[int, dict[Place, str]] = {}
        self._released: set[int] = set()
        self._committed: dict[int, set[Place]] = {}
        self._versions: dict[int, int] = {}
        self._closing = 0
        """The step that every process has trained, while it is being written down."""
        self._left = -1
        self._failure: Aborted | None = None
        self._endings = Endings(epoch)

    # -------------------------------------------------------------- what the engine asks

    @property
    def wanted(self) -> int:
        """The highest step any process asked for or says it has; 0 when there is none."""
        asked = (step for member in self._roster.members for step in member.wants)
        return max((*asked, *self._received), default=0)

    def is_staged(self, step: int) -> bool:
        return step in self._digests

    @property
    def missing(self) -> list[Place]:
        """Processes that have not joined."""
        return self._roster.missing

    def stage(self, staged: Staged, now: float) -> list[Effect]:
        """A step is packed and durable: deliver it to whoever asked for it."""
        assert len(staged.payloads) == self.ranks
        self._staged[staged.step], self._digests[staged.step] = staged, staged.digests
        self.last_step = max(self.last_step, staged.step)
        effects = [e for place in self._roster for e in self._deliver(place, staged.step, now)]
        return effects + self._check_received(staged.step)

    def fail(self, reason: str, *, step: int | None = None, rank: int = -1) -> list[Effect]:
        """End the session for everybody; rank -1 is the plane itself."""
        return self._abort(step or self.next_step, rank, reason)

    # -------------------------------------------------------------- messages

    def on_message(self, peer: Peer, message: FromRank, now: float) -> list[Effect]:
        if isinstance(message, Hello):
            return self._on_hello(peer, message, now)
        place = self._roster.place_of(peer)
        if message.session < self.session:
            return [Send(peer, self._endings.of_session(message.session, self.session))]
        if self._failure is not None and message.session == self.session:
            return [Send(peer, self._failure)]
        if place is None or message.session > self.session:  # the plane restarted, or the peer's address changed
            return [Send(peer, Unknown(epoch=self.epoch))]
        self._roster[place].heard = now
        if isinstance(message, Request):
            return self._on_request(place, message.step, now)
        if isinstance(message, Received):
            return self._on_received(place, message)
        if isinstance(message, Commit):
            return self._on_commit(place, message)
        if isinstance(message, Report):
            return self._on_report(place, message)
        if isinstance(message, Fail):
            return self._abort(message.step, place[0], message.reason)
        if isinstance(message, Bye):
            return self._on_bye(place)
        assert isinstance(message, Beat)
        return [self._pulse(peer)]

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
            self._roster.excuse(now - last)
        if self.phase is Phase.FORMING and self._fresh:
            self._roster.drop_silent(now - self.timeouts.peer_s)
            return []
        return self._notice_silence(now)

    def _notice_silence(self, now: float) -> list[Effect]:
        waited = now - self._forming_since
        if self.phase is Phase.FORMING and self._roster and waited > self.timeouts.peer_s:
            return self._abort(self.next_step, self.missing[0][0], f"did not come back within {waited:.1f} s")
        for place in self._roster:
            member = self._roster[place]
            silent = now - member.heard
            if silent > self.timeouts.peer_s:
                return self._abort(
                    self.next_step, place[0], f"silent for {silent:.1f} s; it died, stopped or was cut off"
                )
            for step, sent in member.sent.items():
                if now - sent > self.timeouts.delivery_s:
                    reason = f"did not acknowledge step {step} within {self.timeouts.delivery_s:g} s of its delivery"
                    return self._abort(step, place[0], reason)
        return []

    # -------------------------------------------------------------- joining

    def _on_hello(self, peer: Peer, hello: Hello, now: float) -> list[Effect]:
        problem = self._roster.mismatch(hello)
        if problem:
            return [Send(peer, Refused(epoch=self.epoch, reason=problem))]
        if self._endings.knows(hello.incarnation):
            ending = self._endings.of_process(hello.incarnation)
            return [Send(peer, ending)] if ending else []
        place = (hello.rank, hello.replica)
        if hello.session:
            return self._rejoin(peer, place, hello, now)
        known = self._roster.get(place)
        if known is not None and known.incarnation == hello.incarnation:  # the same hello again: our answer was lost
            return self._come_back(place, peer, now)
        effects: list[Effect] = []
        if self._roster and not self._fresh:
            effects += self._abort(self.next_step, hello.rank, "restarted while the session was running")
        if self.phase is Phase.FAILED or not self._fresh or self.session == 0:
            self._new_session()
        self._roster.join(place, Member(peer=peer, incarnation=hello.incarnation, start=hello.step, heard=now))
        other = next((m.start for m in self._roster.members if m.start != hello.step), hello.step)
        if other != hello.step:
            reason = f"wants to resume at step {hello.step}, others at {other}; resume all from one checkpoint"
            return [*effects, *self._abort(hello.step, hello.rank, reason)]
        return [*effects, *self._admit(peer, now)]

    def _rejoin(self, peer: Peer, place: Place, hello: Hello, now: float) -> list[Effect]:
        """A process of this session comes back after its connection, or the plane, was lost."""
        if hello.session != self.session or self._fresh:
            return [Send(peer, self._endings.of_session(hello.session, self.session))]
        if self._failure is not None:
            return [Send(peer, self._failure)]
        known = self._roster.get(place)
        if known is None:
            if not self._roster:
                self._forming_since = now
            self._roster.join(place, Member(peer=peer, incarnation=hello.incarnation, start=hello.step, heard=now))
            return self._admit(peer, now)
        if known.incarnation != hello.incarnation:
            return [Send(peer, self._endings.of_session(hello.session, self.session))]
        return self._come_back(place, peer, now)

    def _come_back(self, place: Place, peer: Peer, now: float) -> list[Effect]:
        self._roster.move(place, peer, now)
        return [Send(peer, self._welcome())]

    def _admit(self, peer: Peer, now: float) -> list[Effect]:
        if self.missing or self.phase is Phase.RUNNING:
            return [Send(peer, self._welcome())]
        self.phase = Phase.RUNNING
        effects: list[Effect] = []
        if self._fresh:
            self._fresh = False
            self.next_step = start = self._roster.members[0].start
            self._staged = {step: staged for step, staged in self._staged.items() if step >= start}
            self._digests = {step: staged.digests for step, staged in self._staged.items()}
            effects.append(Resume(self.session, start))
        effects += [Send(member.peer, self._welcome()) for member in self._roster.members]
        return effects + [e for place in self._roster for step in self._staged for e in self._deliver(place, step, now)]

    def _new_session(self) -> None:
        self.session += 1
        self.phase, self._fresh, self._failure, self._left = Phase.FORMING, True, None, -1
        self._roster.clear()
        self._received, self._committed, self._versions, self._released, self._closing = {}, {}, {}, set(), 0

    # -------------------------------------------------------------- steps

    def _on_request(self, place: Place, step: int, now: float) -> list[Effect]:
        if step < self.next_step:
            return []  # a late duplicate: this process already committed that step
        if step > self.last_step + AHEAD:
            return self._abort(step, place[0], f"asks for step {step}; the last one planned is {self.last_step}")
        self._roster[place].wants.add(step)
        return self._deliver(place, step, now)

    def _deliver(self, place: Place, step: int, now: float) -> list[Effect]:
        member, staged = self._roster[place], self._staged.get(step)
        if self.phase is not Phase.RUNNING or staged is None or step not in member.wants:
            return []
        if place in self._received.get(step, ()):
            return []
        member.sent.setdefault(step, now)
        rank = place[0]
        message = Deliver(
            run=self.run,
            epoch=self.epoch,
            session=self.session,
            step=step,
            rank=rank,
            world=self.ranks,
            digest=staged.digests[rank],
            plan=staged.plans[rank],
        )
        return [Send(member.peer, message, staged.payloads[rank])]

    def _on_received(self, place: Place, message: Received) -> list[Effect]:
        member, step = self._roster[place], message.step
        member.sent.pop(step, None)
        member.wants.discard(step)
        if not self.next_step <= step <= self.last_step:
            return []
        if step in self._released and place in self._received[step]:
            return [Send(member.peer, self._release(step))]
        self._received.setdefault(step, {})[place] = message.digest
        return self._check_received(step)

    def _check_received(self, step: int) -> list[Effect]:
        """Release a step when every process has said that it has it."""
        digests, have = self._digests.get(step), self._received.get(step, {})
        if digests is None:
            return []  # the plane restarted: the step is made again first, to know what it should be
        for (rank, _), digest in have.items():
            if digest != digests[rank]:
                return self._abort(
                    step, rank, f"received step {step} with digest {digest[:40]}, sent was {digests[rank]}"
                )
        if len(have) < self.ranks * self.replicas or step in self._released:
            return []
        self._released.add(step)
        self._staged.pop(step)
        release = self._release(step)
        return [StepReceived(step), *(Send(member.peer, release) for member in self._roster.members)]

    def _on_commit(self, place: Place, message: Commit) -> list[Effect]:
        step = message.step
        if step < self.next_step:
            done = Committed(epoch=self.epoch, session=self.session, step=self.next_step - 1)
            return [Send(self._roster[place].peer, done)]
        if step > self.last_step:
            return self._abort(step, place[0], f"commits step {step}, which was never delivered")
        if message.policy_version is not None:
            self._versions[step] = max(self._versions.get(step, 0), message.policy_version)
        for earlier in range(self.next_step, step + 1):  # steps are committed in order, so one speaks for those before
            self._committed.setdefault(earlier, set()).add(place)
        return self._check_committed()

    def _check_committed(self) -> list[Effect]:
        step = self.next_step
        if self._closing == step or len(self._committed.get(step, ())) < self.ranks * self.replicas:
            return []
        self._closing = step
        return [StepCommitted(self.session, step, self._versions.get(step))]

    def committed(self, session: int, step: int) -> list[Effect]:
        """The engine has written down that a step is trained: now the ranks may hear of it."""
        if (session, step) != (self.session, self.next_step) or self.phase is Phase.FAILED:
            return []
        self.next_step, self._closing = step + 1, 0
        for table in (self._staged, self._digests, self._received, self._committed, self._versions):
            table.pop(step, None)
        self._released.discard(step)
        done = Committed(epoch=self.epoch, session=self.session, step=step)
        return [*(Send(member.peer, done) for member in self._roster.members), *self._check_committed()]

    def _on_report(self, place: Place, message: Report) -> list[Effect]:
        member = self._roster[place]
        noted = Send(member.peer, Noted(epoch=self.epoch, session=self.session, number=message.number))
        if message.number <= member.reports:
            return [noted]
        member.reports = message.number
        return [Reported(message.step, message.priorities, message.metrics), noted]

    # -------------------------------------------------------------- ends

    def _on_bye(self, place: Place) -> list[Effect]:
        """Leaving is no failure; when all have left, the next hello begins a session of its own."""
        member = self._roster.leave(place)
        self._left = place[0]
        self._endings.left(member.incarnation)
        if not self._roster:
            self._new_session()
        return [Parted(member.peer)]

    def _abort(self, step: int, rank: int, reason: str) -> list[Effect]:
        if self.phase is Phase.FAILED:
            return []
        who = "the plane" if rank < 0 else f"rank {rank}"
        self.phase = Phase.FAILED
        self._failure = failure = Aborted(
            epoch=self.epoch,
            session=self.session,
            step=step,
            rank=rank,
            reason=f"step {step}: {who}: {reason}"[:MAX_REASON],
        )
        members = self._roster.members
        self._endings.failed(failure, [member.incarnation for member in members])
        return [effect for member in members for effect in (Send(member.peer, failure), Parted(member.peer))]

    def _release(self, step: int) -> Release:
        return Release(epoch=self.epoch, session=self.session, step=step)

    def _welcome(self) -> Welcome:
        ready = self.phase is Phase.RUNNING
        return Welcome(epoch=self.epoch, session=self.session, ready=ready, step=self.next_step)

    def _pulse(self, peer: Peer) -> Send:
        waiting = self.waiting_for
        if self.phase is Phase.FORMING:
            waiting = f"{self._roster.names(self.missing)} to join"
        elif late := self._late():
            waiting = late
        return Send(peer, Pulse(epoch=self.epoch, session=self.session, waiting_for=waiting, left=self._left))

    def _late(self) -> str:
        """Whom a step waits for that some have received, in words."""
        for step, have in self._received.items():
            late = [place for place in self._roster if place not in have]
            if late and step in self._digests:
                return f"{self._roster.names(late)} to receive step {step}"
        return ""
