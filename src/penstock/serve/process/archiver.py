"""Sends what a plane has trained to its archive, from a thread of its own.

The plane's loop only says that there is something new, and hears how far the archive has come. A store that is slow or
away makes the archive fall behind, which `status` says; nothing else waits for it. After a restart the archive itself
says where to go on: its last segment. Segments are written under a name that must be free, so of two planes that
believe the run is theirs, one writes each, and the other goes on behind it.
"""

from __future__ import annotations

import contextlib
import logging
import sqlite3
import threading
from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from functools import partial
from typing import Any

from penstock.archive import check_place, open_place
from penstock.archive.recorded import Segment, numbers_of, segment_of
from penstock.archive.segment import Front, checksum_of, name_of, write_segment
from penstock.assets.blobs import Blobs
from penstock.config import template
from penstock.errors import ConfigError, DiskFull, PenstockError
from penstock.serve.decisions.engine import Engine
from penstock.serve.decisions.given_back import Archived
from penstock.serve.decisions.log import Log
from penstock.serve.decisions.to_archive import Cursor, Gathered, Read, ToArchive
from penstock.serve.settings import PlaneSettings
from penstock.storage import Storage

logger = logging.getLogger("penstock.archive")
COLLECT_S = 2.0
"""What happens within this time goes into one segment, if it is not larger than a segment gets."""
END_S = 3.0
"""How long the end of a plane waits for the rest to be sent; what is left is sent by the next plane."""
_RETRY_S, _MAX_RETRY_S = 0.5, 30.0


@dataclass(frozen=True, slots=True)
class Progress:
    """What the archive has, as its thread last said."""

    cursor: Cursor = field(default_factory=Cursor)
    known: bool = False
    """Whether the store has been reached, so that the cursor is the archive's own."""
    segments: int = 0
    groups: int = 0
    """Frames sent since this plane started."""
    num_bytes: int = 0
    missing: int = 0
    """Groups that were given back before they were archived, since this plane started."""
    error: str = ""
    """Why it stands still; empty while it does not."""


class Archiver:
    """The thread that sends."""

    def __init__(
        self,
        where: str,
        settings: PlaneSettings,
        log: Log,
        read: Read,
        *,
        collect_s: float | None = None,
        place: Callable[[], Blobs] | None = None,
    ) -> None:
        if log.folder is None:
            raise ConfigError(f"archive {where!r}: a plane in memory has none; open it on a folder")
        check_place(where)
        self.where = where
        self._place = place or partial(open_place, where, create=True)
        self._todo = ToArchive(log.folder, read, once=settings.replay.max_times_sampled == 1)
        self._run, self._run_id, self._epoch = settings.run, log.run_id, log.epoch
        self._settings = _as_toml(settings)
        self._collect_s = COLLECT_S if collect_s is None else collect_s
        self._blobs: Blobs | None = None
        self._last: tuple[int, bytes] = (0, b"")
        """Number and checksum of the last segment."""
        self.progress = Progress()
        self._news, self._ending = threading.Event(), threading.Event()
        self._news.set()  # there may be something left from before
        self._thread = threading.Thread(target=self._work, name="penstock-archive", daemon=True)
        self._thread.start()

    def poke(self) -> None:
        """From the loop: there is something new."""
        self._news.set()

    def close(self) -> None:
        """Send what is there, if the store lets us; a thread that waits for the store ends with the process."""
        self._ending.set()
        self._news.set()
        self._thread.join(END_S)
        if self._thread.is_alive():
            logger.warning("%s: not all of it is archived; the next plane on this folder goes on", self.where)

    def _work(self) -> None:
        failures = 0
        while True:
            self._news.wait()
            self._news.clear()
            if not failures:
                self._ending.wait(self._collect_s)
            last = self._ending.is_set()
            try:
                self._send_all()
                failures = 0
            except Exception as error:  # noqa: BLE001 - whatever a store does, the plane goes on and says it
                failures += 1
                self._failed(error)
                self._news.set()
                self._ending.wait(min(_RETRY_S * 2**failures, _MAX_RETRY_S))
            if last:
                return

    def _failed(self, error: Exception) -> None:
        known = isinstance(error, (PenstockError, sqlite3.Error, OSError))
        words = str(error) if known else f"{type(error).__name__}: {error}"
        if words != self.progress.error:
            logger.warning("%s: %s; trying again", self.where, words)
        self._say(error=words)
        self._blobs = None  # look again what is there

    def _say(self, **news: Any) -> None:
        self.progress = replace(self.progress, **news)

    def _send_all(self) -> None:
        """Everything there is, segment by segment."""
        if self._blobs is None:
            self._open()
        while found := self._todo.gather(self.progress.cursor):
            self._send(found)
            if self._ending.is_set() and found.is_full:
                return  # what is behind it follows with the next plane
        if self.progress.error:
            logger.info("%s: goes on", self.where)
        self._say(error="")

    def _open(self) -> None:
        """Find out how far the archive is."""
        blobs = self._place()
        numbers = numbers_of(blobs)
        cursor = Cursor()
        if numbers:
            last = segment_of(blobs, numbers[-1])
            self._check_run(last)
            cursor, self._last = Cursor.of(last.front), (last.front.number, last.checksum)
        else:
            self._last = (0, b"")
        self._todo.check_ahead(cursor, self.where)
        self._todo.remember(cursor)
        self._blobs = blobs
        self._say(cursor=cursor, known=True, segments=len(numbers))

    def _check_run(self, last: Segment) -> None:
        if last.front.run_id != self._run_id:
            raise ConfigError(
                f"archive {self.where}: holds run {last.front.run!r} ({last.front.run_id[:12]}), this is {self._run!r} "
                f"({self._run_id[:12]}); give each run an archive of its own"
            )

    def _send(self, found: Gathered) -> None:
        assert self._blobs is not None
        number = self._last[0] + 1
        data = write_segment(self._front(found, number), found.bodies)
        if not self._blobs.put_if_absent(name_of(number), data):
            # Somebody else wrote it, or we did and the answer was lost.
            there = segment_of(self._blobs, number)
            if there.checksum != checksum_of(data):
                self._open()
                return
        self._last = (number, checksum_of(data))
        self._todo.sent(found)
        self._say(
            cursor=found.cursor,
            segments=number,
            groups=self.progress.groups + len(found.frames),
            num_bytes=self.progress.num_bytes + found.num_bytes,
            missing=self.progress.missing + len(found.missing),
        )

    def _front(self, found: Gathered, number: int) -> Front:
        return Front(
            number=number,
            previous=self._last[1],
            run_id=self._run_id,
            run=self._run,
            epoch=self._epoch,
            settings=self._settings,
            through_op=found.cursor.op,
            through_step=found.cursor.step,
            step_op=found.cursor.step_op,
            through_part=found.cursor.part,
            groups=tuple(found.groups),
            records=tuple(found.records),
            steps=tuple(found.steps),
            frames=tuple(found.frames),
            missing=tuple(found.missing),
        )


