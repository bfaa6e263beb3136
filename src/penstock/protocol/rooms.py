"""Decides who may send a group now and who waits: one waiting line per table. No I/O, no clock.

A *ticket* is one put of one client. It asks for room with `ask`, gets a place in its table's line, and `offer` reserves
room for the first in line as soon as there is some. A reservation is used by the put itself (`claim`, then `close`).

    ask(a), ask(b)     line: a, b        the table is full
    offer              line: b           a step was committed: one group fits, reserved for a
    ask(a)             line: b           a reminder: told again to send, nothing changes
    claim(c)           None              c sent without asking; b waits before it, so c waits too
    claim(a), close(a)                   the put came and takes the room that was reserved for it

Three rules keep the line free of tickets that no client waits for:

- Asks, puts and give-ups take effect in the order in which they arrive, at once.
- A ticket that was put or given up is *closed*. A reminder that arrives later gets no place. It is still told to send,
  because its client may have missed the answer to its put. A client that does not know the ticket answers `GiveUp`.
- A client reminds of each ticket every heartbeat. A ticket that was not mentioned for `peer_s` loses its place or its
  reservation. Its client died, stood still, or never knew it. A reminded reservation never expires.

*Credit* is how much a client may send without asking. It reserves nothing, so an idle client with credit holds up
nobody. It is at most a quarter of the free room divided by the number of clients, and none while anybody waits. A put
that was sent on credit and finds no room after all gets a place in line like an ask.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple, Protocol, TypeAlias

from penstock.protocol.messages import Peer

Ticket: TypeAlias = tuple[Peer, int]
MOST_PLACES, MOST_OF_ONE = 1 << 16, 1024
"""Tickets with a place or a reservation: of all clients together, and of one."""
MOST_CREDIT = (64, 64 << 20)
"""Groups and bytes that one client may send without asking."""
_REMEMBERED = 1 << 14
_TOO_MANY = "too many puts wait for room"


class Amount(NamedTuple):
    groups: int
    bytes: int


NOTHING = Amount(0, 0)


class Space(Protocol):
    """Knows how much a table may hold."""

    def no_room(self, table: str, size: int, reserved: Amount) -> str | None:
        """Return why a group of `size` bytes does not fit beside `reserved`, or "" if it does. None: it will be
        rejected for good, so it should come and needs no room."""

    def spare(self, reserved: Amount) -> Amount:
        """Return the room that is free, rounded down; nothing where tables are shared between tenants."""


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
    """Waiting lines, reservations and credit of all producers."""

    def __init__(self, peer_s: float) -> None:
        self._peer_s = peer_s
        self._time = 0.0
        """Advances with `offer`, and slowly if the plane stood still: reminders sent meanwhile are still unread."""
        self._now: float | None = None
        self._places: OrderedDict[Ticket, _Place] = OrderedDict()
        """Those that wait and those with a reservation, least recently heard first."""
        self._lines: dict[str, OrderedDict[Ticket, None]] = {}
        """Per table, those that wait in order of arrival."""
        self._reserved: dict[str, Amount] = {}
        self._of: dict[Peer, set[int]] = {}
        """The tickets with a place, by client."""
        self._live: OrderedDict[Peer, float] = OrderedDict()
        """When each client was last heard, least recently first."""
        self._closed: OrderedDict[Ticket, None] = OrderedDict()
        """Recently closed. One that is forgotten may get a place again, until its client answers or `peer_s` passed."""
        self._asked: dict[Ticket, bool] = {}
        """Those to answer at the end of this turn -> whether they wait for room."""
        self._spare: Amount | None = None
        """Free room as of this turn; None if it was not looked up yet."""

    @property
    def num_waiting(self) -> int:
        return sum(map(len, self._lines.values()))

    @property
    def oldest_s(self) -> float:
        """How long the first in line has waited."""
        firsts = [self._places[next(iter(line))].since for line in self._lines.values()]
        return self._time - min(firsts, default=self._time)

    @property
    def tickets(self) -> Iterable[Ticket]:
        """All that wait or have room reserved."""
        return self._places.keys()

    def is_waiting(self, ticket: Ticket) -> bool:
        """Whether it has a place in line and no reservation."""
        place = self._places.get(ticket)
        return place is not None and not place.is_reserved

    def reserved(self, table: str) -> Amount:
        return self._reserved.get(table, NOTHING)

    # -------------------------------------------------------------- messages

    def hear(self, peer: Peer, number: int = -1) -> None:
        """A client gave a sign of life, maybe about one of its tickets."""
        self._live[peer] = self._time
        self._live.move_to_end(peer)
        if len(self._live) > MOST_PLACES:
            self._live.popitem(last=False)
        place = self._places.get((peer, number))
        if place is not None:
            place.heard = self._time
            self._places.move_to_end((peer, number))

    def ask(self, ticket: Ticket, table: str, size: int, *, waits: bool = True) -> bool:
        """Append to the waiting line; a repeated ask keeps its position. True: tell it at once to send."""
        self.hear(*ticket)
        place = self._places.get(ticket)
        if place.is_reserved if place is not None else ticket in self._closed:
            return True
        if place is None:
            self._enter(ticket, table, size)
        self._asked[ticket] = waits
        return False

    def claim(self, ticket: Ticket, table: str) -> Amount | None:
        """A put arrived. Return what is reserved for others, or None if others wait before it."""
        self.hear(*ticket)
        reserved, place = self.reserved(table), self._places.get(ticket)
        if place is not None and place.is_reserved and place.table == table:
            return Amount(reserved.groups - 1, reserved.bytes - place.size)
        line = self._lines.get(table)
        return reserved if not line or next(iter(line)) == ticket else None

    def wait(self, ticket: Ticket, table: str, size: int) -> None:
        """A put found no room: it waits like an ask. One whose reservation did not hold goes first."""
        place = self._places.get(ticket)
        is_first = place is not None and place.is_reserved
        if place is None or is_first:
            self._leave(ticket)
            self._closed.pop(ticket, None)
            if self._enter(ticket, table, size) and is_first:
                self._lines[table].move_to_end(ticket, last=False)

    def close(self, ticket: Ticket) -> None:
        """A put was accepted or rejected, or given up: nothing more is to come of it."""
        self._leave(ticket)
        self._asked.pop(ticket, None)
        self._closed[ticket] = None
        if len(self._closed) > _REMEMBERED:
            self._closed.popitem(last=False)

    def gone(self, peer: Peer) -> None:
        """A client cannot be reached: it leaves the line, and its reservations are free."""
        self._live.pop(peer, None)
        for number in list(self._of.get(peer, ())):
            self._leave((peer, number))

    # -------------------------------------------------------------- the end of a turn

    def offer(self, space: Space, now: float) -> tuple[list[Ticket], list[tuple[Ticket, str]]]:
        """Reserve room for the first in line while there is some. Return who may send, and whom to tell why not."""
        self._advance(now)
        self._spare = None
        granted: list[Ticket] = []
        why = {table: self._offer(table, space, granted) for table in list(self._lines)}
        refused = []
        for ticket, waits in self._asked.items():
            place = self._places.get(ticket)
            if place is None:
                if ticket not in self._closed:
                    refused.append((ticket, _TOO_MANY))
            elif not place.is_reserved:
                refused.append((ticket, why[place.table]))
                if not waits:
                    self._leave(ticket)
        self._asked.clear()
        return granted, refused

    def _offer(self, table: str, space: Space, granted: list[Ticket]) -> str:
        """Return why the next in line must wait."""
        for ticket in self._line(table):
            place, reserved = self._places[ticket], self.reserved(table)
            why = space.no_room(table, place.size, reserved)
            if why:
                return why
            if why is None:
                self.close(ticket)
            else:
                self._leave_line(ticket, table)
                place.is_reserved = True
                self._reserved[table] = Amount(reserved.groups + 1, reserved.bytes + place.size)
            granted.append(ticket)
        return ""

    def _line(self, table: str) -> Iterator[Ticket]:
        """The first in line, as often as it is asked for."""
        while line := self._lines.get(table):
            yield next(iter(line))

    def credit(self, space: Space) -> Amount:
        """Return how much a client may send without asking."""
        if self._lines:
            return NOTHING
        if self._spare is None:
            self._spare = space.spare(self.reserved(""))
        groups, size = (free // (4 * max(len(self._live), 1)) for free in self._spare)
        return Amount(min(groups, MOST_CREDIT[0]), min(size, MOST_CREDIT[1])) if groups and size else NOTHING

    def _advance(self, now: float) -> None:
        """Let time pass. Whoever was silent for too long has left."""
        if self._now is not None:
            self._time += min(max(now - self._now, 0.0), self._peer_s / 4)
        self._now = now
        too_old = self._time - self._peer_s
        while self._places and next(iter(self._places.values())).heard < too_old:
            self._leave(next(iter(self._places)))
        while self._live and next(iter(self._live.values())) < too_old:
            self._live.popitem(last=False)

    # -------------------------------------------------------------- places

    def _enter(self, ticket: Ticket, table: str, size: int) -> bool:
        """Go to the end of the line; False if it is too long."""
        peer, number = ticket
        mine = self._of.setdefault(peer, set())
        if len(mine) >= MOST_OF_ONE or len(self._places) >= MOST_PLACES:
            if not mine:
                del self._of[peer]
            return False
        mine.add(number)
        self._places[ticket] = _Place(table, max(size, 0), self._time, self._time)
        self._lines.setdefault(table, OrderedDict())[ticket] = None
        return True

    def _leave(self, ticket: Ticket) -> None:
        """Give up its place or its reservation, if it has one."""
        place = self._places.pop(ticket, None)
        if place is None:
            return
        peer, number = ticket
        self._of[peer].discard(number)
        if not self._of[peer]:
            del self._of[peer]
        if not place.is_reserved:
            self._leave_line(ticket, place.table)
            return
        groups, size = self._reserved.pop(place.table)
        if groups > 1:
            self._reserved[place.table] = Amount(groups - 1, size - place.size)

    def _leave_line(self, ticket: Ticket, table: str) -> None:
        del self._lines[table][ticket]
        if not self._lines[table]:
            del self._lines[table]
