"""Locks that a forked child must not keep: one lives as long as any process has its file open, or until it is undone.

A child closes the file as soon as it runs, for the case that its parent is killed. On a busy machine that may be long
after the parent has closed its plane and opens it again: so whoever closes a lock undoes it for everybody.
"""

from __future__ import annotations

import fcntl
import os
from contextlib import suppress

_open: set[int] = set()
_registered: list[bool] = []


def close_in_children(descriptor: int) -> None:
    """Children that are forked from now on close it at once."""
    if not _registered:
        _registered.append(True)
        os.register_at_fork(after_in_child=_close_all)
    _open.add(descriptor)


def close(descriptor: int) -> None:
    """Undo the lock and close its file, unless this is a child in which that was done."""
    if descriptor in _open:
        _open.discard(descriptor)
        fcntl.flock(descriptor, fcntl.LOCK_UN)
        os.close(descriptor)


def _close_all() -> None:
    for descriptor in _open:
        with suppress(OSError):
            os.close(descriptor)
    _open.clear()
