"""The plane's side of what producers say: which run this is, groups in, who must wait for room. No I/O, no clock.

A group is checked and counted by the engine; this is about what is said around that. Feed it messages with
`on_message`; carry out its effects; tell it what became of them (`answer`, `decided`); and at the end of each turn,
when everything that came is written, let it answer those who asked for a group (`answer_traces`) or wait for room
(`offer_room`).

Room is given in the order in which it was asked for, per run. Who is told to send has it promised for a while, so that
ten who wait are not all sent for when there is room for one.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol, TypeAlias

from penstock.errors import Overloaded, PenstockError
from penstock.send.carrier import Peer
from penstock.send.effects import Send
from penstock.send.messages import (
    MAX_NAME,
    MAX_REASON,
    Accepted,
    AskRoom,
    Attach,
    Attached,
    Buffer,
    Discard,
    Foreign,
    Frames,
    FromPlane,
    GiveUp,
    Missing,
    Pulse,
    Put,
    Refused,
    Rejected,
    Room,
    SettleGroup,
    SetWeight,
    Trace,
)
from penstock.send.roster import Roster

_REMEMBERED = 4096
_MAX_WAITING = 1 << 16
Ticket: TypeAlias = tuple[Peer, int]


@dataclass(frozen=True, slots=True)
class Offer:
    """Give this group to the engine."""

    ticket: Ticket
    group: str
    digest: bytes
    """As it was sent; empty if the sender did not say. If the frame has another one, answer with `missing`."""
    frame: Buffer
    evaluation: bool = False
    priority: float = 1.0


@dataclass(frozen=True, slots=True)
class Decide:
    """Let the engine decide this, once, and say what became of it with `decided`."""

    ticket: Ticket
    message: Discard | SettleGroup | SetWeight


Effect: TypeAlias = Send | Offer | Decide


class Rooms(Protocol):
    """Who knows how much may be held."""

    def table_of(self, run: str) -> str:
        """Where groups of a run wait."""

    def no_room(self, table: str, size: int, *, promised_bytes: int, promised_groups: int) -> str:
        """Why a group of so many bytes must wait there, in words; empty if it may come."""


@dataclass(slots=True)
class _Queue:
    """Those who wait for room in one table."""

    waiting: dict[Ticket, int] = field(default_factory=dict)
    """Ticket -> bytes, in the order in which they asked."""
    promised: dict[Ticket, tuple[int, float]] = field(default_factory=dict)
    """Who was told to send: bytes, and until when they are kept free."""

    def forget_promises(self, now: float) -> None:
        self.promised = {ticket: found for ticket, found in self.promised.items() if found[1] > now}


class Admission:
    """Answers producers."""

    def __init__(
        self,
        *,
        run: str,
        run_id: bytes,
        epoch: int,
        ranks: int,
        promise_s: float,
        pulse: Callable[[], Pulse],
        roster: Roster | None = None,
    ) -> None:
        """`roster` knows the keepers of a plane that has some."""
        self._roster = roster
        self._run, self._run_id, self._epoch, self._ranks = run, run_id, epoch, ranks
        self._promise_s, self._pulse = promise_s, pulse
        self.policy_version: int | None = None
        """The version of the weights that was published last; goes out with every answer."""
        self._traces: list[tuple[Peer, Trace]] = []
        self._asked: deque[tuple[Peer, AskRoom]] = deque()
        """Who asked for room in this turn."""
        self._queues: dict[str, _Queue] = {}
        self._decided: dict[Ticket, FromPlane] = {}
        """What was answered to questions that must not be acted on twice."""

    @property
    def num_waiting(self) -> int:
        """Groups that their producers keep until there is room."""
        return sum(len(queue.waiting) for queue in self._queues.values())

    # -------------------------------------------------------------- messages

    def on_attach(self, peer: Peer, message: Attach) -> Send:
        if message.run and message.run != self._run:
            theirs = message.run[:MAX_NAME]
            reason = f"run: this process says {theirs!r}, the plane has {self._run!r}; start both with the same value"
            return Send(peer, Refused(epoch=self._epoch, reason=reason))
        return Send(
            peer,
            Attached(
                ticket=message.ticket,
                run_id=self._run_id,
                run=self._run,
                epoch=self._epoch,
                ranks=self._ranks,
                policy_version=self.policy_version,
                copies=0 if self._roster is None else self._roster.terms.copies,
                keepers=() if self._roster is None else self._roster.told_to(message.node[:MAX_NAME]),
            ),
        )

    def on_foreign(self, peer: Peer, run_id: bytes) -> Send:
        """Something came that was meant for another run."""
        reason = (
            f"this process belongs to run {run_id.hex()[:12]} of an earlier plane, here is run "
            f"{self._run_id.hex()[:12]} ({self._run!r}); nothing was taken; open it anew"
        )
        return Send(peer, Foreign(reason=reason))

    def on_message(
        self,
        peer: Peer,
        message: Put | Trace | AskRoom | GiveUp | Discard | SettleGroup | SetWeight,
        frames: Frames,
    ) -> list[Effect]:
        if isinstance(message, Put):
            return self._on_put(peer, message, frames)
        if isinstance(message, Trace):
            if not frames:  # the group may be on its way for long: say that we live
                return [Send(peer, self._pulse())]
            self._traces.append((peer, message))  # the group before it may wait for this turn's write
            return []
        if isinstance(message, AskRoom):
            self._asked.append((peer, message))
            return []
        if isinstance(message, GiveUp):
            self._forget((peer, message.ticket))
            return []
        known = self._decided.get((peer, message.ticket))
        if known is not None:  # the answer was slow or lost; counting twice would be wrong
            return [Send(peer, known)]
        return [Decide((peer, message.ticket), message)]

    def _on_put(self, peer: Peer, message: Put, frames: Frames) -> list[Effect]:
        ticket = (peer, message.ticket)
        self._forget(ticket)
        if len(frames) != 1:
            reason = f"group {message.group[:MAX_NAME]!r}: {len(frames)} frames; a group is one"
            return [Send(peer, Rejected(ticket=message.ticket, kind="InvalidInput", reason=reason))]
        return [Offer(ticket, message.group, message.digest, frames[0], message.evaluation, message.priority)]

    # -------------------------------------------------------------- answers

    def answer(
        self,
        ticket: Ticket,
        error: PenstockError | None,
        *,
        duplicate: bool = False,
        stale: bool = False,
        over_length: tuple[int, int, int, int] = (0, 0, 0, 0),
    ) -> Send:
        """What became of an offer."""
        peer, number = ticket
        if error is None:
            answer = Accepted(
                ticket=number,
                duplicate=duplicate,
                policy_version=self.policy_version,
                stale=stale,
                over_length=over_length,
            )
            return Send(peer, answer)
        wait = error.retry_after_s if isinstance(error, Overloaded) else 0.0
        reason = str(error)[:MAX_REASON]
        return Send(peer, Rejected(ticket=number, kind=type(error).__name__, reason=reason, retry_after_s=wait))

    def decided(self, ticket: Ticket, error: PenstockError | None) -> Send:
        """What became of a decision; the same question is answered the same from now on."""
        answer = self.answer(ticket, error)
        self._decided[ticket] = answer.message
        while len(self._decided) > _REMEMBERED:
            self._decided.pop(next(iter(self._decided)))
        return answer

    def missing(self, ticket: Ticket) -> Send:
        """A group did not come, or not as it was sent."""
        return Send(ticket[0], Missing(put=ticket[1]))

    def answer_traces(self, is_kept: Callable[[Ticket, str, bytes], bool | None]) -> list[Send]:
        """Whether groups that were asked for are kept; None for one whose put will be answered by itself."""
        traces, self._traces = self._traces, []
        sends = []
        for peer, trace in traces:
            ticket = (peer, trace.ticket)
            kept = is_kept(ticket, trace.group, trace.digest)
            if kept is not None:
                sends.append(self.answer(ticket, None, duplicate=True) if kept else self.missing(ticket))
        return sends

    # -------------------------------------------------------------- room

    def offer_room(self, rooms: Rooms, now: float) -> list[Send]:
        """Tell those who wait longest to send, as far as there is room; and the others who asked that there is none."""
        asked = [(peer, message, self._enqueue(peer, message, rooms)) for peer, message in self._asked]
        self._asked.clear()
        sends, why = [], {}
        for table in list(self._queues):
            told, why[table] = self._offer(table, rooms, now)
            sends += told
        for peer, message, table in asked:
            queue, ticket = self._queues[table], (peer, message.ticket)
            if ticket not in queue.promised:
                sends.append(self.answer(ticket, Overloaded(why[table] or "too many wait for room")))
                if not message.waits:
                    queue.waiting.pop(ticket, None)
        self._queues = {table: queue for table, queue in self._queues.items() if queue.waiting or queue.promised}
        return sends

    def _enqueue(self, peer: Peer, message: AskRoom, rooms: Rooms) -> str:
        """Behind those who asked before; who asks again keeps its place."""
        table = rooms.table_of(message.run[:MAX_NAME])
        queue, ticket = self._queues.setdefault(table, _Queue()), (peer, message.ticket)
        queue.promised.pop(ticket, None)
        if self.num_waiting < _MAX_WAITING:  # beyond, it asks again
            queue.waiting[ticket] = max(message.size, 0)
        return table

    def came(self, ticket: Ticket) -> None:
        """What room was promised to has come, as facts that a keeper vouches for."""
        self._forget(ticket)

    def _forget(self, ticket: Ticket) -> None:
        for queue in self._queues.values():
            queue.waiting.pop(ticket, None)
            queue.promised.pop(ticket, None)

    def _offer(self, table: str, rooms: Rooms, now: float) -> tuple[list[Send], str]:
        """Who may send, and why the next one may not."""
        queue = self._queues[table]
        sends: list[Send] = []
        queue.forget_promises(now)
        for ticket, size in list(queue.waiting.items()):
            promised = sum(found[0] for found in queue.promised.values())
            why = rooms.no_room(table, size, promised_bytes=promised, promised_groups=len(queue.promised))
            if why:
                return sends, why
            del queue.waiting[ticket]
            queue.promised[ticket] = (size, now + self._promise_s)
            sends.append(Send(ticket[0], Room(ticket=ticket[1], policy_version=self.policy_version)))
        return sends, ""
