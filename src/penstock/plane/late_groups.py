"""Groups that wait for columns which are attached after the put: part of the plane's memory.

    put without rewards     waiting       counted in the ledger, takes room, is in no table
    attach, attach          waiting       values by column and sample, decisions in the log like all others
    the last one            held          it enters its table with its values; they can no longer change
    the deadline            dropped, or held without them

Everything here follows from the log. What the values amount to is computed once, in `late_admission`.
"""

from __future__ import annotations

from collections import Counter

import msgspec

from penstock.log import AttachColumn, AwaitColumns, Awaited, GroupRow


class WaitingGroup(msgspec.Struct, array_like=True, kw_only=True):
    """A group that lacks columns, and what it was given so far."""

    awaited: Awaited
    given: dict[str, dict[int, float | None]] = msgspec.field(default_factory=dict)
    """Column -> sample -> value; None: the sample could not be scored."""
    priority: float = 1.0
    """Its priority in the table."""

    def lacks(self, column: str) -> list[int]:
        """Return the samples that still lack a column."""
        given = self.given.get(column, {})
        return [row for row in self.awaited.columns.get(column, ()) if row not in given]

    @property
    def is_complete(self) -> bool:
        return not any(map(self.lacks, self.awaited.columns))


class LateGroups:
    """The groups that wait for columns, in order of arrival."""

    def __init__(self) -> None:
        self.expected: dict[str, Awaited] = {}
        """By id: groups that are about to be accepted."""
        self.waiting: dict[int, WaitingGroup] = {}
        """By op."""
        self.tables: Counter[str] = Counter()
        """Table -> how many of them will enter it."""

    def follow(self, record: AwaitColumns | AttachColumn) -> None:
        """Apply a decision."""
        if isinstance(record, AwaitColumns):
            self.expected |= record.groups
            return
        given = self.waiting[record.group].given.setdefault(record.column, {})
        given |= record.values
        given |= dict.fromkeys(record.errors)

    def add(self, row: GroupRow, awaited: Awaited, priority: float) -> None:
        self.waiting[row.op] = WaitingGroup(awaited=awaited, priority=priority)
        self.tables[row.run] += 1

    def remove(self, row: GroupRow) -> WaitingGroup:
        self.tables[row.run] -= 1
        return self.waiting.pop(row.op)

    def restore(self, waiting: dict[int, WaitingGroup], rows: dict[int, GroupRow]) -> None:
        """Continue from a snapshot."""
        self.waiting = waiting
        self.tables = Counter(rows[op].run for op in waiting)
