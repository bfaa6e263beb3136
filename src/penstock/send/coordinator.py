"""The plane's side of delivery, as a state machine without I/O or a clock of its own.

A *session* is one life of the trainer: all its processes joined, and none of them died since. Every process of a
session gets the same steps, or all of them get the same error. Three phases:

    FORMING   waiting until every process has said hello
    RUNNING   steps are requested, delivered, received, released, committed
    FAILED    the session is over; every process was told why; a fresh hello starts the next session

A step is released, and only then trained, when every process has it and found it whole: whatever goes wrong on the
way to one of them stops all of them before the forward pass. `TRANSITIONS` lists what moves one phase to another and
is what docs/delivery.md draws. Feed it messages with `on_message` and time with `on_tick`; it answers with effects.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import TypeAlias

from penstock.errors import ConfigError
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
from penstock.send.messages import (
    SCHEMA,
    Aborted,
    Beat,
    Bye,
    Commit,
    Committed,
    Deliver,
    Fail,
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
    Unknown,
    Welcome,
)


class Phase(Enum):
    FORMING = "forming"
    RUNNING = "running"
    FAILED = "failed"


TRANSITIONS: dict[tuple[Phase, str], Phase] = {
    (Phase.FORMING, "hello"): Phase.FORMING,
    (Phase.FORMING, "last hello"): Phase.RUNNING,
    (Phase.FORMING, "mismatch"): Phase.FAILED,
    (Phase.FORMING, "silence"): Phase.FORMING,
    (Phase.RUNNING, "request, received, commit, report"): Phase.RUNNING,
    (Phase.RUNNING, "fail"): Phase.FAILED,
    (Phase.RUNNING, "silence"): Phase.FAILED,
    (Phase.RUNNING, "mismatch"): Phase.FAILED,
    (Phase.RUNNING, "a process restarted"): Phase.FAILED,
    (Phase.RUNNING, "everybody left"): Phase.FORMING,
    (Phase.FAILED, "fresh hello"): Phase.FORMING,
}

Place: TypeAlias = tuple[int, int]
"""(rank, replica)."""

AHEAD = 4
"""Steps beyond the last planned one that may be asked for; no source asks for more than three."""
MAX_REASON = 2000
_REMEMBERED = 4096
"""Processes of ended sessions that would still be told how theirs ended."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeouts:
    """How long silence may last. All waits in the protocol are bounded by one of these, or by a live peer."""

    heartbeat_s: float = 2.0
    peer_s: float = 11.0
    """Silence after which a process counts as dead: three missed heartbeats and five seconds of grace."""
    delivery_s: float = 30.0
    """From sending a step to the rank's word that it has it."""
    plane_s: float = 30.0
    """How long ranks and producers wait for a lost plane to come back."""
    resend_s: float = 1.0
    """An unanswered question is asked again after this, then after twice as long, and so on."""

    def __post_init__(self) -> None:
        for name in ("heartbeat_s", "peer_s", "delivery_s", "plane_s", "resend_s"):
            if not 0 < getattr(self, name) < float("inf"):
                raise ConfigError(f"timeouts.{name}: {getattr(self, name)}; must be a positive number of seconds")
        if self.peer_s < 2 * self.heartbeat_s:
            raise ConfigError(
                f"timeouts: peer_s {self.peer_s} with heartbeat_s {self.heartbeat_s}; "
                "allow at least two heartbeats, or live peers will be called dead"
            )


