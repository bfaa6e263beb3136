"""Leases groups that lack a column to scoring workers, with what they must read to score them.

If no group lacks the column, the answer waits for one, at most for a heartbeat; then the worker asks again. Hand-outs
are written with the other leases of the turn. A worker that cannot read storage gets the samples with the answer,
gathered on a worker thread.

If a group cannot be read, the plane reads its frame. A group whose frame is damaged or gone is dropped as lost: it
could never get its column.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from itertools import islice
from typing import NamedTuple, TypeAlias

from penstock.errors import CorruptFrame, DiskFull, InvalidInput, PenstockError, StorageError
from penstock.frames import GroupMetadata
from penstock.log import HandOut, ReturnLeases
from penstock.plane.damage import Look, lose
from penstock.plane.engine import Engine
from penstock.plane.late_groups import COLUMN, key_of, read_key
from penstock.plane.leases import MAX_LEASE_S, MIN_LEASE_S, Leases
from penstock.plane.recorder import failure_text
from penstock.plane.step_builder import pieces_of
from penstock.plane.workers import Workers
from penstock.protocol import (
    MAX_NAME,
    MAX_SCORED,
    Admission,
    ColumnsLeased,
    Frames,
    FromPlane,
    LeaseColumns,
    Peer,
    PickedGroup,
    Send,
    StepPicks,
)
from penstock.storage import DamagedFrame, Pick, gather_picks

logger = logging.getLogger("penstock.plane")
Ticket: TypeAlias = tuple[Peer, int]
_REMEMBERED = 1024
"""Answers that are remembered: if one is lost, its worker asks again and gets the same leases."""


class _Wanted(NamedTuple):
    message: LeaseColumns
    until: float


class ColumnLeases:
    """Answers scoring workers. Runs on the loop's thread."""

    def __init__(
        self,
        engine: Engine,
        leases: Leases,
        workers: Workers,
        admission: Admission,
        send: Callable[[Send], None],
        look: Look,
    ) -> None:
        self._engine, self._leases, self._workers = engine, leases, workers
        self._admission, self._send = admission, send
        self._hold_s = engine.settings.timeouts.heartbeat_s
        """How long a worker waits for an answer without groups."""
        self._waiting: dict[Ticket, _Wanted] = {}
        """In the order in which they asked."""
        self._granted: dict[Ticket, tuple[str, ...]] = {}
        self._reading: set[Ticket] = set()
        """Answers whose samples are being read. A repeated request must not have them read again: reading that takes
        longer than the pause between requests would fall further and further behind."""
        self._look = look
        self._looking: set[int] = set()
        """Groups whose frames are being read, by op."""
        self._bad: dict[int, str] = {}
        """Groups whose frames are unusable, and why. They wait here while a step is being planned."""
        leases.doubts[COLUMN] = lambda lease: self._doubt(read_key(lease.key)[0])

    def doubt(self, group: str) -> None:
        """Read the frame of a group that could not be read."""
        self._doubt(self._engine.state.by_id.get(group, 0))

    def _reply(self, ticket: Ticket, found: FromPlane | PenstockError, frames: Frames = ()) -> None:
        if isinstance(found, PenstockError):
            self._send(self._admission.answer(ticket, found))
        else:
            self._send(Send(ticket[0], found, frames))

    def on_message(self, peer: Peer, message: LeaseColumns, now: float) -> None:
        ticket = (peer, message.ticket)
        try:
            _check(message)
            self._check_column(message.column)
        except InvalidInput as error:
            self._reply(ticket, error)
            return
        if ticket in self._reading:
            self._send(self._admission.alive(peer))
            return
        if ticket in self._granted:  # the answer was lost
            self._hand_over(ticket, message, self._granted[ticket], None)
        elif ticket not in self._waiting:
            self._waiting[ticket] = _Wanted(message, now + self._hold_s)

    def _check_column(self, column: str) -> None:
        """Reject a column that no group will ever wait for, such as a misspelt one: its worker would wait forever."""
        known = self._engine.settings.late_columns
        if column not in known and column not in self._engine.state.late.free:
            waits = f"its groups wait for {', '.join(known)}" if known else "its groups wait for no column"
            raise InvalidInput(
                f"lacking {column!r:.60}: {waits}; open the plane with {column!r:.60} in `needs`, and with "
                "`needs_deadline_s`"
            )

    def turn(self, now: float) -> None:
        """Hand out groups to the workers that wait. Costs nothing while none waits. Call it before the leases' turn."""
        if self._bad and not self._engine.state.is_drawing:
            bad, self._bad = self._bad, {}
            with suppress(DiskFull):  # it is found again when somebody reads it
                lose(self._engine, {op: why for op, why in bad.items() if op in self._engine.state.late.waiting})
        if not self._waiting:
            return
        # One iterator per column, shared by all workers: what one takes is not offered to the next.
        free: dict[str, Iterator[int]] = {}
        for ticket, wanted in list(self._waiting.items()):
            message = wanted.message
            if message.column not in free:
                free[message.column] = iter(self._engine.state.late.free.get(message.column, ()))
            taken = list(islice(free[message.column], message.groups))
            if taken:
                keys = tuple(key_of(op, message.column) for op in taken)
                record = HandOut(kind=COLUMN, keys=keys, worker=message.worker, lease_s=message.lease_s)
                self._leases.decide(record, partial(self._hand_over, ticket, message, keys))
            elif now >= wanted.until:
                self._reply(ticket, ColumnsLeased(ticket=message.ticket))
            else:
                continue
            del self._waiting[ticket]

    def _hand_over(
        self, ticket: Ticket, message: LeaseColumns, keys: Sequence[str], error: PenstockError | None
    ) -> None:
        """Answer a worker, once its leases are in the log."""
        if error is not None:
            self._reply(ticket, error)
            return
        self._granted[ticket] = tuple(keys)
        while len(self._granted) > _REMEMBERED:
            del self._granted[next(iter(self._granted))]
        state, numbers, picked = self._engine.state, [], []
        for key in keys:
            op, column = read_key(key)
            number = state.leases.number_of(COLUMN, key)
            if number is None or op not in state.late.waiting:
                continue  # it got its values meanwhile
            numbers.append(number)
            picked.append(self._picked(op, state.late.waiting[op].lacks(column)))
        answer = ColumnsLeased(
            ticket=message.ticket, leases=tuple(numbers), picks=StepPicks(groups=tuple(picked)).to_bytes()
        )
        if message.direct or not picked:
            self._reply(ticket, answer)
            return
        picks = [Pick(one.location, one.group, one.rows) for one in picked]
        job = partial(_gathered, self._engine, picks)
        self._reading.add(ticket)
        self._workers.submit("score", job, partial(self._gathered, ticket, answer))

    def _picked(self, op: int, rows: Sequence[int]) -> PickedGroup:
        row, data = self._engine.state.rows[op], self._engine.log.metadata(op)
        assert data is not None  # kept for as long as the group waits
        metadata = GroupMetadata.from_bytes(data)
        return PickedGroup(
            group=row.id,
            location=row.location,
            rows=tuple(rows),
            front=metadata.front,
            digests=tuple(metadata.digests[i] for i in rows),
        )

    def _gathered(self, ticket: Ticket, answer: ColumnsLeased, result: Frames | Exception) -> None:
        self._reading.discard(ticket)
        if isinstance(result, Exception):
            error = result if isinstance(result, PenstockError) else StorageError(failure_text(result))
            if isinstance(result, DamagedFrame):  # a kind of error that clients know
                error = CorruptFrame(str(result))
            self._leases.decide(ReturnLeases(leases=answer.leases), lambda _: self._reply(ticket, error))
            self._granted.pop(ticket, None)
            if isinstance(result, DamagedFrame):
                self.doubt(result.group)
        else:
            self._reply(ticket, answer, result)

    # -------------------------------------------------------------- damage

    def _doubt(self, op: int) -> None:
        state, data = self._engine.state, self._engine.log.metadata(op)
        if op not in state.late.waiting or data is None or op in self._looking:
            return
        self._looking.add(op)
        location = state.rows[op].location
        job = partial(self._look, self._engine.storage, location, data)
        self._workers.submit("verify", job, partial(self._looked, op, location))

    def _looked(self, op: int, location: str, result: CorruptFrame | Exception | None) -> None:
        self._looking.discard(op)
        row = self._engine.state.rows.get(op)
        # If the group got late columns meanwhile, it has another frame, and the one that was read is deleted.
        if isinstance(result, CorruptFrame) and row is not None and row.location == location:
            logger.warning("group %r, which waits for columns: %s; dropped as lost", row.id, result)
            self._bad[op] = str(result)


def _gathered(engine: Engine, picks: Sequence[Pick]) -> Frames:
    """Read samples from storage. Runs on a worker thread."""
    (payload,) = gather_picks(engine.storage, [picks])
    return pieces_of(payload)


def _check(message: LeaseColumns) -> None:
    if not 0 < message.groups <= MAX_SCORED:
        raise InvalidInput(f"lacking: {message.groups} groups; lease 1 to {MAX_SCORED} at once")
    if not MIN_LEASE_S <= message.lease_s <= MAX_LEASE_S:
        raise InvalidInput(f"lease_s: {message.lease_s:g}; give {MIN_LEASE_S:g} to {MAX_LEASE_S:g} seconds")
    if len(message.worker) > MAX_NAME:
        raise InvalidInput(f"worker: {len(message.worker)} characters; give at most {MAX_NAME}")
