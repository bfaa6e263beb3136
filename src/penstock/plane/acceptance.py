"""Accept groups: is the group known, is there room, and is it accepted once its frame is checked and stored?

Room is checked before the frame is read, so a rejected put costs almost nothing. Accepted groups are written to the log
before any producer is answered, many groups with one sync.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import TypeAlias

from penstock.arrays import check_priority
from penstock.errors import Conflict, DiskFull, InvalidInput, Overloaded, PenstockError
from penstock.frames import EvalMetadata, GroupMetadata
from penstock.log import GivePriorities, GroupRow, Shorten, State
from penstock.plane.intake import NONE, OverLength, why_untrained
from penstock.plane.recorder import Recorder
from penstock.plane.settings import PlaneSettings
from penstock.plane.telemetry import Generated
from penstock.protocol import NOTHING, Amount


@dataclass(slots=True)
class Arrival:
    """A group that was offered and is not accepted yet."""

    group: str
    digest: bytes
    size: int
    table_name: str | None
    """The table it will wait in; None for an evaluation group, which waits in none."""
    tickets: list[object]
    """The puts to answer: the first one, then repeated ones."""
    kept: tuple[GroupMetadata, str] | None = None
    """Its metadata and its frame's location, once checked and stored."""
    eval_metadata: EvalMetadata | None = None
    """What metrics show of an evaluation group, once checked and stored."""
    over_length: OverLength = NONE
    """Its truncated and dropped samples."""
    priority: float = 1.0
    raw_metadata: bytes = b""
    """The metadata as it was sent, where the log can store those bytes."""

    @property
    def is_evaluation(self) -> bool:
        return self.table_name is None


class Arrivals:
    """All offered groups, and the room they take in each table."""

    def __init__(self) -> None:
        self.groups: Counter[str | None] = Counter()
        self.bytes: Counter[str | None] = Counter()
        self._all: dict[str, Arrival] = {}

    def get(self, group: str) -> Arrival | None:
        return self._all.get(group)

    def __getitem__(self, group: str) -> Arrival:
        return self._all[group]

    def add(self, arrival: Arrival) -> None:
        self._all[arrival.group] = arrival
        self._count(arrival, 1)

    def pop(self, group: str) -> Arrival:
        arrival = self._all.pop(group)
        self._count(arrival, -1)
        return arrival

    def move(self, group: str, table_name: str) -> None:
        """Count a group for another table than it was offered for."""
        arrival = self._all[group]
        self._count(arrival, -1)
        arrival.table_name = table_name
        self._count(arrival, 1)

    def _count(self, arrival: Arrival, sign: int) -> None:
        self.groups[arrival.table_name] += sign
        self.bytes[arrival.table_name] += sign * arrival.size

    @property
    def ready(self) -> list[str]:
        """The groups that were checked and stored."""
        return [group for group, arrival in self._all.items() if arrival.kept is not None]

    def priorities(self) -> dict[str, float]:
        """Return the priorities of ready groups that have another than 1."""
        ready = [self._all[group] for group in self.ready]
        return {one.group: one.priority for one in ready if one.priority != 1.0 and not one.is_evaluation}

    def rows(self, op: int) -> list[tuple[GroupRow, bytes]]:
        """Return the log rows of ready groups, numbered from `op`, each with its metadata."""
        rows: list[tuple[GroupRow, bytes]] = []
        for number, group in enumerate(self.ready, start=op):
            arrival = self._all[group]
            assert arrival.kept is not None
            metadata, location = arrival.kept
            row = GroupRow(
                op=number,
                id=group,
                digest=arrival.digest,
                policy_version=metadata.policy_version,
                samples=metadata.num_samples,
                tokens=metadata.num_tokens,
                size=arrival.size,
                state=State.EVALUATION if arrival.is_evaluation else State.HELD,
                run=metadata.run if arrival.table_name is None else arrival.table_name,
                prompt=metadata.prompt,
                kinds=tuple(sorted(metadata.kinds.items())),
                location=location,
            )
            rows.append((row, arrival.raw_metadata or (arrival.eval_metadata or metadata).to_bytes()))
        return rows


