"""The plane's two sides of the protocol, for ranks and for producers, as its settings and its log have them."""

from __future__ import annotations

from collections.abc import Callable

from penstock.send.admission import Admission
from penstock.send.coordinator import Coordinator
from penstock.send.messages import Pulse
from penstock.send.roster import Roster
from penstock.serve.decisions.engine import Engine
from penstock.serve.decisions.log import Log
from penstock.serve.decisions.remembered import members_left
from penstock.serve.settings import PlaneSettings


def coordinator_of(settings: PlaneSettings, log: Log, engine: Engine) -> Coordinator:
    """Goes on with the session that the log knows of."""
    return Coordinator(
        run=settings.run,
        ranks=settings.packing.ranks,
        replicas=settings.replicas,
        epoch=log.epoch,
        session=log.meta("session", 0),
        next_step=engine.next_step,
        last_step=engine.last_step,
        left=members_left(settings, log),
        timeouts=settings.timeouts,
    )


def admission_of(settings: PlaneSettings, log: Log, roster: Roster | None, pulse: Callable[[], Pulse]) -> Admission:
    """`pulse` is the plane's sign of life."""
    timeouts = settings.timeouts
    return Admission(
        run=settings.run,
        run_id=bytes.fromhex(log.run_id),
        epoch=log.epoch,
        ranks=settings.packing.ranks,
        # A keeper checks, syncs and copies a frame before its facts come.
        promise_s=2 * timeouts.resend_s if roster is None else timeouts.delivery_s / 2,
        pulse=pulse,
        roster=roster,
        max_frame=settings.max_message_bytes,
    )
