"""File descriptors that a forked child must not keep: a lock lives as long as any process has its file open."""

from __future__ import annotations

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
    """Close it here, unless this is a child in which that was done."""
    if descriptor in _open:
        _open.discard(descriptor)
        os.close(descriptor)


def _close_all() -> None:
    for descriptor in _open:
        with suppress(OSError):
            os.close(descriptor)
    _open.clear()
