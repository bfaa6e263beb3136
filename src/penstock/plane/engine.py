"""The plane's decisions: accept groups, draw steps, follow what ranks report.

Nothing here waits, sends, reads a clock or opens a frame. A decision is written to the log before it changes memory and
before any client is answered. Two decisions take two calls, because the work between them depends on the size of the
data and runs on worker threads (`intake`, `step_builder`). Groups are accepted by `acceptance`:

    offer       is there room, is it known?    the frame is checked and stored      arrive and flush: accepted
    draw_step   which groups make the step?    the step is planned from metadata    record: planned, durable
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import msgspec

from penstock.arrays import MAX_VERSION
from penstock.config import toml_values
from penstock.errors import (
    CorruptFrame,
    DiskFull,
    InvalidInput,
    Overloaded,
    UnknownKey,
    WaitTimeout,
)
from penstock.log import (
    EVENTS,
    Advance,
    Discard,
    DropGroup,
    EvictTenant,
    ForgetReports,
    GroupOutcome,
    GroupRow,
    Log,
    Prioritize,
    Quarantine,
    Record,
    ReleaseGroup,
    State,
    Unlisted,
    Weigh,
    ended,
    started,
    trainer_joined,
)
from penstock.plane.acceptance import Acceptance
from penstock.plane.late_values import LateDecisions
from penstock.plane.ledger import Ledger, odd_groups
from penstock.plane.priorities import report
from penstock.plane.recorder import Recorder, ends_plane
from penstock.plane.remembered import check_settings, damage_named, note_seq_len
from penstock.plane.segments import Outside, Segments
from penstock.plane.settings import PlaneSettings, Target
from penstock.plane.state import PlaneState
from penstock.plane.step_builder import Place, PlannedStep
from penstock.plane.telemetry import Durations
from penstock.plane.tenant_tables import TenantTables
from penstock.storage import Custody, DamagedFrame, ObjectStorage, Storage, Writer, check_log, prove_signing

logger = logging.getLogger("penstock.plane")
MANY_FILTERED = 16
"""Groups filtered in a row before ranks that wait, and `penstock top`, name the filter."""
MIN_WEIGHT, MAX_WEIGHT = 1e-6, 1e6
"""Bounds of a tenant's weight, so that sums and quotients of weights stay finite."""


@dataclass(frozen=True, slots=True)
class Drawn:
    """A step that is drawn and not planned yet."""

    step: int
    op: int
    groups: tuple[Place, ...]
    metadata: tuple[bytes, ...]
    """The metadata of each group, as the log stores it."""
    oldest_version: int = 0
    """Tokens that an earlier policy version sampled are left out of the loss."""
    before: tuple[str, ...] = ()
    """The digests of its plan, if it was drawn and planned before and only its plan is made again."""


