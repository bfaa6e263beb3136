"""The plane's memory: where every group and step is. It follows from the log's decisions, applied in order.

A decision is written to the log first and then applied here, by the same methods that apply it again after a restart.
So a plane that was killed continues exactly where it was. `op` numbers decisions. Only a step takes time: it is drawn
under its number, planned on a worker thread, and recorded when that is done. Groups accepted meanwhile have later
numbers, so a restart applies both in the order in which they happened:

    op 7   step 3 is drawn            in memory
    op 8   a group is accepted        in memory and in the log
    op 7   step 3 is planned          in the log: after a crash before this line, step 3 was never drawn

States of a group:

    waiting               for columns that are attached after the put; in no table
    held                  while the replay table has it
    scheduled, delivered,
    committed             as the last step that uses it, once it has left the table
    dropped               left the table unused
    quarantined           no step can be planned with it
    evaluation            from the start and forever: it is in no table
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Container, Iterable, Mapping
from dataclasses import replace

import msgspec

from penstock.arrays import bounded_sum
from penstock.errors import WaitTimeout
from penstock.frames import EvalMetadata
from penstock.log import (
    AdmitGroup,
    Advance,
    AttachColumn,
    AwaitColumns,
    Awaited,
    Discard,
    DropGroup,
    EvictTenant,
    ForgetReports,
    GivePriorities,
    GroupRow,
    HandOut,
    Log,
    Lose,
    OpenList,
    Prioritize,
    Quarantine,
    Record,
    ReleaseGroup,
    Report,
    ReturnLeases,
    Shorten,
    State,
    Weigh,
    numbers_taken,
)
from penstock.plane.evaluations import Evaluations
from penstock.plane.late_groups import COLUMN, LateGroups, WaitingGroup
from penstock.plane.lease_book import RETURNED, Lease, LeaseBook
from penstock.plane.ledger import Kinds, Ledger
from penstock.plane.manifest import Manifest, read_manifest
from penstock.plane.outcomes import ENDS, Outcomes
from penstock.plane.priorities import Reports
from penstock.plane.segments import Freeing
from penstock.plane.settings import Replay, Target, Unit
from penstock.plane.snapshot import Saved
from penstock.plane.task_book import PROMPT, TaskBook
from penstock.plane.telemetry import Bias
from penstock.plane.tenant_tables import TenantTables
from penstock.protocol import OVER_LENGTH
from penstock.replay import Key

OVER_LENGTH_KEY = "over_length: "
"""Prefix of the key under which the log remembers a group that lost all its samples to `seq_len`."""
_PUBLICATIONS = 8
"""Publications by which the next ones are judged."""
_UNUSABLE = (State.DROPPED, State.QUARANTINED)


class PlaneState:
    """Groups, steps, replay tables and the ledger."""

    def __init__(
        self, replay: Replay, *, retain_steps: int, keeps_all: bool = False, env_unit: Unit | None = None
    ) -> None:
        self.ledger = Ledger()
        self.policy_version = 0
        """The policy version that the trainer published last."""
        self.published = deque[int](maxlen=_PUBLICATIONS)
        """Versions by which the last commits advanced it. The first one tells only where the trainer's count begins."""
        self.next_step = 1
        """The first step that is not committed."""
        self.last_step = 0
        """The last step that was drawn."""
        self.oldest_step = 1
        """The first step that can still be served."""
        self.bytes_of: Counter[str] = Counter()
        """Encoded bytes of groups that wait for training, by table."""
        self.held_tokens = 0
        """Tokens of held groups."""
        self.op = 0
        """The number of the last decision."""
        self.kinds: Counter[Kinds] = Counter()
        """Number of held groups by their kinds. Groups of different kinds cannot be in one step."""
        self.evaluations = Evaluations()
        self.reports = Reports()
        self.leases = LeaseBook()
        self.tasks = TaskBook(self.leases)
        self.usable_groups = 0
        """Groups that were accepted and are trained, or may be."""
        self.late = LateGroups(self.leases)
        """Groups that wait for columns."""
        self.outcomes, self.bias = Outcomes(), Bias()
        self.quarantined: dict[int, GroupRow] = {}
        """Groups in quarantine, by op."""
        self.tenant_tables = TenantTables(replay, self._on_left, env_unit)
        self.leases.on_end = self._lease_ended
        self.rows: dict[int, GroupRow] = {}
        self.by_id: dict[str, int] = {}
        self.steps: dict[int, Manifest] = {}
        self.states: dict[int, State] = {}
        self._replay, self._retain_steps = replay, retain_steps
        self._last_step_of: dict[int, int] = {}
        self._ends: dict[int, list[int]] = {}
        """Step -> the groups whose last use it is."""
        self._left: list[tuple[str, str]] = []
        """Keys of groups that left their table and are not settled yet, with the reason."""
        self.keeps_all = keeps_all
        """Whether log and storage forget nothing. Memory forgets all the same."""
        self._begin_unwritten()
        self._unfilled = (-1, "")
        """The decision after which a draw found too few groups, and why. Drawing again before the next is pointless."""
        self._drawn: tuple[int, ...] = ()
        """Groups of the step that is drawn and not planned yet. The log must not record their new state before the
        step."""

    def _begin_unwritten(self) -> None:
        """Begin with nothing that the next transaction must write."""
        self._unwritten: dict[int, tuple[State, str]] = {}
        self._has_ended = False
        """Whether groups among these were dropped or set aside, which are events."""
        self._unwritten_steps: dict[int, State] = {}
        self.freeing = Freeing(keeps_all=self.keeps_all)
        self._to_slim: list[int] = []
        """Retired steps whose plans the log is about to forget."""
        self.slim: dict[int, Manifest] = {}

    def _on_left(self, key: Key, reason: str) -> None:
        """Note that a group left its table."""
        self._left.append((str(key), str(reason)))

    @property
    def held_bytes(self) -> int:
        return self.bytes_of.total()

    def held(self, target: Target) -> int:
        """Return what is held, in the unit of the target."""
        return {"groups": len(self.tenant_tables), "samples": self.ledger.held, "tokens": self.held_tokens}[target.unit]

    def row_of(self, key: Key) -> GroupRow:
        """Return the row of a held group."""
        return self.rows[self.by_id[str(key)]]

    def take_in(self, row: GroupRow) -> bool:
        """Apply the acceptance of a group. Returns False if it was too stale and dropped."""
        self.op = max(self.op, row.op)
        self.rows[row.op], self.by_id[row.id] = row, row.op
        awaited = self.late.expected.pop(row.id, None)
        if awaited is not None:
            # It keeps its place in the order of dispatch. Before its lease ends, or the window would move past it.
            lease = self.leases.number_of(PROMPT, row.id)
            self.tenant_tables.table(row.run).expect(row.op if lease is None else lease)
        if self.tasks.lists:
            self.tasks.accept(row.id, row.op)
        self.usable_groups += 1
        self.ledger.accepted += row.samples
        self.bytes_of[row.run] += row.size
        if awaited is not None:
            return self._wait(row, awaited)
        self.ledger.held += row.samples
        self.held_tokens += row.tokens
        self.kinds[row.kinds] += 1
        kept = self._insert(row)
        self._settle()
        return kept

    def _wait(self, row: GroupRow, awaited: Awaited) -> bool:
        """Take in a group that lacks columns. Returns False if it was too stale and dropped."""
        self.rows[row.op] = row = replace(row, state=State.WAITING)
        self.ledger.add(State.WAITING, "", row.samples)
        self.late.add(row, awaited, self.tenant_tables.given.pop(row.id, 1.0))
        self._drop_waiting([row.op], "stale", only_stale=True)
        return row.op in self.late.waiting

    def _drop_waiting(self, ops: Iterable[int], reason: str, *, only_stale: bool = False) -> None:
        """Drop groups that wait for columns; with `only_stale`, those that are too old to be trained."""
        most = self._replay.max_staleness
        for row in [self.rows[op] for op in ops]:
            age = self.policy_version - (self.policy_version if row.policy_version is None else row.policy_version)
            if only_stale and (most is None or age <= most):
                continue
            self._end_wait(row)
            self._account(row, State.WAITING, State.DROPPED, reason)
            self.bytes_of[row.run] -= row.size
            self._forget(row.op, frame=True)

    def _end_wait(self, row: GroupRow) -> WaitingGroup:
        self.tenant_tables.table(row.run).unexpect(self.dispatch_of(row))
        return self.late.remove(row)

    def _move_frame(self, op: int, location: str) -> None:
        """Note a group's new frame. After a restart the row from the log has the last location already, or none if the
        frame was freed. The group counts with the size of its put, because an attach never waits for room."""
        if op in self.rows and self.rows[op].location:
            self.rows[op] = replace(self.rows[op], location=location)

    def _admit(self, record: AdmitGroup) -> None:
        """Move a group that has its columns into its table, or drop it."""
        if record.reason:
            self._drop_waiting([record.group], record.reason)
            return
        row = self.rows[record.group] = replace(self.rows[record.group], state=State.HELD, kinds=record.kinds)
        self.tenant_tables.given[row.id] = self._end_wait(row).priority
        self._account(row, State.WAITING, State.HELD, "")
        self._insert(row)

    def take_evaluation(self, row: GroupRow, metadata: EvalMetadata | None) -> None:
        """Apply the acceptance of an evaluation group."""
        self.op = max(self.op, row.op)
        self.ledger.accepted += row.samples
        self.ledger.add(State.EVALUATION, "", row.samples)
        self.evaluations.add(row, metadata)

    def free_evaluations(self, most_bytes: int) -> None:
        """Free the frames of the oldest evaluation groups, until at most `most_bytes` of them are kept."""
        if self.keeps_all:
            return
        for row in self.evaluations.free_oldest(most_bytes):
            self.freeing.add(row)

    def _insert(self, row: GroupRow) -> bool:
        # A group without a policy version counts as made by the current one. With max_staleness it is rejected earlier.
        version = self.policy_version if row.policy_version is None else row.policy_version
        kept = self.tenant_tables.insert(row, version, self.dispatch_of(row))
        if not kept:
            self._left.append((row.id, "stale"))
        return kept

    def dispatch_of(self, row: GroupRow) -> int:
        """Return the number that `WindowedFifo` sorts a group by: of the lease on its prompt, or, if its prompt was
        not handed out by the plane, of its own acceptance."""
        leased = self.tasks.dispatched(row.id) if self.tasks.lists else None
        return row.op if leased is None else leased

    def _lease_ended(self, lease: Lease) -> None:
        if lease.kind == PROMPT:
            self.tenant_tables.unexpect(lease.number)

    def apportion(self, target: Target) -> Mapping[str, int] | Target | None:
        """Return what `draw` should take for the next step: a number of groups per table, or groups until a target is
        met. None if there is not enough."""
        if self.held(target) < target.amount or self.unfilled:
            return None
        return self.tenant_tables.apportion(target, self.held(target), self.row_of)

    @property
    def unfilled(self) -> str:
        """Why the last draw found too few groups, or "" if a draw may find enough now."""
        op, reason = self._unfilled
        return reason if op == self.op else ""

    def draw(self, op: int, step: int, what: Mapping[str, int] | Target, *, one_by_one: bool = False) -> Manifest:
        """Draw a step. Raises WaitTimeout if there are too few groups. Call `planned` afterwards.

        `one_by_one`: repeat a draw by target, from the number of groups that it took."""
        try:
            groups = self.tenant_tables.draw(what, self.row_of, one_by_one=one_by_one)
        except WaitTimeout as error:
            self._unfilled = (self.op, str(error))
            raise
        found = Manifest.of([self.rows[group] for group in groups], self.policy_version)
        manifest = msgspec.structs.replace(found, one_by_one=one_by_one or isinstance(what, Target))
        self.op, self.last_step, self._drawn = max(self.op, op), step, groups
        self.steps[step], self.states[step], self._ends[step] = manifest, State.SCHEDULED, []
        for group in groups:
            self._last_step_of[group] = step
            self.tasks.draw(self.rows[group].id)
        self.ledger.uses += manifest.samples
        self._settle()
        return manifest

    def planned(self, step: int, manifest: Manifest) -> None:
        """Note that the drawn step is planned and recorded."""
        self.steps[step], self._drawn = manifest, ()
        self.bias.planned(manifest.summaries, [self.rows[group].samples for group in manifest.groups])
        self.ledger.mask(*manifest.masked)

    @property
    def is_drawing(self) -> bool:
        """Whether a step is drawn and not planned yet."""
        return bool(self._drawn)

    def redo(self, op: int, record: Record) -> None:
        """Apply any other decision."""
        self.op = max(self.op, op)
        if isinstance(record, Advance):
            if self.policy_version:
                self.published.append(record.policy_version - self.policy_version)
            self.policy_version = record.policy_version
            self.tenant_tables.advance(self.policy_version)
            self._drop_waiting(list(self.late.waiting), "stale", only_stale=True)
        elif isinstance(record, Prioritize):
            self.tenant_tables.update_priorities(record.priorities)
            if record.step:
                self.reports.apply(record.step, record.priorities)
        elif isinstance(record, GivePriorities):
            self.tenant_tables.given |= record.priorities
        elif isinstance(record, (Report, ForgetReports)):
            self.reports.follow(record)
        elif isinstance(record, Quarantine):
            self._set_aside(record.groups)
        elif isinstance(record, Discard):
            # New records are bounded; the log of an earlier version may hold any number.
            self.ledger.discarded[record.reason] = bounded_sum(self.ledger.discarded[record.reason] + record.samples)
        elif isinstance(record, Shorten):
            self.ledger.shorten({name: getattr(record, name) for name in OVER_LENGTH})
            self.tasks.drop(record.key.removeprefix(OVER_LENGTH_KEY), "over_length")
        elif isinstance(record, Weigh):
            self.tenant_tables.admit(record.tenant, record.weight)
            self.tasks.evict(record.tenant, is_evicted=False)
        elif isinstance(record, EvictTenant):
            self._drop_waiting([op for op in self.late.waiting if self.rows[op].run == record.tenant], "evicted")
            self.tenant_tables.evict(record.tenant, record.reason)
            self._left = [(key, "evicted") for key, _ in self._left]
            self.tasks.evict(record.tenant, is_evicted=True)
        elif isinstance(record, ReleaseGroup):
            self._release(self.quarantined.pop(record.op))
        elif isinstance(record, Lose):
            self._lose(record.groups, record.reason)
        elif isinstance(record, (AwaitColumns, AttachColumn)):
            self.late.follow(record)
            if isinstance(record, AttachColumn) and record.location:
                self._move_frame(record.group, record.location)
        elif isinstance(record, AdmitGroup):
            self._admit(record)
        elif isinstance(record, (HandOut, ReturnLeases, OpenList)):
            self._follow_lease(op, record)
        elif isinstance(record, DropGroup):
            row = self.quarantined.pop(record.op)
            self._account(row, State.QUARANTINED, State.DROPPED, "quarantined")
            self.freeing.add(row)
        self._settle()

    def _follow_lease(self, op: int, record: HandOut | ReturnLeases | OpenList) -> None:
        if isinstance(record, HandOut):
            self.op = max(self.op, op + numbers_taken(record) - 1)
            self.leases.begin(op, record, self.policy_version)
            self.tasks.hand_out(record)
            for number, key in enumerate(record.keys if record.kind == PROMPT else (), start=op):
                self.tenant_tables.expect(number, self.tasks.tenant_of(key))
            for key in record.keys if record.kind == COLUMN else ():
                self.late.lent(key)
        elif isinstance(record, ReturnLeases):
            for lease in [self.leases.end(number, record.reason or RETURNED) for number in record.leases]:
                if reason := self.tasks.give_back(lease, record):
                    self.ledger.given_up[reason] += 1
                if lease is not None and lease.kind == COLUMN:
                    self.late.returned(lease.key)
        else:
            self.tasks.open_list(record)

    def _lose(self, groups: Iterable[int], reason: str) -> None:
        known = [op for op in groups if op in self.rows]
        self._drop_waiting([op for op in known if op in self.late.waiting], reason)
        for row in [self.rows[op] for op in known if op in self.rows]:
            if self.tenant_tables.remove(row):
                self._left.append((row.id, ""))
        # A group in a table is listed twice, by `remove` and above; the dict keeps one.
        self._left = list({key: reason for key, _ in self._left}.items())

    def _set_aside(self, groups: Mapping[int, str]) -> None:
        for op, reason in groups.items():
            row = self.rows[op]
            self.tenant_tables.remove(row)
            self._left.clear()  # `remove` listed it as having left its table; it is finished here instead
            self._finish(op, State.QUARANTINED, reason)
            self.quarantined[op] = replace(row, state=State.QUARANTINED, reason=reason)

    def _release(self, row: GroupRow) -> None:
        row = replace(row, state=State.HELD, reason="")
        self.rows[row.op], self.by_id[row.id] = row, row.op
        self._account(row, State.QUARANTINED, State.HELD, "")
        self.bytes_of[row.run] += row.size
        self._insert(row)

    @property
    def versions_per_commit(self) -> int:
        """The versions that a commit may publish, judged by the last ones: the most of them, and at least one."""
        return max(self.published, default=1)

    def set_step(self, step: int, state: State) -> None:
        """Set the state of a step: received or trained by every rank, or to be trained again."""
        old = self.states[step]
        if old is state:
            return
        for op in self._ends[step]:
            self._move(op, old, state)
        if (old is State.COMMITTED) != (state is State.COMMITTED):
            for row in map(self.rows.__getitem__, self._ends[step]):
                self.bytes_of[row.run] += row.size if old is State.COMMITTED else -row.size
        self.states[step] = self._unwritten_steps[step] = state

    def begin_at(self, step: int, *, resend: bool = False) -> None:
        """Mark steps before this one as trained, and later ones as not trained. `resend`: no rank has a later one."""
        self.next_step = step
        for number, state in list(self.states.items()):
            if resend and number >= step:
                self.set_step(number, State.SCHEDULED)
            elif (state is State.COMMITTED) != (number < step):
                self.set_step(number, State.COMMITTED if number < step else State.SCHEDULED)
        self.retire()

    def save(self) -> Saved:
        """Return a snapshot, to be written in the same transaction as everything else that is unwritten."""
        return Saved(
            replay=repr(self._replay),
            op=self.op,
            ledger=self.ledger.as_dict(),
            policy_version=self.policy_version,
            next_step=self.next_step,
            last_step=self.last_step,
            oldest_step=self.oldest_step,
            held_tokens=self.held_tokens,
            bytes_of=dict(self.bytes_of),
            rows=list(self.rows),
            quarantined=list(self.quarantined),
            last_step_of=self._last_step_of,
            steps={step: (int(state), self._ends[step]) for step, state in self.states.items()},
            tenant_tables=self.tenant_tables.save(),
            reports=self.reports,
            waiting=self.late.waiting,
            leases=self.leases.save(),
            tasks=self.tasks.save(),
            usable_groups=self.usable_groups,
            bias=self.bias.sums,
            published=[*self.published],
        )

    def load(self, saved: Saved, log: Log) -> dict[int, GroupRow]:
        """Restore a snapshot and apply the current states of its steps. Returns the rows as the log has them now."""
        self.op, self.policy_version, self.held_tokens = saved.op, saved.policy_version, saved.held_tokens
        self.next_step, self.last_step, self.oldest_step = saved.next_step, saved.last_step, saved.oldest_step
        self.ledger = Ledger.from_dict(saved.ledger)
        self.bytes_of = Counter(saved.bytes_of)
        self.rows = {row.op: row for row in log.groups_of(saved.rows)}
        self.by_id = {row.id: row.op for row in self.rows.values()}
        self.quarantined = {row.op: row for row in log.groups_of(saved.quarantined)}
        self._last_step_of = saved.last_step_of
        self.tenant_tables.load(saved.tenant_tables)
        self.reports = saved.reports
        self.published.extend(saved.published)
        self.leases.load(saved.leases)
        self.tasks.load(saved.tasks)
        self.usable_groups, self.bias = saved.usable_groups, Bias(saved.bias)
        self.late.restore(saved.waiting, self.rows)
        for key in self.tenant_tables:
            self.kinds[self.row_of(key).kinds] += 1
        recorded: dict[int, State] = {}
        for step, _, data, state in log.steps(first=min(saved.steps, default=saved.last_step + 1)):
            if step in saved.steps:
                self.steps[step], recorded[step] = read_manifest(data), state
                self.states[step], self._ends[step] = State(saved.steps[step][0]), saved.steps[step][1]
        for step, state in recorded.items():
            self.set_step(step, state)
        return self.rows | self.quarantined

    def write(self, log: Log) -> None:
        """Update states of groups and steps in the log, inside a transaction. Call `written` after its commit.

        States follow from decisions, so they may wait for any later transaction: a rebuild derives them again."""
        changed: dict[tuple[State, str], list[int]] = {}
        if self._unwritten:
            held_back = set(self._drawn)
            for op, to in self._unwritten.items():
                if op not in held_back:
                    changed.setdefault(to, []).append(op)
            for (state, reason), ops in changed.items():
                log.set_groups(ops, state, reason)
        if changed or self.outcomes.added or self.outcomes.reported_step != max(self.next_step - 1, 0):
            self.outcomes.write(log, self, changed)
        for step, state in self._unwritten_steps.items():
            log.set_steps(step, step, state)
        if self.freeing.ops:
            log.forget_frames(self.freeing.ops)
        for step in () if self.keeps_all else self._to_slim:
            slim = msgspec.structs.replace(self.slim[step], rank_plans=(), needs=(), digests=(), packing="")
            log.set_manifest(step, msgspec.msgpack.encode(slim))
        if self.freeing.ops or self._to_slim:
            log.set_meta("oldest_step", self.oldest_step)

    @property
    def has_news(self) -> bool:
        """Whether the next transaction writes events."""
        return self._has_ended or self.outcomes.reported_step != max(self.next_step - 1, 0)

    def state_of(self, op: int, recorded: State, reason: str) -> tuple[State, str]:
        """Return the state of a group and why, given what the log has. The log may be behind by one transaction."""
        if op in self._drawn:  # the step may still be undone
            return State.HELD, ""
        return self._unwritten.get(op, (recorded, reason))

    def written(self) -> None:
        """Note that the transaction was committed."""
        if self._unwritten:
            held_back = set(self._drawn)
            self._unwritten = {op: change for op, change in self._unwritten.items() if op in held_back}
        self._unwritten_steps, self._to_slim = {}, []
        self.slim.clear()
        if self.outcomes.is_written:
            self.outcomes.written()
        self._has_ended = False

    def _settle(self) -> None:
        """Settle groups that left their table: with the last step that used them, or as dropped. Queued groups move
        up."""
        if self.tenant_tables.overflow:
            self._left += [(str(key), "stale") for key in self.tenant_tables.let_in()]
        if not self._left:
            return
        left, self._left = self._left, []
        for key, reason in left:
            op = self.by_id[key]
            step = self._last_step_of.get(op)
            if step is None:
                self._finish(op, State.DROPPED, reason)
            elif step not in self.states:  # the step is retired, and only committed ones are
                self._finish(op, State.COMMITTED, "")
            else:
                self._ends[step].append(op)
                self._move(op, State.HELD, self.states[step])
                if self.states[step] is State.COMMITTED:
                    self.bytes_of[self.rows[op].run] -= self.rows[op].size

    def _move(self, op: int, old: State, new: State, reason: str = "") -> None:
        self._account(self.rows[op], old, new, reason)

    def _account(self, row: GroupRow, old: State, new: State, reason: str) -> None:
        for state, sign in ((old, -1), (new, 1)):
            if state is State.HELD:
                self.held_tokens += sign * row.tokens
                self.kinds[row.kinds] += sign
                if self.kinds[row.kinds] <= 0:
                    del self.kinds[row.kinds]
        self.ledger.add(old, row.reason if old is State.DROPPED else "", -row.samples)
        self.ledger.add(new, reason, row.samples)
        self.usable_groups += (new not in _UNUSABLE) - (old not in _UNUSABLE)
        self.tasks.follow(row.id, old, new, reason)
        self._unwritten[row.op] = (new, reason)
        self._has_ended |= new in ENDS

    def _finish(self, op: int, state: State, reason: str) -> None:
        """End a held group and free its frame. A quarantined group keeps it, for inspection."""
        self._move(op, State.HELD, state, reason)
        self.bytes_of[self.rows[op].run] -= self.rows[op].size
        self._forget(op, frame=state is not State.QUARANTINED)

    def _forget(self, op: int, *, frame: bool) -> None:
        row = self.rows.pop(op)
        self.by_id.pop(row.id)
        self._last_step_of.pop(op, None)
        if frame:
            self.freeing.add(row)

    def retire(self, oldest: int = 1) -> None:
        """Forget steps that can no longer be served, and the groups that ended with them."""
        self.oldest_step = max(self.oldest_step, oldest, self.next_step - self._retain_steps)
        for step in [s for s in self.steps if s < self.oldest_step]:
            self.slim[step] = self.steps.pop(step)
            self._to_slim.append(step)
            del self.states[step]
            for op in self._ends.pop(step):
                self._forget(op, frame=True)

    def keep_differences(self, rows: Iterable[GroupRow], steps: Mapping[int, State], frames: Container[int]) -> None:
        """After a rebuild, write only states that the log records differently.

        A crash may have prevented a write, or the step that a group was recorded with may have been removed."""
        for row in rows:
            if self._unwritten.get(row.op) == (row.state, row.reason):
                del self._unwritten[row.op]
            elif row.op not in self._unwritten and row.state is not State.HELD and row.id in self.tenant_tables:
                self._unwritten[row.op] = (State.HELD, "")
        self._unwritten_steps = {step: s for step, s in self._unwritten_steps.items() if steps[step] is not s}
        self.freeing.keep_differences(frames)
