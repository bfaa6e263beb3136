"""Watches a simulated run from outside, and checks what must never happen in it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from penstock.errors import PenstockError, StepAborted
from penstock.protocol.message_header import read_from_plane
from penstock.protocol.messages import Answers, Missing, Put, Room
from penstock.protocol.retry import Out

if TYPE_CHECKING:
    from tests.support.simulated import Rank
    from tests.support.simulated_producer import Producer
    from tests.support.simulation import Simulation


_LEAVES_S = 5.0
"""Bound on the silence after which a waiter must be gone: `peer_s`, messages in flight, a plane that paused."""


class Violated(AssertionError):
    """A promise was broken; the message says which, and the seed that shows it."""


class Oracle:
    """Watches the run from outside and knows what must never happen."""

    def __init__(self, world: Simulation) -> None:
        self._world = world
        self.acked: set[str] = set()
        self.digests: dict[tuple[int, int], str] = {}
        self._received: dict[tuple[int, int], set[int]] = {}
        self._words: dict[tuple[int, int], str] = {}
        self._sent: dict[tuple[object, int], int] = {}
        """By producer and ticket, how many times a group was sent; and how many times the plane asked for it."""
        self._asked: dict[tuple[object, int], int] = {}
        self.waited = 0
        """Turns in which a put waited for room, summed over all puts."""
        self._left: dict[tuple[object, int | None], float] = {}
        """Puts that were cancelled, and producers that died (without a ticket): when."""

    def received(self, rank: Rank, step: int) -> None:
        self._received.setdefault((rank.rank_session.session, step), set()).add(rank.rank)

    def returned(self, rank: Rank, step: int, digest: str) -> None:
        """A rank is about to train a step."""
        have = self._received.get((rank.rank_session.session, step), set())
        self.check(len(have) == self._world.ranks, f"step {step} given out while only ranks {have} have it")
        first = self.digests.setdefault((step, rank.rank), digest)
        self.check(digest == first, f"step {step} of rank {rank.rank} had digest {first}, now {digest}")

    def raised(self, rank: Rank, error: PenstockError) -> None:
        self._world.note(f"{rank.name} raised {type(error).__name__}: {error}")
        if isinstance(error, StepAborted) and rank.rank_session.was_ready:  # else it took part in none
            key = (rank.rank_session.session, rank.rank_session.epoch)
            words = self._words.setdefault(key, str(error))
            self.check(words == str(error), f"session {key[0]} ended as {words!r} and as {error}")

    def sent(self, producer: Producer, out: Out) -> None:
        """A producer says something: a group is not sent again unless the plane asked for it."""
        message = out.message
        if not isinstance(message, Put) or message.location:  # a few bytes: said again until it is answered
            return
        times = self._sent.get((producer.peer, message.ticket), 0)
        asked = self._asked.get((producer.peer, message.ticket), 0)
        self.check(times <= asked, f"{producer.name} sends group {message.group} again without being asked")
        self._sent[producer.peer, message.ticket] = times + 1

    def asked(self, peer: object, header: bytes) -> None:
        """The plane says something to a producer."""
        found = read_from_plane(header)
        for message in found.answers if isinstance(found, Answers) else (found,):
            if isinstance(message, (Missing, Room)):
                ticket = message.put if isinstance(message, Missing) else message.ticket
                self._asked[peer, ticket] = self._asked.get((peer, ticket), 0) + 1

    @property
    def num_left(self) -> int:
        """Puts that were cancelled, and producers that died."""
        return len(self._left)

    def left(self, peer: object, ticket: int | None = None) -> None:
        """A put was cancelled, or a producer died with all it had."""
        self._left[peer, ticket] = self._world.clock.now

    def waiting(self, tickets: Iterable[tuple[object, int]]) -> None:
        """Check that room and places in the queue belong to clients that are there, or were until a moment ago."""
        for peer, ticket in tickets:
            self.waited += 1
            assert isinstance(peer, tuple)  # a transport and a name
            for key in ((peer[1], ticket), (peer[1], None)):
                silent_s = self._world.clock.now - self._left.get(key, self._world.clock.now)
                self.check(silent_s < _LEAVES_S, f"put {ticket} of {peer[1]} waits {silent_s:.1f} s after it left")

    def acknowledged(self, group: str) -> None:
        self.acked.add(group)

    def check(self, good: bool, what: str) -> None:
        if not good:
            raise Violated(f"seed {self._world.seed}, {self._world.clock.now:.3f} s: {what}")
