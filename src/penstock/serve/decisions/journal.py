"""A decision is written to the log, then entered in memory: the one way in which anything changes."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from penstock.keep.keeper import Keeper
from penstock.serve.decisions.decision_records import Discard, Record, Shorten
from penstock.serve.decisions.given_back import Archived
from penstock.serve.decisions.log import Log
from penstock.serve.decisions.rebuild import rebuild
from penstock.serve.decisions.run_tables import RunTables
from penstock.serve.decisions.state import PlaneState
from penstock.serve.settings import PlaneSettings

logger = logging.getLogger("penstock.archive")


class Journal:
    """The log, and what memory makes of it."""

    def __init__(self, settings: PlaneSettings, log: Log, keeper: Keeper) -> None:
        self._settings, self.log, self.keeper = settings, log, keeper
        self.counts: Counter[str] = Counter()
        """What happened since this plane started, for `penstock top`."""
        self.sweep: Callable[[], None] = keeper.sweep
        """Gives the space of forgotten frames back; a server has that done beside its loop."""
        self.archived = None if settings.archive is None else Archived()
        """How far the archive is, as far as it has said; None: there is none."""
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
        self.state = rebuild(self.log, settings.replay, retain_steps=settings.retain_steps, archived=self.archived)
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
        self.state.written()
        self.forget(self.state.given_back.take())

    def follow_archive(self, archived: Archived) -> None:
        """The archive has come so far: frames that waited for it are given back, and some of them unarchived where
        all of them take more than may be held for it."""
        self.archived = archived
        given_back = self.state.given_back
        given_back.follow(archived)
        lost = given_back.give_up(self._settings.archive_hold_bytes)
        if lost:
            self.counts["groups_not_archived"] += lost
            logger.warning("%d groups are not archived: the archive is too far behind (archive_hold_bytes)", lost)
        if given_back.ops:
            with self.transaction():
                pass

    def forget(self, locations: Sequence[str]) -> None:
        """Frames are wanted no more."""
        if locations:
            self.keeper.forget(locations)
            self.sweep()
