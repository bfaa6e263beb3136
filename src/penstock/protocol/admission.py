"""The plane's side of the producer protocol: attach, put, wait for room. No I/O, no clock.

The engine checks and counts groups. This module only handles the messages around that:

    on_message      a producer's message -> effects for the caller to carry out
    answer, decided the engine's result  -> the answer to send
    answer_traces   at the end of a turn, when everything that arrived is written: answer questions about groups
    offer_room      at the end of a turn: tell waiting producers to send

`Rooms` decides which producers may send and which wait.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, TypeAlias

import msgspec

from penstock.errors import InvalidInput, Overloaded, PenstockError
from penstock.protocol.effects import Send
from penstock.protocol.lease_messages import AttachValues, ValuesAttached
from penstock.protocol.messages import (
    MAX_NAME,
    MAX_REASON,
    MAX_SIGNED,
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
    OpenSegment,
    Peer,
    Pulse,
    Put,
    Refused,
    Rejected,
    Room,
    SegmentOpened,
    SettleGroup,
    SetWeight,
    SignUrls,
    Trace,
)
from penstock.protocol.rooms import Rooms, Space, Ticket

_NO_WRITER = "metadata without a frame needs a writer key (`penstock keys --writer`); send the frame itself"
_REMEMBERED = 4096
"""Answers to decisions that are kept for repeated questions."""


@dataclass(frozen=True, slots=True)
class Offer:
    """Pass this group to the engine."""

    ticket: Ticket
    put: Put
    """Its digest is empty if the sender gave none. If the frame has another digest, answer with `missing`."""
    frame: Buffer
    """Empty if the sender has written the frame to storage."""


@dataclass(frozen=True, slots=True)
class Decide:
    """Let the engine decide this once, then call `decided` with the result."""

    ticket: Ticket
    message: Discard | SettleGroup | SetWeight | OpenSegment | AttachValues
    frames: Frames = ()


@dataclass(frozen=True, slots=True)
class SignFor:
    """Sign these URLs if this sender may write the objects."""

    ticket: Ticket
    message: SignUrls


Effect: TypeAlias = Send | Offer | Decide | SignFor


class Tables(Space, Protocol):
    """The engine's tables, as far as admission needs them."""

    def table_of(self, run: str) -> str:
        """Return the table for groups of a tenant."""

    def recognises(self, group: str, digest: bytes) -> bool | None:
        """Return True if exactly this group was accepted for training, False if another group has its id, None if the
        id is new."""


