"""Delivery of steps to every process of a session: requested, delivered, received, released, committed.

A step is released when every process has it and verified its digest, and committed when every process has trained it.
The cost of a message does not depend on the number of ranks: each is compared with its own digest and counted.

    rank 0          plane           rank 1
      | request 7 ->  |  <- request 7 |
      |               | (planned, durable, staged)
      | <- deliver 7  |  deliver 7 -> |
      | received 7 -> |               |      one rank has it: none may train
      |               | <- received 7 |
      | <- release 7  |  release 7 -> |      all have it: all may train
      | commit 7 ->   |   <- commit 7 |
      |               | (logged)
      | <- committed 7| committed 7 ->|
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

from penstock.protocol.effects import Effect, Reported, Send, StepCommitted, StepReceived, Suspect
from penstock.protocol.members import Members, Place
from penstock.protocol.messages import (
    BEHIND,
    Commit,
    Committed,
    Damaged,
    Deliver,
    Frames,
    Noted,
    Received,
    Release,
    Report,
    Request,
    Sent,
)
from penstock.protocol.session import Phase, Session

AHEAD = 4
"""How far beyond the last planned step a process may request. No source requests more than three ahead."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Staged:
    """A step that is ready for every rank."""

    step: int
    plans: list[bytes]
    payloads: list[Frames | None]
    """Each rank's samples, or None for a rank that reads them from storage itself."""
    digests: list[str]
    picks: list[bytes] = field(default_factory=list)
    """Per rank, which samples of which stored groups to read. Empty if all payloads are sent."""
    numbers: Mapping[str, float] = field(default_factory=dict)
    """The plane's metrics up to the moment it was planned, for the trainer."""

    def serves(self, inline: Iterable[int]) -> bool:
        """Return whether it has the samples of these ranks."""
        return all(self.payloads[rank] is not None for rank in inline)


@dataclass(frozen=True, slots=True)
class Violation:
    """A process broke the protocol: the session must end."""

    step: int
    rank: int
    reason: str


Outcome: TypeAlias = list[Effect] | Violation


@dataclass(slots=True)
class _Progress:
    """The progress of one step."""

    staged: Staged | None = None
    """The step, while a process may still need it. None before it is staged and after it is released."""
    digests: list[str] | None = None
    """By rank. Known from staging on, also after the payload is freed."""
    wanted: set[Place] = field(default_factory=set)
    received: dict[Place, str] = field(default_factory=dict)
    """The processes that have it, with the digest each computed."""
    released: bool = False
    committed: set[Place] = field(default_factory=set)
    version: int | None = None
    """The version of the weights that training it produced."""


