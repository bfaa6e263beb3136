"""Frames of one node, each under a number that is never used again: a folder of frames, and an index beside it.

    FOLDER/lock            whose process owns it
    FOLDER/frames/...      the frames (`keep/folder.py`)
    FOLDER/index.sqlite    number -> group, digest, size, where it lies; the folder's id, and how often it was opened

A frame is synced before its number is written down, and the number before anybody hears of it. So what was
acknowledged is found again after any crash, and a frame without a number is swept by the next start.
"""

from __future__ import annotations

import logging
import sqlite3
import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from secrets import token_hex

from penstock.encode.layout import Buffer
from penstock.errors import Conflict, CorruptFile, CorruptFrame, DiskFull, StorageError
from penstock.keep.folder import FolderKeeper
from penstock.keep.keeper import Pick

logger = logging.getLogger("penstock.keeper")
FORMAT = 1
_SCHEMA = """
CREATE TABLE IF NOT EXISTS meta (name TEXT PRIMARY KEY, value) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS frames (
    number INTEGER PRIMARY KEY, name TEXT NOT NULL, digest BLOB NOT NULL, size INTEGER NOT NULL,
    location TEXT NOT NULL);
"""


@dataclass(frozen=True, slots=True)
class KeptFrame:
    """A frame that is kept."""

    group: str
    digest: bytes
    size: int
    location: str


class NumberedFrames:
    """Frames by number. `keep` from one thread at a time; the rest from any."""

    def __init__(self, folder: str | Path, node: str = "node") -> None:
        """`node` begins the name of a folder that has none yet."""
        self.folder = Path(folder)
        self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._db = sqlite3.connect(
            self.folder / "index.sqlite", isolation_level=None, check_same_thread=False, cached_statements=16
        )
        self._lock = threading.Lock()
        """Around the index, in memory and on disk."""
        try:
            self.life = self._open(node)
            """How often this folder was opened."""
            found = self._db.execute("SELECT number, name, digest, size, location FROM frames")
            self._frames = {number: KeptFrame(*rest) for number, *rest in found}
        except sqlite3.DatabaseError as error:
            self._db.close()
            index = self.folder / "index.sqlite"
            if getattr(error, "sqlite_errorname", "").startswith("SQLITE_BUSY"):  # on another host, past our lock
                raise Conflict(f"{index}: another keeper has it open; stop it or use another folder") from None
            raise CorruptFile(f"{index}: {error}; begin with an empty folder") from None
        self._keeper = FolderKeeper(self.folder / "frames", life=self.life)
        self._keeper.retain(frame.location for frame in self._frames.values())

    def _open(self, node: str) -> int:
        """Makes the index, or begins its next life; returns how often it was opened."""
        for pragma in ("locking_mode=EXCLUSIVE", "journal_mode=WAL", "synchronous=FULL"):
            self._db.execute(f"PRAGMA {pragma}")
        self._db.executescript(_SCHEMA)
        meta = dict(self._db.execute("SELECT name, value FROM meta"))
        if meta.get("format", FORMAT) != FORMAT:
            raise CorruptFile(f"{self.folder}: format {meta['format']}; this version reads {FORMAT}")
        self.id = str(meta.get("id") or token_hex(16))
        """Tells this folder from any other."""
        self.name = str(meta.get("name") or f"{node}.{self.id[:6]}")
        """What it is called for as long as it lives, on whichever node it is opened."""
        self.last = int(meta.get("last", 0))
        """The highest number that was ever given out."""
        life = int(meta.get("life", 0)) + 1
        self._db.execute("BEGIN IMMEDIATE")
        self._db.executemany(
            "INSERT OR REPLACE INTO meta VALUES (?, ?)",
            [("format", FORMAT), ("id", self.id), ("name", self.name), ("life", life), ("last", self.last)],
        )
        self._db.execute("COMMIT")
        return life

    # -------------------------------------------------------------- keeping

    def keep(self, groups: Sequence[tuple[str, bytes, Buffer]]) -> list[int]:
        """(group, digest, frame) each; all are durable under these numbers when it returns, or it raises and none is
        kept."""
        locations = self._keeper.keep([frame for _, _, frame in groups])
        kept = [
            KeptFrame(group, digest, len(frame), location)
            for (group, digest, frame), location in zip(groups, locations, strict=True)
        ]
        with self._lock:
            numbers = range(self.last + 1, self.last + 1 + len(kept))
            try:
                self._write(numbers, kept)
            except sqlite3.DatabaseError as error:
                if self._db.in_transaction:
                    self._db.execute("ROLLBACK")
                self._keeper.forget(locations)
                full = getattr(error, "sqlite_errorname", "").startswith(("SQLITE_FULL", "SQLITE_IOERR_WRITE"))
                words = f"{self.folder}: {error}; nothing was kept"
                raise (DiskFull if full else StorageError)(words) from None
            self.last = numbers[-1] if numbers else self.last
            self._frames.update(zip(numbers, kept, strict=True))
        return list(numbers)

    def _write(self, numbers: Iterable[int], kept: Sequence[KeptFrame]) -> None:
        self._db.execute("BEGIN IMMEDIATE")
        rows = [(number, f.group, f.digest, f.size, f.location) for number, f in zip(numbers, kept, strict=True)]
        self._db.executemany("INSERT INTO frames VALUES (?, ?, ?, ?, ?)", rows)
        self._db.execute("UPDATE meta SET value = ? WHERE name = 'last'", (self.last + len(kept),))
        self._db.execute("COMMIT")

    # -------------------------------------------------------------- giving

    def read(self, number: int) -> Buffer:
        """A frame, as it was kept; raises CorruptFrame when it is not there."""
        return self._keeper.read(self._known(number).location)

    def take(self, requests: Sequence[Sequence[tuple[int, tuple[int, ...]]]]) -> list[memoryview]:
        """For each request, of (number, rows) each, one frame of these samples; every frame is opened once."""
        picks = [[self._pick(number, rows) for number, rows in request] for request in requests]
        return self._keeper.take(picks)

    def _pick(self, number: int, rows: tuple[int, ...]) -> Pick:
        known = self._known(number)
        return Pick(known.location, known.group, rows)

    def _known(self, number: int) -> KeptFrame:
        try:
            return self._frames[number]
        except KeyError:
            raise CorruptFrame(f"number {number}: no frame is kept under it") from None

    def get(self, number: int) -> KeptFrame | None:
        return self._frames.get(number)

    # -------------------------------------------------------------- giving back

    def forget(self, numbers: Iterable[int]) -> None:
        """These are wanted no more; `sweep` gives their space back."""
        with self._lock:
            gone = [(number, frame) for number in numbers if (frame := self._frames.pop(number, None)) is not None]
            try:
                self._db.execute("BEGIN IMMEDIATE")
                self._db.executemany("DELETE FROM frames WHERE number = ?", [(number,) for number, _ in gone])
                self._db.execute("COMMIT")
            except sqlite3.DatabaseError as error:  # the next life has them in its index, and is told again
                if self._db.in_transaction:
                    self._db.execute("ROLLBACK")
                logger.warning("%s: %s; %d frames are not forgotten for good", self.folder, error, len(gone))
        self._keeper.forget(frame.location for _, frame in gone)

    def sweep(self) -> None:
        self._keeper.sweep()

    def __len__(self) -> int:
        return len(self._frames)

    @property
    def numbers(self) -> list[int]:
        """Of the frames that are kept."""
        with self._lock:
            return list(self._frames)

    @property
    def num_bytes(self) -> int:
        return self._keeper.num_bytes

    def close(self) -> None:
        self._keeper.close()
        self._db.close()
