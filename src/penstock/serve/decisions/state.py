"""The plane's books: where every group and every step is, made by doing what the log says, in the same order.

Each change is written to the log first and then entered here, by the same methods that enter it again after a
restart; so a plane that was killed continues exactly where it was. A group is

    held                  while the replay table has it
    scheduled, delivered,
    committed             with the last step that uses it, once the table has let go of it
    dropped               if the table let go of it unused
    quarantined           if no step could be made with it
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Iterable, Mapping
from dataclasses import replace

import msgspec

from penstock.errors import ConfigError, CorruptFile
from penstock.hold import Key
from penstock.serve.decisions.ledger import Ledger
from penstock.serve.decisions.log import EventRow, GroupRow, Log, State
from penstock.serve.decisions.run_tables import RunTables
from penstock.serve.decisions.snapshot import Saved
from penstock.serve.settings import Replay, Target


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


class PlaneState:
    """Groups, steps, the replay table and the ledger."""

    def __init__(self, replay: Replay, *, retain_steps: int) -> None:
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
        self.misfits: Counter[str] = Counter()
        """Groups that were set aside, by table_name, since their run was admitted."""
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
        self._to_forget: list[int] = []

    @property
    def held_bytes(self) -> int:
        return self.bytes_of.total()

    def held(self, target: Target) -> int:
        """What is held, counted as the target counts."""
        return {"groups": len(self.run_tables), "samples": self.ledger.held, "tokens": self.held_tokens}[target.unit]

    def row_of(self, key: Key) -> GroupRow:
        """What is known of a group that is held."""
        return self.rows[self.by_id[str(key)]]

    # -------------------------------------------------------------- changes

    def take_in(self, row: GroupRow) -> bool:
        """A group was accepted; False if it was too old to be kept."""
        self.op = row.op
        self.rows[row.op], self.by_id[row.id] = row, row.op
        self.ledger.accepted += row.samples
        self.ledger.add(State.HELD, "", row.samples)
        self.bytes_of[row.run] += row.size
        self.held_tokens += row.tokens
        table, sizes = self.run_tables.table(row.run), {"num_bytes": row.size, "num_tokens": row.tokens}
        kept = table.insert(row.id, row.op, **sizes, policy_version=row.policy_version, timeout=0) is not None
        if not kept:
            self._left.append((row.id, "stale"))
        self._settle()
        return kept

    def apportion(self, target: Target) -> dict[str, int] | None:
        """How many groups of each table_name make the next step; None if they are not there."""
        return self.run_tables.apportion(target, self.row_of) if self.held(target) >= target.amount else None

    def draw(self, counts: Mapping[str, int]) -> tuple[int, ...]:
        """Take groups for a step out of the tables; raises WaitTimeout when they are not there. Then `plan`."""
        return self.run_tables.draw(counts, self.row_of)

    def plan(self, op: int, step: int, manifest: Manifest) -> None:
        """A step was planned of what was drawn."""
        self.op, self.last_step = op, step
        self.steps[step], self.states[step], self._ends[step] = manifest, State.SCHEDULED, []
        for group in manifest.groups:
            self._last_step_of[group] = step
        self.ledger.uses += manifest.samples
        self._settle()

    def redo(self, event: EventRow) -> None:
        """Something else was decided: `advance`, `priorities`, `quarantine`, `discard`, `share` or `evict`."""
        self.op = event.op
        if event.kind == "advance":
            self.policy_version = msgspec.msgpack.decode(event.data, type=int)
            self.run_tables.advance(self.policy_version)
        elif event.kind == "priorities":
            self.run_tables.update_priorities(msgspec.msgpack.decode(event.data, type=dict[Key, float]))
        elif event.kind == "quarantine":
            for op, reason in msgspec.msgpack.decode(event.data, type=dict[int, str]).items():
                table_name = self.rows[op].run
                self.run_tables.table(table_name).remove([self.rows[op].id])
                self._left.clear()
                self._finish(op, State.QUARANTINED, reason)
                self.misfits[table_name] += 1
        elif event.kind == "discard":
            reason, samples = msgspec.msgpack.decode(event.data, type=tuple[str, int])
            self.ledger.discarded[reason] += samples
        elif event.kind == "share":
            run, weight = msgspec.msgpack.decode(event.data, type=tuple[str, float])
            self.run_tables.admit(run, weight)
            del self.misfits[run]
        elif event.kind == "evict":
            self.run_tables.evict(*msgspec.msgpack.decode(event.data, type=tuple[str, str]))
            self._left = [(key, "evicted") for key, _ in self._left]
        self._settle()

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

    def begin_at(self, step: int) -> None:
        """Steps before this one are trained, the others are not."""
        self.next_step = step
        for number, state in list(self.states.items()):
            if (state is State.COMMITTED) != (number < step):
                self.set_step(number, State.COMMITTED if number < step else State.SCHEDULED)
        self._retire()

    # -------------------------------------------------------------- to and from the log

    @staticmethod
    def rebuild(log: Log, replay: Replay, *, retain_steps: int) -> PlaneState:
        """Do again, in order, what the log says was done since memory was last written down."""
        state = PlaneState(replay, retain_steps=retain_steps)
        found = log.snapshot()
        saved = None if found is None else Saved.from_bytes(found[1], repr(replay))
        try:
            rows = {} if saved is None else state._load(saved, log)
        except CorruptFile:  # tables in a form of another version
            state, rows = PlaneState(replay, retain_steps=retain_steps), {}
        since, recorded = state.op, list(log.steps(first=state.oldest_step))
        events = {event.op: event for event in log.events(after=since)}
        steps = {op: (step, manifest, state) for step, op, manifest, state in recorded if op > since}
        rows |= {row.op: row for row in log.groups(after=since)}
        for op in sorted([*(op for op in rows if op > since), *events, *steps]):
            if op in rows:
                state.take_in(rows[op])
            elif op in events:
                state.redo(events[op])
            else:
                state._draw_again(op, *steps[op])
        state.begin_at(log.meta("next_step", 1))
        state._retire(log.meta("oldest_step", 1))
        state._keep_differences(rows.values(), {step: state for step, _, _, state in recorded}, log.with_frames())
        return state

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
            misfits=dict(self.misfits),
            rows=list(self.rows),
            last_step_of=self._last_step_of,
            steps={step: (int(state), self._ends[step]) for step, state in self.states.items()},
            run_tables=self.run_tables.save(),
        )

    def _load(self, saved: Saved, log: Log) -> dict[int, GroupRow]:
        """Become what was saved, and follow what became of its steps since; the rows as they are recorded now."""
        self.op, self.policy_version, self.held_tokens = saved.op, saved.policy_version, saved.held_tokens
        self.next_step, self.last_step, self.oldest_step = saved.next_step, saved.last_step, saved.oldest_step
        self.ledger = Ledger.from_dict(saved.ledger)
        self.bytes_of, self.misfits = Counter(saved.bytes_of), Counter(saved.misfits)
        self.rows = {row.op: row for row in log.groups_of(saved.rows)}
        self.by_id = {row.id: row.op for row in self.rows.values()}
        self._last_step_of = saved.last_step_of
        self.run_tables.load(saved.run_tables)
        recorded: dict[int, State] = {}
        for step, _, data, state in log.steps(first=min(saved.steps, default=saved.last_step + 1)):
            if step in saved.steps:
                self.steps[step], recorded[step] = msgspec.msgpack.decode(data, type=Manifest), state
                self.states[step], self._ends[step] = State(saved.steps[step][0]), saved.steps[step][1]
        for step, state in recorded.items():
            self.set_step(step, state)
        return dict(self.rows)

    def write(self, log: Log) -> None:
        """Bring what the log says of groups and steps up to date; inside a transaction. Then `written`.

        This follows from the decisions, so it may wait for the next transaction: a rebuild finds it out again."""
        for op, (state, reason) in self._unwritten.items():
            log.set_groups([op], state, reason)
        for step, state in self._unwritten_steps.items():
            log.set_steps(step, step, state)
        if self._to_forget:
            log.forget_frames(self._to_forget)
            log.set_meta("oldest_step", self.oldest_step)

    def written(self) -> None:
        """The transaction went through."""
        self._unwritten, self._unwritten_steps, self._to_forget = {}, {}, []

    # -------------------------------------------------------------- inside

    def _draw_again(self, op: int, step: int, data: bytes, state: State) -> None:
        manifest = msgspec.msgpack.decode(data, type=Manifest)
        drawn = self.draw(Counter(self.rows[group].run for group in manifest.groups))
        if drawn != manifest.groups:
            raise ConfigError(
                f"step {step}: drawing again gives other groups than were recorded; the replay settings (sampler, "
                "seed, capacity, max_times_sampled, max_staleness) are not those the run began with"
            )
        self.plan(op, step, manifest)
        self.set_step(step, state)

    def _settle(self) -> None:
        """Groups the table let go of end as the last step that used them, or are dropped."""
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
        samples = self.rows[op].samples
        if old is State.HELD:
            self.held_tokens -= self.rows[op].tokens
        self.ledger.add(old, "", -samples)
        self.ledger.add(new, reason, samples)
        self._unwritten[op] = (new, reason)

    def _finish(self, op: int, state: State, reason: str) -> None:
        """A held group comes to its end, and its frame is given back (one in quarantine is kept, to be looked at)."""
        self._move(op, State.HELD, state, reason)
        self.bytes_of[self.rows[op].run] -= self.rows[op].size
        self._forget(op, frame=state is not State.QUARANTINED)

    def _forget(self, op: int, *, frame: bool) -> None:
        if frame:
            self._to_forget.append(op)
        self.by_id.pop(self.rows.pop(op).id)
        self._last_step_of.pop(op, None)

    def _retire(self, oldest: int = 1) -> None:
        """Forget steps that can no longer be asked for, and the groups that ended with them."""
        self.oldest_step = max(self.oldest_step, oldest, self.next_step - self._retain_steps)
        for step in [s for s in self.steps if s < self.oldest_step]:
            del self.steps[step], self.states[step]
            for op in self._ends.pop(step):
                self._forget(op, frame=True)

    def _keep_differences(self, rows: Iterable[GroupRow], steps: Mapping[int, State], frames: Container[int]) -> None:
        """After a rebuild, write only what is recorded differently: a crash may have kept it from being written."""
        for row in rows:
            if self._unwritten.get(row.op) == (row.state, row.reason):
                del self._unwritten[row.op]
        self._unwritten_steps = {step: s for step, s in self._unwritten_steps.items() if steps[step] is not s}
        self._to_forget = [op for op in self._to_forget if op in frames]


def without_frame(row: GroupRow) -> GroupRow:
    """What memory keeps of a group; the frame stays in the log."""
    return replace(row, frame=b"")
