"""The lock of a run's folder: one process owns a folder, until it closes the lock or ends, however it ends.

A lock of `flock` lives as long as any process has its file open, so a forked child would keep it. A child closes the
file as soon as it runs, in case its parent is killed. On a busy machine that may be long after the parent has closed
its plane and wants to open it again, so `release` also unlocks: that takes effect for all processes at once.
"""

from __future__ import annotations

import fcntl
import logging
import os
import socket
import time
from contextlib import suppress
from pathlib import Path

from penstock.errors import Conflict

logger = logging.getLogger("penstock.disk")
_LOCK = "lock"
_LOOK_S = 0.05
_open: set[int] = set()
_registered: list[bool] = []


class LogInUse(Conflict):
    """Another process has the run's folder or log locked. It may let go, so a caller can wait and try again."""


def own(folder: Path, what: str = "plane") -> int:
    """Lock a folder for this process and return the lock, for `release`. Raises LogInUse if another process has it."""
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    descriptor = os.open(folder / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    if not _try_lock(descriptor):
        holder = os.pread(descriptor, 128, 0).decode(errors="replace").strip() or "unknown"
        os.close(descriptor)
        if holder == _me():
            raise LogInUse(
                f"{folder}: this process has it open already; call close() on that {what} first, or open it in `with`"
            )
        raise LogInUse(f"{folder}: another {what} has it open (process {holder}); stop it or use another folder")
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, f"{_me()}\n".encode(), 0)
    _close_in_children(descriptor)
    return descriptor


def release(lock: int) -> None:
    """Unlock a folder and close its lock file. Does nothing in a forked child, where the file is closed already."""
    if lock in _open:
        _open.discard(lock)
        fcntl.flock(lock, fcntl.LOCK_UN)
        os.close(lock)


def take_over(folder: Path, after_s: float) -> bool:
    """Wait up to `after_s` seconds for the process that has the lock to let go, then take the lock from it.

    Call it before `own`. The other process may still run, on this host or another one. Its lock file is unlinked, so
    `own` makes a new one, and the log's epoch keeps the other process from writing. Returns True if that was needed.
    """
    lock, deadline = folder / _LOCK, time.monotonic() + after_s
    while lock.exists():
        descriptor = os.open(lock, os.O_RDWR | os.O_CLOEXEC)
        try:
            if _try_lock(descriptor):
                return False
        finally:
            os.close(descriptor)
        if time.monotonic() >= deadline:
            logger.warning("%s: another process still has it open; taken over", folder)
            lock.unlink(missing_ok=True)
            return True
        time.sleep(_LOOK_S)
    return False


def _try_lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def _me() -> str:
    return f"{os.getpid()} of {socket.gethostname()}"


def _close_in_children(descriptor: int) -> None:
    """Have children that are forked from now on close the file at once."""
    if not _registered:
        _registered.append(True)
        os.register_at_fork(after_in_child=_close_all)
    _open.add(descriptor)


def _close_all() -> None:
    for descriptor in _open:
        with suppress(OSError):
            os.close(descriptor)
    _open.clear()
