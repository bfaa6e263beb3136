"""The plane's two sides of the protocol, for ranks and for producers, as its settings and its log have them."""

from __future__ import annotations

from collections.abc import Callable

from penstock.send.admission import Admission
from penstock.send.carrier import Peer
from penstock.send.coordinator import Coordinator
from penstock.send.messages import Pulse
from penstock.serve.decisions.engine import Engine
from penstock.serve.decisions.log import Log
from penstock.serve.decisions.remembered import members_left
from penstock.serve.settings import PlaneSettings
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
    )


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
    )