class Steps:
    """The steps that are not yet committed by all, and the messages about them."""

    def __init__(self, session: Session, members: Members, left: Mapping[Place, int]) -> None:
        self._session, self._members = session, members
        self._steps: dict[int, _Progress] = {}
        self.left = dict(left)
        """Processes that left, with the last step each of them committed."""
        self._left_at = sorted(left.values())
        self._closing = 0
        """The step that every process has trained, while its commit is being logged."""
        self.wanted = 0
        """The highest step that any process requested or has. 0 if there is none."""

    # -------------------------------------------------------------- sessions

    def new_session(self) -> None:
        """Forget everything but staged steps: those need not be built again."""
        self._closing, self.left, self._left_at = 0, {}, []
        staged = {number: step.staged for number, step in self._steps.items() if step.staged}
        self._steps = {number: _Progress(staged, staged.digests) for number, staged in staged.items()}
        self.wanted = 0

    def begin_at(self, step: int) -> None:
        """Continue at `step`. Earlier steps count as trained."""
        self._session.next_step = step
        self._steps = {number: progress for number, progress in self._steps.items() if number >= step}
        self._count_wanted()

    def unstage(self, first: int) -> None:
        """Forget steps from `first` on. They must be staged again."""
        self._steps = {number: progress for number, progress in self._steps.items() if number < first}
        self._count_wanted()

    def forget(self, place: Place) -> None:
        """Drop the requests of a place, because another process takes it."""
        for progress in self._steps.values():
            progress.wanted.discard(place)
        self._count_wanted()

    def _count_wanted(self) -> None:
        self.wanted = max((number for number, step in self._steps.items() if step.wanted or step.received), default=0)

    # -------------------------------------------------------------- state

    def is_staged(self, step: int) -> bool:
        found = self._steps.get(step)
        if found is None or found.digests is None:
            return False
        return found.staged is None or found.staged.serves(self._members.inline_ranks)

    def describe_late(self) -> str:
        """Return which processes lack the first step that others have, "" if there is no such step."""
        for number, step in sorted(self._steps.items()):
            if step.received and step.digests is not None:
                late = [place for place in self._members if place not in step.received]
                if late:
                    filling = all(number in self._members[place].filling for place in late)
                    return f"{self._members.names(late)} to {'fill' if filling else 'receive'} step {number}"
        return ""

    # -------------------------------------------------------------- requested, delivered

    def stage(self, staged: Staged, now: float) -> Outcome:
        """Deliver a planned and durable step to every process that requested it. A step may be staged again, with the
        samples of further ranks."""
        progress = self._steps.setdefault(staged.step, _Progress())
        before, progress.staged, progress.digests = progress.staged, staged, staged.digests
        self._session.last_step = max(self._session.last_step, staged.step)
        effects: list[Effect] = []
        for place in self._members:
            rank = place[0]
            if before is None or (before.payloads[rank] is None and staged.payloads[rank] is not None):
                effects += self.deliver(place, staged.step, now)
        # After a restart of the plane, processes may have acknowledged the step before it was staged again.
        found = self._check_received(staged.step, list(progress.received))
        return found if isinstance(found, Violation) else effects + found

    def deliver_staged(self, now: float) -> list[Effect]:
        """Deliver every staged step to every process that requested it."""
        steps = [number for number, step in self._steps.items() if step.staged]
        return [effect for place in self._members for step in steps for effect in self.deliver(place, step, now)]

    def on_request(self, place: Place, message: Request, now: float) -> Outcome:
        member, step = self._members[place], message.step
        if step < self._session.next_step:
            return []  # a late duplicate: this process already committed that step
        if step > self._session.last_step + AHEAD:
            return Violation(step, place[0], f"asks for step {step}; the last one planned is {self._session.last_step}")
        self._steps.setdefault(step, _Progress()).wanted.add(place)
        self.wanted = max(self.wanted, step)
        # A repeated request: a copy may still be in transit. Do not send another, but let the rank find out by `Sent`,
        # which travels behind the copy. Example: 1 sent, 0 known lost -> `Sent`; 1 sent, 1 lost -> send it again.
        copies = member.copies.get(step, 0)
        if message.lost < copies:
            sent = Sent(epoch=self._session.epoch, session=self._session.number, step=step, copies=copies)
            return [Send(member.peer, sent, BEHIND)]
        return self.deliver(place, step, now)

    def deliver(self, place: Place, step: int, now: float) -> list[Effect]:
        member, progress = self._members[place], self._steps.get(step)
        if self._session.phase is not Phase.RUNNING or progress is None or progress.staged is None:
            return []
        if place not in progress.wanted or place in progress.received:
            return []
        rank, staged = place[0], progress.staged
        payload = BEHIND if member.direct else staged.payloads[rank]
        if payload is None:
            return []  # its samples are still being read
        member.sent.setdefault(step, now)
        member.copies[step] = member.copies.get(step, 0) + 1
        message = Deliver(
            run=self._session.run,
            epoch=self._session.epoch,
            session=self._session.number,
            step=step,
            rank=rank,
            world=self._session.ranks,
            digest=staged.digests[rank],
            plan=staged.plans[rank],
            picks=staged.picks[rank] if staged.picks else b"",
            numbers=dict(staged.numbers),
        )
        return [Send(member.peer, message, payload)]

    def on_damaged(self, place: Place, message: Damaged, now: float) -> list[Effect]:
        """Handle a group that a process cannot read. Ignored for a step it has received or committed."""
        progress = self._steps.get(message.step)
        if progress is None or place in progress.received or message.step < self._session.next_step:
            return []
        member = self._members[place]
        if not member.direct:  # its samples are sent by now: they may be in transit, or lost
            copies, number = member.copies.get(message.step, 0), self._session.number
            sent = Sent(epoch=self._session.epoch, session=number, step=message.step, copies=copies)
            return [Send(member.peer, sent, BEHIND)]
        member.sent[message.step] = now  # restart its deadline while the plane checks the group
        return [Suspect(self._session.number, place, message.step, message.group, message.reason)]

    # -------------------------------------------------------------- received, released

    def on_received(self, place: Place, message: Received) -> Outcome:
        member, step = self._members[place], message.step
        member.sent.pop(step, None)
        member.copies.pop(step, None)
        if not self._session.next_step <= step <= self._session.last_step:
            return []
        progress = self._steps.setdefault(step, _Progress())
        progress.wanted.discard(place)
        if progress.released and place in progress.received:  # our release was lost
            return [Send(member.peer, self._release(step))]
        progress.received[place] = message.digest
        self.wanted = max(self.wanted, step)
        return self._check_received(step, [place])

    def _check_received(self, step: int, new: Iterable[Place]) -> Outcome:
        """Release a step when every process has acknowledged it. `new` are the latest acknowledgements."""
        progress = self._steps[step]
        if progress.digests is None:
            return []  # the plane restarted: the step is built again first, to know its digest
        for place in new:
            digest, sent = progress.received[place], progress.digests[place[0]]
            if digest != sent:
                reason = f"received step {step} with digest {digest[:40]}, the plane sent {sent}"
                return Violation(step, place[0], reason)
        if progress.released or len(progress.received) + self._num_left_after(step) < self._members.num_places:
            return []
        progress.released, progress.staged = True, None  # frees the payloads, tens of megabytes per rank
        release = self._release(step)
        return [StepReceived(step), *(Send(member.peer, release) for member in self._members.members)]

    def _release(self, step: int) -> Release:
        return Release(epoch=self._session.epoch, session=self._session.number, step=step)

    # -------------------------------------------------------------- committed

    def on_commit(self, place: Place, message: Commit) -> Outcome:
        first, step = self._session.next_step, message.step
        if step < first:
            return [Send(self._members[place].peer, self._committed(first - 1))]
        if step > self._session.last_step:
            return Violation(step, place[0], f"commits step {step}, which was never delivered")
        for number in range(first, step + 1):  # steps are committed in order, so this commit covers earlier ones
            self._steps.setdefault(number, _Progress()).committed.add(place)
        if message.policy_version is not None:
            progress = self._steps[step]
            progress.version = max(progress.version or 0, message.policy_version)
        return self._check_committed()

    def _check_committed(self) -> list[Effect]:
        step = self._session.next_step
        progress = self._steps.get(step)
        if self._closing == step or not self._members or progress is None:
            return []  # already being logged, or there is nothing to check
        if len(progress.committed) + self._num_left_after(step) < self._members.num_places:
            return []
        self._closing = step
        return [StepCommitted(self._session.number, step, progress.version)]

    def committed(self, session: int, step: int) -> list[Effect]:
        """Tell the ranks that a step is committed. Called when the commit is in the log."""
        if (session, step) != (self._session.number, self._session.next_step) or self._session.phase is Phase.FAILED:
            return []
        self._closing = 0
        self.begin_at(step + 1)
        done = self._committed(step)
        return [*(Send(member.peer, done) for member in self._members.members), *self._check_committed()]

    def _committed(self, step: int) -> Committed:
        return Committed(epoch=self._session.epoch, session=self._session.number, step=step)

    def on_report(self, place: Place, message: Report) -> list[Effect]:
        member = self._members[place]
        noted = Send(member.peer, Noted(epoch=self._session.epoch, session=self._session.number, number=message.number))
        if message.number <= member.reports:  # repeated, because our confirmation was lost
            return [noted]
        member.reports = message.number
        return [Reported(message.step, message.priorities, message.metrics), noted]

    # -------------------------------------------------------------- leaving

    def leave(self, place: Place) -> int:
        """Remove a process that leaves. Returns the last step it committed.

        Its commits still count. A step it received that is not released yet can no longer be released.
        """
        trained = (number for number, step in self._steps.items() if place in step.committed)
        last = max(trained, default=self._session.next_step - 1)
        for number, step in self._steps.items():
            step.committed.discard(place)
            step.wanted.discard(place)
            if number <= last or not step.released:
                step.received.pop(place, None)
        self._count_wanted()
        self.left[place] = last
        insort(self._left_at, last)
        return last

    def _num_left_after(self, step: int) -> int:
        """Return how many of the processes that left had trained a step."""
        # Example: last steps [4, 6, 6] and step 6: two of the three committed it, 3 - bisect_left = 3 - 1 = 2.
        return len(self._left_at) - bisect_left(self._left_at, step)
