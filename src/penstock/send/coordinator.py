"""The plane's side of delivery, as a state machine without I/O or a clock of its own.

A *session* is one life of the trainer: all its processes joined, and none of them died since. Every rank of a
session gets the same steps, or all of them get the same error. Three phases:

    FORMING   waiting until every process has said hello
    RUNNING   steps are requested, delivered, received, committed
    FAILED    the session is over; every process was told why; a fresh hello starts the next session

`TRANSITIONS` lists what moves one to the other and is what docs/delivery.md draws. Feed it messages with
`on_message` and time with `on_tick`; it answers with effects for the carrier (`Send`) and for the engine
(`Resume`, `StepReceived`, `StepCommitted`, `Reported`).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import TypeAlias

from penstock.errors import ConfigError
from penstock.send.messages import (
    SCHEMA,
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

Peer: TypeAlias = object
"""Whatever the carrier uses to address a process; comes with each message and goes back with each answer."""
Place: TypeAlias = tuple[int, int]
"""(rank, replica)."""


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
    """An unanswered question is asked again after this."""

    def __post_init__(self) -> None:
        for name in ("heartbeat_s", "peer_s", "delivery_s", "plane_s", "resend_s"):
            if not 0 < getattr(self, name) < float("inf"):
                raise ConfigError(f"timeouts.{name}: {getattr(self, name)}; must be a positive number of seconds")
        if self.peer_s < 2 * self.heartbeat_s:
            raise ConfigError(
                f"timeouts: peer_s {self.peer_s} with heartbeat_s {self.heartbeat_s}; "
                "allow at least two heartbeats, or live peers will be called dead"
            )


@dataclass(frozen=True, slots=True)
class Send:
    """Give this to the carrier."""

    peer: Peer
    message: FromPlane
    frames: Frames = ()


@dataclass(frozen=True, slots=True)
class Resume:
    """A new session begins and its trainer is at `step`: what came before counts as trained."""

    session: int
    step: int


@dataclass(frozen=True, slots=True)
class StepReceived:
    step: int


@dataclass(frozen=True, slots=True)
class StepCommitted:
    step: int
    policy_version: int | None


@dataclass(frozen=True, slots=True)
class Reported:
    step: int
    priorities: dict[str, float]
    metrics: dict[str, float]


Effect: TypeAlias = Send | Resume | StepReceived | StepCommitted | Reported


@dataclass(frozen=True, slots=True, kw_only=True)
class Staged:
    """A step that is ready for every rank."""

    step: int
    plans: list[bytes]
    payloads: list[Frames]
    digests: list[str]


@dataclass(slots=True, kw_only=True)
class _Member:
    peer: Peer
    incarnation: str
    heard: float
    wants: int = 0
    sent: dict[int, float] = field(default_factory=dict)
    """Step -> when it was first sent; removed when received."""


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
        self._start: int | None = None
        self._forming_since = 0.0
        self._members: dict[Place, _Member] = {}
        self._places: dict[Peer, Place] = {}
        self._staged: dict[int, Staged] = {}
        self._received: dict[int, set[Place]] = {}
        self._committed: dict[int, set[Place]] = {}
        self._versions: dict[int, int] = {}
        self._failure: Aborted | None = None

    # -------------------------------------------------------------- what the engine asks

    @property
    def wanted(self) -> int:
        """The highest step any process asked for; 0 when nobody asked."""
        return max((m.wants for m in self._members.values()), default=0)

    def is_staged(self, step: int) -> bool:
        return step in self._staged

    @property
    def missing(self) -> list[Place]:
        """Processes that have not joined."""
        every = [(rank, replica) for rank in range(self.ranks) for replica in range(self.replicas)]
        return [place for place in every if place not in self._members]

    def stage(self, staged: Staged, now: float) -> list[Effect]:
        """A step is packed and durable: deliver it to whoever asked for it."""
        assert len(staged.payloads) == self.ranks
        self._staged[staged.step] = staged
        self.last_step = max(self.last_step, staged.step)
        return [e for place in self._members for e in self._deliver(place, staged.step, now)]

    def fail(self, reason: str, *, step: int | None = None, rank: int = -1) -> list[Effect]:
        """End the session for everybody; rank -1 is the plane itself."""
        return self._abort(step or self.next_step, rank, reason)

    # -------------------------------------------------------------- messages

    def on_message(self, peer: Peer, message: FromRank, now: float) -> list[Effect]:
        if isinstance(message, Hello):
            return self._on_hello(peer, message, now)
        place = self._place_of(peer, now)
        if message.session != self.session:
            return [Send(peer, self._fenced(message.session))]
        if self._failure is not None:
            return [Send(peer, self._failure)]
        if place is None:  # the plane restarted, or the peer's address changed
            return [Send(peer, Unknown(epoch=self.epoch))]
        if isinstance(message, Request):
            return self._on_request(place, message.step, now)
        if isinstance(message, Received):
            return self._on_received(place, message)
        if isinstance(message, Commit):
            return self._on_commit(place, message)
        if isinstance(message, Report):
            return [Reported(message.step, message.priorities, message.metrics)]
        if isinstance(message, Fail):
            return self._abort(message.step, place[0], message.reason)
        if isinstance(message, Bye):
            return self._on_bye(place)
        assert isinstance(message, Beat)
        return [self._pulse(peer)]

    def on_tick(self, now: float) -> list[Effect]:
        """Notice silence. Call it at least once per heartbeat."""
        if self.phase is Phase.FAILED:
            return []
        if self.phase is Phase.FORMING and not self._fresh and self._members:
            waited = now - self._forming_since
            if waited > self.timeouts.peer_s:
                return self._abort(self.next_step, self.missing[0][0], f"did not come back within {waited:.1f} s")
        for place, member in list(self._members.items()):
            silent = now - member.heard
            if silent > self.timeouts.peer_s:
                if self.phase is Phase.FORMING and self._fresh:
                    self._places.pop(self._members.pop(place).peer, None)  # it never took part: its place is free
                    continue
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
        place = (hello.rank, hello.replica)
        if hello.session:
            return self._rejoin(peer, place, hello, now)
        known = self._members.get(place)
        if known is not None and known.incarnation == hello.incarnation and self.phase is not Phase.FAILED:
            self._join(place, known, peer)  # the same hello again: our answer was lost
            known.heard = now
            return [Send(peer, self._welcome())]
        effects: list[Effect] = []
        if self._members and not self._fresh:
            effects += self._abort(self.next_step, hello.rank, "restarted while the session was running")
        if self.phase is Phase.FAILED or not self._fresh or self.session == 0:
            self._new_session()
        self._join(place, _Member(peer=peer, incarnation=hello.incarnation, heard=now))
        if self._start is None:
            self._start = hello.step
        elif self._start != hello.step:
            reason = f"wants to resume at step {hello.step}, others at {self._start}; resume all from one checkpoint"
            return [*effects, *self._abort(hello.step, hello.rank, reason)]
        return [*effects, *self._admit(peer, now)]

    def _rejoin(self, peer: Peer, place: Place, hello: Hello, now: float) -> list[Effect]:
        """A process of this session comes back after its connection, or the plane, was lost."""
        if hello.session != self.session or self._fresh:
            return [Send(peer, self._fenced(hello.session))]
        if self._failure is not None:
            return [Send(peer, self._failure)]
        known = self._members.get(place)
        if known is not None and known.incarnation != hello.incarnation:
            return [Send(peer, self._fenced(hello.session))]
        if known is None:
            if not self._members:
                self._forming_since = now
            self._join(place, _Member(peer=peer, incarnation=hello.incarnation, heard=now))
            return self._admit(peer, now)
        self._join(place, known, peer)
        known.heard, known.sent = now, {}
        return [Send(peer, self._welcome())]

    def _join(self, place: Place, member: _Member, peer: Peer | None = None) -> None:
        old = self._members.get(place)
        if old is not None:
            self._places.pop(old.peer, None)
        if peer is not None:
            member.peer = peer
        self._members[place] = member
        self._places[member.peer] = place

    def _admit(self, peer: Peer, now: float) -> list[Effect]:
        if self.missing or self.phase is Phase.RUNNING:
            return [Send(peer, self._welcome())]
        self.phase = Phase.RUNNING
        effects: list[Effect] = []
        if self._fresh:
            assert self._start is not None
            self._fresh = False
            self.next_step = self._start
            effects.append(Resume(self.session, self._start))
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
        self.phase, self._fresh, self._start, self._failure = Phase.FORMING, True, None, None
        self._members, self._places = {}, {}
        self._received, self._committed, self._versions = {}, {}, {}

    # -------------------------------------------------------------- steps

    def _on_request(self, place: Place, step: int, now: float) -> list[Effect]:
        member = self._members[place]
        if step < self.next_step:
            return []  # a late duplicate: this process already committed that step, or all did
        member.wants = max(member.wants, step)
        return self._deliver(place, step, now)

    def _deliver(self, place: Place, step: int, now: float) -> list[Effect]:
        member, staged = self._members[place], self._staged.get(step)
        if self.phase is not Phase.RUNNING or staged is None or member.wants < step:
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
        staged = self._staged.get(message.step)
        self._members[place].sent.pop(message.step, None)
        if staged is None:
            return []
        if message.digest != staged.digests[place[0]]:
            reason = (
                f"received step {message.step} with digest {message.digest[:40]}, sent was {staged.digests[place[0]]}"
            )
            return self._abort(message.step, place[0], reason)
        have = self._received.setdefault(message.step, set())
        before = len(have)
        have.add(place)
        complete = len(have) == self.ranks * self.replicas
        return [StepReceived(message.step)] if complete and len(have) > before else []

    def _on_commit(self, place: Place, message: Commit) -> list[Effect]:
        peer, step = self._members[place].peer, message.step
        if step < self.next_step:
            return [Send(peer, Committed(epoch=self.epoch, session=self.session, step=step))]
        if step > self.last_step:
            return self._abort(step, place[0], f"commits step {step}, which was never delivered")
        if message.policy_version is not None:
            self._versions[step] = max(self._versions.get(step, 0), message.policy_version)
        self._committed.setdefault(step, set()).add(place)
        effects: list[Effect] = []
        while len(self._committed.get(self.next_step, ())) == self.ranks * self.replicas:
            effects += self._close_step(self.next_step)
        return effects

    def _close_step(self, step: int) -> list[Effect]:
        self.next_step = step + 1
        for table in (self._staged, self._received, self._committed):
            table.pop(step, None)
        done = Committed(epoch=self.epoch, session=self.session, step=step)
        effects: list[Effect] = [StepCommitted(step, self._versions.pop(step, None))]
        return effects + [Send(member.peer, done) for member in self._members.values()]

    # -------------------------------------------------------------- ends

    def _on_bye(self, place: Place) -> list[Effect]:
        """Leaving is no failure; when all have left, the next hello begins a session of its own."""
        self._places.pop(self._members.pop(place).peer, None)
        if not self._members:
            self._new_session()
        return []

    def _abort(self, step: int, rank: int, reason: str) -> list[Effect]:
        if self.phase is Phase.FAILED:
            return []
        who = "the plane" if rank < 0 else f"rank {rank}"
        self.phase = Phase.FAILED
        self._failure = Aborted(
            epoch=self.epoch, session=self.session, step=step, rank=rank, reason=f"step {step}: {who}: {reason}"
        )
        return [Send(member.peer, self._failure) for member in self._members.values()]

    def _fenced(self, session: int) -> FromPlane:
        return Refused(
            epoch=self.epoch,
            reason=f"session {session} is over; the current one is {self.session}; restart this process",
        )

    def _welcome(self) -> Welcome:
        ready = self.phase is Phase.RUNNING
        return Welcome(epoch=self.epoch, session=self.session, ready=ready, step=self.next_step)

    def _pulse(self, peer: Peer) -> Send:
        waiting = self.waiting_for
        if self.phase is Phase.FORMING:
            names = ", ".join(f"rank {r}" + (f" replica {c}" if self.replicas > 1 else "") for r, c in self.missing[:8])
            waiting = f"{names} to join"
        return Send(peer, Pulse(epoch=self.epoch, session=self.session, waiting_for=waiting))

    def _place_of(self, peer: Peer, now: float) -> Place | None:
        place = self._places.get(peer)
        if place is not None:
            self._members[place].heard = now
        return place