class Engine:
    """Makes decisions, writes them to the log, applies them to memory."""

    def __init__(self, settings: PlaneSettings, log: Log, storage: Storage, outside: Outside | None = None) -> None:
        self.settings, self.log, self.storage = settings, log, storage
        self._packing = toml_values(settings.packing)
        self.durations = Durations()
        log.on_commit = partial(self.durations.add, "commit")
        self.numbers: dict[str, float] = {}
        """The latest metrics that ranks reported, by name."""
        with damage_named(log):
            check_settings(settings, log)
            at, is_new = log.commits, not log.last_op
            check_log(storage, run_id=log.run_id, epoch=log.epoch, commits=at, held=log.num_frames, is_new=is_new)
            keeps = storage.prove()
            if settings.sign_puts_s is not None and isinstance(storage, ObjectStorage):
                prove_signing(storage, settings.sign_puts_s)
            custody = Custody(storage, run_id=log.run_id, run=settings.run, epoch=log.epoch, commits=at)
            self.segments = Segments(log, storage, custody, outside, keeps=keeps)
            self.recorder = Recorder(settings, log, self.segments)
            note_seq_len(settings, self.recorder, storage)
        self.writer = Writer(storage, self.segments.next_own, self.segments.finished)
        self.writer.on_write = partial(self.durations.add, "write")
        """Writes frames that clients sent to the plane. Used by the intake thread only."""
        self.acceptance = Acceptance(settings, self.recorder)
        self.late = LateDecisions(settings, self.recorder, self.acceptance)
        self._last_delivered = self.last_step
        """The last step that all ranks had, or, of steps planned before this plane started, may have had."""
        self.maybe_trained = self.last_step
        """Steps up to this one may be trained although the log does not say so, until a trainer resumes."""
        self._apply_shares()
        events = started(log, step=self.next_step, epoch=log.epoch)
        with suppress(DiskFull), self.recorder.transaction():  # it also seals the segments of earlier epochs
            log.set_meta(EVENTS, events)
        with suppress(DiskFull):  # a plane on a full disk must start: only training makes room
            self.segments.stock_up()

    def _apply_shares(self) -> None:
        """Apply `shares` of the settings if they changed since the last start. Shares set at run time stay
        otherwise."""
        envs = self.settings.env_weights
        wanted = msgspec.json.encode(dict(sorted((self.settings.shares or envs).items()))).decode()
        if wanted == self.log.text("shares"):
            return
        for tenant, weight in self.settings.shares.items():
            if tenant not in self.tenant_tables.evicted:
                self.share(tenant, weight)
        for env, weight in envs.items():
            self.share(env, weight)
        for env in sorted(self.tenant_tables.members - envs.keys()) if envs else ():
            self.evict(env, "no longer in env_weights")
        with self.log.transaction():
            self.log.set_meta("shares", wanted)

    def close(self) -> None:
        """Write what would have waited for the next decision."""
        self.writer.finish()
        self.segments.tidy(self.segments.take_finished())
        self.segments.close()
        events = ended(self.log, step=self.next_step, epoch=self.log.epoch)
        with self.recorder.transaction():
            self.log.set_meta(EVENTS, events)

    # -------------------------------------------------------------- looking

    @property
    def state(self) -> PlaneState:
        return self.recorder.state

    @property
    def counts(self) -> Counter[str]:
        """Counters since this plane started, for `penstock top`."""
        return self.recorder.counts

    @property
    def ledger(self) -> Ledger:
        return self.state.ledger

    @property
    def tenant_tables(self) -> TenantTables:
        return self.state.tenant_tables

    @property
    def is_full(self) -> bool:
        """Whether every table rejected a put for lack of room since room last became free."""
        return bool(self.acceptance.full) and self.acceptance.full >= self.tenant_tables.members

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

    # -------------------------------------------------------------- samples that were never put

    def discard(self, reason: str, samples: int, key: str = "", about: Unlisted | None = None) -> None:
        """Count samples that were filtered out before they were put. A `key` is counted once."""
        if key and self.log.is_discarded(key):
            return
        about = about or Unlisted(samples=samples)
        event = GroupOutcome(outcome="filtered", reason=reason, unlisted=(about,))
        self.recorder.decide(Discard(reason=reason, samples=samples, key=key), event)
        self.acceptance.filtered_in_a_row[reason] += 1

    # -------------------------------------------------------------- tenants

    def share(self, tenant: str, weight: float) -> None:
        """Set the weight of a tenant. Admits a new tenant, or an evicted one again."""
        if not tenant or not MIN_WEIGHT <= weight <= MAX_WEIGHT:
            raise InvalidInput(
                f"share of tenant {tenant!r}: {weight}; give a name and a number from {MIN_WEIGHT:g} to {MAX_WEIGHT:g}"
            )
        self.recorder.decide(Weigh(tenant=tenant, weight=weight))

    def evict(self, tenant: str, reason: str) -> None:
        """Drop all waiting groups of a tenant and reject its puts from now on. Planned steps stay."""
        if tenant not in self.tenant_tables.members:
            known = ", ".join(map(repr, sorted(self.tenant_tables.members))) or "none; this plane has no tenants"
            raise UnknownKey(f"evict tenant {tenant!r}: it has no share; those that have: {known}")
        self.recorder.decide(EvictTenant(tenant=tenant, reason=reason))
        self.counts["tenants_evicted"] += 1

    def tenants(self) -> dict[str, dict[str, Any]]:
        """Return the state of each tenant, evicted ones included."""
        return {
            tenant: found | {"held_bytes": self.state.bytes_of[tenant]}
            for tenant, found in self.tenant_tables.report().items()
        }

    # -------------------------------------------------------------- steps out

    def draw_step(self, step: int) -> Drawn | str:
        """Choose the groups of the next step, or return what it waits for. Call `record` or `undo_draw` afterwards."""
        assert step == self.last_step + 1
        assert not self.state.is_drawing
        if early := too_early(self.settings, self.state, step):
            return early
        counts = self.state.apportion(self.settings.target)
        if counts is None:
            return self._missing()
        if odd := odd_groups(self.state.kinds, map(self.state.row_of, self.tenant_tables)):
            self._quarantine(odd)
            counts = self.state.apportion(self.settings.target)
            if counts is None:
                return self._missing()
        op = self.state.op + 1
        try:
            manifest = self.state.draw(op, step, counts)
            places, metadata = self._places(manifest.groups), self._metadata(manifest.groups)
            return Drawn(step, op, places, metadata, oldest_token_version(self.settings, self.state, step))
        except WaitTimeout as error:
            if not isinstance(counts, Target) and len(counts) > 1:
                self.recorder.rebuild()  # the draw may have taken groups from other tables before this one had too few
            return f"generation: {error}"
        except Exception:
            self.recorder.rebuild()  # groups that were drawn return to their tables
            raise

    def is_outdated(self, step: int) -> bool:
        """Return whether a step must be planned again before it is served: it was planned with other packing settings.

        A session that began on an earlier plane keeps the plans that its ranks may have; its ranks are as many as
        before. A trained step keeps its plan, until a rewind makes it one to be trained."""
        manifest = self.state.steps.get(step)
        if manifest is None or not manifest.rank_plans or step < self.next_step:  # no plan yet: it is being drawn
            return False
        if len(manifest.rank_plans) != self.settings.packing.ranks:
            return True
        return step > self.maybe_trained and manifest.packing not in ("", self._packing)

    def draw_again(self, step: int) -> Drawn:
        """Return the groups of a planned step, to plan it again. Call `record` afterwards."""
        manifest = self.state.steps[step]
        places, metadata = self._places(manifest.groups), self._metadata(manifest.groups)
        return Drawn(step, 0, places, metadata, manifest.oldest_version, manifest.digests)

    def record(self, drawn: Drawn, planned: PlannedStep) -> bool:
        """Record a drawn step with its plan. Raises DiskFull, and may then be called again.

        Returns False if the step was planned before, and was trained, removed or freed since `draw_again`."""
        if drawn.before:
            return self._record_again(drawn, planned)
        manifest = msgspec.structs.replace(
            self.state.steps[drawn.step],
            rank_plans=planned.rank_plans,
            needs=planned.needs,
            digests=planned.digests,
            loss_tokens=planned.loss_tokens,
            summaries=planned.summaries,
            oldest_version=drawn.oldest_version,
            masked=planned.masked,
            names_clash=planned.names_clash,
            packing=self._packing,
        )
        with self.log.transaction():
            self.log.add_step(drawn.step, drawn.op, msgspec.msgpack.encode(manifest))
            self.log.count_uses(manifest.groups)
        self.state.planned(drawn.step, manifest)
        self.counts["tokens_masked"] += planned.masked[0]
        self.counts["samples_masked"] += planned.masked[1]
        self.recorder.on_stage("planned", self._rows(drawn.step), drawn.step)
        self.acceptance.generated.close(drawn.step, self.tenant_tables.metrics(), self.state.bias.metrics())
        return True

    def _record_again(self, drawn: Drawn, planned: PlannedStep) -> bool:
        """Replace the plan of a step that was planned before.

        What was counted when it was drawn stays: a snapshot has counted its masked tokens."""
        found = self.state.steps.get(drawn.step)
        if found is None or drawn.step < self.next_step or found.digests != drawn.before:
            return False
        manifest = msgspec.structs.replace(
            found,
            rank_plans=planned.rank_plans,
            needs=planned.needs,
            digests=planned.digests,
            loss_tokens=planned.loss_tokens,
            packing=self._packing,
        )
        with self.log.transaction():
            self.log.set_manifest(drawn.step, msgspec.msgpack.encode(manifest))
        self.state.steps[drawn.step] = manifest
        return True

    def undo_draw(self, drawn: Drawn, bad: Mapping[int, str]) -> None:
        """Undo a draw that cannot be planned, and quarantine the groups that caused it.

        `bad` maps positions in the step to reasons."""
        manifest = self.state.steps.get(drawn.step)  # missing if memory was rebuilt since
        ops = () if manifest is None else manifest.groups
        self.recorder.rebuild()  # the draw is not in the log, so this undoes it
        if bad and ops:
            self._quarantine({ops[i]: reason[:500] for i, reason in bad.items()})

    def unplan(self, step: int, group: str, reason: str) -> bool:
        """Remove a planned step and all later ones, and quarantine the group that keeps it from being built.

        Returns False if the step was delivered, or may have been before this plane started."""
        if step <= self.maybe_trained:
            return False
        if self.state.is_drawing or self.state.states.get(step) is not State.SCHEDULED or step < self.next_step:
            return False
        self.counts["steps_replanned"] += self.last_step - step + 1
        with self.log.transaction():
            self.log.remove_steps(step)
        self.recorder.rebuild()
        if group in self.state.by_id:
            self._quarantine({self.state.by_id[group]: reason[:500]})
        return True

    def planned(self, step: int) -> tuple[PlannedStep, tuple[Place, ...]]:
        """Return the plan of a recorded step and the places of its groups."""
        manifest = self.state.steps[step]
        plan = PlannedStep(rank_plans=manifest.rank_plans, needs=manifest.needs, digests=manifest.digests)
        places = zip(self._places(manifest.groups), self._metadata(manifest.groups), strict=True)
        return plan, tuple(replace(place, metadata=metadata) for place, metadata in places)

    def is_planned(self, step: int, planned: PlannedStep) -> bool:
        """Return whether a step still has this plan."""
        found = self.state.steps.get(step)
        return found is not None and found.digests == planned.digests

    def _places(self, ops: Sequence[int]) -> tuple[Place, ...]:
        """Return where groups are stored. A group that was quarantined after it was drawn still has its frame."""
        rows = [self.state.rows.get(op) or self.state.quarantined.get(op) for op in ops]
        for op, row in zip(ops, rows, strict=True):
            if row is None or not row.location:
                name = next(self.log.groups_of([op])).id
                raise DamagedFrame(
                    name, "its frame was freed; raise retain_steps, or drop no group that steps may need"
                )
        return tuple(Place(row.id, row.location, row.samples) for row in rows if row is not None)

    def _metadata(self, ops: Sequence[int]) -> tuple[bytes, ...]:
        found = self.log.metadata_of(ops)
        for op in ops:
            if op not in found:
                raise CorruptFrame(f"group {self.state.rows[op].id!r}: its metadata are not in the log")
        return tuple(found[op] for op in ops)

    def _missing(self) -> str:
        """Return what the next step waits for."""
        target, held = self.settings.target, self.state.held(self.settings.target)
        why = [f"tenant {name!r} is at its share of max_held_bytes" for name in sorted(self.acceptance.full) if name]
        lacking = self._lacking_envs()
        why += lacking
        if held >= target.amount and not lacking:
            why.append(self.tenant_tables.waits_for() or f"{self.settings.replay.limiter} holds it back")
        lists = self.state.tasks.lists
        ended = [name for name, one in lists.items() if one.evicted or not (one.num_to_come or one.leased)]
        if ended and (lacking or (held < target.amount and len(ended) == len(lists))):
            why.append(f"no prompts are left in {', '.join(map(repr, ended[:3]))}")
        if stale := self.acceptance.stale_in_a_row:
            why.append(
                f"the last {stale} groups that arrived were dropped as stale (max_staleness "
                f"{self.settings.replay.max_staleness}, policy version {self.policy_version})"
            )
        if waiting := self.state.late.waiting:
            names = sorted({name for group in waiting.values() for name in group.awaited.columns})
            why.append(f"{len(waiting)} groups wait for {', '.join(names)}")
        filtered = self.acceptance.filtered_in_a_row
        if filtered.total() >= MANY_FILTERED:
            reasons = ", ".join(reason for reason, _ in filtered.most_common(3))
            why.append(f"the last {filtered.total():,} groups were filtered: {reasons}")
        if self.state.quarantined:
            why.append(f"{len(self.state.quarantined)} groups are in quarantine")
        return "; ".join([f"generation: {held} of {target}", *why])

    def _lacking_envs(self) -> list[str]:
        """Return the environments that the next step waits for, with what it has and needs of each."""
        groups, tables = self.settings.target.groups, self.tenant_tables
        if tables.env_unit is None:
            return []
        if groups is None:
            none = [f"environment {env!r}: none" for env in sorted(tables.members) if not len(tables.table(env))]
            return none or [self.state.unfilled] * bool(self.state.unfilled)
        quotas = {env: (len(tables.table(env)), quota) for env, quota in tables.quotas(groups).items()}
        return [f"environment {env!r}: {have} of {quota}" for env, (have, quota) in quotas.items() if have < quota]

    # -------------------------------------------------------------- quarantine

    def _quarantine(self, bad: Mapping[int, str]) -> None:
        """Set aside groups that no step can be planned with, so that they do not block the others."""
        self.recorder.decide(Quarantine(groups=dict(bad)))
        self.counts["groups_quarantined"] += len(bad)

    def settle(self, group: str, *, drop: bool) -> None:
        """Drop a group in quarantine, or release it to wait for training again."""
        row = self._quarantined_row(group)
        if not drop and not self.tenant_tables.table(row.run).may_insert(ahead=self.acceptance.ahead(row.run)):
            raise Overloaded(f"release of group {group!r}: its table is full; try again later", retry_after_s=1.0)
        self.recorder.decide(DropGroup(op=row.op) if drop else ReleaseGroup(op=row.op))

    def quarantine(self, most: int = 100) -> list[dict[str, Any]]:
        """Return the latest groups in quarantine, at most `most`, oldest first."""
        rows = list(self.state.quarantined.values())[-most:]
        return [{"id": row.id, "run": row.run, "samples": row.samples, "reason": row.reason} for row in rows]

    def _quarantined_row(self, group: str) -> GroupRow:
        found = next((row for row in self.state.quarantined.values() if row.id == group), None)
        if found is None:
            known = ", ".join(repr(row.id) for row in list(self.state.quarantined.values())[:5]) or "none"
            raise UnknownKey(f"group {group!r}: not in quarantine; there are: {known}")
        return found

    # -------------------------------------------------------------- what ranks report

    def received(self, step: int) -> None:
        """Note that every rank has the step."""
        self._last_delivered = max(self._last_delivered, step)
        if self.state.states.get(step) is State.SCHEDULED:
            self.state.set_step(step, State.DELIVERED)
            self.recorder.on_stage("delivered", self._rows(step), step)

    def _rows(self, step: int) -> list[GroupRow]:
        """Return the rows of a step's groups, without those that were set aside since."""
        return [row for row in map(self.state.rows.get, self.state.steps[step].groups) if row is not None]

    def commit(self, step: int, policy_version: int | None) -> None:
        """Commit a step that every rank has trained."""
        assert step == self.next_step
        records: list[Record] = []
        if step in self.state.reports.waiting:
            records.append(Prioritize(priorities=self.state.reports.waiting[step], step=step))
        if policy_version is not None and self.policy_version < policy_version <= MAX_VERSION:
            records.append(Advance(policy_version=policy_version))
            self._warn_of_leap(step, policy_version - self.policy_version)
        rows = self._rows(step)
        self._begin_at(step + 1, {"next_step": step + 1}, records)
        self.recorder.on_stage("committed", rows, step)
        self.acceptance.full.clear()
        self._save_now_and_then()

    def _warn_of_leap(self, step: int, versions: int) -> None:
        """Log that steps were drawn for fewer versions than a commit publishes. Further ones are drawn for as many."""
        further = versions - self.state.versions_per_commit
        bounds = (self.settings.replay.max_staleness, self.settings.max_token_staleness)
        if further > 0 and self.last_step > step and bounds != (None, None):
            logger.warning(
                "the commit of step %d published %d versions; steps up to %d are drawn and may be trained %d versions "
                "staler than the bound",
                *(step, versions, self.last_step, further),
            )

    def _begin_at(
        self, step: int, meta: Mapping[str, int | str], records: Sequence[Record], *, resend: bool = False
    ) -> None:
        """Mark steps before this one as trained and record `meta` and `records`, in one transaction."""
        numbered = list(enumerate(records, start=self.state.op + 1))
        with self.recorder.transaction():
            for name, value in meta.items():
                self.log.set_meta(name, value)
            for op, record in numbered:
                self.log.add_record(op, record)
        self.state.begin_at(step, resend=resend)
        for op, record in numbered:
            self.state.redo(op, record)

    def _save_now_and_then(self) -> None:
        """Write a snapshot of memory once `snapshot_every` decisions were made since the last one.

        While more groups than that are held, waits for as many decisions as there are groups: a snapshot's cost grows
        with its groups, so its cost per decision stays constant."""
        if self.state.is_drawing or self.state.op - self.recorder.saved_op < max(
            self.settings.snapshot_every, len(self.state.rows)
        ):
            return
        self.recorder.saved_op = self.state.op
        try:
            with self.recorder.transaction():
                self.log.set_snapshot(self.state.op, self.state.save().to_bytes())
        except Exception as error:
            if ends_plane(error):
                raise
            self.counts["snapshots_skipped"] += 1  # only a restart takes longer
            if not isinstance(error, DiskFull):
                logger.exception("the snapshot at decision %d could not be made", self.state.op)

    def report(self, priorities: dict[str, float], metrics: dict[str, float], step: int | None = None) -> None:
        """Record new priorities, by group or sample id, and metrics. See the module `priorities` for the rule."""
        self.numbers.update(metrics)
        if priorities:
            report(self.recorder, priorities, step)

    def resume(self, session: int, step: int, after: str = "") -> str:
        """Begin a session at `step`. Earlier steps count as trained, later ones are served again. `after` says why the
        session before failed.

        Returns a note if that rewinds or skips steps, or "". A commit does not wait for its answer, so a checkpoint may
        be ahead of the log. It is accepted up to one above the last step that all ranks had. Steps planned before this
        plane started count as had, because the note of a delivery may not have reached the disk.
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
                f"resume at step {step}: steps before {oldest} were freed; resume from a checkpoint of step "
                f"{oldest - 1} or later (retain_steps, {self.settings.retain_steps} now, says how many are kept)"
            )
        first = self.next_step
        forget = [ForgetReports(first=step)] if self.state.reports.has_from(step) else []
        events = trainer_joined(self.log, step=step, was=first, after=after, epoch=self.log.epoch)
        self._begin_at(step, {"session": session, "next_step": step, EVENTS: events}, forget, resend=True)
        self.maybe_trained = step - 1
        self._log_outdated()
        if step < first:
            self.counts["resumes_rewound"] += 1
            return f"rewound from step {first} to {step}: steps {step} to {first - 1} are served again"
        if step > first:
            self.counts["resumes_ahead"] += 1
            return f"resumed ahead at step {step}: steps {first} to {step - 1} count as trained, as the checkpoint says"
        return ""

    def _log_outdated(self) -> None:
        """Log which steps will be planned again when ranks ask for them."""
        steps = [step for step in self.state.steps if self.is_outdated(step)]
        if steps:
            which = f"step {steps[0]}" if len(steps) == 1 else f"steps {steps[0]} to {steps[-1]}"
            before = sorted({len(self.state.steps[step].rank_plans) for step in steps})
            logger.warning(
                "%s: %s: planned for %s ranks, planned again for %d with the same groups and today's settings",
                *(self.log.where, which, " and ".join(map(str, before)), self.settings.packing.ranks),
            )


def too_early(settings: PlaneSettings, state: PlaneState, step: int) -> str:
    """Return what a step must wait for so that nothing too stale is trained, or "".

    A rank that prefetches asks for step k + 1 while it trains step k. Committing step k publishes a version, so groups
    drawn now are one version older when they are trained. With max_staleness 1 and version 5 published: a group of
    version 4 is fresh enough for the next step (5 - 4 = 1), but not for the one after it (6 - 4 = 2). A trainer whose
    commits published two versions each is expected to go on so: then it is 7 - 4 = 3."""
    most, tokens = settings.replay.max_staleness, settings.max_token_staleness
    newer = _versions_until(state, step)
    if tokens is not None and newer > tokens:
        first = step - 1 - tokens // state.versions_per_commit
        return (
            f"step {first} to be committed: max_token_staleness {tokens} would leave even tokens of the "
            f"published version {state.policy_version} out of step {step} if it was drawn now"
        )
    if most is None or newer <= 0:
        return ""
    oldest = state.tenant_tables.oldest_version()  # scans all held groups, so only after the cheap tests
    if oldest is None or state.policy_version + newer - oldest <= most:
        return ""
    return (
        f"step {step - 1} to be committed: groups of policy version {oldest} would be staler than max_staleness {most} "
        f"if step {step} was drawn now"
    )


def _versions_until(state: PlaneState, step: int) -> int:
    """Return how many versions will be published before a step is trained: by the commits of the steps before it."""
    return max(0, step - state.next_step) * state.versions_per_commit


def oldest_token_version(settings: PlaneSettings, state: PlaneState, step: int) -> int:
    """Return the oldest policy version whose tokens a step trains; 0: any.

    A step that is drawn ahead is trained after the steps before it are committed, as in `too_early`."""
    if settings.max_token_staleness is None:
        return 0
    return max(0, state.policy_version + _versions_until(state, step) - settings.max_token_staleness)