@dataclass(slots=True, kw_only=True)
class _Member:
    peer: Peer
    incarnation: str
    start: int
    """The first step it wants."""
    heard: float
    wants: set[int] = field(default_factory=set)
    sent: dict[int, float] = field(default_factory=dict)
    """Step -> when it was first sent; removed when received."""
    reports: int = 0
    """How many of its reports arrived."""


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
        self._members: dict[Place, _Member] = {}
        self._places: dict[Peer, Place] = {}
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
        self._failures: dict[int, Aborted] = {}
        """How earlier sessions ended."""
        self._past: dict[str, Aborted | None] = {}
        """Incarnations of processes whose session ended, or who left."""

    # -------------------------------------------------------------- what the engine asks

    @property
    def wanted(self) -> int:
        """The highest step any process asked for or says it has; 0 when there is none."""
        asked = (step for member in self._members.values() for step in member.wants)
        return max((*asked, *self._received), default=0)

    def is_staged(self, step: int) -> bool:
        return step in self._digests

    @property
    def missing(self) -> list[Place]:
        """Processes that have not joined."""
        every = [(rank, replica) for rank in range(self.ranks) for replica in range(self.replicas)]
        return [place for place in every if place not in self._members]

    def stage(self, staged: Staged, now: float) -> list[Effect]:
        """A step is packed and durable: deliver it to whoever asked for it."""
        assert len(staged.payloads) == self.ranks
        self._staged[staged.step], self._digests[staged.step] = staged, staged.digests
        self.last_step = max(self.last_step, staged.step)
        effects = [e for place in self._members for e in self._deliver(place, staged.step, now)]
        return effects + self._check_received(staged.step)

    def fail(self, reason: str, *, step: int | None = None, rank: int = -1) -> list[Effect]:
        """End the session for everybody; rank -1 is the plane itself."""
        return self._abort(step or self.next_step, rank, reason)

    # -------------------------------------------------------------- messages

    def on_message(self, peer: Peer, message: FromRank, now: float) -> list[Effect]:
        if isinstance(message, Hello):
            return self._on_hello(peer, message, now)
        place = self._places.get(peer)
        if message.session < self.session:
            return [Send(peer, self._ending_of(message.session))]
        if self._failure is not None and message.session == self.session:
            return [Send(peer, self._failure)]
        if place is None or message.session > self.session:  # the plane restarted, or the peer's address changed
            return [Send(peer, Unknown(epoch=self.epoch))]
        self._members[place].heard = now
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
            self._excuse(now - last)
        if self.phase is Phase.FORMING and self._fresh:
            self._drop_silent(now)
            return []
        return self._notice_silence(now)

    def _excuse(self, gap: float) -> None:
        """The plane itself stood still so long; what was said meanwhile may not have been read yet."""
        self._forming_since += gap
        for member in self._members.values():
            member.heard += gap
            member.sent = {step: sent + gap for step, sent in member.sent.items()}

    def _drop_silent(self, now: float) -> None:
        """Who falls silent before the session runs has taken no part: its place is free again."""
        for place, member in list(self._members.items()):
            if now - member.heard > self.timeouts.peer_s:
                self._places.pop(self._members.pop(place).peer, None)

    def _notice_silence(self, now: float) -> list[Effect]:
        waited = now - self._forming_since
        if self.phase is Phase.FORMING and self._members and waited > self.timeouts.peer_s:
            return self._abort(self.next_step, self.missing[0][0], f"did not come back within {waited:.1f} s")
        for place, member in self._members.items():
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
        problem = self._mismatch(hello)
        if problem:
            return [Send(peer, Refused(epoch=self.epoch, reason=problem))]
        if hello.incarnation in self._past:
            ending = self._past[hello.incarnation]
            return [Send(peer, ending)] if ending else []
        place = (hello.rank, hello.replica)
        if hello.session:
            return self._rejoin(peer, place, hello, now)
        known = self._members.get(place)
        if known is not None and known.incarnation == hello.incarnation:  # the same hello again: our answer was lost
            return self._come_back(place, known, peer, now)
        effects: list[Effect] = []
        if self._members and not self._fresh:
            effects += self._abort(self.next_step, hello.rank, "restarted while the session was running")
        if self.phase is Phase.FAILED or not self._fresh or self.session == 0:
            self._new_session()
        self._join(place, _Member(peer=peer, incarnation=hello.incarnation, start=hello.step, heard=now))
        other = next((m.start for m in self._members.values() if m.start != hello.step), hello.step)
        if other != hello.step:
            reason = f"wants to resume at step {hello.step}, others at {other}; resume all from one checkpoint"
            return [*effects, *self._abort(hello.step, hello.rank, reason)]
        return [*effects, *self._admit(peer, now)]

    def _rejoin(self, peer: Peer, place: Place, hello: Hello, now: float) -> list[Effect]:
        """A process of this session comes back after its connection, or the plane, was lost."""
        if hello.session != self.session or self._fresh:
            return [Send(peer, self._ending_of(hello.session))]
        if self._failure is not None:
            return [Send(peer, self._failure)]
        known = self._members.get(place)
        if known is None:
            if not self._members:
                self._forming_since = now
            self._join(place, _Member(peer=peer, incarnation=hello.incarnation, start=hello.step, heard=now))
            return self._admit(peer, now)
        if known.incarnation != hello.incarnation:
            return [Send(peer, self._ending_of(hello.session))]
        return self._come_back(place, known, peer, now)

    def _come_back(self, place: Place, member: _Member, peer: Peer, now: float) -> list[Effect]:
        self._places.pop(member.peer, None)
        member.peer, member.heard, member.sent = peer, now, {}
        self._places[peer] = place
        return [Send(peer, self._welcome())]

    def _join(self, place: Place, member: _Member) -> None:
        old = self._members.get(place)
        if old is not None:
            self._places.pop(old.peer, None)
        self._members[place] = member
        self._places[member.peer] = place

    def _admit(self, peer: Peer, now: float) -> list[Effect]:
        if self.missing or self.phase is Phase.RUNNING:
            return [Send(peer, self._welcome())]
        self.phase = Phase.RUNNING
        effects: list[Effect] = []
        if self._fresh:
            self._fresh = False
            self.next_step = start = next(iter(self._members.values())).start
            self._staged = {step: staged for step, staged in self._staged.items() if step >= start}
            self._digests = {step: staged.digests for step, staged in self._staged.items()}
            effects.append(Resume(self.session, start))
        effects += [Send(member.peer, self._welcome()) for member in self._members.values()]
        return effects + [
            e for place in self._members for step in self._staged for e in self._deliver(place, step, now)
        ]

    def _mismatch(self, hello: Hello) -> str:
        pairs = (
            ("run", hello.run or self.run, self.run),
            ("world", hello.world, self.ranks),
            ("replicas", hello.replicas, self.replicas),
            ("schema", hello.schema, SCHEMA),
        )
        for name, theirs, ours in pairs:
            if theirs != ours:
                return f"{name}: this process says {theirs!r}, the plane has {ours!r}; start both with the same value"
        if not (0 <= hello.rank < self.ranks and 0 <= hello.replica < self.replicas):
            have = f"{self.ranks} ranks of {self.replicas} processes"
            return f"rank {hello.rank}, replica {hello.replica}: the plane has {have}, counted from 0"
        if hello.step < 1:
            return f"step {hello.step}: steps are counted from 1"
        return ""

    def _new_session(self) -> None:
        self.session += 1
        self.phase, self._fresh, self._failure, self._left = Phase.FORMING, True, None, -1
        self._members, self._places = {}, {}
        self._received, self._committed, self._versions, self._released, self._closing = {}, {}, {}, set(), 0

    # -------------------------------------------------------------- steps

    def _on_request(self, place: Place, step: int, now: float) -> list[Effect]:
        if step < self.next_step:
            return []  # a late duplicate: this process already committed that step
        if step > self.last_step + AHEAD:
            return self._abort(step, place[0], f"asks for step {step}; the last one planned is {self.last_step}")
        self._members[place].wants.add(step)
        return self._deliver(place, step, now)

    def _deliver(self, place: Place, step: int, now: float) -> list[Effect]:
        member, staged = self._members[place], self._staged.get(step)
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
        member, step = self._members[place], message.step
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
        return [StepReceived(step), *(Send(member.peer, release) for member in self._members.values())]

    def _on_commit(self, place: Place, message: Commit) -> list[Effect]:
        step = message.step
        if step < self.next_step:
            done = Committed(epoch=self.epoch, session=self.session, step=self.next_step - 1)
            return [Send(self._members[place].peer, done)]
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
        return [*(Send(member.peer, done) for member in self._members.values()), *self._check_committed()]

    def _on_report(self, place: Place, message: Report) -> list[Effect]:
        member = self._members[place]
        noted = Send(member.peer, Noted(epoch=self.epoch, session=self.session, number=message.number))
        if message.number <= member.reports:
            return [noted]
        member.reports = message.number
        return [Reported(message.step, message.priorities, message.metrics), noted]

    # -------------------------------------------------------------- ends

    def _on_bye(self, place: Place) -> list[Effect]:
        """Leaving is no failure; when all have left, the next hello begins a session of its own."""
        member = self._members.pop(place)
        self._places.pop(member.peer, None)
        self._left = place[0]
        self._remember(member.incarnation, None)
        if not self._members:
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
        self._failures[self.session] = failure
        effects: list[Effect] = []
        for member in self._members.values():
            self._remember(member.incarnation, failure)
            effects += [Send(member.peer, failure), Parted(member.peer)]
        return effects

    def _remember(self, incarnation: str, ending: Aborted | None) -> None:
        self._past[incarnation] = ending
        while len(self._past) > _REMEMBERED:
            self._past.pop(next(iter(self._past)))
        while len(self._failures) > _REMEMBERED:
            self._failures.pop(next(iter(self._failures)))

    def _ending_of(self, session: int) -> FromPlane:
        """What to tell a process of a session that is over."""
        reason = f"session {session} is over; the current one is {self.session}; restart this process"
        return self._failures.get(session) or Refused(epoch=self.epoch, reason=reason, session=session)

    def _release(self, step: int) -> Release:
        return Release(epoch=self.epoch, session=self.session, step=step)

    def _welcome(self) -> Welcome:
        ready = self.phase is Phase.RUNNING
        return Welcome(epoch=self.epoch, session=self.session, ready=ready, step=self.next_step)

    def _pulse(self, peer: Peer) -> Send:
        waiting = self.waiting_for
        if self.phase is Phase.FORMING:
            waiting = f"{self._names(self.missing)} to join"
        elif late := self._late():
            waiting = late
        return Send(peer, Pulse(epoch=self.epoch, session=self.session, waiting_for=waiting, left=self._left))

    def _late(self) -> str:
        """Whom a step waits for that some have received, in words."""
        for step, have in self._received.items():
            late = [place for place in self._members if place not in have]
            if late and step in self._digests:
                return f"{self._names(late)} to receive step {step}"
        return ""

    def _names(self, places: list[Place]) -> str:
        return ", ".join(f"rank {r}" + (f" replica {c}" if self.replicas > 1 else "") for r, c in places[:8])
