"""Accept groups: recognise repeated puts, check for room, and record groups whose frames are checked and stored.

Room is checked before the frame is read, so a rejected put costs almost nothing. Accepted groups are written to the log
before any producer is answered, many groups with one sync.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from typing import TypeAlias

import msgspec

from penstock.arrays import check_priority
from penstock.errors import Conflict, DiskFull, InvalidInput, Overloaded, PenstockError
from penstock.log import (
    AwaitColumns,
    GivePriorities,
    GroupOutcome,
    GroupRow,
    Record,
    ReturnLeases,
    Shorten,
    State,
    Summary,
    Unlisted,
)
from penstock.plane.intake import NONE, Incoming, OverLength, summary_of, why_untrained
from penstock.plane.recorder import Recorder
from penstock.plane.settings import PlaneSettings
from penstock.plane.state import OVER_LENGTH_KEY
from penstock.plane.task_book import PROMPT, Verdict
from penstock.plane.telemetry import Generated
from penstock.protocol import NOTHING, Amount

_RETRY_AFTER_S = 0.25
_SPARE = [4**power for power in range(9, 0, -1)]
"""Credits for groups that `spare` tries, largest first: 262,144 down to 4."""
Claim: TypeAlias = Callable[[str], Amount | None]
"""Maps a table to the room reserved there for other puts. Returns None if others wait ahead of this put."""
ACCEPTED_BEFORE = "accepted before"
MAX_ID = 512
"""The longest group id, in characters."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of a put: an error, or success."""

    ticket: object
    error: PenstockError | None = None
    duplicate: bool = False
    stale: bool = False
    """Accepted and dropped at once: its policy version is further behind than `max_staleness` allows."""
    table: str = ""
    """The table without room, if the error is `Overloaded`."""
    size: int = 0
    """The size of the frame in bytes, if it did not fit."""
    over_length: OverLength = NONE
    """What was truncated or dropped of its samples."""
    late: bool = False
    """Another group completed its task first. This one is not kept."""


class Arrivals:
    """Groups that were offered and are not accepted yet, and the room they take in each table."""

    def __init__(self) -> None:
        self.groups: Counter[str] = Counter()
        self.bytes: Counter[str] = Counter()
        """Both by table. Evaluation groups wait in no table, so they are not counted here."""
        self.num_bytes = 0
        """Bytes of all offered groups. Evaluation groups take room on the disk too."""
        self._all: dict[str, Incoming] = {}

    def get(self, group: str) -> Incoming | None:
        return self._all.get(group)

    def add(self, group: Incoming) -> None:
        self._all[group.id] = group
        self._count(group, 1)

    def remove(self, group: Incoming) -> None:
        del self._all[group.id]
        self._count(group, -1)

    def move(self, group: Incoming, table: str) -> None:
        """Count a group for another table than it was offered for."""
        if table != group.table:
            self._count(group, -1)
            group.table = table
            self._count(group, 1)

    def _count(self, group: Incoming, sign: int) -> None:
        self.num_bytes += sign * group.size
        if not group.is_evaluation:
            self.groups[group.table] += sign
            self.bytes[group.table] += sign * group.size

    @property
    def ready(self) -> list[Incoming]:
        """Groups that were checked and stored, in the order they were offered."""
        return [group for group in self._all.values() if group.is_ready]


