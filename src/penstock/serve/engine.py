"""The plane's decisions, one call at a time: take groups in, plan steps, follow what ranks report.

Nothing here waits, talks or looks at a clock. Each decision is in the log before it is in the books and before
anybody hears of it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import msgspec
import xxhash

from penstock.errors import (
    CallerError,
    Conflict,
    CorruptFrame,
    InvalidInput,
    Overloaded,
    PeerError,
    PenstockError,
    WaitTimeout,
)
from penstock.hold import Table
from penstock.hold.table import MAX_PRIORITY
from penstock.send.effects import Staged
from penstock.send.messages import Buffer
from penstock.serve.book import Book, Manifest, without_frame
from penstock.serve.ledger import Ledger
from penstock.serve.log import EventRow, GroupRow, Log, State
from penstock.serve.making import Maker, StepMaker
from penstock.serve.settings import PlaneSettings

_RETRY_AFTER_S = 0.25


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a put: an error, or nothing."""

    ticket: object
    error: PenstockError | None = None
    duplicate: bool = False


@dataclass(slots=True)
class _Arrival:
    """A group that waits for the next write, and everybody who waits for it."""

    row: GroupRow
    tickets: list[object]


class Engine:
    """Decides, writes down, does."""

    def __init__(self, settings: PlaneSettings, log: Log, *, maker: Maker | None = None) -> None:
        self.settings, self.log = settings, log
        self.counts: Counter[str] = Counter()
        """What happened since this plane started, for `penstock top`."""
        self.numbers: dict[str, float] = {}
        """The last metrics that ranks reported, by name."""
        self.is_full = False
        """A put was refused for want of room since the last time some became free."""
        self._maker = maker or StepMaker(settings.packing)
        self._arrivals: dict[str, _Arrival] = {}
        self._arriving_bytes = 0
        self._rebuild()

    def _rebuild(self) -> None:
        self.book = Book.rebuild(self.log, self.settings.replay, retain_steps=self.settings.retain_steps)

    def close(self) -> None:
        """Write down what may wait for the next decision: there is none."""
        with self._transaction():
            pass

    # -------------------------------------------------------------- looking

    @property
    def ledger(self) -> Ledger:
        return self.book.ledger

    @property
    def table(self) -> Table:
        return self.book.table

    @property
    def next_step(self) -> int:
        return self.book.next_step

    @property
    def last_step(self) -> int:
        return self.book.last_step

    @property
    def policy_version(self) -> int:
        return self.book.policy_version

    @property
    def held_bytes(self) -> int:
        return self.book.held_bytes

    # -------------------------------------------------------------- groups in

    def put(self, ticket: object, group: str, frame: Buffer) -> Outcome | None:
        """Check a group and queue it for the next `flush`; an outcome is returned only if it needs no writing."""
        try:
            return self._put(ticket, group, frame)
        except PenstockError as error:
            self.counts["puts_overloaded" if isinstance(error, Overloaded) else "puts_refused"] += 1
            return Outcome(ticket, error)

    def _put(self, ticket: object, group: str, frame: Buffer) -> Outcome | None:
        digest = xxhash.xxh3_128_digest(frame)
        arrival = self._arrivals.get(group)
        known = arrival.row.digest if arrival else self.log.digest_of(group)
        if known is not None:
            self.counts["puts_repeated"] += 1
            if known != digest:
                raise Conflict(f"group {group!r}: accepted before with other content; give each group its own id")
            if arrival is None:
                return Outcome(ticket, duplicate=True)
            arrival.tickets.append(ticket)  # it is not durable yet: the answer must wait
            return None
        facts = self._maker.look(group, frame)
        self._check_room(group, len(frame))
        row = GroupRow(
            op=0,
            id=group,
            digest=digest,
            policy_version=facts.policy_version,
            samples=facts.samples,
            tokens=facts.tokens,
            size=len(frame),
            frame=bytes(frame) if isinstance(frame, bytearray) else frame,
        )
        self._arrivals[group] = _Arrival(row, [ticket])
        self._arriving_bytes += row.size
        return None

    def _check_room(self, group: str, size: int) -> None:
        limit, waiting = self.settings.max_held_bytes, self.held_bytes + self._arriving_bytes
        if size > limit:
            raise InvalidInput(f"group {group!r}: {size:,} bytes; at most max_held_bytes, {limit:,}, are ever held")
        self.log.check_room(self._arriving_bytes + size)
        if waiting + size > limit or not self.table.may_insert(ahead=len(self._arrivals)):
            self.is_full = True
            groups, capacity = len(self.table) + len(self._arrivals), self.settings.replay.capacity
            raise Overloaded(
                f"group {group!r}: {waiting:,} bytes in {groups} groups wait for the trainer, the limits are "
                f"{limit:,} bytes and {capacity} groups, {self.table.settings.limiter}; try again later",
                retry_after_s=_RETRY_AFTER_S,
            )

    def flush(self) -> list[Outcome]:
        """Write what was put since the last time, as one transaction; what is returned without error is durable."""
        if not self._arrivals:
            return []
        arrivals, self._arrivals, self._arriving_bytes = list(self._arrivals.values()), {}, 0
        rows = [replace(arrival.row, op=self.book.op + i) for i, arrival in enumerate(arrivals, start=1)]
        try:
            with self._transaction():
                self.log.add_groups(rows)
        except PenstockError as error:
            self.counts["puts_failed"] += len(rows)
            return [Outcome(ticket, error) for arrival in arrivals for ticket in arrival.tickets]
        for row in rows:
            self.book.take_in(without_frame(row))
        self.counts["groups"] += len(rows)
        self.counts["samples"] += sum(row.samples for row in rows)
        self.counts["tokens"] += sum(row.tokens for row in rows)
        return [Outcome(ticket, duplicate=i > 0) for arrival in arrivals for i, ticket in enumerate(arrival.tickets)]

    def discard(self, reason: str, samples: int) -> None:
        """Count samples that were filtered out before they were put."""
        self._decide("discard", (reason, samples))

    # -------------------------------------------------------------- steps out

    def plan_step(self, step: int) -> Staged | str:
        """Plan a step and make it durable; or say in words what is missing for it."""
        assert step == self.last_step + 1
        count = self._draw_count()
        if isinstance(count, str):
            return count
        try:
            ops = self.book.draw(count)
        except WaitTimeout as error:
            return f"generation: {error}"
        try:
            return self._plan(step, ops)
        except PenstockError as error:
            self._rebuild()  # the draw did not happen: the log knows nothing of it
            if not isinstance(error, (CallerError, PeerError)) or not self._quarantine(ops, error):
                raise
        return self.plan_step(step)

    def _plan(self, step: int, ops: tuple[int, ...]) -> Staged:
        made = self._maker.make(step, self._frames(ops))
        stale = [self.policy_version - self.book.rows[op].policy_version for op in ops]
        manifest = Manifest(
            groups=ops,
            shares=made.shares,
            digests=tuple(made.staged.digests),
            policy_version=self.policy_version,
            samples=made.samples,
            tokens=made.tokens,
            loss_tokens=made.loss_tokens,
            staleness=(min(stale), sum(stale), max(stale)),
        )
        number = self.book.op + 1
        with self._transaction():
            self.log.add_step(step, number, msgspec.msgpack.encode(manifest))
            self.log.count_uses(ops)
        self.book.plan(number, step, manifest)
        return made.staged

    def stage_again(self, step: int) -> Staged:
        """Make the bytes of a planned step anew; they are the same as the first time, or this raises."""
        manifest = self.book.steps[step]
        staged = self._maker.again(step, self._frames(manifest.groups), manifest.shares)
        if tuple(staged.digests) != manifest.digests:
            raise CorruptFrame(f"step {step}: made again, its bytes differ from those recorded; the log was altered")
        return staged

    def _draw_count(self) -> int | str:
        """How many groups the next step takes; or what is missing."""
        target, held = self.settings.target, len(self.table)
        if target.groups is not None:
            return target.groups if held >= target.groups else f"generation: {held} of {target.groups} groups"
        by_samples = target.samples is not None
        need = target.samples if target.samples is not None else target.tokens
        assert need is not None
        have = self.ledger.held if by_samples else self.book.held_tokens
        if have < need:
            return f"generation: {have} of {target}"
        have = taken = 0
        keys = self.table.keys()
        for key in keys:
            row = self.book.rows[self.book.by_id[str(key)]]
            have, taken = have + (row.samples if by_samples else row.tokens), taken + 1
            if have >= need:
                break
        return taken

    def _frames(self, ops: Sequence[int]) -> list[Buffer]:
        frames: list[Buffer] = []
        for op in ops:
            frame = self.log.frame(op)
            if frame is None:
                raise CorruptFrame(f"group number {op}: its frame was given back; raise retain_steps")
            frames.append(frame)
        return frames

    def _quarantine(self, ops: Sequence[int], error: PenstockError) -> bool:
        """Set aside groups no step can be made with, so that one of them does not stop all others; False if none."""
        bad = {ops[i]: str(error)[:500] for i in self._maker.misfits(self._frames(ops))}
        if bad:
            self._decide("quarantine", bad)
            self.counts["groups_quarantined"] += len(bad)
        return bool(bad)

    # -------------------------------------------------------------- what ranks report

    def received(self, step: int) -> None:
        """Every rank has the step."""
        if self.book.states.get(step) is State.SCHEDULED:
            self.book.set_step(step, State.DELIVERED)

    def commit(self, step: int, policy_version: int | None) -> None:
        """Every rank has trained the step."""
        assert step == self.next_step
        event = None
        if policy_version is not None and policy_version > self.policy_version:
            event = EventRow(self.book.op + 1, "advance", msgspec.msgpack.encode(policy_version))
        with self._transaction():
            self.log.set_meta("next_step", step + 1)
            if event is not None:
                self.log.add_event(event)
        self.book.begin_at(step + 1)
        if event is not None:
            self.book.redo(event)
        self.is_full = False

    def report(self, priorities: dict[str, float], metrics: dict[str, float]) -> None:
        """New priorities, by group or sample id (of a group's samples the largest counts), and numbers to show."""
        self.numbers.update(metrics)
        found: dict[str, float] = {}
        for name, value in priorities.items():
            if not 0.0 <= value <= MAX_PRIORITY:
                raise InvalidInput(f"priority of {name!r}: {value}; give a finite number from 0 to {MAX_PRIORITY:g}")
            group = name if name in self.table else name.rpartition("/")[0]
            if group in self.table:
                found[group] = max(value, found.get(group, 0.0))
            else:
                self.counts["priorities_unknown"] += 1
        if found:
            self._decide("priorities", found)

    def resume(self, session: int, step: int) -> None:
        """A trainer begins at `step`: what comes before counts as trained, what comes after is served again."""
        if step > self.last_step + 1:
            raise InvalidInput(
                f"resume at step {step}: only {self.last_step} steps were ever planned; "
                "this checkpoint is of another run, or of a later copy of its folder"
            )
        oldest = min(self.book.oldest_step, self.next_step)
        if step < oldest:
            raise InvalidInput(f"resume at step {step}: steps before {oldest} were given back; raise retain_steps")
        with self._transaction():
            self.log.set_meta("session", session)
            self.log.set_meta("next_step", step)
        self.book.begin_at(step)

    # -------------------------------------------------------------- inside

    def _decide(self, kind: str, data: object) -> None:
        event = EventRow(self.book.op + 1, kind, msgspec.msgpack.encode(data))
        with self._transaction():
            self.log.add_event(event)
        self.book.redo(event)

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        with self.log.transaction():
            yield
            self.book.write(self.log)
        self.book.written()