class Admission:
    """Answers producers."""

    def __init__(
        self,
        *,
        run: str,
        run_id: bytes,
        epoch: int,
        ranks: int,
        tables: Tables,
        peer_s: float,
        pulse: Callable[[], Pulse],
        storage: str = "",
        seq_len: int = 0,
        drops_long: bool = False,
        max_frame: int = 0,
        may_write: Callable[[Peer], bool] = lambda _peer: False,
        signs: bool = False,
        by_env: bool = False,
    ) -> None:
        """`storage` is where clients may read and write themselves. `may_write` tells whose metadata is trusted. With
        `signs`, clients write with URLs that the plane signs."""
        self._signs, self._by_env = signs, by_env
        self._max_frame, self._drops_long = max_frame, drops_long
        self._storage, self._seq_len, self._may_write = storage, seq_len, may_write
        self._run, self._run_id, self._epoch, self._ranks = run, run_id, epoch, ranks
        self._tables, self._pulse = tables, pulse
        self.rooms = Rooms(peer_s)
        self.policy_version: int | None = None
        """The version of the weights that was published last. Sent with every answer."""
        self._traces: list[tuple[Peer, Trace]] = []
        self._decided: dict[Ticket, FromPlane] = {}
        """Answers to requests that must not take effect twice."""

    # -------------------------------------------------------------- messages

    def on_attach(self, peer: Peer, message: Attach) -> Send:
        if message.run and message.run != self._run:  # two runs whose addresses were mixed up
            theirs = message.run[:MAX_NAME]
            reason = f"run: this process says {theirs!r}, the plane has {self._run!r}; start both with the same value"
            return Send(peer, Refused(epoch=self._epoch, reason=reason))
        self.rooms.hear(peer)
        groups, size = self.rooms.credit(self._tables)
        return Send(
            peer,
            Attached(
                ticket=message.ticket,
                run_id=self._run_id,
                run=self._run,
                epoch=self._epoch,
                ranks=self._ranks,
                policy_version=self.policy_version,
                credit_groups=groups,
                credit_bytes=size,
                storage=self._storage,
                may_write=bool(self._storage) and self._may_write(peer),
                seq_len=self._seq_len,
                max_frame=self._max_frame,
                drops_long=self._drops_long,
                signs=self._signs,
                by_env=self._by_env,
            ),
        )

    def on_foreign(self, peer: Peer, run_id: bytes) -> Send:
        """Answer a message meant for another run."""
        reason = (
            f"this process belongs to run {run_id.hex()[:12]} of an earlier plane, here is run "
            f"{self._run_id.hex()[:12]} ({self._run!r}); nothing was accepted; open it again"
        )
        return Send(peer, Foreign(reason=reason))

    def on_message(
        self,
        peer: Peer,
        message: Put
        | OpenSegment
        | SignUrls
        | Trace
        | AskRoom
        | GiveUp
        | Discard
        | SettleGroup
        | SetWeight
        | AttachValues,
        frames: Frames,
    ) -> list[Effect]:
        if isinstance(message, Put):
            return self._on_put(peer, message, frames)
        if isinstance(message, Trace):
            self.rooms.hear(peer, message.ticket)  # keeps a reservation for this put from expiring
            if not frames:  # a large group may be in transit for minutes on a slow link: show that the plane is alive
                return [self.alive(peer)]
            if (known := self._decided.get((peer, message.ticket))) is not None:
                return [Send(peer, known)]
            # The traced group may have arrived in this very turn and not be written yet: answer when it is.
            self._traces.append((peer, message))
            return []
        if isinstance(message, AskRoom):
            return self._on_ask(peer, message)
        if isinstance(message, GiveUp):
            self.rooms.close((peer, message.ticket))
            return []
        if isinstance(message, SignUrls):
            return [self._on_sign(peer, message)]
        if isinstance(message, AttachValues) and message.stored and not self._may_write(peer):
            return [self.answer((peer, message.ticket), InvalidInput(f"attach {message.column[:80]!r}: {_NO_WRITER}"))]
        known = self._decided.get((peer, message.ticket))
        if known is not None:  # our answer was slow or lost; deciding again would count the samples twice
            return [Send(peer, known)]
        return [Decide((peer, message.ticket), message, frames)]

    def _on_ask(self, peer: Peer, message: AskRoom) -> list[Effect]:
        ticket = (peer, message.ticket)
        if ticket not in self.rooms.tickets:
            known = self._tables.recognises(message.group, message.digest)
            # A group the plane already has needs no room. One that has its id and other content gets room at once, so
            # that its put arrives and is rejected with the reason.
            if known is not None:
                self.rooms.close(ticket)
                return [self.answer(ticket, None, duplicate=True) if known else self._room(ticket)]
        table = self._tables.table_of(message.tenant[:MAX_NAME])
        is_free = self.rooms.ask(ticket, table, message.size, waits=message.waits)
        return [self._room(ticket)] if is_free else []

    def _on_put(self, peer: Peer, message: Put, frames: Frames) -> list[Effect]:
        ticket = (peer, message.ticket)
        reason = ""
        if len(frames) != (0 if message.location else 1):
            reason = f"{len(frames)} frames; send one frame, or none if it is in storage"
        elif message.location and not self._may_write(peer):
            reason = _NO_WRITER
        if reason:
            self.rooms.close(ticket)
            reason = f"group {message.group[:MAX_NAME]!r}: {reason}"
            return [Send(peer, Rejected(ticket=message.ticket, kind="InvalidInput", reason=reason))]
        return [Offer(ticket, message, frames[0] if frames else b"")]

    def _on_sign(self, peer: Peer, message: SignUrls) -> Effect:
        ticket = (peer, message.ticket)
        if not self._signs or not self._may_write(peer):
            return self.answer(ticket, InvalidInput("signed URLs: only for writers, where `sign_puts_s` is set"))
        if message.method not in ("GET", "PUT") or not 0 < len(message.names) <= MAX_SIGNED:
            words = f"signed URLs: {message.method[:20]!r} of {len(message.names):,} objects"
            return self.answer(ticket, InvalidInput(f"{words}; ask for GET or PUT, of 1 to {MAX_SIGNED}"))
        return SignFor(ticket, message)

    # -------------------------------------------------------------- answers

    def answer(
        self,
        ticket: Ticket,
        error: PenstockError | None,
        *,
        duplicate: bool = False,
        stale: bool = False,
        over_length: tuple[int, int, int, int] = (0, 0, 0, 0),
        late: bool = False,
    ) -> Send:
        """Return the answer to a put: accepted, or rejected with an error."""
        peer, number = ticket
        if error is None:
            groups, size = self.rooms.credit(self._tables)
            accepted = Accepted(
                ticket=number,
                duplicate=duplicate,
                policy_version=self.policy_version,
                stale=stale,
                over_length=over_length,
                credit_groups=groups,
                credit_bytes=size,
                late=late,
            )
            return Send(peer, accepted)
        wait = error.retry_after_s if isinstance(error, Overloaded) else 0.0
        reason = str(error)[:MAX_REASON]
        return Send(peer, Rejected(ticket=number, kind=type(error).__name__, reason=reason, retry_after_s=wait))

    def opened(self, ticket: Ticket, segment: str) -> Send:
        """Answer with a registered segment. Repeated requests get the same answer."""
        return self._remember(ticket, Send(ticket[0], SegmentOpened(ticket=ticket[1], segment=segment)))

    def decided(self, ticket: Ticket, error: PenstockError | None) -> Send:
        """Answer a decision. Repeated requests get the same answer."""
        return self._remember(ticket, self.answer(ticket, error))

    def attached(self, ticket: Ticket, error: PenstockError | None, new: int, known: int, late: int) -> Send:
        """Answer values that were attached. Repeated requests get the same answer."""
        if error is not None:
            return self.decided(ticket, error)
        return self._remember(
            ticket, Send(ticket[0], ValuesAttached(ticket=ticket[1], new=new, known=known, late=late))
        )

    def _remember(self, ticket: Ticket, answer: Send) -> Send:
        self._decided[ticket] = answer.message
        while len(self._decided) > _REMEMBERED:
            self._decided.pop(next(iter(self._decided)))  # the oldest: dicts keep insertion order
        return answer

    def alive(self, peer: Peer) -> Send:
        """Return a heartbeat, for a client whose answer takes long."""
        groups, size = self.rooms.credit(self._tables)
        return Send(peer, msgspec.structs.replace(self._pulse(), credit_groups=groups, credit_bytes=size))

    def missing(self, ticket: Ticket) -> Send:
        """Tell the sender that a group did not arrive, or arrived damaged."""
        return Send(ticket[0], Missing(put=ticket[1]))

    def answer_traces(self, is_kept: Callable[[Ticket, str, bytes], bool | None]) -> list[Send]:
        """Answer this turn's traces. `is_kept` returns None for a group whose put will still be answered by itself."""
        if not self._traces:
            return []
        traces, self._traces = self._traces, []
        sends = []
        for peer, trace in traces:
            ticket = (peer, trace.ticket)
            kept = is_kept(ticket, trace.group, trace.digest)
            if kept:
                self.rooms.close(ticket)
                sends.append(self.answer(ticket, None, duplicate=True))
            elif kept is not None:
                sends.append(self._waits(ticket) if self.rooms.is_waiting(ticket) else self.missing(ticket))
        return sends

    # -------------------------------------------------------------- room

    def offer_room(self, now: float) -> list[Send]:
        """Tell waiting producers to send, in order, while there is room. Tell the others why they wait."""
        granted, refused = self.rooms.offer(self._tables, now)
        if not granted and not refused:
            return []
        return [*map(self._room, granted), *(self._waits(ticket, why) for ticket, why in refused)]

    def _room(self, ticket: Ticket) -> Send:
        return Send(ticket[0], Room(ticket=ticket[1], policy_version=self.policy_version))

    def _waits(self, ticket: Ticket, why: str = "it waits for room") -> Send:
        return self.answer(ticket, Overloaded(why))
