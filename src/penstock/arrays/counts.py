"""Bounds for numbers that come from outside and are added up.

A count may be at most `MAX_COUNT`, so two billion of them fit 64 bits, which is what messages, the log and JSON hold.
Sums of policy versions have no such bound (one version may be 2**53): they end at `MAX_SUM`.
"""

from __future__ import annotations

import numpy as np

from penstock.errors import InvalidInput

MAX_PRIORITY = 1e100
"""Beyond this, sums of powers of priorities could overflow."""

MAX_COUNT = 2**32
MAX_SUM = 2**63 - 1


def check_count(value: object, where: str) -> int:
    """Return a count as an int; raise InvalidInput for anything but a whole number from 0 to `MAX_COUNT`.

    >>> check_count(np.int32(3), "discard")
    3
    """
    whole = isinstance(value, (int, np.integer)) and not isinstance(value, bool)
    if not whole or not 0 <= int(value) <= MAX_COUNT:  # type: ignore[call-overload]
        raise InvalidInput(f"{where}: {str(value)[:40]}; give a whole number from 0 to 2**32")
    return int(value)  # type: ignore[call-overload,no-any-return]


def bounded_sum(total: int) -> int:
    """Return a sum, or the nearest number that fits 64 bits.

    >>> bounded_sum(7), bounded_sum(2**70) == MAX_SUM, bounded_sum(-(2**70)) == -MAX_SUM
    (7, True, True)
    """
    return max(-MAX_SUM, min(total, MAX_SUM))


def check_priority(name: str, value: float) -> None:
    """Raise InvalidInput unless a group's priority is a finite number from 0 to `MAX_PRIORITY`."""
    if not 0.0 <= value <= MAX_PRIORITY:
        raise InvalidInput(f"priority of {name!r}: {value}; give a finite number from 0 to {MAX_PRIORITY:g}")
