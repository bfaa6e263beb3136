"""Groups in: is it known, is there room, and, once its frame is checked and kept, is it accepted.

Room is looked for before a frame is looked at, so a put that is refused costs nothing. What is accepted is written
down, many groups with one sync, before anybody hears of it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import TypeAlias

from penstock.arrays import check_priority
from penstock.errors import Conflict, DiskFull, InvalidInput, Overloaded, PenstockError
from penstock.frames import EvalMetadata, GroupMetadata
from penstock.log import GivePriorities, GroupRow, Shorten, State
from penstock.plane.arrivals import Arrival, Arrivals
from penstock.plane.generated import Generated
from penstock.plane.over_length import NONE, OverLength
from penstock.plane.recorder import Recorder
from penstock.plane.settings import PlaneSettings
from penstock.plane.untrained import why_untrained
from penstock.protocol import NOTHING, Amount

_RETRY_AFTER_S = 0.25
_SPARE = [4**power for power in range(9, 0, -1)]
Claim: TypeAlias = Callable[[str], Amount | None]
"""Table -> what is reserved there for others; None if others wait before this put."""
MAX_ID = 512
"""Characters of a group's id."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a put: an error, or nothing."""

    ticket: object
    error: PenstockError | None = None
    duplicate: bool = False
    stale: bool = False
    """It was accepted, and dropped at once: its policy version is further behind than the plane allows."""
    table: str = ""
    """Where it did not fit, if the error is `Overloaded`."""
    size: int = 0
    """Its bytes, if it did not fit."""
    over_length: OverLength = NONE
    """What was truncated or dropped of its samples."""


