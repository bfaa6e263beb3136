"""A keeper's side of puts, as a state machine without I/O or a clock of its own.

To a producer it answers as a plane would. A frame that comes is checked, kept here and by other keepers, and then its
facts are sent to the plane; the producer hears of it when the plane has accepted.

    producer         keeper a                       keeper b          plane
      | ask room ->    | ask room ------------------------------------> |
      | <- room        | <---------------------------------------- room |
      | put g ->       | (checked, facts made)         |                |
      |                | copy g ---------------------> | (synced)       |
      |                | (synced: a#12)    <- copied 7 |                |
      |                | facts of g, a#12 b#7 ------------------------> | (written down)
      | <- accepted    | <------------------------------------ accepted |

Room is asked for before a frame is sent. Every attempt has numbers of its own: one that comes to nothing is forgotten,
and can never be taken for a later one that does not.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec

from penstock.errors import PenstockError
from penstock.send.carrier import Peer
from penstock.send.keeper_events import CheckFrame, Event, ForgetNumbers, KeepFrame, ToClient, ToPeer, ToPlane
from penstock.send.keeper_messages import Copied, CopyFrame, DropCopies, PutFacts
from penstock.send.keeper_session import KeeperSession
from penstock.send.messages import (
    MAX_REASON,
    Accepted,
    AskRoom,
    Buffer,
    Frames,
    GiveUp,
    Missing,
    Pulse,
    Put,
    Rejected,
    Room,
    Trace,
)
from penstock.send.retry import Pending
from penstock.send.timeouts import Timeouts

Ticket = tuple[Peer, int]


@dataclass(slots=True)
class _CopyUnderWay:
    """A frame on its way to a peer."""

    peer: str
    pending: Pending
    since: float


@dataclass(slots=True)
class _Put:
    """A group that is being taken in."""

    work: int
    group: str
    digest: bytes
    frame: Buffer
    is_evaluation: bool
    tickets: list[Ticket]
    own: int
    """The ticket it has with the plane."""
    facts: bytes = b""
    evaluation: bytes = b""
    number: int = 0
    """Under which it is kept here; 0 before."""
    copies: dict[str, int] = field(default_factory=dict)
    """Peer -> number there."""
    copying: dict[int, _CopyUnderWay] = field(default_factory=dict)
    tried: set[str] = field(default_factory=set)
    filing: Pending | None = None
    """The facts, on their way to the plane."""


class PutDesk:
    """Takes groups in."""

    def __init__(
        self, session: KeeperSession, *, name: str, used_bytes: Callable[[], int], quota_bytes: int | None
    ) -> None:
        self._session, self._name = session, name
        self._used_bytes, self._quota = used_bytes, quota_bytes
        self._numbers = itertools.count(1)
        """Of puts, of copies, and of tickets with the plane."""
        self._puts: dict[int, _Put] = {}
        self._by_group: dict[str, int] = {}
        self._own: dict[Ticket, tuple[int, float]] = {}
        """A client's ticket -> ours with the plane, and when it was last mentioned."""
        self._theirs: dict[int, Ticket] = {}

    @property
    def _timeouts(self) -> Timeouts:
        return self._session.timeouts

    @property
    def num_puts(self) -> int:
        return len(self._puts)

    # -------------------------------------------------------------- producers

    def on_ask_room(self, peer: Peer, message: AskRoom, now: float) -> list[Event]:
        why = self._obstacle(message.size, now)
        if why is not None:
            return [ToClient(peer, _to(why, message.ticket))]
        if message.evaluation:
            return [ToClient(peer, Room(ticket=message.ticket, policy_version=self._session.policy_version))]
        lives: list[Event] = [ToClient(peer, self._pulse())] if (peer, message.ticket) in self._own else []
        own = self._ticket((peer, message.ticket), now)
        return [ToPlane(AskRoom(ticket=own, run=message.run, size=message.size, waits=message.waits)), *lives]

    def on_give_up(self, peer: Peer, message: GiveUp) -> list[Event]:
        own = self._release((peer, message.ticket))
        return [ToPlane(GiveUp(ticket=own))] if own else []

    def on_put(self, peer: Peer, message: Put, frames: Frames, now: float) -> list[Event]:
        ticket = (peer, message.ticket)
        known = self._puts.get(self._by_group.get(message.group, 0))
        if known is not None and known.digest == message.digest:
            self._follow(known, ticket)
            return []
        if known is not None:
            words = f"group {message.group!r}: under way with other content; give each group its own id"
            return [ToClient(peer, Rejected(ticket=message.ticket, kind="Conflict", reason=words))]
        if len(frames) != 1:
            words = f"group {message.group!r}: {len(frames)} frames; a group is one"
            return [ToClient(peer, Rejected(ticket=message.ticket, kind="InvalidInput", reason=words))]
        why = self._obstacle(len(frames[0]), now)
        if why is not None:
            return [ToClient(peer, _to(why, message.ticket))]
        own, work = self._ticket(ticket, now), next(self._numbers)
        put = _Put(work, message.group, message.digest, frames[0], message.evaluation, [ticket], own)
        self._puts[work], self._by_group[message.group] = put, work
        return [CheckFrame(work, put.group, put.digest, put.frame, put.is_evaluation)]

    def on_trace(self, peer: Peer, message: Trace, frames: Frames) -> list[Event]:
        if not frames:
            return [ToClient(peer, self._pulse())]
        known = self._puts.get(self._by_group.get(message.group, 0))
        if known is None or known.digest != message.digest:
            return [ToClient(peer, Missing(put=message.ticket))]
        self._follow(known, (peer, message.ticket))
        return []

    def _pulse(self) -> Pulse:
        return Pulse(epoch=0, session=0, waiting_for="", policy_version=self._session.policy_version)

    def _follow(self, put: _Put, ticket: Ticket) -> None:
        if ticket not in put.tickets:
            put.tickets.append(ticket)

    def _obstacle(self, size: int, now: float) -> Rejected | None:
        """Why nothing can be taken in now."""
        silent = self._session.silent_s(now)
        if silent > self._timeouts.plane_s:
            return _rejected("PlaneLost", f"keeper {self._name}: no word from the plane for {silent:.1f} s")
        terms = self._session.terms
        if terms is None or not self._session.is_ready:
            return _rejected("Overloaded", f"keeper {self._name}: it has not joined its plane yet")
        if 1 + len({at.node for at in self._session.peers}) < terms.copies:
            return _rejected("Overloaded", self._too_few(terms.copies))
        if self._quota is not None:
            waiting = sum(len(put.frame) for put in self._puts.values() if not put.number)
            if self._used_bytes() + waiting + size > self._quota:
                return _rejected(
                    "Overloaded",
                    f"keeper {self._name}: {self._used_bytes():,} bytes kept and {size:,} more do not fit its quota of "
                    f"{self._quota:,}; raise it, or wait until steps are committed",
                )
        return None

    def _too_few(self, copies: int) -> str:
        up = ", ".join([self._name, *(peer.name for peer in self._session.peers)])
        down = f"; down: {', '.join(self._session.down)}" if self._session.down else ""
        return f"{copies} copies are wanted and too few keepers can take one: up: {up}{down}"

    # -------------------------------------------------------------- checked, kept, copied

    def checked(self, work: int, facts: bytes, evaluation: bytes, now: float) -> list[Event]:
        """The frame is good; `evaluation` is what is shown of a group that is not to be trained."""
        put = self._puts[work]
        put.facts, put.evaluation = facts, evaluation
        return self._keep(put, now)

    def refused(self, work: int, error: PenstockError) -> list[Event]:
        """The frame is not good."""
        put = self._drop(work)
        return self._answer(put, _rejected(type(error).__name__, str(error)[:MAX_REASON])) if put else []

    def altered(self, work: int) -> list[Event]:
        """It is not what was sent: it must be sent again."""
        put = self._drop(work)
        return [ToClient(peer, Missing(put=ticket)) for peer, ticket in put.tickets] if put else []

    def _keep(self, put: _Put, now: float) -> list[Event]:
        """With numbers of their own, here and at peers."""
        put.number, put.copies, put.copying, put.tried, put.filing = 0, {}, {}, set(), None
        return [KeepFrame(put.work, put.group, put.digest, put.frame), *self._copy(put, now)]

    def _copy(self, put: _Put, now: float) -> list[Event]:
        """To as many more peers as are wanted; gives the put up where there are none."""
        terms = self._session.terms
        assert terms is not None
        events: list[Event] = []
        while 1 + len(put.copies) + len(put.copying) < terms.copies:
            peer = self._choose(put)
            if peer is None:
                return events + self._give_up(put, _rejected("Overloaded", self._too_few(terms.copies)))
            put.tried.add(peer)
            ticket = next(self._numbers)
            message = CopyFrame(ticket=ticket, group=put.group, digest=put.digest)
            pending = Pending(message, now, self._timeouts.peer_s / 2, [put.frame])
            put.copying[ticket] = _CopyUnderWay(peer, pending, now)
            events.append(ToPeer(peer, message, pending.frames))
        return events

    def _choose(self, put: _Put) -> str | None:
        """The next peer for a group: which one is first differs from group to group."""
        taken = {*put.copies, *(copy.peer for copy in put.copying.values())}
        nodes = {at.node for at in self._session.peers if at.name in taken}
        peers = [at.name for at in self._session.peers if at.name not in put.tried and at.node not in nodes]
        return peers[put.digest[0] % min(len(peers), 8)] if peers else None

    def kept(self, work: int, number: int, now: float) -> list[Event]:
        """It is synced here."""
        put = self._puts.get(work)
        if put is None or put.number:  # given up meanwhile, or kept anew
            return [ForgetNumbers((number,))]
        put.number = number
        return self._file(put, now)

    def not_kept(self, work: int, error: PenstockError) -> list[Event]:
        """The disk here does not take it."""
        put = self._puts.get(work)
        return self._give_up(put, _rejected(type(error).__name__, str(error)[:MAX_REASON])) if put else []

    def on_copied(self, message: Copied, now: float) -> list[Event]:
        """A peer has synced it, or cannot."""
        put = next((put for put in self._puts.values() if message.ticket in put.copying), None)
        if put is None:
            return []
        peer = put.copying.pop(message.ticket).peer
        if not message.error:
            put.copies[peer] = message.number
            return self._file(put, now)
        return self._copy(put, now)

    def _file(self, put: _Put, now: float) -> list[Event]:
        """All copies are there: the plane may have the facts."""
        terms = self._session.terms
        if terms is None or not put.number or 1 + len(put.copies) < terms.copies or put.filing is not None:
            return []
        message = PutFacts(
            ticket=put.own,
            group=put.group,
            digest=put.digest,
            size=len(put.frame),
            facts=put.facts,
            copies=((self._name, put.number), *put.copies.items()),
            evaluation=put.evaluation,
        )
        put.filing = Pending(message, now, self._timeouts.resend_s)
        return [ToPlane(message)] if self._session.is_ready else []

    def _give_up(self, put: _Put, why: Rejected) -> list[Event]:
        """Nothing comes of it: what was kept of it is not wanted, here or anywhere."""
        self._drop(put.work)
        events: list[Event] = [ForgetNumbers((put.number,))] if put.number else []
        events += [ToPeer(peer, DropCopies(numbers=(number,))) for peer, number in put.copies.items()]
        return events + self._answer(put, why)

    # -------------------------------------------------------------- the plane

    def on_plane(self, message: Accepted | Rejected | Missing | Room, now: float) -> list[Event]:
        """What the plane answers to one of our tickets."""
        own = message.put if isinstance(message, Missing) else message.ticket
        put = next((put for put in self._puts.values() if put.own == own and put.filing is not None), None)
        if put is None:
            theirs = self._theirs.get(own)
            if theirs is None or isinstance(message, (Accepted, Missing)):
                return []
            answer = _to(message, theirs[1])
            return [ToClient(theirs[0], answer)]
        if isinstance(message, Missing):  # its copies count no more: the plane or a peer restarted
            return self._keep(put, now)
        if isinstance(message, Room):
            return []
        self._drop(put.work)
        return self._answer(put, message)

    def _answer(self, put: _Put, answer: Accepted | Rejected) -> list[Event]:
        return [ToClient(peer, _to(answer, number)) for peer, number in put.tickets]

    def _drop(self, work: int) -> _Put | None:
        put = self._puts.pop(work, None)
        if put is not None:
            del self._by_group[put.group]
            for ticket in put.tickets:
                self._release(ticket)
        return put

    # -------------------------------------------------------------- tickets

    def _ticket(self, ticket: Ticket, now: float) -> int:
        """Ours with the plane, for a client's."""
        own = self._own[ticket][0] if ticket in self._own else next(self._numbers)
        self._own[ticket], self._theirs[own] = (own, now), ticket
        return own

    def _release(self, ticket: Ticket) -> int:
        own, _ = self._own.pop(ticket, (0, 0.0))
        self._theirs.pop(own, None)
        return own

    # -------------------------------------------------------------- time

    def on_tick(self, now: float) -> list[Event]:
        """Ask again, notice silence. Call it at least twice per `resend_s`."""
        events: list[Event] = []
        up = {at.name for at in self._session.peers}
        for put in list(self._puts.values()):
            if put.filing is not None:
                events += self._remind_plane(put, now)
                continue
            for ticket, copy in list(put.copying.items()):
                if put.work not in self._puts:
                    break  # given up
                silent = now - copy.since
                if silent > self._timeouts.delivery_s or (silent > self._timeouts.peer_s and copy.peer not in up):
                    del put.copying[ticket]
                    events += self._copy(put, now)
                elif copy.pending.is_due(now):
                    copy.pending.asked(now, self._timeouts.peer_s)
                    events.append(ToPeer(copy.peer, copy.pending.message, copy.pending.frames))
        return events + self._forget_old(now)

    def _remind_plane(self, put: _Put, now: float) -> list[Event]:
        assert put.filing is not None
        silent = self._session.silent_s(now)
        if silent > self._timeouts.plane_s:  # it may have accepted: what is kept stays, until we enlist again
            self._drop(put.work)
            words = f"keeper {self._name}: no word from the plane for {silent:.1f} s"
            return self._answer(put, _rejected("PlaneLost", words))
        if not self._session.is_ready or not put.filing.is_due(now):
            return []
        put.filing.asked(now, self._timeouts.heartbeat_s)
        return [ToPlane(put.filing.message)]

    def _forget_old(self, now: float) -> list[Event]:
        """Clients that asked for room and went away."""
        busy = {ticket for put in self._puts.values() for ticket in put.tickets}
        limit = now - 2 * self._timeouts.plane_s
        old = [ticket for ticket, (_, at) in self._own.items() if at < limit and ticket not in busy]
        return [ToPlane(GiveUp(ticket=self._release(ticket))) for ticket in old]


def _rejected(kind: str, reason: str) -> Rejected:
    return Rejected(ticket=0, kind=kind, reason=reason, retry_after_s=0.25 if kind == "Overloaded" else 0.0)


def _to(answer: Accepted | Rejected | Room, ticket: int) -> Accepted | Rejected | Room:
    """The same answer, under another ticket."""
    if isinstance(answer, Accepted):
        return msgspec.structs.replace(answer, ticket=ticket)
    if isinstance(answer, Room):
        return Room(ticket=ticket, policy_version=answer.policy_version)
    return Rejected(ticket=ticket, kind=answer.kind, reason=answer.reason, retry_after_s=answer.retry_after_s)
