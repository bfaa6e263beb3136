"""A keeper's line to its plane, as a state machine without I/O or a clock of its own.

It asks which run this is, enlists with the numbers it has, forgets what the plane says nobody wants, and beats. A
plane that restarted does not know it, and it enlists again. It never gives up: while the plane is away, frames are
still given to ranks.

    attach              -> attached(run id)
    enlist + numbers    -> enlisted + numbers to forget
    beat                -> pulse: who else is up, what to forget
    beat                -> unknown                         the plane restarted
    enlist + numbers    -> enlisted + numbers to forget
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from enum import Enum
from typing import Protocol

import msgspec

from penstock.errors import CorruptFrame, Fenced, PeerError, PenstockError
from penstock.send.copies import numbers_of, numbers_to_bytes
from penstock.send.keeper_events import Event, ForgetNumbers, Joined, ToPlane
from penstock.send.keeper_messages import Enlist, Enlisted, KeeperAt, KeeperBeat, KeeperPulse
from penstock.send.message_header import NO_RUN
from penstock.send.messages import Attach, Attached, Foreign, Frames, FromPlane, Refused, Unknown
from penstock.send.timeouts import Timeouts

_MAX_DAMAGED = 1000
"""Damaged frames named in one beat; the others follow when these are forgotten."""


class Membership(Enum):
    ATTACHING = "attaching"
    ENLISTING = "enlisting"
    READY = "ready"


class Store(Protocol):
    """Who has the frames."""

    @property
    def last(self) -> int:
        """The highest number that was ever given out."""

    @property
    def numbers(self) -> list[int]:
        """Of the frames that are kept."""

    @property
    def num_bytes(self) -> int:
        """What they take."""

    def __len__(self) -> int: ...


class KeeperSession:
    """Takes part in a plane's run as one of its keepers."""

    def __init__(self, about: Enlist, store: Store, *, run: str = "", timeouts: Timeouts) -> None:
        """`about` is what the keeper says of itself."""
        self.timeouts = timeouts
        self.membership = Membership.ATTACHING
        self.run_id = NO_RUN
        self.attached: Attached | None = None
        self.terms: Enlisted | None = None
        """What the plane asks of its keepers."""
        self.peers: tuple[KeeperAt, ...] = ()
        """Other keepers that are up, those to copy to first."""
        self.down: tuple[str, ...] = ()
        self.policy_version: int | None = None
        self.failure: PenstockError | None = None
        """Why it can never take part."""
        self.damaged: set[int] = set()
        """Frames that were asked for and cannot be read, until the plane has heard of it."""
        self._about, self._store, self._run = about, store, run
        self._epoch = 0
        self._said = self._beat = float("-inf")
        self._heard: float | None = None
        self._beats = self._batch = self._enlists = 0
        self._reported: tuple[int, tuple[int, ...]] = (0, ())
        """The last beat, and the damage it named: the plane knows of it when it answers."""

    @property
    def is_ready(self) -> bool:
        return self.membership is Membership.READY

    def raise_failure(self) -> None:
        """Raise what keeps it from ever taking part, if anything does."""
        if self.failure is not None:
            raise self.failure

    def silent_s(self, now: float) -> float:
        """How long the plane has said nothing."""
        return 0.0 if self._heard is None else now - self._heard

    def start(self, now: float) -> list[Event]:
        self._heard = now
        return self._ask(now)

    def on_message(self, message: FromPlane, frames: Frames, now: float) -> list[Event]:
        if isinstance(message, Foreign):
            self.failure = Fenced(message.reason)
            return []
        if isinstance(message, Refused):
            self.failure = PeerError(f"the plane refused: {message.reason}")
            return []
        epoch = getattr(message, "epoch", self._epoch)
        if epoch < self._epoch:
            return []  # an old plane that does not know it was replaced
        self._heard, self._epoch = now, epoch
        if isinstance(message, Attached):
            return self._on_attached(message, now)
        if isinstance(message, Unknown):
            return self._on_unknown(now)
        with suppress(CorruptFrame):  # as if it had been lost
            if isinstance(message, Enlisted):
                return self._on_enlisted(message, frames, now)
            if isinstance(message, KeeperPulse):
                return self._on_pulse(message)
        return []

    def on_tick(self, now: float) -> list[Event]:
        """Ask again, beat. Call it at least twice per heartbeat."""
        if self.membership is not Membership.READY:
            return self._ask(now) if now - self._said >= self.timeouts.resend_s else []
        return self.beat(now) if now - self._beat >= self.timeouts.heartbeat_s else []

    def beat(self, now: float) -> list[Event]:
        """A sign of life, now."""
        self._beat, self._beats = now, self._beats + 1
        damaged = tuple(sorted(self.damaged)[:_MAX_DAMAGED])
        self._reported = (self._beats, damaged)
        message = KeeperBeat(
            incarnation=self._about.incarnation,
            number=self._beats,
            num_bytes=self._store.num_bytes,
            num_groups=len(self._store),
            forgot=self._batch,
            damaged=damaged,
        )
        return [ToPlane(message)]

    def _ask(self, now: float) -> list[Event]:
        self._said = now
        if self.run_id == NO_RUN:
            return [ToPlane(Attach(ticket=0, run=self._run))]
        self._enlists += 1
        message = msgspec.structs.replace(self._about, last=self._store.last, number=self._enlists)
        return [ToPlane(message, [numbers_to_bytes(self._store.numbers)])]

    def _on_unknown(self, now: float) -> list[Event]:
        """The plane restarted: enlist again, unless that was just said."""
        if self.membership is not Membership.READY and now - self._said <= self.timeouts.resend_s / 2:
            return []
        self.membership = Membership.ENLISTING
        return self._ask(now)

    def _on_attached(self, message: Attached, now: float) -> list[Event]:
        self.policy_version = message.policy_version
        if self.run_id != NO_RUN:
            return []
        if not message.copies:
            self.failure = PeerError(
                "the plane keeps frames itself; start it with copies (`penstock serve --copies 2`), or no keeper"
            )
            return []
        self.run_id, self.attached, self.membership = message.run_id, message, Membership.ENLISTING
        return self._ask(now)

    def _on_enlisted(self, message: Enlisted, frames: Frames, now: float) -> list[Event]:
        if self.membership is Membership.READY:
            return []  # said twice
        unwanted = numbers_of(frames)
        self.terms, self.membership, self._batch = message, Membership.READY, 0
        events: list[Event] = [Joined(message.clients, message.keepers)]
        return [*events, *self._forget(unwanted), *self.beat(now)]

    def _on_pulse(self, message: KeeperPulse) -> list[Event]:
        unwanted = numbers_of([message.forget])
        self.peers, self.down = message.peers, message.down
        self.policy_version = message.policy_version
        if message.number == self._reported[0]:
            self.damaged -= set(self._reported[1])
        if message.batch <= self._batch or self.membership is not Membership.READY:
            return []
        self._batch = message.batch
        return self._forget(unwanted)

    def _forget(self, numbers: Iterable[int]) -> list[Event]:
        wanted_no_more = tuple(numbers)
        self.damaged -= set(wanted_no_more)
        return [ForgetNumbers(wanted_no_more)] if wanted_no_more else []
