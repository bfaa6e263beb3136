"""What a run's folder remembers of earlier planes: whether today's settings go with it, and whether it can be read."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields

import msgspec

from penstock.config import template
from penstock.errors import ConfigError, CorruptFile, PenstockError
from penstock.log import Log, State
from penstock.plane.settings import PlaneSettings
from penstock.storage import address_of

logger = logging.getLogger("penstock.plane")
SETTINGS = "settings "
"""Begins the names under which a log remembers settings; the first decision they hold for follows."""


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
    if planned != ranks and log.steps_from(log.meta("next_step", 1)):
        raise ConfigError(
            f"ranks: {ranks}, and steps are planned for {planned} that are not trained yet; train and commit them with "
            f"{planned} ranks first, or begin a new folder"
        )
    _log_changes(settings, log)
    _remember(log, {"replay": replay, "ranks": ranks, "storage": _storage(settings)}, as_toml(settings))


def _remember(log: Log, values: dict[str, int | str], settings: str) -> None:
    """Write down what changed. Settings are kept with the first decision they hold for: a rerun needs all of them."""
    changed = {name: value for name, value in values.items() if log.text(name) != str(value)}
    known = log.texts(SETTINGS)
    if not known or known[max(known)] != settings:
        changed[f"{SETTINGS}{log.last_op + 1:020}"] = settings
    if changed:
        with log.transaction():
            for name, value in changed.items():
                log.set_meta(name, value)


def _storage(settings: PlaneSettings) -> str:
    """Where readers of the run's folder find its frames; empty: in that folder."""
    return "" if settings.storage is None else address_of(settings.storage)


def as_toml(settings: PlaneSettings) -> str:
    """Every setting of the plane with its value, without comments; not those of the process around it, nor where the
    log is: whoever decides the run again does not write there."""
    plane = PlaneSettings(**{one.name: getattr(settings, one.name) for one in fields(PlaneSettings)} | {"log": None})
    lines = template(plane, title="", all_values=True).splitlines()
    return "\n".join(line for line in lines if line and not line.startswith("#")) + "\n"


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
            log.where,
        )
    return known or settings.retain == "all"


def _log_changes(settings: PlaneSettings, log: Log) -> None:
    """Log settings that may change from one start to the next and change what is trained, with both values."""
    now = {"run": settings.run, "seq_len": str(settings.packing.seq_len), "step": str(settings.target)}
    text = log.text("opened")
    before = msgspec.json.decode(text, type=dict[str, str]) if text else {}
    for name, value in now.items():
        if before.get(name, value) != value:
            logger.warning("%s: %s: was %s, is now %s", log.where, name, before[name], value)
    if now != before:
        with log.transaction():
            log.set_meta("opened", msgspec.json.encode(now).decode())


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
    except (msgspec.MsgspecError, ValueError, TypeError, LookupError, AssertionError) as error:
        where = log.where
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
