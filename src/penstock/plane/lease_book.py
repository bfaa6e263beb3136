"""Leases: work that is handed to a process and returns when the process ends.

A lease is on a prompt ("prompt") or on a column that a group lacks ("column"). Handing out and returning are decisions
in the log, so a restarted plane knows every open lease. Deadlines are not in the log: they are clocks in the loop's
memory, which a restart sets back to their full time. So no process loses its work because the plane was away.

    op 40  hand out    kind "prompt", two keys, worker w       leases 40 and 41 are open
    op 42  a group is accepted that completes lease 40         lease 41 is open
           w is killed, `lease_s` pass without a renewal       the clock says that 41 ran out
    op 43  return      lease 41                                its key can be handed out again
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable

import msgspec

from penstock.log import HandOut

COMPLETED = "completed: a group was accepted for it"
RETURNED = "returned: it ran out, or its process returned it"
_REMEMBERED = 1 << 14
"""Ended leases whose reason is kept for a process that still renews them."""


class Lease(msgspec.Struct, frozen=True, array_like=True):
    """One open lease."""

    number: int
    kind: str
    key: str
    worker: str
    lease_s: float
    version: int
    """The policy version that was published when it was handed out."""


class LeaseBook:
    """The open leases. Follows from the log."""

    def __init__(self) -> None:
        self.open: dict[int, Lease] = {}
        self.kinds: Counter[str] = Counter()
        """Open leases by kind."""
        self._numbers: dict[tuple[str, str], int] = {}
        self._ended: dict[int, str] = {}
        """Reasons of leases that ended lately. Not in the snapshot: only a message is shorter without it."""
        self.on_end: Callable[[Lease], None] = lambda _lease: None

    def begin(self, op: int, record: HandOut, version: int) -> None:
        """Apply a hand-out."""
        for number, key in enumerate(record.keys, start=op):
            lease = Lease(number, record.kind, key, record.worker, record.lease_s, version)
            self.open[number] = lease
            self._numbers[record.kind, key] = number
            self.kinds[record.kind] += 1

    def end(self, number: int, reason: str) -> Lease | None:
        """End a lease. Returns it, or None if it had ended before."""
        lease = self.open.pop(number, None)
        if lease is None:
            return None
        self.kinds[lease.kind] -= 1
        if self._numbers.get((lease.kind, lease.key)) == number:
            del self._numbers[lease.kind, lease.key]
        self._ended[number] = reason
        if len(self._ended) > _REMEMBERED:
            del self._ended[next(iter(self._ended))]
        self.on_end(lease)
        return lease

    def complete(self, kind: str, key: str, reason: str) -> None:
        """End the lease on a key, if there is one."""
        number = self.number_of(kind, key)
        if number is not None:
            self.end(number, reason)

    def number_of(self, kind: str, key: str) -> int | None:
        """Return the open lease on a key."""
        return self._numbers.get((kind, key))

    def why_ended(self, number: int) -> str:
        return self._ended.get(number, "ended: it ran out, or its work was completed")

    def save(self) -> list[Lease]:
        return list(self.open.values())

    def load(self, leases: Iterable[Lease]) -> None:
        for lease in leases:
            self.open[lease.number] = lease
            self._numbers[lease.kind, lease.key] = lease.number
            self.kinds[lease.kind] += 1
