"""The members of a session: which process has which place, its address, and whether it was silent too long."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from typing import TypeAlias

from penstock.protocol.messages import MAX_NAME, SCHEMA, Beat, Hello, Peer
from penstock.protocol.timeouts import Timeouts

Place: TypeAlias = tuple[int, int]
"""(rank, replica)."""
_MAX_NAMED = 8


@dataclass(slots=True, kw_only=True)
class Member:
    """A process that has joined."""

    peer: Peer
    incarnation: str
    start: int
    """The first step it wants, or 0 for the first uncommitted one."""
    heard: float
    sent: dict[int, float] = field(default_factory=dict)
    """Step -> when it was first sent, or last reported as being filled. Removed when received."""
    copies: dict[int, int] = field(default_factory=dict)
    """Step -> how many times it was sent."""
    direct: bool = False
    """Whether it reads samples from storage itself."""
    process: str = ""
    """Its pid and host, for error messages."""
    pid: int = 0
    pid_space: str = ""
    """Where the pid is valid. Empty if unknown."""
    life: str = ""
    """What all sources of its process have in common. Empty if unknown."""
    reports: int = 0
    """The number of its last report that arrived."""
    filling: set[int] = field(default_factory=set)
    """Steps it has and is filling, as of its last beat."""
    unheard: tuple[int, float] | None = None
    """The first pulse it has not confirmed, and when that was sent."""

    def beat(self, beat: Beat, now: float) -> None:
        """Note the pulse a member confirms, the pulse it is about to be sent, and the steps that have reached it."""
        number, heard = beat.number, beat.heard
        # A step that is being filled is not late: restart its deadline with every beat that reports it.
        self.filling = self.sent.keys() & set(beat.filling)
        self.sent |= dict.fromkeys(self.filling, now)
        # Example: pulse 5 is unconfirmed since 10.0. A beat that heard 4 leaves it. A beat that heard 5 confirms it,
        # and the pulse that answers this beat (number 7) is the next to be confirmed.
        if self.unheard is not None and heard >= self.unheard[0]:
            self.unheard = None
        if self.unheard is None and number:
            self.unheard = (number, now)


@dataclass(frozen=True, slots=True)
class Overdue:
    """A process that missed a deadline."""

    place: Place
    step: int | None
    """The step it is late with, or None for the next one."""
    reason: str


class Members:
    """The places of a session and the processes in them. Joining, leaving and lookups take constant time."""

    def __init__(self, run: str, ranks: int, replicas: int) -> None:
        self._run, self._ranks, self._replicas = run, ranks, replicas
        self._every = [(rank, replica) for rank in range(ranks) for replica in range(replicas)]
        self._members: dict[Place, Member] = {}
        self._places: dict[Peer, Place] = {}
        self._inline: frozenset[int] | None = None
        """Cache of `inline_ranks`, or None if it must be computed."""
        self.awaited: set[Place] = set()
        """Processes not heard since the last place was taken. They may be dead."""

    def __len__(self) -> int:
        return len(self._members)

    def __iter__(self) -> Iterator[Place]:
        return iter(self._members)

    def __getitem__(self, place: Place) -> Member:
        return self._members[place]

    def get(self, place: Place) -> Member | None:
        return self._members.get(place)

    @property
    def members(self) -> Collection[Member]:
        return self._members.values()

    @property
    def num_places(self) -> int:
        return len(self._every)

    @property
    def free(self) -> Iterator[Place]:
        """Free places, in order."""
        return (place for place in self._every if place not in self._members)

    @property
    def inline_ranks(self) -> frozenset[int]:
        """Ranks with a process that needs its samples sent."""
        if self._inline is None:
            self._inline = frozenset(rank for (rank, _), member in self._members.items() if not member.direct)
        return self._inline

    def serve_inline(self, place: Place) -> None:
        """Send this process its samples from now on."""
        self._members[place].direct, self._inline = False, None

    def place_of(self, peer: Peer) -> Place | None:
        return self._places.get(peer)

    def join(self, place: Place, member: Member) -> None:
        """Give a place to a process. Removes the process that had it."""
        if place in self._members:
            self.leave(place)
        self._members[place] = member
        self._places[member.peer], self._inline = place, None

    def move(self, place: Place, peer: Peer, now: float) -> None:
        """Note a process's new address. What was in transit to the old address is lost."""
        member = self._members[place]
        self._places.pop(member.peer, None)
        member.peer, member.heard, member.sent, member.copies, member.unheard = peer, now, {}, {}, None
        self._places[peer] = place

    def leave(self, place: Place) -> Member:
        member = self._members.pop(place)
        self._places.pop(member.peer, None)
        self._inline = None
        self.awaited.clear()  # a place is free again
        return member

    def clear(self) -> None:
        self._members, self._places, self._inline, self.awaited = {}, {}, None, set()

    # -------------------------------------------------------------- before the session runs

    def await_silent(self, now: float) -> set[Place]:
        """Await a sign of life from every process not heard at `now`."""
        self.awaited = set(self.silent_since(now))
        return self.awaited

    def was_last_awaited(self, place: Place) -> bool:
        """Note that a process was heard. Returns whether it was the last one awaited."""
        if place not in self.awaited:
            return False
        self.awaited.discard(place)
        return not self.awaited

    def starts(self) -> dict[int, Place]:
        """Return the steps that processes want to begin at, in order of joining, each with one such process."""
        return {member.start: place for place, member in self._members.items() if member.start}

    # -------------------------------------------------------------- liveness

    def excuse(self, gap_s: float) -> None:
        """Extend all deadlines: for `gap_s` seconds the plane itself could not receive."""
        for member in self._members.values():
            member.heard += gap_s
            member.sent = {step: sent + gap_s for step, sent in member.sent.items()}
            if member.unheard is not None:
                member.unheard = (member.unheard[0], member.unheard[1] + gap_s)

    def silent_since(self, time: float) -> list[Place]:
        return [place for place, member in self._members.items() if member.heard < time]

    def overdue(self, timeouts: Timeouts, now: float) -> Overdue | None:
        """Return the first process that missed a deadline to send, receive or acknowledge. None if there is none."""
        for place, member in self._members.items():
            silent = now - member.heard
            if silent > timeouts.peer_s:
                return Overdue(place, None, f"silent for {silent:.1f} s; it died, stopped or was cut off")
            # The process sends but does not receive: only the direction to it is cut. Two heartbeats more than for
            # silence, because a pulse is confirmed by the beat after next at the latest. Example with heartbeat 2 s and
            # peer_s 11: a process paused for 10.9 s still has 4.1 s to confirm.
            if member.unheard is not None and now - member.unheard[1] > timeouts.peer_s + 2 * timeouts.heartbeat_s:
                deaf = now - member.unheard[1]
                return Overdue(place, None, f"has not heard the plane for {deaf:.1f} s; the connection to it is cut")
            for step, sent in member.sent.items():
                if now - sent > timeouts.delivery_s:
                    reason = f"did not acknowledge step {step} within {timeouts.delivery_s:g} s of its delivery"
                    return Overdue(place, step, reason)
        return None

    # -------------------------------------------------------------- texts

    def mismatch(self, hello: Hello) -> str:
        """Return why a process cannot take part, with both values, or "" if it can."""
        for name, text in (
            ("run", hello.run),
            ("incarnation", hello.incarnation),
            ("process", hello.process),
            ("pid_space", hello.pid_space),
            ("life", hello.life),
        ):
            if len(text) > MAX_NAME:
                return f"{name}: {len(text):,} characters, beginning {text[:20]!r}; use at most {MAX_NAME}"
        pairs = (
            ("run", hello.run or self._run, self._run),
            ("world", hello.world, self._ranks),
            ("replicas", hello.replicas, self._replicas),
            ("schema", hello.schema, SCHEMA),
        )
        for name, theirs, ours in pairs:
            if theirs != ours:
                return f"{name}: this process says {theirs!r}, the plane has {ours!r}; start both with the same value"
        if not (0 <= hello.rank < self._ranks and 0 <= hello.replica < self._replicas):
            have = f"{self._ranks} ranks of {self._replicas} processes"
            return f"rank {hello.rank}, replica {hello.replica}: the plane has {have}, counted from 0"
        if hello.step < 0:
            return f"step {hello.step}: steps are counted from 1; 0 is the first uncommitted one"
        return ""

    def names(self, places: Iterable[Place]) -> str:
        """Return the names of the first eight places, "" if there are none."""
        first = list(islice(places, _MAX_NAMED + 1))
        more = ", ..." if len(first) > _MAX_NAMED else ""
        return ", ".join(map(self.name, first[:_MAX_NAMED])) + more

    def name(self, place: Place) -> str:
        return f"rank {place[0]}" + (f" replica {place[1]}" if self._replicas > 1 else "")


def another(process: str) -> str:
    """Return text that names a process other than the reader's.

    >>> another("pid 7 on node-1"), another("")
    ('another process (pid 7 on node-1)', 'another process')
    """
    return f"another process ({process})" if process else "another process"


def is_second_source(known: Member | None, hello: Hello) -> bool:
    """Check whether a process joins in a place that the same process has, through another source."""
    return known is not None and bool(hello.life) and hello.life == known.life
