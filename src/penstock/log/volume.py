"""The volume under a run's folder: a quota for puts, and a reserve for the steps that make room again.

Groups fill a volume, and only training empties it. But a step must be written to the log before it is trained, which
needs room itself. So a file of `reserve_bytes` lies beside the log. When the volume is full the file is deleted, steps
and commits go on in the room it leaves, and puts are rejected until there is room to reserve it again.
"""

from __future__ import annotations

import errno
import logging
import os
from collections.abc import Callable
from pathlib import Path

from penstock.errors import DiskFull

logger = logging.getLogger("penstock.disk")
RESERVE = "reserve"
_FREES_NOTHING = (
    'this run keeps everything (retain="all") and frees nothing: make room, raise max_disk_bytes, or let it forget '
    "what was trained with `penstock storage forget`"
)


class Disk:
    """The volume under a run's folder. A plane in memory has no folder (None) and no limit but its quota."""

    def __init__(self, folder: Path | None, *, quota: int | None, reserve_bytes: int) -> None:
        self._folder, self._quota = folder, quota
        self._path = None if folder is None else folder / RESERVE
        self.reserve_bytes = reserve_bytes
        self.keeps_all = False
        """Whether the run frees nothing (`retain="all"`), so that training makes no room."""
        if folder is not None:
            # On a small volume 64 MiB would be most of it: reserve at most an eighth.
            volume = os.statvfs(folder)
            self.reserve_bytes = min(reserve_bytes, volume.f_blocks * volume.f_frsize // 8)

    def check(self, size: int, count_used: Callable[[], int]) -> None:
        """Raise DiskFull unless `size` bytes of groups may be put. Calls `count_used` only if there is a quota."""
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
        """Make the reserve if it is missing. Returns False if there is no room for it."""
        if self._path is None or not self.reserve_bytes or os.path.exists(self._path):  # noqa: PTH110 - per put
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
        """Delete the reserve to make room. Returns False if there is none."""
        if self._path is None or not self._path.exists():
            return False
        self._path.unlink(missing_ok=True)
        until = "there is room: this run frees nothing" if self.keeps_all else "training has made room"
        logger.warning("%s: the volume is full; groups are refused until %s", self._folder, until)
        return True
