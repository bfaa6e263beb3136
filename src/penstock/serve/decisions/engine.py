"""The plane's decisions, one call at a time: take groups in, plan steps, follow what ranks report.

Nothing here waits, talks or looks at a clock. Each decision is in the log before it is in the books and before
anybody hears of it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import msgspec
import xxhash

from penstock.errors import (
    CallerError,
    Conflict,
    CorruptFrame,
    DiskFull,
    InvalidInput,
    Overloaded,
    PeerError,
    PenstockError,
    UnknownKey,
    WaitTimeout,
)
from penstock.hold.table import MAX_PRIORITY
from penstock.send.messages import Buffer
from penstock.send.steps import Staged
from penstock.serve.decisions.ledger import Ledger
from penstock.serve.decisions.log import EventRow, GroupRow, Log, State
from penstock.serve.decisions.run_tables import RunTables
from penstock.serve.decisions.state import Manifest, PlaneState, without_frame
from penstock.serve.decisions.step_builder import Builder, StepBuilder
from penstock.serve.settings import PlaneSettings

_RETRY_AFTER_S = 0.25


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a put: an error, or nothing."""

    ticket: object
    error: PenstockError | None = None
    duplicate: bool = False
    stale: bool = False
    """It was too old, and dropped as it came."""


@dataclass(slots=True)
class _Arrival:
    """A group that waits for the next write, and everybody who waits for it."""

    row: GroupRow
    tickets: list[object]


