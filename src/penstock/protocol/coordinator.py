"""The plane's side of delivery: a state machine without I/O or a clock of its own.

Every process of a session gets the same steps, or all of them get the same error. Feed it messages with `on_message`
and time with `on_tick`; it returns effects. `session.py` has the phases and the table of transitions, `members.py` the
processes that take part, `steps.py` how a step reaches all of them. This module handles joining, failing and leaving.

**Joining.** A process that just started sends a hello with session 0. When every place is taken, the processes that
joined earlier must show that they are still alive. Then the session runs, from the step that all of them named. So a
trainer that is killed and restarted while it joins replaces its dead processes one by one, and never runs with one.

    FORMING   rank 0: hello(session 0)  -> welcome(session 4, not ready)
              rank 1: hello(session 0)  -> welcome(session 4, not ready), to both
              rank 0: beat              -> welcome(session 4, ready), to both
    RUNNING

**Rejoining.** A broken connection or a restarted plane does not end the session. A process that took part sends a
hello with its session. It keeps its place and repeats whatever was not answered. A restarted plane knows only the
number of its session, from the log, and none of its processes: it is REJOINING until all have come back.

    RUNNING     rank 0: request 7                    (the plane is killed, and started again)
    REJOINING   rank 0: request 7           -> unknown
                rank 0: hello(session 4)    -> welcome(session 4, not ready)
                rank 1: beat                -> unknown
                rank 1: hello(session 4)    -> welcome(session 4, ready), to both
    RUNNING     rank 0: request 7           -> deliver 7

A process that *restarts* (another incarnation, session 0) ends the session for the others: the state they computed
together is gone. While its earlier incarnation may be alive it waits, and it is refused if that one answers
(`joiners.py`). An incarnation that left or failed has a tombstone, from which its late messages are answered.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from penstock.protocol.effects import Detach, Effect, MemberLeft, Note, Resume, Send
from penstock.protocol.joiners import Joiner, Joiners
from penstock.protocol.members import Member, Members, Place, another, is_second_source
from penstock.protocol.messages import (
    MAX_REASON,
    Aborted,
    Beat,
    Bye,
    Commit,
    Damaged,
    Fail,
    FromRank,
    Hello,
    Peer,
    Pulse,
    Received,
    Refused,
    Report,
    Request,
    Unknown,
    Welcome,
)
from penstock.protocol.session import Happened, Phase, Session, Tombstones
from penstock.protocol.steps import Outcome, Staged, Steps, Violation
from penstock.protocol.timeouts import Timeouts


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
        is_gone: Callable[[str, int], bool] = lambda _space, _pid: False,
    ) -> None:
        """`session` and `left` come from the `Resume` and `MemberLeft` logged before the plane restarted. `is_gone`
        returns whether a process, given by pid namespace and pid, is known to have ended."""
        self.run, self.ranks, self.replicas, self.epoch = run, ranks, replicas, epoch
        self._session = Session(
            run=run,
            ranks=ranks,
            epoch=epoch,
            number=session,
            next_step=next_step,
            last_step=last_step,
            phase=Phase.REJOINING if session else Phase.FORMING,
        )
        self.timeouts = timeouts or Timeouts()
        self.waiting_for = ""
        """What the plane waits for before it can stage a step, as text for people."""
        self.remark = ""
        """A further note for ranks that wait."""
        self.policy_version: int | None = None
        """The version of the weights that was published last."""
        self._rejoining_since = 0.0
        self._ticked: float | None = None
        self._members = Members(run, ranks, replicas)
        self._joiners = Joiners(self._members, self.timeouts, is_gone)
        self._steps = Steps(self._session, self._members, left or {})
        self._failure: Aborted | None = None
        self._after = ""
        """Why the last session failed, for the `Resume` that follows."""
        self._tombstones = Tombstones(epoch)
        self._waits_for = (float("-inf"), Phase.FAILED, "")
        """Cache of `waits_for`: when it was computed, in which phase, the text."""

    # -------------------------------------------------------------- what the engine asks

    @property
    def session(self) -> int:
        """The session that is forming, running or failed; 0 before the first."""
        return self._session.number

    @property
    def phase(self) -> Phase:
        return self._session.phase

    @property
    def failure(self) -> Aborted | None:
        """The message sent to every process when the session failed."""
        return self._failure

    @property
    def next_step(self) -> int:
        """The first uncommitted step."""
        return self._session.next_step

    @property
    def wanted(self) -> int:
        """The highest step that any process requested or has. 0 if there is none."""
        return self._steps.wanted

    @property
    def inline_ranks(self) -> frozenset[int]:
        """Ranks that need their samples sent. The others read storage themselves."""
        return self._members.inline_ranks

    def serve_inline(self, session: int, place: Place) -> str:
        """Send a process its samples from now on, because it cannot read storage. Returns its name, "" if it left."""
        if session != self.session or self._members.get(place) is None:
            return ""
        self._members.serve_inline(place)
        return self._members.name(place)

    def is_staged(self, step: int) -> bool:
        return self._steps.is_staged(step)

    @property
    def missing(self) -> Iterator[Place]:
        """Places whose processes have neither joined nor left."""
        return (place for place in self._members.free if place not in self._steps.left)

    @property
    def is_training(self) -> bool:
        """Whether a trainer is at work, or is expected back: it failed, or the plane restarted, or some have joined."""
        return self.phase is not Phase.FORMING or len(list(self._members.free)) < self.ranks * self.replicas

    def stage(self, staged: Staged, now: float) -> list[Effect]:
        """Deliver a planned and durable step to every process that requested it."""
        assert len(staged.payloads) == self.ranks
        return self._judge(self._steps.stage(staged, now))

    def committed(self, session: int, step: int) -> list[Effect]:
        """Tell the ranks that a step is committed. Call it when the commit is in the log."""
        return self._steps.committed(session, step)

    def refuse(self, resume: Resume, next_step: int, reason: str) -> list[Effect]:
        """Reject a resume at a step the run does not have. `next_step` is where the run is."""
        self._session.next_step = next_step
        return self._abort(Happened.FAIL, resume.step, -1, reason)

    def fail(self, reason: str, *, step: int | None = None) -> list[Effect]:
        """End the session for every process. `step` and the steps after it may then be planned again."""
        if step is not None:
            self.unstage(step)
        return self._abort(Happened.FAIL, step or self.next_step, -1, reason)

    def unstage(self, first: int) -> None:
        """Forget staged steps from `first` on. They must be staged again."""
        self._steps.unstage(first)

    def waits_for(self, now: float) -> str:
        """Return what ranks wait for, as text. Cached for an eighth of a heartbeat: a thousand ranks may ask."""
        found, phase, _ = self._waits_for
        if now - found >= self.timeouts.heartbeat_s / 8 or phase is not self.phase:
            self._waits_for = (now, self.phase, self._describe_wait())
        return self._waits_for[2]

    def _describe_wait(self) -> str:
        if self.phase in (Phase.FORMING, Phase.REJOINING):
            if self._members.awaited:
                return f"{self._members.names(self._members.awaited)} to answer"
            return f"{self._members.names(self.missing)} to {'join' if self.phase is Phase.FORMING else 'come back'}"
        if self._failure is not None:
            return "a new session"
        if late := self._steps.describe_late():
            return late
        text = self.waiting_for or f"a rank to ask for step {self.next_step}"
        return f"{text}; {self.remark}" if self.remark else text

    def on_message(self, peer: Peer, message: FromRank, now: float) -> list[Effect]:
        if isinstance(message, Hello):
            return self._on_hello(peer, message, now)
        place = self._members.place_of(peer)
        session = message.session
        if session == 0 and place is not None:  # it sent a hello and has not received our welcome yet
            session = self.session
        if 0 < session < self.session:  # a process that missed the end of its session
            return [Send(peer, self._tombstones.of_session(session, self.session))]
        if self._failure is not None and session == self.session:
            return [Send(peer, self._failure)]
        if place is None and isinstance(message, Bye) and self._joiners.leave(peer):
            return [Detach(peer)]
        if place is None or session != self.session:  # the plane restarted, or the peer's address changed
            return [Send(peer, Unknown(epoch=self.epoch))]
        # `_answered` comes last: the message itself may end the session or take the process out of it.
        self._members[place].heard = now
        return [*self._on_member_message(place, message, now), *self._answered(place, now)]

    def _on_member_message(self, place: Place, message: FromRank, now: float) -> list[Effect]:
        if isinstance(message, Fail):
            return self._abort(Happened.FAIL, message.step, place[0], message.reason)
        if isinstance(message, Bye):
            return self._on_bye(place)
        self._session.on(Happened.MESSAGE)
        if isinstance(message, Beat):
            self._members[place].beat(message, now)
            return [
                *self._joiners.answered(place, message, self.epoch),
                Send(self._members[place].peer, self.pulse(now, message.number)),
            ]
        if isinstance(message, Report):
            return self._steps.on_report(place, message)
        if isinstance(message, Damaged):
            return self._steps.on_damaged(place, message, now)
        if isinstance(message, Request):
            outcome = self._steps.on_request(place, message, now)
        elif isinstance(message, Received):
            outcome = self._steps.on_received(place, message)
        else:
            assert isinstance(message, Commit)
            outcome = self._steps.on_commit(place, message)
        return self._judge(outcome)

    def on_beat(self, peer: Peer, beat: Beat, now: float) -> Pulse | None:
        """Answer a member's beat while the plane cannot decide anything. Returns None if the peer is no member.

        Used while the log's database is away: heartbeats must continue, or live ranks would give up.
        """
        place = self._members.place_of(peer)
        if place is None or beat.session != self.session or self._failure is not None:
            return None
        self._members[place].heard = now
        self._members[place].beat(beat, now)
        return self.pulse(now, beat.number)

    def on_tick(self, now: float) -> list[Effect]:
        """Detect silent processes. Call it at least once per heartbeat."""
        last, pace = self._ticked, self.timeouts.heartbeat_s
        if last is not None and now - last < pace / 8:
            return []  # the plane's loop may turn thousands of times per second; looking costs O(ranks)
        self._ticked = now
        if last is not None and now - last > pace:
            self._joiners.excuse(now - last)
        joined = [e for place, one in self._joiners.due(now) for e in self._join_or_wait(place, one, now)]
        joined += [Send(peer, self.pulse(now, probe=number)) for peer, number in self._joiners.probes()]
        if self.phase is Phase.FAILED:
            return joined
        if last is not None and now - last > pace:
            # The plane itself was paused (a slow disk, SIGSTOP). Messages that arrived meanwhile may still be unread,
            # so that time must not count as silence of the ranks. Example: heartbeat 2 s, last tick at 100, now 109:
            # all deadlines move by 9 s.
            self._rejoining_since += now - last
            self._members.excuse(now - last)
        if self.phase is Phase.FORMING:
            return [*joined, *self._drop_silent(now)]
        return [*joined, *self._notice_silence(now)]

    def _drop_silent(self, now: float) -> list[Effect]:
        """Free the places of processes that fell silent before the session ran. Nothing was computed with them."""
        silent = self._members.silent_since(now - self.timeouts.peer_s)
        for place in silent:
            self._session.on(Happened.SILENCE)
            self._members.leave(place)
            self._steps.forget(place)
        gone = ", ".join(map(self._members.name, silent))
        return [Note(f"session {self.session}: {gone} went silent before all had joined")] if silent else []

    def _notice_silence(self, now: float) -> list[Effect]:
        if self.phase is Phase.REJOINING:
            waited = now - self._rejoining_since
            if not self._members or waited <= self.timeouts.peer_s:
                return []
            reason = f"did not come back within {waited:.1f} s"
            return self._abort(Happened.NOT_BACK, self.next_step, next(self.missing)[0], reason)
        if (late := self._members.overdue(self.timeouts, now)) is None:
            return []
        return self._abort(Happened.SILENCE, late.step or self.next_step, late.place[0], late.reason)

    def _on_hello(self, peer: Peer, hello: Hello, now: float) -> list[Effect]:
        problem = self._members.mismatch(hello)
        if problem:
            return [Send(peer, Refused(epoch=self.epoch, reason=problem[:MAX_REASON]))]
        if self._tombstones.knows(hello.incarnation):
            ending = self._tombstones.of_process(hello.incarnation, self.session)
            return [Send(peer, ending)] if ending else []
        place = (hello.rank, hello.replica)
        if hello.session:
            return self._rejoin(peer, place, hello, now)
        known = self._members.get(place)
        if known is not None and known.incarnation == hello.incarnation:  # the same hello again: our answer was lost
            return [*self._come_back(place, peer, now), *self._answered(place, now)]
        return self._join_or_wait(place, Joiner.at_once(peer, hello, now), now)

    def _join_or_wait(self, place: Place, joiner: Joiner, now: float) -> list[Effect]:
        if self.phase is not Phase.FAILED and self._joiners.must_wait(place, joiner):
            holder, probe = self._joiners.wait(place, joiner, now)
            return [Send(holder, self.pulse(now, probe=probe))]
        return self._join_fresh(place, joiner, now)

    def _join_fresh(self, place: Place, joiner: Joiner, now: float) -> list[Effect]:
        """Let a fresh process join the session that is forming, or begin a new session."""
        effects: list[Effect] = []
        hello = joiner.hello
        if self._members and self.phase in (Phase.RUNNING, Phase.REJOINING):
            why = f"{another(hello.process)} joined as this rank: it restarted"
            if is_second_source(self._members.get(place), hello):
                why = f"its process ({hello.process}) already had a source for this rank and opened a second; use one"
            effects = self._abort(Happened.RESTARTED, self.next_step, hello.rank, why)
        # A failed session is replaced. So is the session of a restarted plane that no process has come back to.
        if self.phase is not Phase.FORMING or self.session == 0:
            self._begin_session(Happened.FRESH_HELLO)
        self._join(joiner.peer, place, hello, joiner.heard)
        return [*effects, *self._admit(place, now)]

    def _rejoin(self, peer: Peer, place: Place, hello: Hello, now: float) -> list[Effect]:
        """Readmit a process of this session after its connection broke or the plane restarted."""
        over = [Send(peer, self._tombstones.of_session(hello.session, self.session))]
        if hello.session != self.session or self.phase is Phase.FORMING:
            return [*over]
        if self._failure is not None:
            return [Send(peer, self._failure)]
        known = self._members.get(place)
        if known is not None:
            return self._come_back(place, peer, now) if known.incarnation == hello.incarnation else [*over]
        if place in self._steps.left:  # a process that left does not rejoin: this message was delayed
            return [*over]
        if not self._members:
            self._rejoining_since = now
        self._join(peer, place, hello, now)
        return self._admit(place, now)

    def _join(self, peer: Peer, place: Place, hello: Hello, heard: float) -> None:
        known, name = self._members.get(place), self._members.name(place)
        if known is not None:  # an earlier incarnation, from before the session ran
            by = f"{another(hello.process)} has joined as {name} since; stop one of the two trainers"
            if is_second_source(known, hello):
                by = f"this process ({hello.process}) has opened a second source for {name} since; use one"
            self._tombstones.replaced(self._members.leave(place).incarnation, by)
            self._steps.forget(place)
        self._members.join(
            place,
            Member(
                peer=peer,
                incarnation=hello.incarnation,
                start=hello.step,
                heard=heard,
                direct=hello.direct,
                process=hello.process,
                pid=hello.pid,
                pid_space=hello.pid_space,
                life=hello.life,
            ),
        )

    def _come_back(self, place: Place, peer: Peer, now: float) -> list[Effect]:
        self._session.on(Happened.HELLO)
        self._members.move(place, peer, now)
        return [Send(peer, self._welcome())]

    def _admit(self, place: Place, now: float) -> list[Effect]:
        """Begin when all processes have joined and, in a new session, are alive."""
        here, all_ = len(self._members) + len(self._steps.left), self._members.num_places
        back = "joined" if self.phase is Phase.FORMING else "came back"
        note = Note(f"session {self.session}: {self._members.name(place)} {back}, {here} of {all_}")
        if here < all_:
            self._session.on(Happened.HELLO)
            return [note, Send(self._members[place].peer, self._welcome())]
        awaited = self._members.await_silent(now) if self.phase is Phase.FORMING else set()
        if not awaited:
            return [note, *self._begin(now)]
        self._session.on(Happened.HELLO)
        # A process that is not ready answers a welcome with a beat at once: that proves it is alive.
        welcome = self._welcome()
        return [note, *(Send(self._members[one].peer, welcome) for one in {place, *awaited})]

    def _answered(self, place: Place, now: float) -> list[Effect]:
        """Begin if this process was the last one whose sign of life was awaited."""
        last = self._members.was_last_awaited(place) and self.phase is Phase.FORMING
        return self._begin(now) if last else []

    def _begin(self, now: float) -> list[Effect]:
        effects: list[Effect] = []
        if self.phase is Phase.FORMING:
            named = self._members.starts()
            # Ranks that name no step follow those that do. Example: {7: rank 0} and nothing from rank 1 starts at 7;
            # {7: rank 0, 9: rank 1} cannot start.
            start, *others = named or [self.next_step]
            if others:
                reason = f"wants to resume at step {others[-1]}, others at {start}; resume all from one checkpoint"
                return self._abort(Happened.MISMATCH, others[-1], named[others[-1]][0], reason)
            effects.append(Resume(self.session, start, after=self._after))
            self._after = ""
            self._steps.begin_at(start)
        self._session.on(Happened.LAST_HELLO)
        effects.append(Note(f"session {self.session} runs: {len(self._members)} processes, at step {self.next_step}"))
        welcome = self._welcome()
        effects += [Send(member.peer, welcome) for member in self._members.members]
        return effects + self._steps.deliver_staged(now)

    def _begin_session(self, happened: Happened) -> None:
        self._session.on(happened)
        self._failure = None
        self._members.clear()
        self._steps.new_session()

    def _on_bye(self, place: Place) -> list[Effect]:
        """Let a process leave without failing the others. When all have left, the next hello begins a new session."""
        member = self._members.leave(place)
        self._tombstones.left(member.incarnation)
        note = Note(f"session {self.session}: {self._members.name(place)} left at step {self.next_step}")
        if not self._members:
            self._begin_session(Happened.LAST_BYE)
            return [note, Detach(member.peer)]
        if self.phase is Phase.FORMING:
            ended = self._abort(Happened.BYE, self.next_step, place[0], "left before all had joined")
            return [note, Detach(member.peer), *ended]
        self._session.on(Happened.BYE)
        last = self._steps.leave(place)
        return [note, Detach(member.peer), MemberLeft(self.session, *place, last)]

    def _judge(self, outcome: Outcome) -> list[Effect]:
        if isinstance(outcome, Violation):
            return self._abort(Happened.MISMATCH, outcome.step, outcome.rank, outcome.reason)
        return outcome

    def _abort(self, happened: Happened, step: int, rank: int, reason: str) -> list[Effect]:
        if self.phase is Phase.FAILED:
            return []
        self._session.on(happened)
        who = "the plane" if rank < 0 else f"rank {rank}"
        self._failure = failure = Aborted(
            epoch=self.epoch,
            session=self.session,
            step=step,
            rank=rank,
            reason=f"step {step}: {who}: {reason}"[:MAX_REASON],
        )
        self._after = failure.reason
        self._tombstones.failed(failure, (member.incarnation for member in self._members.members))
        ends = [e for member in self._members.members for e in (Send(member.peer, failure), Detach(member.peer))]
        return [Note(f"session {self.session} failed: {failure.reason}"), *ends]

    def _welcome(self) -> Welcome:
        is_ready = self.phase is Phase.RUNNING
        return Welcome(epoch=self.epoch, session=self.session, ready=is_ready, step=self.next_step)

    def pulse(self, now: float, number: int = 0, probe: int = 0) -> Pulse:
        """Return a heartbeat that also says what the plane waits for."""
        return Pulse(
            epoch=self.epoch,
            session=self.session,
            waiting_for=self.waits_for(now),
            left=next((rank for rank, _ in reversed(self._steps.left)), -1),
            number=number,
            policy_version=self.policy_version,
            probe=probe,
        )
