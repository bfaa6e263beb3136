"""The files in a run's folder beside the log: the lock, the witness and the reserve.

The lock: one process owns a folder, until it closes the lock or ends, however it ends. A lock of `flock` lives as long
as any process has its file open, so a forked child would keep it. A child closes the file as soon as it runs, in case
its parent is killed. On a busy machine that may be long after the parent has closed its plane and wants to open it
again, so `release` also unlocks: that takes effect for all processes at once.

The witness counts committed transactions in a small file. SQLite ends its recovery at the first damaged page of the
write-ahead log and ignores everything after it. So a damaged log looks like a shorter, sound one. The witness is
written after each commit, outside the database: a log that is shorter than it was, missing, or restored from an older
copy is found at the next start. It needs no sync of its own: after a power cut it may be behind the log, never ahead.

    penstock-log 1 3f9c...d07b 00000000000000004711 9a2b6c1d      run id, transactions, checksum

The reserve: groups fill a volume, and only training empties it. But a step must be written to the log before it is
trained, which needs room itself. So a file of `reserve_bytes` lies beside the log. When the volume is full the file is
deleted, steps and commits go on in the room it leaves, and puts are rejected until there is room to reserve it again.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import socket
import time
import zlib
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from penstock.atomic import read_small
from penstock.errors import Conflict, CorruptFile, DiskFull, StorageError

logger = logging.getLogger("penstock.disk")

# ------------------------------------------------------------------------------------------------------------- the lock

_LOCK = "lock"
_LOOK_S = 0.05
"""Interval of the check whether another process has let go of a folder."""
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
                f"{folder}: this process has it open already; call close() on that {what} and on its sources first, "
                "or open them in `with`; one that a variable still names keeps it open"
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
    """Make children that are forked from now on close the file at once."""
    if not _registered:
        _registered.append(True)
        os.register_at_fork(after_in_child=_close_all)
    _open.add(descriptor)


def _close_all() -> None:
    for descriptor in _open:
        with suppress(OSError):
            os.close(descriptor)
    _open.clear()


# ---------------------------------------------------------------------------------------------------------- the witness

WITNESS, LOG = "log.witness", "log.sqlite"
_PUT_BACK = (
    "put the newest copy of the folder back, or rebuild the log from the frames with `penstock storage recover`; "
    "nothing was changed"
)
_KIND = "penstock-log 1"


@dataclass(frozen=True, slots=True)
class Seen:
    """The contents of a witness."""

    run_id: str
    commits: int


class Witness:
    """The file, kept open and overwritten in place."""

    def __init__(self, folder: Path) -> None:
        self._log = str(folder / LOG)
        self._inode = _inode_of(self._log)
        self._file = os.open(folder / WITNESS, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        self._failed = False

    def write(self, run_id: str, commits: int) -> None:
        """Count a commit. A failed write is logged once: the log itself is safe, only the check of it is not.

        Raises StorageError if the log was removed or replaced. SQLite would go on committing to the removed file, and
        no later plane would ever read it.
        """
        if _inode_of(self._log) != self._inode:
            raise StorageError(f"{self._log}: removed or replaced under the running plane; stop it, {_PUT_BACK}")
        try:
            os.pwrite(self._file, _line(run_id, commits), 0)
        except OSError as error:
            if not self._failed:
                logging.getLogger("penstock.log").warning(
                    "%s: %s; damage to the log may go unnoticed", WITNESS, error.strerror
                )
            self._failed = True

    def close(self) -> None:
        if self._file >= 0:
            os.close(self._file)
            self._file = -1


def read_witness(folder: Path) -> Seen | None:
    """Read the witness of a folder. Returns None if the file is missing, is no witness, or was torn by a power cut."""
    try:
        line = read_small(folder / WITNESS, 256)
    except OSError as error:
        if error.errno not in (errno.ENOENT, errno.EINVAL, errno.EFBIG):
            raise
        return None
    fields = line.decode("ascii", "replace").split()
    # Writing the line again from what was parsed checks everything at once: kind, padding and checksum.
    if len(fields) != 5 or _line(fields[2], _number(fields[3])) != line:
        return None
    return Seen(fields[2], _number(fields[3]))


def check_log_is_there(folder: Path) -> None:
    """Raise CorruptFile if a run began in this folder and its log is gone."""
    if read_witness(folder) is not None and not (folder / LOG).exists():
        raise CorruptFile(f"{folder / LOG}: missing, and the run began before; {_PUT_BACK}")


def check_witness(folder: Path, run_id: str, commits: int) -> None:
    """Raise CorruptFile if committed transactions are missing from a log."""
    seen, path = read_witness(folder), folder / LOG
    if seen is None and commits > 1:  # with one commit: the plane was killed before it wrote its first witness
        raise CorruptFile(
            f"{folder / WITNESS}: missing or damaged, so it is unknown whether {path} is complete; {_PUT_BACK}"
        )
    if seen is not None and seen.run_id != run_id:
        what = f"of run {run_id[:12]}" if run_id else "holds no run (is its -wal file missing?)"
        raise CorruptFile(f"{path}: {what}, and this folder is of run {seen.run_id[:12]}; {_PUT_BACK}")
    if seen is not None and seen.commits > commits:
        raise CorruptFile(
            f"{path}: ends at transaction {commits}, and {seen.commits} were committed: the log or its -wal file was "
            f"damaged, cut short, or restored from an older copy; {_PUT_BACK}"
        )


def _inode_of(path: Path | str) -> tuple[int, int] | None:
    try:
        found = os.stat(path)  # noqa: PTH116 - once per commit, and a Path takes three times as long
    except FileNotFoundError:
        return None
    return found.st_ino, found.st_dev


def _number(text: str) -> int:
    return int(text) if text.isdecimal() and len(text) <= 20 else -1


def _line(run_id: str, commits: int) -> bytes:
    text = f"{_KIND} {run_id} {commits:020}"
    return f"{text} {zlib.crc32(text.encode()):08x}\n".encode()


# ---------------------------------------------------------------------------------------------------------- the reserve

RESERVE = "reserve"
_RESTORE_S = 1.0
"""Interval of the check whether another process deleted the reserve."""
_FREES_NOTHING = (
    'this run keeps everything (retain="all") and frees nothing: make room, raise max_disk_bytes, or let it forget '
    "what was trained with `penstock storage forget`"
)


class Disk:
    """The volume under a run's folder. A plane in memory has no folder (None) and no limit but its quota."""

    def __init__(self, folder: Path | None, *, quota: int | None, reserve_bytes: int) -> None:
        self._folder, self._quota = folder, quota
        self._path = None if folder is None else folder / RESERVE
        self._look_at = 0.0
        """When to look again whether the reserve is there: every put asks, and only this process deletes it."""
        self.reserve_bytes = reserve_bytes
        self.keeps_all = False
        """Whether the run frees nothing (`retain="all"`). Then training makes no room."""
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
        now = time.monotonic()
        if self._path is None or not self.reserve_bytes or now < self._look_at:
            return True
        if not self._path.exists() and not self._make(self._path):
            return False
        self._look_at = now + _RESTORE_S
        return True

    def _make(self, path: Path) -> bool:
        try:
            file = os.open(path, os.O_CREAT | os.O_WRONLY | os.O_CLOEXEC, 0o600)
            try:
                os.posix_fallocate(file, 0, self.reserve_bytes)
            finally:
                os.close(file)
        except OSError as error:
            path.unlink(missing_ok=True)
            return error.errno in (errno.EINVAL, errno.EOPNOTSUPP)  # this filesystem cannot reserve
        return True

    def release(self) -> bool:
        """Delete the reserve to make room. Returns False if there is none."""
        self._look_at = 0.0
        if self._path is None or not self._path.exists():
            return False
        self._path.unlink(missing_ok=True)
        until = "there is room: this run frees nothing" if self.keeps_all else "training has made room"
        logger.warning("%s: the volume is full; groups are refused until %s", self._folder, until)
        return True
