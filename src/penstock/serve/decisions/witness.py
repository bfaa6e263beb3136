"""A small file beside the log that remembers how many transactions were committed.

SQLite ends its recovery at the first damaged page of the write-ahead log and takes what it has read for the whole
truth. The witness is written after each commit, outside the database, so a log that is shorter than it was, missing,
or restored from an older copy is found at the next start. It needs no sync of its own: after a power cut it may be
behind the log, never ahead of it.

    penstock-log 1 3f9c...d07b 00000000000000004711 9a2b6c1d      run id, transactions, checksum
"""

from __future__ import annotations

import logging
import os
import zlib
from dataclasses import dataclass
from pathlib import Path

logger = logging.getLogger("penstock.log")
NAME = "log.witness"
_KIND = "penstock-log 1"


@dataclass(frozen=True, slots=True)
class Seen:
    """What a witness says."""

    run_id: str
    commits: int


class Witness:
    """The file, kept open and overwritten in place."""

    def __init__(self, folder: Path) -> None:
        self._file = os.open(folder / NAME, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        self._failed = False

    def write(self, run_id: str, commits: int) -> None:
        """Remember a commit. A failure is logged once: the log itself is safe, only its check is not."""
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
    """What the witness of a folder says; None if there is none, or a power cut tore it."""
    try:
        line = (folder / NAME).read_bytes()[:256]
    except FileNotFoundError:
        return None
    words = line.decode("ascii", "replace").split()
    if len(words) != 5 or _line(words[2], _number(words[3])) != line:
        return None
    return Seen(words[2], _number(words[3]))


def _number(text: str) -> int:
    return int(text) if text.isdecimal() and len(text) <= 20 else -1


def _line(run_id: str, commits: int) -> bytes:
    text = f"{_KIND} {run_id} {commits:020}"
    return f"{text} {zlib.crc32(text.encode()):08x}\n".encode()