_RETRY_AFTER_S = 0.25
_SPARE = [4**power for power in range(9, 0, -1)]
"""Credits for groups that `spare` tries, largest first: 262,144 down to 4."""
Claim: TypeAlias = Callable[[str], Amount | None]
"""Maps a table to the room reserved there for other puts. Returns None if others wait ahead of this put."""
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

    def table_of(self, run: str) -> str:
        """Return the table for groups of a run, or the run's name if the run may not put."""
        try:
            return self._recorder.run_tables.table_for(run)
        except PenstockError:
            return run

    def look_up(self, groups: Sequence[str]) -> None:
        """Query the log once for all groups that a turn names; later lookups hit its cache."""
        names = [group for group in groups if 0 < len(group) <= MAX_ID]
        self._recorder.log.look_up(names, [_dropped_key(group) for group in names])

    def recognises(self, group: str, digest: bytes) -> bool | None:
        """Return whether this group is accepted for training with the same content, or None if the id is new."""
        log = self._recorder.log
        known = log.digest_of(group) if 0 < len(group) <= MAX_ID else None
        return None if known is None else known == digest and not log.is_evaluation(group)

    def no_room(self, table: str, size: int, reserved: Amount) -> str | None:
        """Return why a group must wait, "" if there is room, or None if it can never be accepted."""
        tables = self._recorder.run_tables
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
        if self._recorder.run_tables.members:
            return NOTHING
        table, arriving = self._recorder.run_tables.table(""), self._arrivals.groups[""] + reserved.groups
        groups = next((n for n in _SPARE if table.may_insert(ahead=arriving + n - 1)), 0)
        used = self._recorder.state.bytes_of[""] + self._arrivals.bytes[""] + reserved.bytes
        return Amount(groups, max(self._settings.max_held_bytes - used, 0))

    def ahead(self, table_name: str) -> int:
        """Return how many groups were offered for a table and are not accepted yet."""
        return self._arrivals.groups[table_name]

    def offer(
        self,
        ticket: object,
        group: str,
        digest: bytes,
        size: int,
        run: str = "",
        *,
        evaluation: bool = False,
        claim: Claim = lambda _: NOTHING,
        priority: float = 1.0,
    ) -> Outcome | bool:
        """Decide whether a group's frame should be checked and stored.

        True: do that, then call `arrive`, `drop` or `refuse`. False: the same group is being checked already; this
        ticket is answered with it. An `Outcome`: the put is decided. `claim` returns the room reserved for others."""
        table_name = ""
        try:
            if not 0 < len(group) <= MAX_ID:
                raise InvalidInput(f"group id of {len(group)} characters; give each group one of 1 to {MAX_ID}")
            check_priority(group, priority)
            known = self._recognise(ticket, group, digest, evaluation=evaluation)
            if known is not None:
                return known
            table_name = self._recorder.run_tables.table_for(run)
            if evaluation:
                self._check_evaluation_room(group, size)
            else:
                reserved = claim(table_name)
                if reserved is None:
                    raise Overloaded(f"group {group!r}: others wait for room before it", _RETRY_AFTER_S)
                self._check_room(group, table_name, size, reserved)
        except PenstockError as error:
            self._recorder.counts["puts_overloaded" if isinstance(error, Overloaded) else "puts_refused"] += 1
            return Outcome(ticket, error, table=table_name, size=size)
        where = None if evaluation else table_name
        self._arrivals.add(Arrival(group, digest, size, where, [ticket], priority=priority))
        return True

    def _recognise(self, ticket: object, group: str, digest: bytes, *, evaluation: bool) -> Outcome | bool | None:
        """Return the answer to a repeated put, False if its first put is still being checked, or None for a new
        group."""
        arrival = self._arrivals.get(group)
        known = arrival.digest if arrival else self._recorder.log.digest_of(group)
        if known is None and not self._recorder.log.is_discarded(_dropped_key(group)):
            return None
        self._recorder.counts["puts_repeated"] += 1
        if known is None:
            return Outcome(ticket, duplicate=True)
        if known != digest:
            raise Conflict(f"group {group!r}: accepted before with other content; give each group its own id")
        before = arrival.is_evaluation if arrival else self._recorder.log.is_evaluation(group)
        if before != evaluation:
            was, now = ("for evaluation", "to be trained") if before else ("to be trained", "for evaluation")
            raise Conflict(f"group {group!r}: accepted before {was}, now {now}; give each group its own id")
        if arrival is None:
            return Outcome(ticket, duplicate=True)
        arrival.tickets.append(ticket)  # not durable yet: "duplicate" would acknowledge what a crash may still lose
        return False

    def _check_evaluation_room(self, group: str, size: int) -> None:
        """Raise unless an evaluation group fits on the disk. It waits in no table, so no table needs room."""
        most = self._settings.retain_eval_bytes
        if size > most and not self._recorder.keeps_all:
            raise InvalidInput(f"group {group!r}: {size:,} bytes; at most {most:,} are ever kept: retain_eval_bytes")
        self._check_disk(size)

    def _check_room(self, group: str, table_name: str, size: int, reserved: Amount) -> None:
        """Raise unless a group fits into its table and on the disk, beside the room reserved for others."""
        table = self._recorder.run_tables.table(table_name)
        arriving = self._arrivals.groups[table_name] + reserved.groups
        limit = int(self._settings.max_held_bytes * self._recorder.run_tables.part(table_name))
        of = f" (run {table_name!r} has its share)" if table_name else ""
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
        arriving = self._arrivals.bytes.total() + size
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

    def arrive(
        self,
        group: str,
        metadata: GroupMetadata,
        location: str,
        eval_metadata: EvalMetadata | None = None,
        over_length: OverLength = NONE,
        raw_metadata: bytes = b"",
    ) -> None:
        """Note that an offered group was checked and stored. The next `flush` accepts it."""
        arrival = self._arrivals[group]
        arrival.raw_metadata = raw_metadata
        arrival.kept, arrival.eval_metadata, arrival.over_length = (metadata, location), eval_metadata, over_length

    def drop(self, group: str, over_length: OverLength) -> list[Outcome]:
        """Count an offered group without a sample that fits, and remember its id so that a repeated put is
        recognised."""
        arrival = self._arrivals.pop(group)
        try:
            self._recorder.decide(Shorten(**asdict(over_length), key=_dropped_key(group)))
        except PenstockError as error:
            return [Outcome(ticket, error) for ticket in arrival.tickets]
        return _outcomes(arrival, over_length=over_length)

    def follow(self, ticket: object, group: str, digest: bytes) -> bool:
        """Return whether a group is being checked. If so, this ticket is answered with it."""
        arrival = self._arrivals.get(group)
        if arrival is None or arrival.digest != digest:
            return False
        if ticket not in arrival.tickets:
            arrival.tickets.append(ticket)
        return True

    def refuse(self, group: str, error: PenstockError) -> list[Outcome]:
        """Reject a group that was offered, under all its tickets."""
        arrival = self._arrivals.pop(group)
        self._recorder.counts["puts_failed" if isinstance(error, DiskFull) else "puts_refused"] += len(arrival.tickets)
        return [Outcome(ticket, error) for ticket in arrival.tickets]

    def flush(self) -> list[Outcome]:
        """Accept all groups that were checked and stored, in one transaction. An outcome without error is durable."""
        outcomes = [outcome for group in self._arrivals.ready for outcome in self._late_refusal(group)]
        first = self._recorder.state.op + 1
        given = self._arrivals.priorities()
        rows = self._arrivals.rows(first + bool(given))
        if not rows:
            return outcomes
        evaluated = sum(row.size for row, _ in rows if row.state is State.EVALUATION)
        self._recorder.state.free_evaluations(max(self._settings.retain_eval_bytes - evaluated, 0))
        try:
            with self._recorder.transaction():
                if given:
                    self._recorder.log.add_record(first, GivePriorities(priorities=given))
                self._recorder.log.add_groups(rows)
                shortened = self._shortened(rows)
                if shortened is not None:
                    self._recorder.log.add_record(*shortened)
        except Exception as error:  # noqa: BLE001 - whatever a row provokes, its producer is told
            # After a failed sync the rows may or may not be on disk, so their frames must stay. They are deleted with
            # their segment, once it holds no accepted frame.
            for row, _ in rows:
                self._recorder.segments.settle(row.location, accepted=False)
            known = error if isinstance(error, PenstockError) else InvalidInput(f"{type(error).__name__}: {error}")
            return outcomes + [outcome for row, _ in rows for outcome in self.refuse(row.id, known)]
        if given:
            self._recorder.state.redo(first, GivePriorities(priorities=given))
        self._recorder.counts["groups_untrained"] += sum(self._is_untrained(row) for row, _ in rows)
        for row, _ in rows:
            outcomes += self._accept(row)
        if shortened is not None:
            self._recorder.state.redo(*shortened)
        self._recorder.state.free_evaluations(self._settings.retain_eval_bytes)  # one batch alone may exceed the limit
        self._recorder.counts["groups"] += len(rows)
        self._recorder.counts["samples"] += sum(row.samples for row, _ in rows)
        self._recorder.counts["tokens"] += sum(row.tokens for row, _ in rows)
        return outcomes

    def _is_untrained(self, row: GroupRow) -> bool:
        kept = self._arrivals[row.id].kept
        return kept is not None and row.state is not State.EVALUATION and bool(why_untrained(kept[0]))

    def _shortened(self, rows: Sequence[tuple[GroupRow, bytes]]) -> tuple[int, Shorten] | None:
        """Return the decision that counts truncated and dropped samples of these groups, with the number after
        theirs."""
        total = OverLength.total(self._arrivals[row.id].over_length for row, _ in rows)
        return (rows[-1][0].op + 1, Shorten(**asdict(total))) if total else None

    def _late_refusal(self, group: str) -> list[Outcome]:
        """Reject a stored group whose run may not put: the run was evicted meanwhile, or the frame names another
        run."""
        arrival = self._arrivals[group]
        assert arrival.kept is not None
        metadata, location = arrival.kept
        try:
            table_name = self._recorder.run_tables.table_for(metadata.run)
            if not arrival.is_evaluation:
                self._arrivals.move(group, table_name)
        except PenstockError as error:
            self._recorder.segments.reject(location)
            return self.refuse(group, error)
        return []

    def _accept(self, row: GroupRow) -> list[Outcome]:
        arrival = self._arrivals.pop(row.id)
        self._recorder.segments.settle(row.location, accepted=True)
        if row.state is State.EVALUATION:
            self._recorder.state.take_evaluation(row, arrival.eval_metadata)
            return _outcomes(arrival)
        if arrival.kept is not None:
            self.generated.add(arrival.kept[0])
        stale = not self._recorder.state.take_in(row)
        self._recorder.counts["groups_stale"] += stale
        self.stale_in_a_row = self.stale_in_a_row + 1 if stale else 0
        return _outcomes(arrival, stale=stale, over_length=arrival.over_length)


def _outcomes(arrival: Arrival, *, stale: bool = False, over_length: OverLength = NONE) -> list[Outcome]:
    """Answer every ticket of a group. The first put it, the others repeated it."""
    return [
        Outcome(ticket, duplicate=i > 0, stale=stale, over_length=NONE if i else over_length)
        for i, ticket in enumerate(arrival.tickets)
    ]


def _dropped_key(group: str) -> str:
    """Return the key under which the log remembers a group that lost all its samples to `seq_len`."""
    return f"over_length: {group}"
