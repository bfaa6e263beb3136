"""The plane's work, one call at a time: take groups in, plan steps, remember what became of every sample.

Nothing here waits, talks or looks at a clock. Each decision is in the log before anybody hears of it, and what is
in memory (the replay table, the ledger) is made by doing what the log says, in the same order; so a plane that was
killed continues exactly where it was.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace

import msgspec
import xxhash

from penstock.arrays import Samples
from penstock.encode import decode, encode
from penstock.errors import ConfigError, Conflict, CorruptFrame, InvalidInput, Overloaded, PenstockError, WaitTimeout
from penstock.hold import Key, Table
from penstock.pack import Share, Traits, plan
from penstock.send.coordinator import Staged
from penstock.send.messages import Buffer
from penstock.serve.ledger import Ledger
from penstock.serve.log import EventRow, GroupRow, Log, State
from penstock.serve.settings import PlaneSettings


class Manifest(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """What a step is made of; with the log's frames, enough to make the very same bytes again."""

    groups: tuple[int, ...]
    """The groups, by op, in the order they were drawn."""
    shares: tuple[bytes, ...]
    """Each rank's part of the plan."""
    digests: tuple[str, ...]
    """Of each rank's plan and payload."""
    policy_version: int
    """The trainer's version when the step was planned."""
    samples: int
    tokens: int
    loss_tokens: int
    staleness: tuple[int, int, int] = (0, 0, 0)
    """Smallest, summed and largest staleness of its groups."""
    last_uses: tuple[int, ...] = ()
    """Those of its groups that will not be drawn again."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a put: an error, or nothing."""

    ticket: object
    error: PenstockError | None = None
    duplicate: bool = False


def digest_of(share: bytes, frame: Buffer) -> str:
    """What plane and rank compare: xxh3-128 over the rank's plan and payload."""
    both = xxhash.xxh3_128(share)
    both.update(frame)
    return both.hexdigest()