class Acceptance:
    """Decides which groups are accepted. Runs on the loop's thread."""

    def __init__(self, settings: PlaneSettings, recorder: Recorder) -> None:
        self._settings, self._recorder = settings, recorder
        self._arrivals = Arrivals()
        self.generated = Generated()
        """Rewards, lengths and truncation of recently accepted groups."""
        self.full: set[str] = set()
        """Tables that rejected a put for lack of room since room last became free."""
        self.stale_in_a_row = 0
        """Accepted groups that were dropped as stale since the last fresh one."""
        self.filtered_in_a_row: Counter[str] = Counter()
        """Groups that producers filtered out since the last one that was accepted, by reason."""

    def table_of(self, run: str) -> str:
        """Return the table for groups of a run, or the run's name if the run may not put."""
        try:
            return self._recorder.tenant_tables.table_for(run)
        except PenstockError:
            return run

    def look_up(self, groups: Sequence[str]) -> None:
        """Query the log once for all groups that a turn names; later lookups hit its cache."""
        names = [group for group in groups if 0 < len(group) <= MAX_ID]
        self._recorder.log.look_up(names, [_dropped_key(group) for group in names])

    def recognises(self, group: str, digest: bytes) -> bool | None:
        """Return whether this group is accepted for training with the same content, or None if the id is new."""
        log = self._recorder.log
        known = self.digest_of(group, digest) if 0 < len(group) <= MAX_ID else None
        return None if known is None else known == digest and not log.is_evaluation(group)

    def digest_of(self, group: str, digest: bytes) -> bytes | None:
        """Return the digest of a group's frame, or None. A group that got late columns has a new frame: if it was put
        with `digest`, return that."""
        log = self._recorder.log
        known = log.digest_of(group)
        if known is not None and known != digest and log.is_discarded(put_key(group, digest)):
            return digest
        return known

    def states_of(self, groups: Sequence[str]) -> list[tuple[str, str]]:
        """Return the state and reason of each group, in the ledger's words; ("unknown", "") if it was not accepted."""
        log, state = self._recorder.log, self._recorder.state
        self.look_up(groups)
        recorded = log.states_of([group for group in groups if 0 < len(group) <= MAX_ID])
        found = []
        for group in groups:
            if group in recorded:
                at, reason = state.state_of(*recorded[group])
                found.append((at.name.lower(), reason))
            elif 0 < len(group) <= MAX_ID and log.is_discarded(_dropped_key(group)):
                found.append((State.DROPPED.name.lower(), "over_length"))
            else:
                found.append(("unknown", ""))
        return found

    def no_room(self, table: str, size: int, reserved: Amount) -> str | None:
        """Return why a group must wait, "" if there is room, or None if it can never be accepted."""
        tables = self._recorder.tenant_tables
        if table in tables.evicted or (tables.members and table not in tables.members):
            return None
        try:
            self._check_room("", table, size, reserved)
        except Overloaded as error:
            return str(error).removeprefix("group '': ")
        except PenstockError:
            return None
        return ""

    def spare(self, reserved: Amount) -> Amount:
        """Return how many groups and bytes producers may send without asking, beside `reserved`.

        Groups are a power of four, because the exact number would need a search in every answer. With tenants it is
        nothing: room in one table says nothing about the others."""
        state = self._recorder.state
        if state.tenant_tables.members:
            return NOTHING
        table, arriving = state.tenant_tables.table(""), self.ahead("") + reserved.groups
        # A table of 1,000 groups has no room for 262,144: asking takes longer than comparing.
        settings, room = table.settings, table.settings.capacity - len(table) - arriving
        groups = 0
        for count in _SPARE:
            if (count <= room or settings.remover is not None) and table.may_insert(ahead=arriving + count - 1):
                groups = count
                break
        used = state.bytes_of[""] + self._arrivals.bytes[""] + reserved.bytes
        return Amount(groups, max(self._settings.max_held_bytes - used, 0))

    def ahead(self, table_name: str) -> int:
        """Return how many groups will enter a table: those that are not accepted yet, and those that wait for
        columns. Their room is taken, so that attaching a column never waits for any."""
        return self._arrivals.groups[table_name] + self._recorder.state.late.tables.get(table_name, 0)

    def offer(self, group: Incoming, run: str = "", *, claim: Claim = lambda _: NOTHING) -> Outcome | bool:
        """Decide whether a group's frame should be checked and stored.

        True: do that, then call `arrive`, `drop` or `refuse`. False: the same group is being checked already; this
        ticket is answered with it. An `Outcome`: the put is decided. `claim` returns the room reserved for others."""
        (ticket,) = group.tickets
        try:
            if not 0 < len(group.id) <= MAX_ID:
                raise InvalidInput(f"group id of {len(group.id)} characters; give each group one of 1 to {MAX_ID}")
            if group.priority != 1.0:  # the default needs no check
                check_priority(group.id, group.priority)
            known = self._recognise(group)
            if known is None and self._recorder.state.tasks.lists:
                known = self._judge_task(group)
            if known is not None:
                return known
            tables = self._recorder.state.tenant_tables
            if tables.is_shared and not (group.is_evaluation and self._settings.env_weights):
                group.table = tables.table_for(run)  # evaluation needs no weight
            if group.is_evaluation:
                self._check_evaluation_room(group.id, group.size)
            else:
                reserved = claim(group.table)
                if reserved is None:
                    raise Overloaded(f"group {group.id!r}: others wait for room before it", _RETRY_AFTER_S)
                self._check_room(group.id, group.table, group.size, reserved)
        except PenstockError as error:
            self._recorder.counts["puts_overloaded" if isinstance(error, Overloaded) else "puts_refused"] += 1
            return Outcome(ticket, error, table=group.table, size=group.size)
        self._arrivals.add(group)
        return True

    def _recognise(self, group: Incoming) -> Outcome | bool | None:
        """Return the answer to a repeated put, False if its first put is still being checked, or None for a new
        group."""
        (ticket,) = group.tickets
        first = self._arrivals.get(group.id)
        known = first.digest if first else self.digest_of(group.id, group.digest)
        if known is None and not self._recorder.log.is_discarded(_dropped_key(group.id)):
            return None
        self._recorder.counts["puts_repeated"] += 1
        if known is None:
            return Outcome(ticket, duplicate=True)
        if known != group.digest and self._verdict(group.id) is not None:
            return self._late(group)
        if known != group.digest:
            raise Conflict(f"group {group.id!r}: accepted before with other content; give each group its own id")
        before = first.is_evaluation if first else self._recorder.log.is_evaluation(group.id)
        if before != group.is_evaluation:
            was, now = ("for evaluation", "to be trained") if before else ("to be trained", "for evaluation")
            raise Conflict(f"group {group.id!r}: accepted before {was}, now {now}; give each group its own id")
        if first is None:
            self._close_task(group.id)
            return Outcome(ticket, duplicate=True)
        first.tickets.append(ticket)  # not durable yet: "duplicate" would acknowledge what a crash may still lose
        return False

    def _judge_task(self, group: Incoming) -> Outcome | None:
        """Return the answer to a group whose task needs none, or None if it is welcome. Raises InvalidInput for a task
        that was never handed out."""
        verdict = self._verdict(group.id)
        if verdict is None or (verdict is Verdict.OPEN and not group.is_evaluation):
            return None
        if verdict is Verdict.LATE and not group.is_evaluation:
            return self._late(group)
        raise InvalidInput(
            f"group {group.id!r}: such ids belong to prompts that this plane leases, and this one was not leased for "
            "training; make the group with task.group(), or choose another id"
        )

    def _verdict(self, group: str) -> Verdict | None:
        """Return what a put of a group of tasks may do, or None for any other group."""
        tasks = self._recorder.state.tasks
        return tasks.verdict(group) if tasks.lists else None

    def _close_task(self, group: str) -> None:
        """Close a task whose group the log has, although the task is open: the log was recovered from its frames."""
        lease = self._recorder.state.leases.number_of(PROMPT, group)
        if lease is not None:
            self._recorder.decide(ReturnLeases(leases=(lease,), reason=ACCEPTED_BEFORE))

    def _late(self, group: Incoming) -> Outcome:
        """Answer the second group of a task. This is no error: its worker was slow."""
        self._recorder.counts["tasks_late"] += 1
        if self._recorder.log.digest_of(group.id) is not None:
            self._close_task(group.id)
        return Outcome(group.tickets[0], duplicate=True, late=True)

    def _check_evaluation_room(self, group: str, size: int) -> None:
        """Raise unless an evaluation group fits on the disk. It waits in no table, so no table needs room."""
        most = self._settings.retain_eval_bytes
        if size > most and not self._recorder.keeps_all:
            raise InvalidInput(f"group {group!r}: {size:,} bytes; at most {most:,} are ever kept: retain_eval_bytes")
        self._check_disk(size)

    def _check_room(self, group: str, table_name: str, size: int, reserved: Amount) -> None:
        """Raise unless a group fits into its table and on the disk, beside the room reserved for others."""
        tables = self._recorder.state.tenant_tables
        table, arriving = tables.table(table_name), self.ahead(table_name) + reserved.groups
        limit = int(self._settings.max_held_bytes * tables.part(table_name))
        of = f" (tenant {table_name!r} has its share)" if table_name else ""
        if size > limit:
            raise InvalidInput(f"group {group!r}: {size:,} bytes; at most {limit:,} are ever held{of}: max_held_bytes")
        self._check_disk(size + reserved.bytes)
        waiting = self._recorder.state.bytes_of[table_name] + self._arrivals.bytes[table_name] + reserved.bytes
        if waiting + size > limit or not table.may_insert(ahead=arriving):
            # Only a table that is full without the groups on their way can deadlock: those may still complete the step
            # that ranks wait for.
            if not arriving:
                self.full.add(table_name)
            groups, capacity = len(table) + arriving, self._settings.replay.capacity
            raise Overloaded(
                f"group {group!r}: {waiting:,} bytes in {groups} groups wait for the trainer, the limits{of} are "
                f"{limit:,} bytes and {capacity} groups, {table.settings.limiter}; try again later",
                retry_after_s=_RETRY_AFTER_S,
            )

    def _check_disk(self, size: int) -> None:
        """Raise DiskFull if the disk has no room. Frees retained steps and evaluation groups first."""
        arriving = self._arrivals.num_bytes + size
        tried = False
        while True:
            try:
                self._recorder.log.disk.check(arriving, self._used_bytes)
            except DiskFull as error:
                if self._recorder.segments.is_deleting:
                    text = f"the disk is full, and freed frames are being deleted: {error}"
                    raise Overloaded(text, retry_after_s=_RETRY_AFTER_S) from None
                if tried and not self._free_retained():
                    raise
                tried = True
                # a grown write-ahead log may be the only problem, and truncating it costs nothing
                self._recorder.log.shrink()
                self._recorder.log.disk.restore()
            else:
                return

    def _used_bytes(self) -> int:
        return self._recorder.log.used_bytes + self._recorder.segments.num_bytes

    def make_room(self) -> None:
        """Free retained steps and evaluation groups after a frame did not fit on its volume, which need not be the
        log's.

        The producer tries again and finds room once storage has deleted them."""
        with suppress(DiskFull):
            if not self._recorder.segments.is_deleting:
                self._free_retained()

    def _free_retained(self) -> bool:
        """Free half of the steps retained for a rewind or, if there are none, half of the evaluation groups.

        Returns False if nothing was left to free or the run keeps everything."""
        state, counts = self._recorder.state, self._recorder.counts
        if state.keeps_all:
            return False
        kept = state.next_step - state.oldest_step
        if kept > 0 and not state.is_drawing:
            with self._recorder.transaction():
                state.retire(state.next_step - kept // 2)
            counts["steps_freeing_early"] += kept - kept // 2
            return True
        before = state.evaluations.freeing
        with self._recorder.transaction():
            state.free_evaluations(state.evaluations.num_bytes // 2)
        counts["eval_groups_freeing_early"] += state.evaluations.freeing - before
        return state.evaluations.freeing > before

    def arrive(self, group: Incoming) -> None:
        """Note that an offered group was checked and stored. The next `flush` accepts it."""
        group.is_ready = True

    def drop(self, group: Incoming) -> list[Outcome]:
        """Count an offered group without a sample that fits, and remember its id so that a repeated put is
        recognised."""
        self._arrivals.remove(group)
        try:
            record = Shorten(**asdict(group.over_length), key=_dropped_key(group.id))
            self._recorder.decide(record, _over_length(group))
        except PenstockError as error:
            return [Outcome(ticket, error) for ticket in group.tickets]
        return _outcomes(group)

    def follow(self, ticket: object, group: str, digest: bytes) -> bool:
        """Return whether a group is being checked. If so, this ticket is answered with it."""
        first = self._arrivals.get(group)
        if first is None or first.digest != digest:
            return False
        if ticket not in first.tickets:
            first.tickets.append(ticket)
        return True

    def refuse(self, group: Incoming, error: PenstockError) -> list[Outcome]:
        """Reject a group that was offered, under all its tickets."""
        self._arrivals.remove(group)
        self._recorder.counts["puts_failed" if isinstance(error, DiskFull) else "puts_refused"] += len(group.tickets)
        return [Outcome(ticket, error) for ticket in group.tickets]

    def flush(self) -> list[Outcome]:
        """Accept all groups that were checked and stored, in one transaction. An outcome without error is durable."""
        outcomes, groups, state = list[Outcome](), list[Incoming](), self._recorder.state
        for group in self._arrivals.ready:
            if refused := self._late_refusal(group):
                outcomes += refused
            else:
                groups.append(group)
        if not groups:
            return outcomes
        before = list(enumerate(_before(groups, self._recorder.log.epoch), start=state.op + 1))
        rows = [_row(group, op) for op, group in enumerate(groups, start=state.op + 1 + len(before))]
        shortened = _shortened(groups, rows[-1].op + 1)
        evaluated = sum([group.size for group in groups if group.is_evaluation])
        if evaluated:
            state.free_evaluations(max(self._settings.retain_eval_bytes - evaluated, 0))
        try:
            with self._recorder.transaction():
                self._write(before, rows, groups, shortened)
        except Exception as error:  # noqa: BLE001 - whatever a row provokes, its producer gets the error
            # After a failed sync the rows may or may not be on disk, so their frames must stay. They are deleted with
            # their segment, once it holds no accepted frame.
            for group in groups:
                self._recorder.segments.settle(group.location, accepted=False)
            known = error if isinstance(error, PenstockError) else InvalidInput(f"{type(error).__name__}: {error}")
            return outcomes + [outcome for group in groups for outcome in self.refuse(group, known)]
        for op, record in before:
            state.redo(op, record)
        for group, row in zip(groups, rows, strict=True):
            outcomes += self._accept(group, row)
        if shortened is not None:
            state.redo(*shortened)
        if evaluated:
            state.free_evaluations(self._settings.retain_eval_bytes)  # one batch alone may exceed the limit
        return outcomes

    def _write(
        self,
        before: Sequence[tuple[int, Record]],
        rows: Sequence[GroupRow],
        groups: Sequence[Incoming],
        shortened: tuple[int, Shorten] | None,
    ) -> None:
        """Write accepted groups, and what is decided with them, inside a transaction."""
        log = self._recorder.log
        for op, record in before:
            log.add_record(op, record)
        log.add_groups([(row, _metadata(group)) for row, group in zip(rows, groups, strict=True)])
        log.add_summaries(_summaries(rows, groups))
        if evaluated := tuple(row.op for row, group in zip(rows, groups, strict=True) if group.is_evaluation):
            self._recorder.state.outcomes.add(GroupOutcome(outcome="evaluation", groups=evaluated))
        if shortened is not None:
            log.add_record(*shortened)

    def _late_refusal(self, group: Incoming) -> list[Outcome]:
        """Reject a stored group whose run may not put: the run was evicted meanwhile, or the frame names another
        run."""
        metadata, tables = group.metadata, self._recorder.state.tenant_tables
        assert metadata is not None
        if group.is_evaluation and self._settings.env_weights:
            return []
        try:
            if self._settings.env_weights and len(metadata.env) > 1:
                envs = ", ".join(map(repr, sorted(set(metadata.env))[:5]))
                raise InvalidInput(f"group {group.id!r}: samples of environments {envs}; with env_weights it has one")
            table = tables.table_for(tables.key_of(metadata.run, metadata.env[0])) if tables.is_shared else ""
            if not group.is_evaluation:
                self._arrivals.move(group, table)
        except PenstockError as error:
            self._recorder.segments.reject(group.location)
            return self.refuse(group, error)
        if self._recorder.state.tasks.lists and self._verdict(group.id) is Verdict.LATE:
            # Its task was decided while it was checked.
            self._arrivals.remove(group)
            self._recorder.segments.reject(group.location)
            return [replace(self._late(group), ticket=ticket) for ticket in group.tickets]
        return []

    def _accept(self, group: Incoming, row: GroupRow) -> list[Outcome]:
        assert group.metadata is not None
        state, counts = self._recorder.state, self._recorder.counts
        self._arrivals.remove(group)
        self._recorder.segments.settle(group.location, accepted=True)
        counts["groups"] += 1
        counts["samples"] += row.samples
        counts["tokens"] += row.tokens
        if group.is_evaluation:
            state.take_evaluation(row, group.eval_metadata)
            return _outcomes(group)
        if self._settings.untrained_groups != "reject":  # else there are none
            counts["groups_untrained"] += bool(why_untrained(group.metadata))
        if group.awaited is None:
            self.generated.add(group.metadata)
            state.bias.put(row, group.metadata.rewards)
        else:
            counts["groups_awaited"] += 1
        self.filtered_in_a_row.clear()
        stale = not state.take_in(row)
        self._recorder.on_stage("put", (row,), 0)
        counts["groups_stale"] += stale
        self.stale_in_a_row = self.stale_in_a_row + 1 if stale else 0
        return _outcomes(group, stale=stale)


def _row(group: Incoming, op: int) -> GroupRow:
    """Return the row of a group in the log."""
    metadata = group.metadata
    assert metadata is not None
    return GroupRow(
        op=op,
        id=group.id,
        digest=group.digest,
        policy_version=metadata.policy_version,
        samples=len(metadata.ids),
        tokens=metadata.num_tokens,
        size=group.size,
        state=_first_state(group),
        run=metadata.run if group.is_evaluation else group.table,
        prompt=metadata.prompt,
        kinds=tuple(sorted(metadata.kinds.items())),
        location=group.location,
    )


def _first_state(group: Incoming) -> State:
    if group.is_evaluation:
        return State.EVALUATION
    return State.HELD if group.awaited is None else State.WAITING


def _before(groups: Sequence[Incoming], epoch: int) -> list[Record]:
    """Return the decisions to record before these groups: priorities other than 1, and columns that some wait for."""
    if all(group.priority == 1.0 and group.awaited is None for group in groups):  # the usual case
        return []
    trained = [group for group in groups if not group.is_evaluation]
    given = {group.id: group.priority for group in trained if group.priority != 1.0}
    put = {"at": time.time(), "epoch": epoch}
    awaited = {one.id: msgspec.structs.replace(one.awaited, **put) for one in trained if one.awaited is not None}
    found: list[Record] = [GivePriorities(priorities=given)] if given else []
    return [*found, AwaitColumns(groups=awaited)] if awaited else found


def _metadata(group: Incoming) -> bytes:
    """Return the metadata of a group as the log stores it."""
    found = group.eval_metadata or group.metadata
    assert found is not None
    return group.raw_metadata or found.to_bytes()


def _shortened(groups: Sequence[Incoming], op: int) -> tuple[int, Shorten] | None:
    """Return the decision that counts truncated and dropped samples of these groups, if there are any."""
    found = [group.over_length for group in groups if group.over_length is not NONE]
    if not found:
        return None
    total = OverLength.total(found)
    return (op, Shorten(**asdict(total))) if total else None


def _summaries(rows: Sequence[GroupRow], groups: Sequence[Incoming]) -> list[tuple[int, Summary]]:
    pairs = zip(rows, groups, strict=True)
    return [(row.op, summary_of(group.metadata)) for row, group in pairs if group.metadata is not None]


def _over_length(group: Incoming) -> GroupOutcome:
    """Return the event of a group that lost all its samples to `seq_len`."""
    metadata = group.metadata
    assert metadata is not None
    about = Unlisted(group=group.id, prompt=metadata.prompt, samples=metadata.num_samples, summary=summary_of(metadata))
    return GroupOutcome(outcome="dropped", reason="over_length", unlisted=(about,))


def _outcomes(group: Incoming, *, stale: bool = False) -> list[Outcome]:
    """Answer every ticket of a group. The first put it, the others repeated it."""
    if len(group.tickets) == 1:
        return [Outcome(group.tickets[0], stale=stale, over_length=group.over_length)]
    return [
        Outcome(ticket, duplicate=i > 0, stale=stale, over_length=NONE if i else group.over_length)
        for i, ticket in enumerate(group.tickets)
    ]


def put_key(group: str, digest: bytes) -> str:
    """Return the key by which the log recognises a repeated put after late columns gave the group another frame."""
    return f"put: {digest.hex()} {group}"


def _dropped_key(group: str) -> str:
    """Return the key under which the log remembers a group that lost all its samples to `seq_len`."""
    return f"{OVER_LENGTH_KEY}{group}"
