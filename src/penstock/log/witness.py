"""A small file beside the log that counts committed transactions.

SQLite ends its recovery at the first damaged page of the write-ahead log and ignores everything after it. So a damaged
log looks like a shorter, sound one. The witness is written after each commit, outside the database: a log that is
shorter than it was, missing, or restored from an older copy is found at the next start. It needs no sync of its own:
after a power cut it may be behind the log, never ahead of it.

    penstock-log 1 3f9c...d07b 00000000000000004711 9a2b6c1d      run id, transactions, checksum
"""

from __future__ import annotations

import logging
import os
import zlib
from dataclasses import dataclass
from pathlib import Path

from penstock.errors import CorruptFile, StorageError

logger = logging.getLogger("penstock.log")
NAME, LOG = "log.witness", "log.sqlite"
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
        self._file = os.open(folder / NAME, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
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
                logger.warning("%s: %s; damage to the log may go unnoticed", NAME, error.strerror)
            self._failed = True

    def close(self) -> None:
        if self._file >= 0:
            os.close(self._file)
            self._file = -1


def read_witness(folder: Path) -> Seen | None:
    """Read the witness of a folder. Returns None if there is none, or a power cut tore it."""
    try:
        line = (folder / NAME).read_bytes()[:256]
    except FileNotFoundError:
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
            f"{folder / NAME}: missing or damaged, so it is unknown whether {path} is complete; {_PUT_BACK}"
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
