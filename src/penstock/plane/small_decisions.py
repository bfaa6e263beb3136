"""Decisions that producers and operators ask for in one message: discards, quarantined groups, the share of a run."""

from __future__ import annotations

import logging

from penstock.arrays import check_count
from penstock.errors import InvalidInput, PenstockError
from penstock.plane.engine import Engine
from penstock.plane.failures import ends_plane, failure_in_words
from penstock.plane.run_logger import RunLogger
from penstock.protocol import Discard, SettleGroup, SetWeight, check_decision

logger = logging.getLogger("penstock.plane")


def decide(engine: Engine, run_logger: RunLogger, message: Discard | SettleGroup | SetWeight) -> PenstockError | None:
    """Have it decided; the error, if it is refused."""
    try:
        check_decision(message)
        if isinstance(message, Discard):
            reason = run_logger.discarded(message.reason, engine)
            engine.discard(reason, check_count(message.samples, f"discard of {reason!r}"), message.key)
        elif isinstance(message, SettleGroup):
            engine.settle(message.group, drop=message.drop)
        elif message.weight:
            engine.share(message.run, message.weight)
        else:
            engine.evict(message.run, message.reason[:200])
    except PenstockError as refused:
        return refused
    except Exception as error:
        if ends_plane(error):
            raise
        # Memory may hold half of it, so it is read again from the log: what is not there was not decided.
        logger.exception("%s could not be decided", type(message).__name__)
        engine.counts["decisions_failed"] += 1
        engine.recorder.rebuild()
        return InvalidInput(f"{type(message).__name__}: {failure_in_words(error)}; the plane could not decide it")
    return None
