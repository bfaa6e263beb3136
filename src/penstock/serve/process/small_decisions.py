"""Decisions that producers and operators ask for in one message: discards, quarantined groups, the share of a run."""

from __future__ import annotations

from penstock.errors import PenstockError
from penstock.send.decision_limits import check_decision
from penstock.send.messages import Discard, SettleGroup, SetWeight
from penstock.serve.decisions.engine import Engine
from penstock.serve.process.run_story import RunStory


def decide(engine: Engine, story: RunStory, message: Discard | SettleGroup | SetWeight) -> PenstockError | None:
    """Have it decided; the error, if it is refused."""
    try:
        check_decision(message)
        if isinstance(message, Discard):
            reason = story.discarded(message.reason, engine)
            engine.discard(reason, max(message.samples, 0), message.key)
        elif isinstance(message, SettleGroup):
            engine.settle(message.group, drop=message.drop)
        elif message.weight:
            engine.share(message.run, message.weight)
        else:
            engine.evict(message.run, message.reason[:200])
    except PenstockError as refused:
        return refused
    return None