class Acceptance:
    """Takes groups in."""

    def __init__(self, settings: PlaneSettings, recorder: Recorder) -> None:
        self._settings, self._recorder = settings, recorder
        self._arrivals = Arrivals()
        self.generated = Generated()
        """How good what was put lately is."""
        self.full: set[str] = set()
        """Tables a put was refused in, for want of room, since the last time some became free."""
        self.stale_in_a_row = 0
        """Groups that were accepted and dropped as stale since the last one that was not."""

    def table_of(self, run: str) -> str:
        """Where groups of a run wait; the run itself when they may not."""
        try:
            return self._recorder.run_tables.table_for(run)
        except PenstockError:
            return run

    def look_up(self, groups: Sequence[str]) -> None:
        """Ask the log once about all groups of a turn."""
        names = [group for group in groups if 0 < len(group) <= MAX_ID]
        self._recorder.log.look_up(names, [_dropped_key(group) for group in names])

    def recognises(self, group: str, digest: bytes) -> bool | None:
        """Whether this very group is accepted, to be trained; None if none of this name is."""
        log = self._recorder.log
        known = log.digest_of(group) if 0 < len(group) <= MAX_ID else None
        return None if known is None else known == digest and not log.is_evaluation(group)

    def no_room(self, table: str, size: int, reserved: Amount) -> str | None:
        """Return why a group must wait, or "" if it may come; None if it will be rejected for good."""
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
        """Return how many groups and bytes fit beside `reserved`, in powers of four; nothing for tenants."""
        if self._recorder.run_tables.members:
            return NOTHING
        table, arriving = self._recorder.run_tables.table(""), self._arrivals.groups[""] + reserved.groups
        groups = next((n for n in _SPARE if table.may_insert(ahead=arriving + n - 1)), 0)
        used = self._recorder.state.bytes_of[""] + self._arrivals.bytes[""] + reserved.bytes
        return Amount(groups, max(self._settings.max_held_bytes - used, 0))

    def ahead(self, table_name: str) -> int:
        """Groups on their way into a table."""
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
        """A group wants to come in. True: check and keep its frame, then `arrive` or `refuse`. False: wait, the same
        group is under way already. An outcome: that is all. `claim` returns what is reserved for others in a table."""
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
        """What to answer for a group that was put before; None for a new one."""
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
        arrival.tickets.append(ticket)  # it is not durable yet: the answer must wait
        return False

    def _check_evaluation_room(self, group: str, size: int) -> None:
        """Raise unless there is room on the disk: no table has to have any."""
        most = self._settings.retain_eval_bytes
        if size > most and not self._recorder.keeps_all:
            raise InvalidInput(f"group {group!r}: {size:,} bytes; at most {most:,} are ever kept: retain_eval_bytes")
        self._check_disk(size)

    def _check_room(self, group: str, table_name: str, size: int, reserved: Amount) -> None:
        """Raise unless there is room, beside what is reserved for others."""
        table = self._recorder.run_tables.table(table_name)
        arriving = self._arrivals.groups[table_name] + reserved.groups
        limit = int(self._settings.max_held_bytes * self._recorder.run_tables.part(table_name))
        of = f" (run {table_name!r} has its share)" if table_name else ""
        if size > limit:
            raise InvalidInput(f"group {group!r}: {size:,} bytes; at most {limit:,} are ever held{of}: max_held_bytes")
        self._check_disk(size + reserved.bytes)
        waiting = self._recorder.state.bytes_of[table_name] + self._arrivals.bytes[table_name] + reserved.bytes
        if waiting + size > limit or not table.may_insert(ahead=arriving):
            if not arriving:  # what is on its way, or has room reserved, may still fill the step that is waited for
                self.full.add(table_name)
            groups, capacity = len(table) + arriving, self._settings.replay.capacity
            raise Overloaded(
                f"group {group!r}: {waiting:,} bytes in {groups} groups wait for the trainer, the limits{of} are "
                f"{limit:,} bytes and {capacity} groups, {table.settings.limiter}; try again later",
                retry_after_s=_RETRY_AFTER_S,
            )

    def _check_disk(self, size: int) -> None:
        """Raise DiskFull if there is no room; what is only kept to be looked at again is given back before that."""
        arriving = self._arrivals.bytes.total() + size
        tried = False
        while True:
            try:
                self._recorder.log.disk.check(arriving, self._used_bytes)
            except DiskFull as error:
                if self._recorder.segments.is_deleting:
                    words = f"the disk is full, and freed frames are being deleted: {error}"
                    raise Overloaded(words, retry_after_s=_RETRY_AFTER_S) from None
                if tried and not self._give_back():
                    raise
                tried = True
                self._recorder.log.shrink()  # the write-ahead log may be all that is too much
                self._recorder.log.disk.restore()
            else:
                return

    def _used_bytes(self) -> int:
        return self._recorder.log.used_bytes + self._recorder.segments.num_bytes

    def make_room(self) -> None:
        """A frame did not fit on its volume, which need not be the log's: free what is only kept to be looked at again.
        Whoever puts it again finds room, once storage has deleted that."""
        with suppress(DiskFull):
            if not self._recorder.segments.is_deleting:
                self._give_back()

    def _give_back(self) -> bool:
        """Free half of the steps that are kept for a rewind, then half of the evaluation groups. False: nothing left,
        or the run keeps everything."""
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
            state.give_back_evaluations(state.evaluations.num_bytes // 2)
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
        """The frame of a group that was offered is checked and kept; `flush` accepts it."""
        arrival = self._arrivals[group]
        arrival.raw_metadata = raw_metadata
        arrival.kept, arrival.eval_metadata, arrival.over_length = (metadata, location), eval_metadata, over_length

    def drop(self, group: str, over_length: OverLength) -> list[Outcome]:
        """Count a group that was offered and has no sample that fits; a repeated put is recognised."""
        arrival = self._arrivals.pop(group)
        try:
            self._recorder.decide(Shorten(**asdict(over_length), key=_dropped_key(group)))
        except PenstockError as error:
            return [Outcome(ticket, error) for ticket in arrival.tickets]
        return _outcomes(arrival, over_length=over_length)

    def follow(self, ticket: object, group: str, digest: bytes) -> bool:
        """Whether a group is under way, and will be answered under this ticket too."""
        arrival = self._arrivals.get(group)
        if arrival is None or arrival.digest != digest:
            return False
        if ticket not in arrival.tickets:
            arrival.tickets.append(ticket)
        return True

    def refuse(self, group: str, error: PenstockError) -> list[Outcome]:
        """The frame of a group that was offered is not accepted."""
        arrival = self._arrivals.pop(group)
        self._recorder.counts["puts_failed" if isinstance(error, DiskFull) else "puts_refused"] += len(arrival.tickets)
        return [Outcome(ticket, error) for ticket in arrival.tickets]

    def flush(self) -> list[Outcome]:
        """Accept what has arrived, as one transaction; what is returned without error is durable."""
        outcomes = [outcome for group in self._arrivals.ready for outcome in self._late_refusal(group)]
        first = self._recorder.state.op + 1
        given = self._arrivals.priorities()
        rows = self._arrivals.rows(first + bool(given))
        if not rows:
            return outcomes
        evaluated = sum(row.size for row, _ in rows if row.state is State.EVALUATION)
        self._recorder.state.give_back_evaluations(max(self._settings.retain_eval_bytes - evaluated, 0))
        try:
            with self._recorder.transaction():
                if given:
                    self._recorder.log.add_record(first, GivePriorities(priorities=given))
                self._recorder.log.add_groups(rows)
                shortened = self._shortened(rows)
                if shortened is not None:
                    self._recorder.log.add_record(*shortened)
        except Exception as error:  # noqa: BLE001 - one that no row may provoke is an error to its producers
            # Whether the rows are on disk is unknown after a failed sync: their frames must stay. They are free when
            # their segment is.
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
        self._recorder.state.give_back_evaluations(self._settings.retain_eval_bytes)  # where one batch is beyond it
        self._recorder.counts["groups"] += len(rows)
        self._recorder.counts["samples"] += sum(row.samples for row, _ in rows)
        self._recorder.counts["tokens"] += sum(row.tokens for row, _ in rows)
        return outcomes

    def _is_untrained(self, row: GroupRow) -> bool:
        kept = self._arrivals[row.id].kept
        return kept is not None and row.state is not State.EVALUATION and bool(why_untrained(kept[0]))

    def _shortened(self, rows: Sequence[tuple[GroupRow, bytes]]) -> tuple[int, Shorten] | None:
        """The decision, behind those about these groups, that counts what was truncated or dropped of them."""
        total = OverLength.total(self._arrivals[row.id].over_length for row, _ in rows)
        return (rows[-1][0].op + 1, Shorten(**asdict(total))) if total else None

    def _late_refusal(self, group: str) -> list[Outcome]:
        """Its run is known only now, or was evicted meanwhile, or it was offered as another's."""
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
    """The first ticket put the group, the others repeated it."""
    return [
        Outcome(ticket, duplicate=i > 0, stale=stale, over_length=NONE if i else over_length)
        for i, ticket in enumerate(arrival.tickets)
    ]


def _dropped_key(group: str) -> str:
    """The name under which a group of which nothing was left is remembered."""
    return f"over_length: {group}"
