"""The plane's two sides of the protocol, for ranks and for producers, as its settings and its log have them."""

from __future__ import annotations

from collections.abc import Callable

from penstock.errors import CorruptFrame
from penstock.log import Log, is_gone
from penstock.plane.engine import Engine
from penstock.plane.remembered import members_left
from penstock.plane.settings import PlaneSettings
from penstock.protocol import Admission, AskRoom, Beat, Buffer, Coordinator, Peer, Pulse, Put, Trace, read_from_client
from penstock.storage import KeptStorage, address_of


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
        is_gone=is_gone,
    )


def sign_of_life(coordinator: Coordinator, peer: Peer, header: Buffer, now: float) -> Pulse | None:
    """What to answer at once while nothing can be decided: numbered to a rank's beat, which needs no other answer;
    without credit to a producer, whose question waits."""
    try:
        message = read_from_client(header)
    except CorruptFrame:
        return None
    if isinstance(message, Beat):
        return coordinator.on_beat(peer, message, now)
    return coordinator.pulse(now) if isinstance(message, (Put, Trace, AskRoom)) else None


def admission_of(
    settings: PlaneSettings, log: Log, engine: Engine, pulse: Callable[[], Pulse], may_write: Callable[[Peer], bool]
) -> Admission:
    """`pulse` is the plane's sign of life; `may_write` says which clients may vouch for metadata."""
    storage = engine.storage
    return Admission(
        run=settings.run,
        run_id=bytes.fromhex(log.run_id),
        epoch=log.epoch,
        ranks=settings.packing.ranks,
        tables=engine.acceptance,
        peer_s=settings.timeouts.peer_s,
        pulse=pulse,
        storage=address_of(storage.url) if isinstance(storage, KeptStorage) and settings.direct else "",
        seq_len=settings.packing.seq_len,
        may_write=may_write,
        max_frame=settings.max_message_bytes,
        drops_long=settings.over_length == "drop",
        signs=settings.direct and settings.sign_puts_s is not None,
    )
