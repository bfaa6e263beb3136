"""What a run's folder remembers of earlier planes: whether today's settings go with it, and whether it can be read."""

from __future__ import annotations

import logging
import sqlite3
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

import msgspec

from penstock.errors import ConfigError, CorruptFile, PenstockError
from penstock.serve.decisions.log import Log, State
from penstock.serve.settings import PlaneSettings

logger = logging.getLogger("penstock.plane")


def check_settings(settings: PlaneSettings, log: Log) -> None:
    """Refuse settings that cannot be applied to what is held or planned, with both values; remember the others."""
    replay, ranks = repr(settings.replay), settings.packing.ranks
    began, planned = log.text("replay"), log.meta("ranks", ranks)
    if began and began != replay and log.has_steps:
        raise ConfigError(
            f"replay settings: the run began with {began}, now {replay}; a run's draws follow from them: open it with "
            "the same sampler, remover, limiter, capacity, max_times_sampled, max_staleness and seed"
        )
    if began and began != replay and settings.replay.remover is None:
        _check_capacity(settings.replay.capacity, log)
    copies = log.text("copies") or "0"
    if copies != "0" and log.locations():
        raise ConfigError(
            f"{log.folder}: this run began with copies={copies}, so its frames are with keepers, which this version "
            "does not have; finish it with the version that began it, or begin a new folder"
        )
    if planned != ranks and log.steps_from(log.meta("next_step", 1)):
        raise ConfigError(
            f"ranks: {ranks}, and steps are planned for {planned} that are not trained yet; train and commit them with "
            f"{planned} ranks first, or begin a new folder"
        )
    if (began, planned) != (replay, ranks) or not log.text("ranks"):
        with log.transaction():
            log.set_meta("replay", replay)
            log.set_meta("ranks", ranks)


def keeps_all(settings: PlaneSettings, log: Log) -> bool:
    """Whether the run frees nothing. Remembered: a plane that is started without `retain="all"` goes on with it."""
    known = log.text("retain") == "all"
    if settings.retain == "all" and not known:
        with log.transaction():
            log.set_meta("retain", "all")
    elif settings.retain != "all" and known:
        logger.warning(
            '%s: this run keeps everything (retain="all") since an earlier start, and goes on with that; '
            "`penstock storage forget` ends it",
            log.folder or "memory",
        )
    return known or settings.retain == "all"


def _check_capacity(capacity: int, log: Log) -> None:
    held = max(Counter(row.run for row in log.groups_in(State.HELD)).values(), default=0)
    if held > capacity:
        raise ConfigError(f"capacity: {capacity}, and more groups are held than that ({held}); raise it")


@contextmanager
def damage_named(log: Log) -> Iterator[None]:
    """Whatever a damaged log provokes while it is read is said as what it is."""
    try:
        yield
    except PenstockError:
        raise
    except (sqlite3.Error, msgspec.MsgspecError, ValueError, TypeError, LookupError, AssertionError) as error:
        where = log.folder or "memory"
        raise CorruptFile(
            f"{where}: the log cannot be read: {type(error).__name__}: {error}; restore the folder from a copy"
        ) from error


def members_left(settings: PlaneSettings, log: Log) -> dict[tuple[int, int], int]:
    """Who left the session that an earlier life of this plane served, and the last step each of them committed."""
    session, found = log.meta("session", 0), {}
    for rank in range(settings.packing.ranks):
        for replica in range(settings.replicas):
            step = log.meta(left_name(session, rank, replica), -1)
            if step >= 0:
                found[rank, replica] = step
    return found


def left_name(session: int, rank: int, replica: int) -> str:
    return f"left {session} {rank} {replica}"