class Archiving:
    """The archive of a plane, as its loop sees it; without one, it does nothing."""

    def __init__(self, engine: Engine, **more: Any) -> None:
        """`more` goes to the archiver."""
        settings = engine.settings
        self._engine, self._seen = engine, (0, 0)
        self._archiver: Archiver | None = None
        if settings.archive is not None:
            read = reader_of(engine.storage)
            self._archiver = Archiver(settings.archive, settings, engine.log, read, **more)

    def turn(self) -> None:
        """From the loop: say what is new, and hear how far the archive is."""
        if self._archiver is None:
            return
        seen = (self._engine.next_step, self._engine.state.op)
        if seen != self._seen:
            self._seen = seen
            self._archiver.poke()
        progress, journal = self._archiver.progress, self._engine.journal
        archived = Archived(progress.cursor.step, progress.cursor.op) if progress.known else Archived()
        over = self._engine.state.given_back.waiting_bytes > self._engine.settings.archive_hold_bytes
        if archived != journal.archived or over:
            with contextlib.suppress(DiskFull):  # the next transaction says it too
                journal.follow_archive(archived)

    def status(self) -> dict[str, Any] | None:
        """Where it is, how far, how far behind, and why; None without an archive."""
        if self._archiver is None:
            return None
        progress, engine = self._archiver.progress, self._engine
        return {
            "where": self._archiver.where,
            "step": progress.cursor.step,
            "behind_steps": max(engine.next_step - 1 - progress.cursor.step, 0),
            "segments": progress.segments,
            "groups": progress.groups,
            "bytes": progress.num_bytes,
            "waiting_groups": engine.state.given_back.num_waiting,
            "waiting_bytes": engine.state.given_back.waiting_bytes,
            "not_archived": progress.missing,
            "error": progress.error,
        }

    def close(self) -> None:
        if self._archiver is not None:
            self._archiver.close()
            with contextlib.suppress(PenstockError):  # found out again at the next start
                self.turn()


def _as_toml(settings: PlaneSettings) -> str:
    """Every setting of the plane with its value, without comments; not those of the process around it."""
    plane = PlaneSettings(**{one.name: getattr(settings, one.name) for one in fields(PlaneSettings)})
    lines = template(plane, title="", all_values=True).splitlines()
    return "\n".join(line for line in lines if line and not line.startswith("#")) + "\n"


def reader_of(storage: Storage) -> Read:
    """Reads frames of the plane's own storage."""
    return lambda location, _group: storage.read(location)[0]