class Engine:
    """Decides, writes down, does."""

    def __init__(self, settings: PlaneSettings, log: Log, *, builder: Builder | None = None) -> None:
        self.settings, self.log = settings, log
        self.counts: Counter[str] = Counter()
        """What happened since this plane started, for `penstock top`."""
        self.numbers: dict[str, float] = {}
        """The last metrics that ranks reported, by name."""
        self._builder = builder or StepBuilder(settings.packing)
        self._arrivals: dict[str, _Arrival] = {}
        self._arriving: Counter[str] = Counter()
        """Groups that wait for the next write, by table_name."""
        self._arriving_bytes: Counter[str] = Counter()
        self._full: set[str] = set()
        """RunTables a put was refused in, for want of room, since the last time some became free."""
        self._rebuild()
        self._last_delivered = self.last_step
        """The last step that all ranks had; or may have had, of those planned before this plane started."""
        for run, weight in settings.shares.items():
            if run not in self.run_tables.evicted and (
                run not in self.run_tables.members or self.run_tables.shares.weight(run) != weight
            ):
                self.share(run, weight)

    def _rebuild(self) -> None:
        self.state = PlaneState.rebuild(self.log, self.settings.replay, retain_steps=self.settings.retain_steps)
        found = self.log.snapshot()
        self._saved_op = 0 if found is None else found[0]

    def close(self) -> None:
        """Write down what may wait for the next decision: there is none."""
        with self._transaction():
            pass

    # -------------------------------------------------------------- looking

    @property
    def ledger(self) -> Ledger:
        return self.state.ledger

    @property
    def run_tables(self) -> RunTables:
        return self.state.run_tables

    @property
    def is_full(self) -> bool:
        """Whether everybody who may put was refused for want of room since the last time some became free."""
        return bool(self._full) and self._full >= self.run_tables.members

    @property
    def next_step(self) -> int:
        return self.state.next_step

    @property
    def last_step(self) -> int:
        return self.state.last_step

    @property
    def policy_version(self) -> int:
        return self.state.policy_version

    @property
    def held_bytes(self) -> int:
        return self.state.held_bytes

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
        facts = self._builder.look(group, frame)
        table_name = self.run_tables.table_for(facts.run)
        self._check_room(group, table_name, len(frame))
        row = GroupRow(
            op=0,
            id=group,
            digest=digest,
            policy_version=facts.policy_version,
            samples=facts.samples,
            tokens=facts.tokens,
            size=len(frame),
            frame=bytes(frame) if isinstance(frame, bytearray) else frame,
            run=table_name,
        )
        self._arrivals[group] = _Arrival(row, [ticket])
        self._arriving[table_name] += 1
        self._arriving_bytes[table_name] += row.size
        return None

    def _check_room(self, group: str, table_name: str, size: int) -> None:
        arriving, table = self._arriving[table_name], self.run_tables.table(table_name)
        limit = int(self.settings.max_held_bytes * self.run_tables.part(table_name))
        of = f" (run {table_name!r} has its share)" if table_name else ""
        if size > limit:
            raise InvalidInput(f"group {group!r}: {size:,} bytes; at most {limit:,} are ever held{of}: max_held_bytes")
        self.log.check_room(self._arriving_bytes.total() + size)
        waiting = self.state.bytes_of[table_name] + self._arriving_bytes[table_name]
        if waiting + size > limit or not table.may_insert(ahead=arriving):
            self._full.add(table_name)
            groups, capacity = len(table) + arriving, self.settings.replay.capacity
            raise Overloaded(
                f"group {group!r}: {waiting:,} bytes in {groups} groups wait for the trainer, the limits{of} are "
                f"{limit:,} bytes and {capacity} groups, {table.settings.limiter}; try again later",
                retry_after_s=_RETRY_AFTER_S,
            )

    def table_of(self, run: str) -> str:
        """Where groups of a run wait; the run itself when they may not."""
        try:
            return self.run_tables.table_for(run)
        except PenstockError:
            return run

    def no_room(self, table: str, size: int, *, promised_bytes: int, promised_groups: int) -> str:
        """Why a group of so many bytes must wait, in words; empty if it may come, be it to be refused for good."""
        if table not in self.run_tables.members and self.run_tables.members:
            return ""
        self._arriving[table] += promised_groups
        self._arriving_bytes[table] += promised_bytes
        try:
            self._check_room("", table, size)
        except Overloaded as error:
            return str(error).removeprefix("group '': ")
        except PenstockError:
            return ""
        finally:
            self._arriving[table] -= promised_groups
            self._arriving_bytes[table] -= promised_bytes
        return ""

    def flush(self) -> list[Outcome]:
        """Write what was put since the last time, as one transaction; what is returned without error is durable."""
        if not self._arrivals:
            return []
        arrivals, self._arrivals = list(self._arrivals.values()), {}
        self._arriving.clear()
        self._arriving_bytes.clear()
        rows = [replace(arrival.row, op=self.state.op + i) for i, arrival in enumerate(arrivals, start=1)]
        try:
            with self._transaction():
                self.log.add_groups(rows)
        except PenstockError as error:
            self.counts["puts_failed"] += len(rows)
            return [Outcome(ticket, error) for arrival in arrivals for ticket in arrival.tickets]
        stale = {row.id for row in rows if not self.state.take_in(without_frame(row))}
        self.counts["groups"] += len(rows)
        self.counts["samples"] += sum(row.samples for row in rows)
        self.counts["tokens"] += sum(row.tokens for row in rows)
        return [
            Outcome(ticket, duplicate=i > 0, stale=arrival.row.id in stale)
            for arrival in arrivals
            for i, ticket in enumerate(arrival.tickets)
        ]

    def discard(self, reason: str, samples: int) -> None:
        """Count samples that were filtered out before they were put."""
        self._decide("discard", (reason, samples))

    # -------------------------------------------------------------- runs

    def share(self, run: str, weight: float) -> None:
        """Give a run a share of the trainer, or another one, or let it in again."""
        if not run or not 0 < weight < float("inf"):
            raise InvalidInput(f"share of run {run!r}: {weight}; give a name and a positive number")
        self._decide("share", (run, weight))

    def evict(self, run: str, reason: str) -> None:
        """Drop all a run has waiting and refuse it from now on; steps that were planned stay as they are."""
        if run not in self.run_tables.members:
            known = ", ".join(map(repr, sorted(self.run_tables.members))) or "none; runs are not kept apart here"
            raise UnknownKey(f"evict run {run!r}: it has no share; those that have: {known}")
        self._decide("evict", (run, reason))
        self.counts["runs_evicted"] += 1

    def runs(self) -> dict[str, dict[str, Any]]:
        """What each run that shares the trainer, or did, has and had of it."""
        return {
            run: facts | {"held_bytes": self.state.bytes_of[run]} for run, facts in self.run_tables.report().items()
        }

    # -------------------------------------------------------------- steps out

    def plan_step(self, step: int) -> Staged | str:
        """Plan a step and make it durable; or say in words what is missing for it."""
        assert step == self.last_step + 1
        counts = self.state.apportion(self.settings.target)
        if counts is None:
            return self._missing()
        try:
            ops = self.state.draw(counts)
        except WaitTimeout as error:
            if len(counts) > 1:
                self._rebuild()  # others may have been drawn from
            return f"generation: {error}"
        try:
            return self._plan(step, ops)
        except PenstockError as error:
            self._rebuild()  # the draw did not happen: the log knows nothing of it
            if not isinstance(error, (CallerError, PeerError)) or not self._quarantine(ops, error):
                raise
        return self.plan_step(step)

    def _plan(self, step: int, ops: tuple[int, ...]) -> Staged:
        made = self._builder.make(step, self._frames(ops))
        stale = [self.policy_version - self.state.rows[op].policy_version for op in ops]
        manifest = Manifest(
            groups=ops,
            shares=made.rank_plans,
            digests=tuple(made.staged.digests),
            policy_version=self.policy_version,
            samples=made.samples,
            tokens=made.tokens,
            loss_tokens=made.loss_tokens,
            staleness=(min(stale), sum(stale), max(stale)),
        )
        number = self.state.op + 1
        with self._transaction():
            self.log.add_step(step, number, msgspec.msgpack.encode(manifest))
            self.log.count_uses(ops)
        self.state.plan(number, step, manifest)
        return made.staged

    def stage_again(self, step: int) -> Staged:
        """Make the bytes of a planned step anew; they are the same as the first time, or this raises."""
        manifest = self.state.steps[step]
        staged = self._builder.again(step, self._frames(manifest.groups), manifest.shares)
        if tuple(staged.digests) != manifest.digests:
            raise CorruptFrame(f"step {step}: made again, its bytes differ from those recorded; the log was altered")
        return staged

    def _missing(self) -> str:
        """What the next step waits for, in words."""
        target, held = self.settings.target, self.state.held(self.settings.target)
        why = [
            f"run {table_name!r} is at its share of max_held_bytes" for table_name in sorted(self._full) if table_name
        ]
        if held >= target.amount:
            why.append(f"{self.settings.replay.limiter} holds it back")
        return "; ".join([f"generation: {held} of {target}", *why])

    def _frames(self, ops: Sequence[int]) -> list[Buffer]:
        frames: list[Buffer] = []
        for op in ops:
            frame = self.log.frame(op)
            if frame is None:
                raise CorruptFrame(f"group number {op}: its frame was given back, and a step needs it")
            frames.append(frame)
        return frames

    def _quarantine(self, ops: Sequence[int], error: PenstockError) -> bool:
        """Set aside groups no step can be made with, so that one of them does not stop all others; False if none."""
        bad = {ops[i]: str(error)[:500] for i in self._builder.misfits(self._frames(ops))}
        if bad:
            run_tables = {self.state.rows[op].run for op in bad}
            self._decide("quarantine", bad)
            self.counts["groups_quarantined"] += len(bad)
            for table_name in sorted(run_tables & self.run_tables.members):
                self._judge(table_name, str(error)[:500])
        return bool(bad)

    def _judge(self, run: str, error: str) -> None:
        """A run that sends groups no step can be made with, again and again, is evicted."""
        limit, found = self.settings.evict_after, self.state.misfits[run]
        if limit is not None and found >= limit:
            self.evict(run, f"{found} of its groups could not be packed, the last because of: {error}")

    # -------------------------------------------------------------- what ranks report

    def received(self, step: int) -> None:
        """Every rank has the step."""
        self._last_delivered = max(self._last_delivered, step)
        if self.state.states.get(step) is State.SCHEDULED:
            self.state.set_step(step, State.DELIVERED)

    def commit(self, step: int, policy_version: int | None) -> None:
        """Every rank has trained the step."""
        assert step == self.next_step
        event = None
        if policy_version is not None and policy_version > self.policy_version:
            event = EventRow(self.state.op + 1, "advance", msgspec.msgpack.encode(policy_version))
        with self._transaction():
            self.log.set_meta("next_step", step + 1)
            if event is not None:
                self.log.add_event(event)
        self.state.begin_at(step + 1)
        if event is not None:
            self.state.redo(event)
        self._full.clear()
        self._save_now_and_then()

    def _save_now_and_then(self) -> None:
        """Write memory down once much was decided since; so often that it costs little against what is held."""
        if self.state.op - self._saved_op < max(self.settings.snapshot_every, len(self.state.rows)):
            return
        self._saved_op = self.state.op
        try:
            with self._transaction():
                self.log.set_snapshot(self.state.op, self.state.save().to_bytes())
        except DiskFull:
            self.counts["snapshots_skipped"] += 1  # a restart takes longer, that is all

    def report(self, priorities: dict[str, float], metrics: dict[str, float]) -> None:
        """New priorities, by group or sample id (of a group's samples the largest counts), and numbers to show."""
        self.numbers.update(metrics)
        found: dict[str, float] = {}
        for name, value in priorities.items():
            if not 0.0 <= value <= MAX_PRIORITY:
                raise InvalidInput(f"priority of {name!r}: {value}; give a finite number from 0 to {MAX_PRIORITY:g}")
            group = name if name in self.run_tables else name.rpartition("/")[0]
            if group in self.run_tables:
                found[group] = max(value, found.get(group, 0.0))
            else:
                self.counts["priorities_unknown"] += 1
        if found:
            self._decide("priorities", found)

    def resume(self, session: int, step: int) -> str:
        """A trainer begins at `step`: what comes before counts as trained, what comes after is served again. Says in
        words what that changes.

        A commit does not wait for its answer, so a checkpoint may be ahead of what is written here: its word counts,
        up to one above the last step that all ranks had. Steps planned before this plane started may have been
        delivered without that being on disk.
        """
        last = self._last_delivered = max(self._last_delivered, self.next_step - 1)
        if step > last + 1:
            raise InvalidInput(
                f"resume at step {step}: the last step that was delivered is {last}; "
                "this checkpoint is of another run, or of a later copy of its folder"
            )
        oldest = min(self.state.oldest_step, self.next_step)
        if step < oldest:
            raise InvalidInput(
                f"resume at step {step}: steps before {oldest} were given back; resume from a checkpoint of step "
                f"{oldest - 1} or later (retain_steps, {self.settings.retain_steps} now, says how many are kept)"
            )
        first = self.next_step
        with self._transaction():
            self.log.set_meta("session", session)
            self.log.set_meta("next_step", step)
        self.state.begin_at(step)
        if step < first:
            self.counts["resumes_rewound"] += 1
            return f"rewound from step {first} to {step}: steps {step} to {first - 1} are served again"
        if step > first:
            self.counts["resumes_ahead"] += 1
            return f"resumed ahead at step {step}: steps {first} to {step - 1} count as trained, as the checkpoint says"
        return ""

    # -------------------------------------------------------------- inside

    def _decide(self, kind: str, data: object) -> None:
        event = EventRow(self.state.op + 1, kind, msgspec.msgpack.encode(data))
        with self._transaction():
            self.log.add_event(event)
        self.state.redo(event)

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        with self.log.transaction():
            yield
            self.state.write(self.log)
        self.state.written()