class Engine:
    ledger: Ledger
    policy_version: int
    """The trainer's published version."""
    next_step: int
    """The first step that is not committed."""
    last_step: int
    """The last step that was planned."""
    held_bytes: int
    """Encoded bytes of groups that wait for training."""
    table: Table
    _op: int

    def __init__(self, settings: PlaneSettings, log: Log) -> None:
        self.settings, self.log = settings, log
        self.counts: Counter[str] = Counter()
        """What happened since this plane started, for `penstock top`."""
        self._incoming: list[tuple[object, GroupRow]] = []
        self._rebuild()

    # -------------------------------------------------------------- groups in

    def put(self, ticket: object, group: str, frame: Buffer) -> Outcome | None:
        """Check a group and queue it for the next `flush`; an outcome is returned only if it needs no writing."""
        try:
            row = self._check(group, frame)
        except PenstockError as error:
            self.counts["puts_refused"] += 1
            return Outcome(ticket, error)
        if row is None:
            self.counts["puts_repeated"] += 1
            return Outcome(ticket, duplicate=True)
        self._incoming.append((ticket, row))
        return None

    def _check(self, group: str, frame: Buffer) -> GroupRow | None:
        """The row of a new group; None when the very same group is already here."""
        samples = decode(frame)
        _check_group(group, samples)
        digest = xxhash.xxh3_128_digest(frame)
        pending = next((row.digest for _, row in self._incoming if row.id == group), None)
        known = pending or self.log.digest_of(group)
        if known is not None:
            if known != digest:
                raise Conflict(f"group {group!r}: accepted before with other content; give each group its own id")
            return None
        self._check_room(group, len(frame))
        return GroupRow(
            op=0,
            id=group,
            digest=digest,
            policy_version=int(samples.policy_versions.min()),
            samples=len(samples),
            tokens=samples.num_tokens,
            size=len(frame),
            frame=bytes(frame) if isinstance(frame, bytearray) else frame,
        )

    def _check_room(self, group: str, size: int) -> None:
        waiting = self.held_bytes + sum(row.size for _, row in self._incoming)
        groups, replay = len(self.table) + len(self._incoming), self.settings.replay
        limit = self.settings.max_held_bytes
        if waiting + size > limit or (groups >= replay.capacity and replay.remover is None):
            self.counts["puts_overloaded"] += 1
            raise Overloaded(
                f"group {group!r}: {waiting:,} bytes in {groups} groups wait for the trainer, the limits are "
                f"{limit:,} bytes and {replay.capacity} groups; try again later",
                retry_after_s=0.25,
            )

    def flush(self) -> list[Outcome]:
        """Write what was put since the last time, as one transaction; what is returned without error is durable."""
        if not self._incoming:
            return []
        puts, self._incoming = self._incoming, []
        rows = [replace(row, op=self._op + i) for i, (_, row) in enumerate(puts, start=1)]
        try:
            with self.log.transaction():
                self.log.add_groups(rows)
        except PenstockError as error:
            self.counts["puts_failed"] += len(puts)
            return [Outcome(ticket, error) for ticket, _ in puts]
        for row in rows:
            self._op = row.op
            self._take_in(row)
        self._settle_evictions()
        self.counts["groups"] += len(rows)
        self.counts["samples"] += sum(row.samples for row in rows)
        self.counts["tokens"] += sum(row.tokens for row in rows)
        return [Outcome(ticket) for ticket, _ in puts]

    def _take_in(self, row: GroupRow) -> None:
        """Into the table and the ledger; the frame itself stays in the log."""
        self._rows[row.op] = replace(row, frame=b"")
        self._by_id[row.id] = row.op
        self.ledger.accepted += row.samples
        self.ledger.add(State.HELD, "", row.samples)
        self.held_bytes += row.size
        sizes = {"num_bytes": row.size, "num_tokens": row.tokens}
        if self.table.insert(row.id, row.op, **sizes, policy_version=row.policy_version, timeout=0) is None:
            self._evicted.append((row.id, "stale"))

    def discard(self, reason: str, samples: int) -> None:
        """Count samples that were filtered out before they were put."""
        with self.log.transaction():
            self._event("discard", (reason, samples))
        self.ledger.discarded[reason] += samples

    # -------------------------------------------------------------- steps out

    def plan_step(self, step: int) -> Staged | str:
        """Plan a step and make it durable; or say in words what is missing for it."""
        assert step == self.last_step + 1
        count = self._draw_count()
        if isinstance(count, str):
            return count
        try:
            ops = [int(op) for op in self.table.sample(count, timeout=0).items]
        except WaitTimeout as error:
            return f"generation: {error}"
        try:
            return self._plan(step, ops)
        except PenstockError:
            self._rebuild()  # the draw did not happen: the log knows nothing of it
            raise

    def _plan(self, step: int, ops: list[int]) -> Staged:
        samples = Samples.concat([self._samples(op) for op in ops])
        made = plan(Traits.of(samples, self.settings.packing.seq_len), self.settings.packing)
        staged = _stage(step, samples, made.shares)
        stale = [self.policy_version - self._rows[op].policy_version for op in ops]
        manifest = Manifest(
            groups=tuple(ops),
            shares=tuple(share.to_bytes() for share in made.shares),
            digests=tuple(staged.digests),
            policy_version=self.policy_version,
            samples=len(samples),
            tokens=samples.num_tokens,
            loss_tokens=int(samples.loss_tokens.sum()),
            staleness=(min(stale), sum(stale), max(stale)),
            last_uses=tuple(op for op in ops if self._rows[op].id not in self.table),
        )
        with self.log.transaction():
            self.log.add_step(step, self._op + 1, msgspec.msgpack.encode(manifest))
            self.log.count_uses(ops)
            self.log.set_groups(manifest.last_uses, State.SCHEDULED)
        self._op += 1
        self._remember(step, manifest, State.SCHEDULED)
        self._move(manifest.last_uses, State.HELD, State.SCHEDULED)
        self.ledger.uses += manifest.samples
        self._evicted.clear()  # sampled out: the last uses, which the ledger has just followed
        return staged

    def stage_again(self, step: int) -> Staged:
        """Make the bytes of a planned step anew; they are the same as the first time, or this raises."""
        manifest = self._steps[step]
        samples = Samples.concat([self._samples(op) for op in manifest.groups])
        staged = _stage(step, samples, tuple(Share.from_bytes(share) for share in manifest.shares))
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
        have = 0
        for taken, key in enumerate(self.table.keys(), start=1):
            row = self._rows[self._by_id[str(key)]]
            have += row.samples if by_samples else row.tokens
            if have >= need:
                return taken
        return f"generation: {have} of {target}"

    def _samples(self, op: int) -> Samples:
        frame = self.log.frame(op)
        if frame is None:
            raise CorruptFrame(f"group {self._rows[op].id!r}: its frame was given back; raise retain_steps")
        return decode(frame)

    # -------------------------------------------------------------- what ranks report

    def received(self, step: int) -> None:
        """Every rank has the step."""
        if self._states[step] is State.SCHEDULED:
            with self.log.transaction():
                self._set_step(step, State.DELIVERED)

    def commit(self, step: int, policy_version: int | None) -> None:
        """Every rank has trained the step."""
        advance = policy_version is not None and policy_version > self.policy_version
        with self.log.transaction():
            self.log.set_meta("next_step", step + 1)
            self._set_step(step, State.COMMITTED)
            if advance:
                self._event("advance", policy_version)
            self._forget(step - self.settings.retain_steps)
        self.held_bytes -= sum(self._rows[op].size for op in self._steps[step].last_uses)
        self.next_step = step + 1
        if policy_version is not None and advance:
            self._advance(policy_version)
            self._settle_evictions()

    def report(self, priorities: dict[str, float]) -> None:
        """New priorities, by group id or by sample id; of a group's samples the largest counts."""
        found: dict[Key, float] = {}
        for name, value in priorities.items():
            group = name if name in self._by_id else name.rpartition("/")[0]
            if group in self._by_id:
                found[group] = max(value, found.get(group, 0.0))
            else:
                self.counts["priorities_unknown"] += 1
        if found:
            self.table.update_priorities(found)  # refuses bad values before they are written down
            with self.log.transaction():
                self._event("priorities", found)

    def resume(self, session: int, step: int) -> None:
        """A trainer begins at `step`: what comes before counts as trained, what comes after is served again."""
        if step > self.last_step + 1:
            raise InvalidInput(
                f"resume at step {step}: only {self.last_step} steps were ever planned; "
                "this checkpoint is of another run, or of a later copy of its folder"
            )
        oldest = self.next_step - self.settings.retain_steps
        if step < min(oldest, self.next_step):
            raise InvalidInput(f"resume at step {step}: steps before {oldest} were given back; raise retain_steps")
        with self.log.transaction():
            self.log.set_meta("session", session)
            self.log.set_meta("next_step", step)
            for number, state in list(self._states.items()):
                wanted = State.COMMITTED if number < step else State.SCHEDULED
                if (state is State.COMMITTED) != (wanted is State.COMMITTED):
                    self._set_step(number, wanted)
        self.next_step = step
        self.held_bytes = sum(row.size for row in self._rows.values() if self._is_waiting(row))

    # -------------------------------------------------------------- inside

    def _remember(self, step: int, manifest: Manifest, state: State) -> None:
        self._steps[step], self._states[step] = manifest, state
        self.last_step = step
        for op in manifest.groups:
            self._last_step_of[op] = step

    def _set_step(self, step: int, state: State) -> None:
        """Move a step and the groups it used up to another state; inside a transaction."""
        groups, old = self._steps[step].last_uses, self._states[step]
        self.log.set_steps(step, step, state)
        self.log.set_groups(groups, state)
        self._move(groups, old, state)
        self._states[step] = state

    def _is_waiting(self, row: GroupRow) -> bool:
        """Whether a group still waits for its last training."""
        step = self._last_step_of.get(row.op)
        return row.id in self.table or (step is not None and self._states.get(step) is not State.COMMITTED)

    def _forget(self, step: int) -> None:
        """Give back the frames of a step that can no longer be asked for, and what memory knows of it."""
        if step in self._steps:
            self.log.forget_frames(self._steps[step].last_uses)
            self._forget_in_memory(step)

    def _forget_in_memory(self, step: int) -> None:
        self._states.pop(step)
        for op in self._steps.pop(step).last_uses:
            self._by_id.pop(self._rows.pop(op).id, None)
            self._last_step_of.pop(op, None)

    def _event(self, kind: str, data: object) -> None:
        self._op += 1
        self.log.add_event(EventRow(self._op, kind, msgspec.msgpack.encode(data)))

    def _advance(self, version: int) -> None:
        self.policy_version = version
        self.table.advance(version)

    def _move(self, ops: tuple[int, ...], old: State, new: State, reason: str = "") -> None:
        samples = sum(self._rows[op].samples for op in ops)
        self.ledger.add(old, "", -samples)
        self.ledger.add(new, reason, samples)

    def _settle_evictions(self) -> None:
        """Groups the table let go of: dropped if never used, else they end as the last step that used them."""
        gone = [(key, reason) for key, reason in self._evicted if reason != "sampled_out" and key in self._by_id]
        self._evicted.clear()
        if not gone:
            return
        with self.log.transaction():
            for key, reason in gone:
                op = self._by_id[key]
                step = self._last_step_of.get(op)
                state = State.DROPPED if step is None else self._states.get(step, State.COMMITTED)
                self.log.set_groups([op], state, reason if state is State.DROPPED else "")
                if state in (State.DROPPED, State.COMMITTED):
                    self.log.forget_frames([op])
                    self.held_bytes -= self._rows[op].size
                self._move((op,), State.HELD, state, reason)

    # -------------------------------------------------------------- from the log

    def _rebuild(self) -> None:
        """Do again, in order, what the log says was done; then take states as they were recorded."""
        self.ledger = Ledger()
        self.policy_version = 0
        self.next_step = self.log.meta("next_step", 1)
        self.last_step = 0
        self.held_bytes = 0
        self._op = 0
        self._rows: dict[int, GroupRow] = {}
        self._by_id: dict[str, int] = {}
        self._steps: dict[int, Manifest] = {}
        self._states: dict[int, State] = {}
        self._last_step_of: dict[int, int] = {}
        self._evicted: list[tuple[str, str]] = []
        self.table = self.settings.replay.table(lambda key, reason: self._evicted.append((str(key), str(reason))))
        rows = {row.op: row for row in self.log.groups()}
        events = {event.op: event for event in self.log.events()}
        steps = {op: (step, manifest, state) for step, op, manifest, state in self.log.steps()}
        for op in sorted([*rows, *events, *steps]):
            self._op = op
            if op in rows:
                self._take_in(rows[op])
            elif op in steps:
                self._redraw(*steps[op])
            else:
                self._redo(events[op])
        self._recount(rows)
        for step in [s for s in self._steps if s < self.next_step - self.settings.retain_steps]:
            self._forget_in_memory(step)

    def _redraw(self, step: int, data: bytes, state: State) -> None:
        manifest = msgspec.msgpack.decode(data, type=Manifest)
        drawn = tuple(int(op) for op in self.table.sample(len(manifest.groups), timeout=0).items)
        if drawn != manifest.groups:
            raise ConfigError(
                f"step {step}: drawing again gives other groups than were recorded; the replay settings (sampler, "
                "seed, capacity, max_times_sampled, max_staleness) are not those the run began with"
            )
        self._remember(step, manifest, state)

    def _redo(self, event: EventRow) -> None:
        if event.kind == "advance":
            self._advance(msgspec.msgpack.decode(event.data, type=int))
        elif event.kind == "priorities":
            self.table.update_priorities(msgspec.msgpack.decode(event.data, type=dict[str | int, float]))
        elif event.kind == "discard":
            reason, samples = msgspec.msgpack.decode(event.data, type=tuple[str, int])
            self.ledger.discarded[reason] += samples

    def _recount(self, rows: dict[int, GroupRow]) -> None:
        """The ledger from recorded states, and the evictions a crash kept from being recorded."""
        self.ledger = Ledger(discarded=self.ledger.discarded)
        for row in rows.values():
            self.ledger.accepted += row.samples
            self.ledger.add(row.state, row.reason, row.samples)
        self.ledger.uses = sum(manifest.samples for manifest in self._steps.values())
        self.held_bytes = sum(row.size for row in rows.values() if self._is_waiting(row))
        self._evicted = [(key, why) for key, why in self._evicted if rows[self._by_id[key]].state is State.HELD]
        self._settle_evictions()


def _check_group(group: str, samples: Samples) -> None:
    if not len(samples):
        raise InvalidInput(f"group {group!r}: no samples; a group has at least one")
    foreign = next((name for name in samples.text["group"] if name != group), group)
    if foreign != group:
        raise InvalidInput(f"group {group!r}: holds a sample of group {foreign!r}; put groups one by one")
    if len(set(samples.ids)) != len(samples):
        raise InvalidInput(f"group {group!r}: two samples have the same id; ids must be unique")


def _stage(step: int, samples: Samples, shares: tuple[Share, ...]) -> Staged:
    """Each rank's plan and payload: only the samples it needs."""
    plans = [share.relative().to_bytes() for share in shares]
    frames = [encode(samples.take(share.needs)) for share in shares]
    digests = [digest_of(packed, frame) for packed, frame in zip(plans, frames, strict=True)]
    return Staged(step=step, plans=plans, payloads=[[frame] for frame in frames], digests=digests)
