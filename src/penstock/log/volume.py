"""The folder and the volume under it: who owns it, a quota for what is put, a reserve for what drains it.

Groups fill a volume, and only training empties it again; but a step must be written down before it is trained. So a
file of `reserve_bytes` is kept beside the log. When the volume is full it is given up, steps and commits go on in the
room it leaves, and nothing is put until there is room for it again.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import socket
import time
from collections.abc import Callable
from pathlib import Path

from penstock.errors import Conflict, DiskFull
from penstock.log import fork

logger = logging.getLogger("penstock.disk")
RESERVE = "reserve"
_LOCK_S = 0.05
_FREES_NOTHING = (
    'this run keeps everything (retain="all") and frees nothing: make room, raise max_disk_bytes, or let it forget '
    "what was trained with `penstock storage forget`"
)


class Disk:
    """The volume under a run's folder; None for a plane in memory, which has no limit but its quota."""

    def __init__(self, folder: Path | None, *, quota: int | None, reserve_bytes: int) -> None:
        self._folder, self._quota = folder, quota
        self._path = None if folder is None else folder / RESERVE
        self.reserve_bytes = reserve_bytes
        self.keeps_all = False
        """Whether the run frees nothing (`retain="all"`), so that training makes no room."""
        if folder is not None:
            volume = os.statvfs(folder)
            self.reserve_bytes = min(reserve_bytes, volume.f_blocks * volume.f_frsize // 8)

    def check(self, size: int, count_used: Callable[[], int]) -> None:
        """Raise DiskFull unless `size` bytes of groups may be put. Counts what is used only where there is a quota."""
        used = 0 if self._quota is None else count_used()
        if self._quota is not None and used + size > self._quota:
            todo = _FREES_NOTHING if self.keeps_all else "raise it, or wait until steps are committed"
            raise DiskFull(
                f"{self._folder or 'memory'}: {used:,} bytes are used and {size:,} more do not fit max_disk_bytes "
                f"{self._quota:,}; {todo}"
            )
        if not self.restore():
            why = _FREES_NOTHING if self.keeps_all else "training goes on and makes room"
            raise DiskFull(
                f"{self._folder}: the volume is full; {why}; groups are taken again when {self.reserve_bytes:,} bytes "
                "are free"
            )

    def restore(self) -> bool:
        """Make sure that the reserve is there; False if there is no room for it."""
        if self._path is None or not self.reserve_bytes or self._path.exists():
            return True
        try:
            file = os.open(self._path, os.O_CREAT | os.O_WRONLY | os.O_CLOEXEC, 0o600)
            try:
                os.posix_fallocate(file, 0, self.reserve_bytes)
            finally:
                os.close(file)
        except OSError as error:
            self._path.unlink(missing_ok=True)
            return error.errno in (errno.EINVAL, errno.EOPNOTSUPP)  # this filesystem cannot reserve
        return True

    def release(self) -> bool:
        """Give the reserve up; False if there is none."""
        if self._path is None or not self._path.exists():
            return False
        self._path.unlink(missing_ok=True)
        until = "there is room: this run frees nothing" if self.keeps_all else "training has made room"
        logger.warning("%s: the volume is full; groups are refused until %s", self._folder, until)
        return True


def own(folder: Path, what: str = "plane") -> int:
    """Lock the folder for this process; the lock goes with the process, however it ends."""
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    descriptor = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        holder = os.pread(descriptor, 128, 0).decode(errors="replace").strip() or "unknown"
        os.close(descriptor)
        if holder == _me():
            words = (
                f"{folder}: this process has it open already; call close() on that {what} first, or open it in `with`"
            )
            raise Conflict(words) from None
        raise Conflict(
            f"{folder}: another {what} has it open (process {holder}); stop it or use another folder"
        ) from None
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, f"{_me()}\n".encode(), 0)
    fork.close_in_children(descriptor)
    return descriptor


def _me() -> str:
    return f"{os.getpid()} of {socket.gethostname()}"


def take_over(folder: Path, after_s: float) -> bool:
    """Before `own`: let a process that has the lock go; if it does not in so many seconds, it counts as lost.

    It may still run, on this host or another one. Then its lock file is put aside, and what keeps it from writing is
    the log's epoch. True if that had to be done.
    """
    lock, deadline = folder / "lock", time.monotonic() + after_s
    while lock.exists():
        descriptor = os.open(lock, os.O_RDWR | os.O_CLOEXEC)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            if time.monotonic() >= deadline:
                logger.warning("%s: another process still has it open; taken over", folder)
                lock.unlink(missing_ok=True)
                return True
            time.sleep(_LOCK_S)
        else:
            return False
        finally:
            os.close(descriptor)
    return False
