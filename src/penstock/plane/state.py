"""Where every group and every step is, made by doing what the log says, in the same order.

Each decision is written to the log first and then entered here, by the same methods that enter it again after a
restart; so a plane that was killed continues exactly where it was. `op` numbers decisions. A step is the one decision
that takes time: it is drawn under its number, planned beside the loop, and written down when that is done. Groups that
arrive meanwhile have later numbers, so a restart does both in the order in which they happened:

    op 7   step 3 is drawn            in memory
    op 8   a group is accepted        in memory, in the log
    op 7   step 3 is planned          in the log: after a crash before this, step 3 was never drawn

A group is

    held                  while the replay table has it
    scheduled, delivered,
    committed             with the last step that uses it, once the table has let go of it
    dropped               if the table let go of it unused
    quarantined           if no step could be made with it
    evaluation            from the beginning, and for good: it is in no table
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Iterable, Mapping
from dataclasses import replace

import msgspec

from penstock.arrays import bounded_sum
from penstock.errors import WaitTimeout
from penstock.frames import EvalMetadata
from penstock.log import (
    Advance,
    Discard,
    EvictRun,
    ForgetReports,
    GivePriorities,
    GroupRow,
    Log,
    Lose,
    Prioritize,
    Quarantine,
    Record,
    ReleaseGroup,
    Report,
    Shorten,
    State,
    Weigh,
)
from penstock.plane.evaluations import Evaluations
from penstock.plane.freeing import Freeing
from penstock.plane.ledger import Ledger
from penstock.plane.manifest import Manifest, read_manifest
from penstock.plane.mixed_columns import count_kinds
from penstock.plane.priorities import Reports
from penstock.plane.run_tables import RunTables
from penstock.plane.settings import Replay, Target
from penstock.plane.snapshot import Saved
from penstock.protocol import OVER_LENGTH
from penstock.replay import Key


class PlaneState:
    """Groups, steps, the replay table and the ledger."""

    def __init__(self, replay: Replay, *, retain_steps: int, keeps_all: bool = False) -> None:
        self.ledger = Ledger()
        self.policy_version = 0
        """The trainer's published version."""
        self.next_step = 1
        """The first step that is not committed."""
        self.last_step = 0
        """The last step that was planned."""
        self.oldest_step = 1
        """The first step that can still be served."""
        self.bytes_of: Counter[str] = Counter()
        """Encoded bytes of groups that wait for training, by table_name."""
        self.held_tokens = 0
        """Tokens of groups in the table."""
        self.op = 0
        """The last decision's number."""
        self.unpackable: Counter[str] = Counter()
        """Groups that were set aside, by table, since their run was admitted."""
        self.kinds: dict[str, Counter[str]] = {}
        """Column -> what held groups ask of the others in their step -> how many of them do."""
        self.evaluations = Evaluations()
        self.reports = Reports()
        self.quarantined: dict[int, GroupRow] = {}
        """Groups that were set aside and not decided upon since."""
        self.run_tables = RunTables(replay, lambda key, reason: self._left.append((str(key), str(reason))))
        self.rows: dict[int, GroupRow] = {}
        self.by_id: dict[str, int] = {}
        self.steps: dict[int, Manifest] = {}
        self.states: dict[int, State] = {}
        self._replay, self._retain_steps = replay, retain_steps
        self._last_step_of: dict[int, int] = {}
        self._ends: dict[int, list[int]] = {}
        """Step -> the groups whose last use it is."""
        self._left: list[tuple[str, str]] = []
        """What the table let go of and is not settled yet."""
        self._unwritten: dict[int, tuple[State, str]] = {}
        self._unwritten_steps: dict[int, State] = {}
        self.keeps_all = keeps_all
        """Whether the log and the storage forget nothing; memory forgets all the same."""
        self.freeing = Freeing(keeps_all=keeps_all)
        self._to_slim: list[int] = []
        """Steps whose plans are given back."""
        self.slim: dict[int, Manifest] = {}
        self._unfilled = -1
        """The decision after which a limiter allowed too few groups for a step; nothing changes before the next."""
        self._drawn: tuple[int, ...] = ()
        """Groups of the step that is drawn and not planned yet: the log does not hear of them before."""

    @property
    def held_bytes(self) -> int:
        return self.bytes_of.total()

    def held(self, target: Target) -> int:
        """What is held, counted as the target counts."""
        return {"groups": len(self.run_tables), "samples": self.ledger.held, "tokens": self.held_tokens}[target.unit]

    def row_of(self, key: Key) -> GroupRow:
        """What is known of a group that is held."""
        return self.rows[self.by_id[str(key)]]

    def take_in(self, row: GroupRow) -> bool:
        """A group was accepted; False if it was too old to be kept."""
        self.op = max(self.op, row.op)
        self.rows[row.op], self.by_id[row.id] = row, row.op
        self.ledger.accepted += row.samples
        self.ledger.add(State.HELD, "", row.samples)
        self.bytes_of[row.run] += row.size
        self.held_tokens += row.tokens
        count_kinds(self.kinds, row, 1)
        kept = self._insert(row)
        self._settle()
        return kept

    def take_evaluation(self, row: GroupRow, metadata: EvalMetadata | None) -> None:
        """An evaluation group was accepted."""
        self.op = max(self.op, row.op)
        self.ledger.accepted += row.samples
        self.ledger.add(State.EVALUATION, "", row.samples)
        self.evaluations.add(row, metadata)

    def give_back_evaluations(self, most_bytes: int) -> None:
        """Free the frames of the oldest evaluation groups, until at most `most_bytes` of them are kept."""
        if self.keeps_all:
            return
        for row in self.evaluations.give_back(most_bytes):
            self.freeing.add(row)

    def _insert(self, row: GroupRow) -> bool:
        # A group that does not say which policy made it counts as of the present one; where staleness is limited it is
        # not accepted at all.
        version = self.policy_version if row.policy_version is None else row.policy_version
        kept = self.run_tables.insert(row, version)
        if not kept:
            self._left.append((row.id, "stale"))
        return kept

    def apportion(self, target: Target) -> Mapping[str, int] | Target | None:
        """What `draw` is to take for the next step: so many groups of each table_name, or groups until a target is met;
        None if they are not there."""
        if self.held(target) < target.amount or self._unfilled == self.op:
            return None
        return self.run_tables.apportion(target, self.held(target), self.row_of)

    def draw(self, op: int, step: int, what: Mapping[str, int] | Target, *, one_by_one: bool = False) -> Manifest:
        """Take groups for a step out of the tables; raises WaitTimeout when they are not there. Then `planned`.

        `one_by_one`: as a target took them that took so many."""
        try:
            groups = self.run_tables.draw(what, self.row_of, one_by_one=one_by_one)
        except WaitTimeout:
            self._unfilled = self.op
            raise
        found = Manifest.of([self.rows[group] for group in groups], self.policy_version)
        manifest = msgspec.structs.replace(found, one_by_one=one_by_one or isinstance(what, Target))
        self.op, self.last_step, self._drawn = max(self.op, op), step, groups
        self.steps[step], self.states[step], self._ends[step] = manifest, State.SCHEDULED, []
        for group in groups:
            self._last_step_of[group] = step
        self.ledger.uses += manifest.samples
        self._settle()
        return manifest

    def planned(self, step: int, manifest: Manifest) -> None:
        """The step that was drawn is planned, and written down."""
        self.steps[step], self._drawn = manifest, ()

    @property
    def is_drawing(self) -> bool:
        """Whether a step is drawn and not planned yet."""
        return bool(self._drawn)

    def redo(self, op: int, record: Record) -> None:
        """Something else was decided."""
        self.op = max(self.op, op)
        if isinstance(record, Advance):
            self.policy_version = record.policy_version
            self.run_tables.advance(self.policy_version)
        elif isinstance(record, Prioritize):
            self.run_tables.update_priorities(record.priorities)
            if record.step:
                self.reports.apply(record.step, record.priorities)
        elif isinstance(record, GivePriorities):
            self.run_tables.given |= record.priorities
        elif isinstance(record, (Report, ForgetReports)):
            self.reports.follow(record)
        elif isinstance(record, Quarantine):
            self._set_aside(record.groups)
        elif isinstance(record, Discard):
            # Bounded where it enters; a log of an earlier version may hold any number.
            self.ledger.discarded[record.reason] = bounded_sum(self.ledger.discarded[record.reason] + record.samples)
        elif isinstance(record, Shorten):
            self.ledger.shorten({name: getattr(record, name) for name in OVER_LENGTH})
        elif isinstance(record, Weigh):
            self.run_tables.admit(record.run, record.weight)
            del self.unpackable[record.run]
        elif isinstance(record, EvictRun):
            self.run_tables.evict(record.run, record.reason)
            self._left = [(key, "evicted") for key, _ in self._left]
        elif isinstance(record, ReleaseGroup):
            self._release(self.quarantined.pop(record.op))
        elif isinstance(record, Lose):
            for row in [self.rows[op] for op in record.groups if op in self.rows]:
                if self.run_tables.remove(row):
                    self._left.append((row.id, ""))
            self._left = list({key: "lost" for key, _ in self._left}.items())
        else:
            row = self.quarantined.pop(record.op)
            self._account(row, State.QUARANTINED, State.DROPPED, "quarantined")
            self.freeing.add(row)
        self._settle()

    def _set_aside(self, groups: Mapping[int, str]) -> None:
        for op, reason in groups.items():
            row = self.rows[op]
            self.run_tables.remove(row)
            self._left.clear()
            self._finish(op, State.QUARANTINED, reason)
            self.quarantined[op] = replace(row, state=State.QUARANTINED, reason=reason)
            self.unpackable[row.run] += 1

    def _release(self, row: GroupRow) -> None:
        row = replace(row, state=State.HELD, reason="")
        self.rows[row.op], self.by_id[row.id] = row, row.op
        self._account(row, State.QUARANTINED, State.HELD, "")
        self.bytes_of[row.run] += row.size
        self._insert(row)

    def set_step(self, step: int, state: State) -> None:
        """A step was received or trained by every rank, or counts as not trained after all."""
        old = self.states[step]
        if old is state:
            return
        for op in self._ends[step]:
            self._move(op, old, state)
        if (old is State.COMMITTED) != (state is State.COMMITTED):
            for row in map(self.rows.__getitem__, self._ends[step]):
                self.bytes_of[row.run] += row.size if old is State.COMMITTED else -row.size
        self.states[step] = self._unwritten_steps[step] = state

    def begin_at(self, step: int, *, anew: bool = False) -> None:
        """Steps before this one are trained, the others are not; `anew`: and no rank has any of them."""
        self.next_step = step
        for number, state in list(self.states.items()):
            if anew and number >= step:
                self.set_step(number, State.SCHEDULED)
            elif (state is State.COMMITTED) != (number < step):
                self.set_step(number, State.COMMITTED if number < step else State.SCHEDULED)
        self.retire()

    def save(self) -> Saved:
        """All of it, to be kept in the transaction that writes the rest."""
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
            unpackable=dict(self.unpackable),
            rows=list(self.rows),
            quarantined=list(self.quarantined),
            last_step_of=self._last_step_of,
            steps={step: (int(state), self._ends[step]) for step, state in self.states.items()},
            run_tables=self.run_tables.save(),
            reports=self.reports,
        )

    def load(self, saved: Saved, log: Log) -> dict[int, GroupRow]:
        """Become what was saved, and follow what became of its steps since; the rows as they are recorded now."""
        self.op, self.policy_version, self.held_tokens = saved.op, saved.policy_version, saved.held_tokens
        self.next_step, self.last_step, self.oldest_step = saved.next_step, saved.last_step, saved.oldest_step
        self.ledger = Ledger.from_dict(saved.ledger)
        self.bytes_of, self.unpackable = Counter(saved.bytes_of), Counter(saved.unpackable)
        self.rows = {row.op: row for row in log.groups_of(saved.rows)}
        self.by_id = {row.id: row.op for row in self.rows.values()}
        self.quarantined = {row.op: row for row in log.groups_of(saved.quarantined)}
        self._last_step_of = saved.last_step_of
        self.run_tables.load(saved.run_tables)
        self.reports = saved.reports
        for key in self.run_tables:
            count_kinds(self.kinds, self.row_of(key), 1)
        recorded: dict[int, State] = {}
        for step, _, data, state in log.steps(first=min(saved.steps, default=saved.last_step + 1)):
            if step in saved.steps:
                self.steps[step], recorded[step] = read_manifest(data), state
                self.states[step], self._ends[step] = State(saved.steps[step][0]), saved.steps[step][1]
        for step, state in recorded.items():
            self.set_step(step, state)
        return self.rows | self.quarantined

    def write(self, log: Log) -> None:
        """Bring what the log says of groups and steps up to date; inside a transaction. Then `written`.

        This follows from the decisions, so it may wait for the next transaction: a rebuild finds it out again."""
        held_back = set(self._drawn)
        changed: dict[tuple[State, str], list[int]] = {}
        for op, to in self._unwritten.items():
            if op not in held_back:
                changed.setdefault(to, []).append(op)
        for (state, reason), ops in changed.items():
            log.set_groups(ops, state, reason)
        for step, state in self._unwritten_steps.items():
            log.set_steps(step, step, state)
        if self.freeing.ops:
            log.forget_frames(self.freeing.ops)
        for step in () if self.keeps_all else self._to_slim:
            slim = msgspec.structs.replace(self.slim[step], rank_plans=(), needs=(), digests=())
            log.set_manifest(step, msgspec.msgpack.encode(slim))
        if self.freeing.ops or self._to_slim:
            log.set_meta("oldest_step", self.oldest_step)

    def written(self) -> None:
        """The transaction went through."""
        held_back = set(self._drawn)
        self._unwritten = {op: change for op, change in self._unwritten.items() if op in held_back}
        self._unwritten_steps, self._to_slim = {}, []
        self.slim.clear()

    def _settle(self) -> None:
        """Groups the table let go of end as the last step that used them, or are dropped; others take their place."""
        self._left += [(str(key), "stale") for key in self.run_tables.let_in()]
        if not self._left:
            return
        left, self._left = self._left, []
        for key, reason in left:
            op = self.by_id[key]
            step = self._last_step_of.get(op)
            if step is None:
                self._finish(op, State.DROPPED, reason)
            elif step not in self.states:
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
                count_kinds(self.kinds, row, sign)
        self.ledger.add(old, row.reason if old is State.DROPPED else "", -row.samples)
        self.ledger.add(new, reason, row.samples)
        self._unwritten[row.op] = (new, reason)

    def _finish(self, op: int, state: State, reason: str) -> None:
        """A held group comes to its end, and its frame is given back (one in quarantine is kept, to be looked at)."""
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
        """Forget steps that can no longer be asked for, and the groups that ended with them."""
        self.oldest_step = max(self.oldest_step, oldest, self.next_step - self._retain_steps)
        for step in [s for s in self.steps if s < self.oldest_step]:
            self.slim[step] = self.steps.pop(step)
            self._to_slim.append(step)
            del self.states[step]
            for op in self._ends.pop(step):
                self._forget(op, frame=True)

    def keep_differences(self, rows: Iterable[GroupRow], steps: Mapping[int, State], frames: Container[int]) -> None:
        """After a rebuild, write only what is recorded differently: a crash may have kept it from being written, or
        the step that a group was recorded with is no more."""
        for row in rows:
            if self._unwritten.get(row.op) == (row.state, row.reason):
                del self._unwritten[row.op]
            elif row.op not in self._unwritten and row.state is not State.HELD and row.id in self.run_tables:
                self._unwritten[row.op] = (State.HELD, "")
        self._unwritten_steps = {step: s for step, s in self._unwritten_steps.items() if steps[step] is not s}
        self.freeing.keep_differences(frames)
