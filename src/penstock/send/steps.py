"""Steps on their way to every process of a session: requested, delivered, received, released, committed.

A step is released when every process has it and found it whole, and committed when every process has trained it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from penstock.send.effects import Effect, Reported, Send, Staged, StepCommitted, StepReceived
from penstock.send.members import Members, Place
from penstock.send.messages import (
    BEHIND,
    Commit,
    Committed,
    Deliver,
    Noted,
    Received,
    Release,
    Report,
    Request,
    Sent,
)
from penstock.send.progress import Progress
from penstock.send.session import Phase

AHEAD = 4
"""Steps beyond the last planned one that may be asked for; no source asks for more than three."""


@dataclass(slots=True, kw_only=True)
class Session:
    """One life of the trainer, and where it stands."""

    run: str
    ranks: int
    epoch: int
    """Of the plane."""
    number: int
    """Of the session that is forming, running or failed; 0 before the first."""
    next_step: int
    """The first step that is not committed."""
    last_step: int
    """The last step that was planned, possibly by an earlier life of the plane."""
    phase: Phase = Phase.FORMING


@dataclass(frozen=True, slots=True)
class Violation:
    """A process did what no process may do: the session must end."""

    step: int
    rank: int
    reason: str


Outcome: TypeAlias = list[Effect] | Violation


class Steps:
    """What is done with the steps of a session, and said about them."""

    def __init__(self, session: Session, members: Members, progress: Progress) -> None:
        self._session, self._members, self._progress = session, members, progress
        self._closing = 0
        """The step that every process has trained, while it is being written down."""

    def new_session(self) -> None:
        self._closing = 0
        self._progress.new_session()

    def stage(self, staged: Staged, now: float) -> Outcome:
        """A step is packed and durable: deliver it to whoever asked for it."""
        self._progress.stage(staged)
        self._session.last_step = max(self._session.last_step, staged.step)
        effects = self.deliver_all([staged.step], now)
        found = self._check_received(staged.step)
        return found if isinstance(found, Violation) else effects + found

    def deliver_all(self, steps: list[int], now: float) -> list[Effect]:
        """To everybody who asked for them."""
        return [effect for place in self._members for step in steps for effect in self.deliver(place, step, now)]

    def on_request(self, place: Place, message: Request, now: float) -> Outcome:
        member, step = self._members[place], message.step
        if step < self._session.next_step:
            return []  # a late duplicate: this process already committed that step
        if step > self._session.last_step + AHEAD:
            return Violation(step, place[0], f"asks for step {step}; the last one planned is {self._session.last_step}")
        member.wants.add(step)
        copies = member.copies.get(step, 0)
        if message.lost < copies:
            sent = Sent(epoch=self._session.epoch, session=self._session.number, step=step, copies=copies)
            return [Send(member.peer, sent, BEHIND)]
        return self.deliver(place, step, now)

    def deliver(self, place: Place, step: int, now: float) -> list[Effect]:
        member, staged = self._members[place], self._progress.staged.get(step)
        if self._session.phase is not Phase.RUNNING or staged is None or step not in member.wants:
            return []
        if self._progress.has(place, step):
            return []
        member.sent.setdefault(step, now)
        member.copies[step] = member.copies.get(step, 0) + 1
        rank = place[0]
        message = Deliver(
            run=self._session.run,
            epoch=self._session.epoch,
            session=self._session.number,
            step=step,
            rank=rank,
            world=self._session.ranks,
            digest=staged.digests[rank],
            plan=staged.plans[rank],
        )
        return [Send(member.peer, message, staged.payloads[rank])]

    def on_received(self, place: Place, message: Received) -> Outcome:
        member, step = self._members[place], message.step
        member.sent.pop(step, None)
        member.copies.pop(step, None)
        member.wants.discard(step)
        if not self._session.next_step <= step <= self._session.last_step:
            return []
        if self._progress.is_released(step) and self._progress.has(place, step):
            return [Send(member.peer, self._release(step))]
        self._progress.receive(place, step, message.digest)
        return self._check_received(step)

    def _check_received(self, step: int) -> Outcome:
        """Release a step when every process has said that it has it."""
        digests = self._progress.digests.get(step)
        if digests is None:
            return []  # the plane restarted: the step is made again first, to know what it should be
        altered = self._progress.altered(step)
        if altered is not None:
            rank, digest = altered
            return Violation(step, rank, f"received step {step} with digest {digest[:40]}, sent was {digests[rank]}")
        if not self._progress.release(step):
            return []
        release = self._release(step)
        return [StepReceived(step), *(Send(member.peer, release) for member in self._members.members)]

    def on_commit(self, place: Place, message: Commit) -> Outcome:
        step = message.step
        if step < self._session.next_step:
            done = Committed(epoch=self._session.epoch, session=self._session.number, step=self._session.next_step - 1)
            return [Send(self._members[place].peer, done)]
        if step > self._session.last_step:
            return Violation(step, place[0], f"commits step {step}, which was never delivered")
        self._progress.commit(place, self._session.next_step, step, message.policy_version)
        return self._check_committed()

    def _check_committed(self) -> list[Effect]:
        step = self._session.next_step
        if self._closing == step or not self._members or not self._progress.is_committed(step):
            return []
        self._closing = step
        return [StepCommitted(self._session.number, step, self._progress.version(step))]

    def committed(self, session: int, step: int) -> list[Effect]:
        """The engine has written down that a step is trained: now the ranks may hear of it."""
        if (session, step) != (self._session.number, self._session.next_step) or self._session.phase is Phase.FAILED:
            return []
        self._session.next_step, self._closing = step + 1, 0
        self._progress.done(step)
        done = Committed(epoch=self._session.epoch, session=self._session.number, step=step)
        return [*(Send(member.peer, done) for member in self._members.members), *self._check_committed()]

    def on_report(self, place: Place, message: Report) -> list[Effect]:
        member = self._members[place]
        noted = Send(member.peer, Noted(epoch=self._session.epoch, session=self._session.number, number=message.number))
        if message.number <= member.reports:
            return [noted]
        member.reports = message.number
        return [Reported(message.step, message.priorities, message.metrics), noted]

    def _release(self, step: int) -> Release:
        return Release(epoch=self._session.epoch, session=self._session.number, step=step)
