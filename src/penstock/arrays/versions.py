"""Policy versions: whole numbers that count a policy's updates, and None where nobody said.

Not given is not 0: a sample of version 0 was sampled from the very first weights. In arrays, where None cannot
stand, `NO_VERSION` (-1) does. Versions end at 2**53, so that every reader of JSON gives them back as they are, and
differences of them cannot overflow.
"""

from __future__ import annotations

import numpy as np

from penstock.errors import InvalidInput

MAX_VERSION = 2**53


def check_version(value: object, where: str) -> int | None:
    """The version as an int, or None; raises for anything else.

    >>> check_version(np.int32(3), "sample.policy_version"), check_version(None, "sample.policy_version")
    (3, None)
    """
    if value is None:
        return None
    whole = isinstance(value, (int, np.integer)) and not isinstance(value, bool)
    if not whole or not 0 <= int(value) <= MAX_VERSION:  # type: ignore[call-overload]
        raise InvalidInput(f"{where}: {repr(value)[:40]}; must be a whole number from 0 to 2**53, or None if not known")
    return int(value)  # type: ignore[call-overload,no-any-return]


def known(version: int) -> int | None:
    """A version out of an array: None for `NO_VERSION`."""
    return None if version < 0 else version
