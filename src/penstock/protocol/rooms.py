"""Decides which puts may be sent now and which wait: one queue per table. No I/O, no clock.

A *ticket* is one put of one client. It asks for room with `ask`, gets a place in its table's queue, and `offer`
reserves room for the first in the queue as soon as there is some. The put itself uses the reservation (`claim`, then
`close`).

    ask(a), ask(b)     queue: a, b       the table is full
    offer              queue: b          a step was committed: one group fits, reserved for a
    ask(a)             queue: b          a reminder: answered again with room, nothing changes
    claim(c)           None              c was sent without asking; b waits before it, so c waits too
    claim(a), close(a)                   the put arrived and uses the room reserved for it

Three rules keep the queue free of tickets that no client waits for:

- Asks, puts and give-ups take effect in the order in which they arrive, at once.
- A ticket that was put or given up is *closed*. A reminder that arrives later gets no place. It is still answered with
  room, because its client may have missed the answer to its put. A client that does not know the ticket sends `GiveUp`.
- A client repeats each ask every heartbeat. A ticket without a reminder for `peer_s` loses its place or reservation:
  its client died, was paused, or never knew it. A reservation with reminders never expires.

*Credit* is how much a client may send without asking. It reserves nothing, so an idle client with credit blocks no
other. It is at most a quarter of the free room divided by the number of clients, and none while any put waits. With 80
groups of free room and 4 clients, each may have 80 // (4 * 4) = 5 groups unanswered. A put that was sent on credit and
finds no room after all gets a place in the queue like an ask.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple, Protocol, TypeAlias

from penstock.protocol.messages import Peer

Ticket: TypeAlias = tuple[Peer, int]
MOST_PLACES, MOST_OF_ONE = 1 << 16, 1024
"""Limits on tickets with a place or reservation: of all clients together, and of one client."""
MOST_CREDIT = (64, 64 << 20)
"""Groups and bytes that one client may send without asking."""
_REMEMBERED = 1 << 14
"""Closed tickets that are remembered."""
_TOO_MANY = "too many puts wait for room"


class Amount(NamedTuple):
    groups: int
    bytes: int


NOTHING = Amount(0, 0)


class Space(Protocol):
    """The free room of tables."""

    def no_room(self, table: str, size: int, reserved: Amount) -> str | None:
        """Return why a group of `size` bytes does not fit beside `reserved`, or "" if it does.

        Returns None for a group that will be rejected for good: it needs no room, and sending it gets it the reason.
        """

    def spare(self, reserved: Amount) -> Amount:
        """Return the free room, rounded down, or nothing if tenants share the plane."""


@dataclass(slots=True)
class _Place:
    table: str
    size: int
    since: float
    """When it first asked."""
    heard: float
    """When it last asked."""
    is_reserved: bool = False


class Rooms:
    """Queues, reservations and credit of all producers."""

    def __init__(self, peer_s: float) -> None:
        self._peer_s = peer_s
        self._time = 0.0
        """Advances with `offer`, by at most `peer_s / 4` per call. After a pause of the plane, reminders are still
        unread and must not count as missing."""
        self._now: float | None = None
        self._places: OrderedDict[Ticket, _Place] = OrderedDict()
        """Tickets that wait or have a reservation, least recently heard first."""
        self._queues: dict[str, OrderedDict[Ticket, None]] = {}
        """The queue of each table, in order of arrival."""
        self._reserved: dict[str, Amount] = {}
        self._of: dict[Peer, set[int]] = {}
        """The tickets with a place, by client."""
        self._live: OrderedDict[Peer, float] = OrderedDict()
        """When each client was last heard, least recently first."""
        self._closed: OrderedDict[Ticket, None] = OrderedDict()
        """Recently closed tickets. A forgotten one may get a place again, until its client answers or `peer_s`
        passes."""
        self._asked: dict[Ticket, bool] = {}
        """Tickets to answer at the end of this turn -> whether they wait for room."""
        self._spare: Amount | None = None
        """Free room as of this turn, or None if it was not looked up yet."""

    @property
    def num_waiting(self) -> int:
        return sum(map(len, self._queues.values()))

    @property
    def oldest_s(self) -> float:
        """How long the longest waiting ticket has waited."""
        firsts = [self._places[next(iter(queue))].since for queue in self._queues.values()]
        return self._time - min(firsts, default=self._time)

    @property
    def tickets(self) -> Iterable[Ticket]:
        """All tickets that wait or have a reservation."""
        return self._places.keys()

    def is_waiting(self, ticket: Ticket) -> bool:
        """Return whether a ticket has a place in the queue and no reservation."""
        place = self._places.get(ticket)
        return place is not None and not place.is_reserved

    def reserved(self, table: str) -> Amount:
        return self._reserved.get(table, NOTHING)

    # -------------------------------------------------------------- messages

    def hear(self, peer: Peer, number: int = -1) -> None:
        """Note that a client is alive, and that it still waits for one of its tickets."""
        self._live[peer] = self._time
        self._live.move_to_end(peer)
        if len(self._live) > MOST_PLACES:
            self._live.popitem(last=False)
        place = self._places.get((peer, number))
        if place is not None:
            place.heard = self._time
            self._places.move_to_end((peer, number))

    def ask(self, ticket: Ticket, table: str, size: int, *, waits: bool = True) -> bool:
        """Append to the queue. A repeated ask keeps its position. Returns True if the client may send at once."""
        self.hear(*ticket)
        place = self._places.get(ticket)
        if place.is_reserved if place is not None else ticket in self._closed:
            return True
        if place is None:
            self._enter(ticket, table, size)
        self._asked[ticket] = waits
        return False

    def claim(self, ticket: Ticket, table: str) -> Amount | None:
        """Handle a put that arrived. Returns the room reserved for others, or None if others wait before it."""
        self.hear(*ticket)
        reserved, place = self._reserved.get(table, NOTHING), self._places.get(ticket)
        if place is not None and place.is_reserved and place.table == table:
            # Its own reservation must not count against it. Example: 3 groups reserved in all, one of them for this
            # put: 2 are reserved for others.
            return Amount(reserved.groups - 1, reserved.bytes - place.size)
        queue = self._queues.get(table)
        return reserved if not queue or next(iter(queue)) == ticket else None

    def wait(self, ticket: Ticket, table: str, size: int) -> None:
        """Queue a put that found no room. One whose reservation did not hold goes to the front."""
        place = self._places.get(ticket)
        is_first = place is not None and place.is_reserved
        if place is None or is_first:
            # A reservation does not hold if the frame is larger than its ask claimed.
            self._leave(ticket)
            self._closed.pop(ticket, None)
            if self._enter(ticket, table, size) and is_first:
                self._queues[table].move_to_end(ticket, last=False)

    def close(self, ticket: Ticket) -> None:
        """End a ticket: its put was accepted, rejected or given up."""
        if ticket in self._places:
            self._leave(ticket)
        self._asked.pop(ticket, None)
        self._closed[ticket] = None
        if len(self._closed) > _REMEMBERED:
            self._closed.popitem(last=False)

    def gone(self, peer: Peer) -> None:
        """Remove a client that cannot be reached, with its places and reservations."""
        self._live.pop(peer, None)
        for number in list(self._of.get(peer, ())):
            self._leave((peer, number))

    # -------------------------------------------------------------- the end of a turn

    def offer(self, space: Space, now: float) -> tuple[list[Ticket], list[tuple[Ticket, str]]]:
        """Reserve room in order of arrival while there is some. Returns the tickets that may send, and for the others
        that asked in this turn the reason why not."""
        self._advance(now)
        self._spare = None
        granted: list[Ticket] = []
        if not self._queues and not self._asked:
            return granted, []
        why = {table: self._offer(table, space, granted) for table in list(self._queues)}
        refused = []
        for ticket, waits in self._asked.items():
            place = self._places.get(ticket)
            if place is None:
                if ticket not in self._closed:  # `_enter` found the queue too long
                    refused.append((ticket, _TOO_MANY))
            elif not place.is_reserved:
                refused.append((ticket, why[place.table]))
                if not waits:
                    self._leave(ticket)
        self._asked.clear()
        return granted, refused

    def _offer(self, table: str, space: Space, granted: list[Ticket]) -> str:
        """Grant room to one table's queue. Returns why the next ticket must wait, "" if none is left."""
        for ticket in self._first_of(table):
            place, reserved = self._places[ticket], self.reserved(table)
            why = space.no_room(table, place.size, reserved)
            if why:
                return why
            if why is None:  # rejected for good whenever it is sent: let it come, without a reservation
                self.close(ticket)
            else:
                self._leave_queue(ticket, table)
                place.is_reserved = True
                self._reserved[table] = Amount(reserved.groups + 1, reserved.bytes + place.size)
            granted.append(ticket)
        return ""

    def _first_of(self, table: str) -> Iterator[Ticket]:
        """Yield the first ticket of the queue until it is empty. The caller removes each."""
        while queue := self._queues.get(table):
            yield next(iter(queue))

    def credit(self, space: Space) -> Amount:
        """Return how much a client may send without asking."""
        if self._queues:
            return NOTHING  # a put on credit would overtake those that wait
        # Looked up once per turn, because every answer and pulse carries credit.
        if self._spare is None:
            self._spare = space.spare(self.reserved(""))
        clients = 4 * max(len(self._live), 1)
        groups, size = self._spare.groups // clients, self._spare.bytes // clients
        return Amount(min(groups, MOST_CREDIT[0]), min(size, MOST_CREDIT[1])) if groups and size else NOTHING

    def _advance(self, now: float) -> None:
        """Advance the clock and remove tickets and clients that were silent for too long."""
        # Not the wall clock: after the plane was paused for a minute, all reminders of that minute are still unread in
        # the socket. Advancing by at most a quarter of `peer_s` per turn leaves at least three turns to read them.
        if self._now is not None:
            self._time += min(max(now - self._now, 0.0), self._peer_s / 4)
        self._now = now
        too_old = self._time - self._peer_s
        # Both dicts are ordered by last sign of life, so only expired entries are visited.
        while self._places and next(iter(self._places.values())).heard < too_old:
            self._leave(next(iter(self._places)))
        while self._live and next(iter(self._live.values())) < too_old:
            self._live.popitem(last=False)

    # -------------------------------------------------------------- places

    def _enter(self, ticket: Ticket, table: str, size: int) -> bool:
        """Append a ticket to its queue. Returns False if a limit is reached."""
        peer, number = ticket
        mine = self._of.setdefault(peer, set())
        # Tickets come from peers, so their number is bounded, in total and per client.
        if len(mine) >= MOST_OF_ONE or len(self._places) >= MOST_PLACES:
            if not mine:
                del self._of[peer]
            return False
        mine.add(number)
        self._places[ticket] = _Place(table, max(size, 0), self._time, self._time)
        self._queues.setdefault(table, OrderedDict())[ticket] = None
        return True

    def _leave(self, ticket: Ticket) -> None:
        """Free a ticket's place or reservation, if it has one."""
        place = self._places.pop(ticket, None)
        if place is None:
            return
        peer, number = ticket
        self._of[peer].discard(number)
        if not self._of[peer]:
            del self._of[peer]
        if not place.is_reserved:
            self._leave_queue(ticket, place.table)
            return
        groups, size = self._reserved.pop(place.table)
        if groups > 1:
            self._reserved[place.table] = Amount(groups - 1, size - place.size)

    def _leave_queue(self, ticket: Ticket, table: str) -> None:
        del self._queues[table][ticket]
        if not self._queues[table]:
            del self._queues[table]
