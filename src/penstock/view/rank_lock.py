"""One exporter for each rank of a folder: two would write into one file."""

from __future__ import annotations

import errno
import fcntl
import os
import threading
from pathlib import Path

from penstock.atomic import folder_errors
from penstock.errors import Conflict

_mutex = threading.Lock()
_held: set[Path] = set()
"""Locks of this process: a record lock keeps only other processes out."""


class RankLock:
    """Held until `release`, or the end of the process. Forked children do not inherit it."""

    def __init__(self, folder: Path, rank: int) -> None:
        """Raise Conflict if another exporter has it."""
        self._pid, self._path = os.getpid(), folder.resolve() / f".rank_{rank}.lock"
        with _mutex:
            if self._path in _held:
                raise _taken(folder, rank, "this process")
            with folder_errors(self._path):
                self._file = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                if error.errno in (errno.EACCES, errno.EAGAIN):
                    holder = os.pread(self._file, 32, 0).decode(errors="replace").strip() or "unknown"
                    os.close(self._file)
                    raise _taken(folder, rank, f"process {holder}") from None
                # a filesystem without locks: as before
            os.pwrite(self._file, f"{os.getpid():<16}\n".encode(), 0)
            _held.add(self._path)

    def release(self) -> None:
        with _mutex:
            if self._path in _held and os.getpid() == self._pid:
                _held.discard(self._path)
                os.close(self._file)


def _taken(folder: Path, rank: int, holder: str) -> Conflict:
    return Conflict(
        f"{folder}: another exporter of rank {rank} ({holder}) writes here; give each process its own rank=, and "
        "export from one process of each rank"
    )
