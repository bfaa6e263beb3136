"""Groups that wait for columns which are attached after the put: part of the plane's memory.

    put without rewards     waiting       counted in the ledger, takes room, is in no table
    attach, attach          waiting       values by column and sample, decisions in the log like all others
    the last one            held          it enters its table with its values; they can no longer change
    the deadline            dropped, or held without them

Everything here follows from the log. What the values amount to is computed once, in `late_admission`.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, defaultdict

import msgspec

from penstock.frames import ERROR_DIGEST, LATE_COLUMNS, NO_DIGEST
from penstock.log import AttachColumn, AwaitColumns, Awaited, GroupRow
from penstock.plane.lease_book import LeaseBook

COLUMN = "column"
"""The kind of leases on columns."""
_COMPLETED = "completed: its values were attached"
_ENDED = "ended: the group waits no longer"


class WaitingGroup(msgspec.Struct, array_like=True, kw_only=True):
    """A group that lacks columns, and what it was given so far."""

    awaited: Awaited
    given: dict[str, dict[int, float | bytes | None]] = msgspec.field(default_factory=dict)
    """Column -> sample -> value. Of a column that is stored in the frame, the digest of the values. None: the sample
    could not be scored."""
    priority: float = 1.0
    """Its priority in the table."""

    def lacks(self, column: str) -> list[int]:
        """Return the samples that still lack a column."""
        given = self.given.get(column, {})
        return [row for row in self.awaited.columns.get(column, ()) if row not in given]

    @property
    def is_complete(self) -> bool:
        return not any(map(self.lacks, self.awaited.columns))

    def digests(self, samples: int) -> dict[str, bytes]:
        """Return what `LateColumns.digests` keeps of columns that are stored in the frame."""
        found = {}
        for column, given in self.given.items():
            if column not in LATE_COLUMNS:
                values = [given.get(row, NO_DIGEST) for row in range(samples)]
                found[column] = b"".join(value if isinstance(value, bytes) else ERROR_DIGEST for value in values)
        return found


class LateGroups:
    """The groups that wait for columns, in order of arrival."""

    def __init__(self, leases: LeaseBook) -> None:
        """`leases` are those of the plane, which end when a column is complete."""
        self._leases = leases
        self.expected: dict[str, Awaited] = {}
        """By id: groups that are about to be accepted."""
        self.waiting: dict[int, WaitingGroup] = {}
        """By op."""
        self.tables: Counter[str] = Counter()
        """Table -> how many of them will enter it."""
        self.free: defaultdict[str, OrderedDict[int, None]] = defaultdict(OrderedDict)
        """Column -> the groups that lack it and are leased to no worker, in order. Ordered dicts, because finding the
        first key of a plain one steps over every key removed before it."""

    def follow(self, record: AwaitColumns | AttachColumn) -> None:
        """Apply a decision."""
        if isinstance(record, AwaitColumns):
            self.expected |= record.groups
            return
        group = self.waiting.get(record.group)
        if group is None:
            return  # a recovery attached to a group that was dropped in the last decisions of the log
        given = group.given.setdefault(record.column, {})
        given |= record.values
        given |= record.digests
        given |= dict.fromkeys(record.errors)
        if not group.lacks(record.column):
            self._taken(record.column, record.group)
            self._leases.complete(COLUMN, key_of(record.group, record.column), _COMPLETED)

    def add(self, row: GroupRow, awaited: Awaited, priority: float) -> None:
        self.waiting[row.op] = WaitingGroup(awaited=awaited, priority=priority)
        self.tables[row.run] += 1
        for column in awaited.columns:
            self.free[column][row.op] = None

    def remove(self, row: GroupRow) -> WaitingGroup:
        self.tables[row.run] -= 1
        group = self.waiting.pop(row.op)
        for column in group.awaited.columns:
            self._taken(column, row.op)
            self._leases.complete(COLUMN, key_of(row.op, column), _ENDED)
        return group

    def lent(self, key: str) -> None:
        """Note that a group is leased for a column."""
        op, column = read_key(key)
        self._taken(column, op)

    def _taken(self, column: str, op: int) -> None:
        if column in self.free:  # after a restart: only columns of free groups are there
            self.free[column].pop(op, None)

    def returned(self, key: str) -> None:
        """Note that a lease ended without values."""
        op, column = read_key(key)
        if op in self.waiting and self.waiting[op].lacks(column):
            self.free[column][op] = None

    def restore(self, waiting: dict[int, WaitingGroup], rows: dict[int, GroupRow]) -> None:
        """Continue from a snapshot."""
        self.waiting = waiting
        self.tables = Counter(rows[op].run for op in waiting)
        for op, group in waiting.items():
            for column in group.awaited.columns:
                if group.lacks(column) and self._leases.number_of(COLUMN, key_of(op, column)) is None:
                    self.free[column][op] = None


def key_of(op: int, column: str) -> str:
    """Return the key of a lease on a column of a group.

    >>> key_of(40, "rewards"), read_key("40:rewards")
    ('40:rewards', (40, 'rewards'))
    """
    return f"{op}:{column}"


def read_key(key: str) -> tuple[int, str]:
    op, _, column = key.partition(":")
    return int(op) if op.isdecimal() else 0, column
