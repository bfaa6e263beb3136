"""A decision is written to the log, then entered in memory: the one way in which anything changes."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeAlias

from penstock.errors import Fenced, PenstockError
from penstock.log import Discard, Log, Record, Shorten
from penstock.plane.counted import COUNTS
from penstock.plane.rebuild import rebuild
from penstock.plane.remembered import keeps_all
from penstock.plane.run_tables import RunTables
from penstock.plane.segments import Segments
from penstock.plane.settings import PlaneSettings
from penstock.plane.state import PlaneState

logger = logging.getLogger("penstock.plane")
Job: TypeAlias = Callable[[], Any]
Then: TypeAlias = Callable[[Any], None]
"""Receives what the job returned, or the exception it raised."""


class Recorder:
    """The log, and what memory makes of it."""

    def __init__(self, settings: PlaneSettings, log: Log, segments: Segments) -> None:
        self._settings, self.log, self.segments = settings, log, segments
        self.keeps_all = log.disk.keeps_all = keeps_all(settings, log)
        """Whether no frame, metadata or plan of an accepted group is ever freed."""
        self.counts: Counter[str] = Counter(dict.fromkeys(COUNTS, 0))
        """What happened since this plane started, for `penstock top`."""
        self.run_beside: Callable[[Job, Then], None] = run_at_once
        """Runs a job and passes its result on; a server does that beside its loop."""
        self.state: PlaneState
        self.saved_op = 0
        """The last decision that is in the snapshot."""
        self.rebuild()

    @property
    def run_tables(self) -> RunTables:
        return self.state.run_tables

    def rebuild(self) -> None:
        """Make memory anew from the log: what was not written down did not happen."""
        settings = self._settings
        self.state = rebuild(
            self.log,
            settings.replay,
            retain_steps=settings.retain_steps,
            keeps_all=self.keeps_all,
        )
        self.state.give_back_evaluations(settings.retain_eval_bytes)
        found = self.log.snapshot()
        self.saved_op = 0 if found is None else found[0]

    def decide(self, record: Record) -> None:
        op = self.state.op + 1
        with self.transaction():
            self.log.add_record(op, record)
            if isinstance(record, (Discard, Shorten)) and record.key:
                self.log.add_discard(record.key)
        self.state.redo(op, record)

    @contextmanager
    def transaction(self) -> Iterator[None]:
        with self.log.transaction():
            yield
            self.state.write(self.log)
            freed = self.state.freeing.locations
            self.segments.write(freed)
        self.state.written()
        self.segments.written(freed)
        self.state.freeing.done()
        self.delete_freed()

    def delete_freed(self) -> None:
        """Have storage delete what the log says is free. What fails stays in the log and is tried again."""
        names = self.segments.take_deletions()
        if names:
            op = self.log.commits
            self.run_beside(lambda: self.segments.delete(names, op), partial(self._deleted, names))

    def _deleted(self, names: list[str], result: tuple[list[str], dict[str, int]] | Exception) -> None:
        if not isinstance(result, Exception):
            self.segments.deleted(*result)
            return
        self.segments.not_deleted(names)
        if isinstance(result, Fenced) or not isinstance(result, (PenstockError, OSError)):
            raise result
        self.counts["deletions_failed"] += 1
        logger.warning("%d frames or segments are not deleted yet: %s", len(names), result)


def run_at_once(job: Job, then: Then) -> None:
    try:
        result = job()
    except Exception as error:  # noqa: BLE001 - the receiver decides what to make of it
        then(error)
    else:
        then(result)
