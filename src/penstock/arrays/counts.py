"""Bounds for numbers that come from outside: counts, priorities and policy versions.

A count may be at most `MAX_COUNT`, so two billion of them fit in 64 bits, which is what messages, the log and JSON
hold. Sums of policy versions have no such bound (one version may be 2**53), so they are clamped to `MAX_SUM`.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from penstock.errors import InvalidInput

MAX_PRIORITY = 1e100
"""Beyond this, sums of powers of priorities could overflow."""

MAX_GROUP_SAMPLES = 1 << 16
"""Samples of one group that a plane takes, so that no message holds its loop or a thread for long."""

MAX_COUNT = 2**32
MAX_SUM = 2**63 - 1


def check_count(value: object, where: str) -> int:
    """Return a count as an int. Raises InvalidInput for anything but an integer from 0 to `MAX_COUNT`.

    >>> check_count(np.int32(3), "discard")
    3
    """
    is_integer = isinstance(value, (int, np.integer)) and not isinstance(value, bool)
    if not is_integer or not 0 <= int(value) <= MAX_COUNT:  # type: ignore[call-overload]
        raise InvalidInput(f"{where}: {str(value)[:40]}; give a whole number from 0 to 2**32")
    return int(value)  # type: ignore[call-overload,no-any-return]


def bounded_sum(total: int) -> int:
    """Clamp a sum to what fits in 64 bits.

    >>> bounded_sum(7), bounded_sum(2**70) == MAX_SUM, bounded_sum(-(2**70)) == -MAX_SUM
    (7, True, True)
    """
    return max(-MAX_SUM, min(total, MAX_SUM))


def check_priority(name: str, value: Any) -> None:
    """Raise InvalidInput unless a group's priority is a finite number from 0 to `MAX_PRIORITY`."""
    is_number = not isinstance(value, (bool, str)) and hasattr(value, "__float__")
    if not is_number or not 0.0 <= value <= MAX_PRIORITY:
        raise InvalidInput(f"priority of {name!r}: {repr(value)[:40]}; give a finite number from 0 to {MAX_PRIORITY:g}")


MAX_VERSION = 2**53


def check_version(value: object, where: str) -> int | None:
    """Return a policy version as an int, or None if it is not known. Raises InvalidInput for anything else.

    >>> check_version(np.int32(3), "sample.policy_version"), check_version(None, "sample.policy_version")
    (3, None)

    Not known is not 0: a sample of version 0 came from the very first weights. Arrays cannot hold None, so they hold
    `NO_VERSION` (-1). Versions end at 2**53: every JSON reader returns them unchanged, and their differences cannot
    overflow.
    """
    if value is None:
        return None
    is_integer = isinstance(value, (int, np.integer)) and not isinstance(value, bool)
    if not is_integer or not 0 <= int(value) <= MAX_VERSION:  # type: ignore[call-overload]
        raise InvalidInput(f"{where}: {repr(value)[:40]}; must be a whole number from 0 to 2**53, or None if not known")
    return int(value)  # type: ignore[call-overload,no-any-return]


def known(version: int) -> int | None:
    """Convert a version from an array: None for `NO_VERSION`."""
    return None if version < 0 else version
