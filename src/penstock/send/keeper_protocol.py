"""A keeper's side of the protocol: what comes in goes to the state machine that it is for, and what is to be done
comes out.

    from clients       on_client  ->  PutDesk, TakeDesk, CopyDesk
    from the plane     on_plane   ->  KeeperSession, PutDesk
    from other keepers on_peer    ->  PutDesk
    work that is done  `puts.checked`, kept, taken

No I/O, no clock: `serve/keepers` drives it over sockets, `testing/simulated_keepers.py` over a simulated network.
"""

from __future__ import annotations

import logging
from collections.abc import Collection

import msgspec

from penstock.errors import PenstockError
from penstock.send.carrier import Peer
from penstock.send.copy_desk import CopyDesk
from penstock.send.keeper_events import Event, ForgetNumbers, KeepFrame, TakeFrame, ToClient
from penstock.send.keeper_messages import Copied, CopyFrame, DropCopies, Enlist, Take
from penstock.send.keeper_session import KeeperSession, Store
from penstock.send.messages import (
    Accepted,
    AskRoom,
    Attach,
    Foreign,
    Frames,
    FromClient,
    FromPlane,
    GiveUp,
    Missing,
    Put,
    Rejected,
    Room,
    Trace,
)
from penstock.send.put_desk import PutDesk
from penstock.send.take_desk import TakeDesk
from penstock.send.timeouts import Timeouts

logger = logging.getLogger("penstock.keeper")


class KeeperProtocol:
    """One keeper, from its start to its end."""

    def __init__(self, about: Enlist, store: Store, *, run: str = "", timeouts: Timeouts) -> None:
        """`about` is what the keeper says of itself."""
        self._store, self._quota = store, about.quota_bytes
        self.session = KeeperSession(about, store, run=run, timeouts=timeouts)
        self.puts = PutDesk(
            self.session, name=about.name, used_bytes=lambda: store.num_bytes, quota_bytes=about.quota_bytes
        )
        self._takes = TakeDesk()
        self._copies = CopyDesk(self._has_room)

    def start(self, now: float) -> list[Event]:
        return self.session.start(now)

    def on_tick(self, now: float) -> list[Event]:
        return [*self.session.on_tick(now), *self.puts.on_tick(now)]

    # -------------------------------------------------------------- messages

    def on_client(
        self, peer: Peer, message: FromClient, frames: Frames, now: float, *, run_id: bytes, is_keeper: bool
    ) -> list[Event]:
        """From somebody who connected here: with a message of run `run_id`, and a keeper's key or another one."""
        if isinstance(message, Attach):
            return self._on_attach(peer, message)
        if run_id != self.session.run_id:
            return self._on_other_run(peer)
        if isinstance(message, Put):
            return self.puts.on_put(peer, message, frames, now)
        if isinstance(message, AskRoom):
            return self.puts.on_ask_room(peer, message, now)
        if isinstance(message, Trace):
            return self.puts.on_trace(peer, message, frames)
        if isinstance(message, GiveUp):
            return self.puts.on_give_up(peer, message)
        if isinstance(message, Take):
            return self._takes.on_take(peer, message)
        if isinstance(message, CopyFrame) and is_keeper:
            return self._copies.on_copy(peer, message, frames)
        if isinstance(message, DropCopies) and is_keeper:
            return [ForgetNumbers(message.numbers)]
        logger.debug("dropped a %s: it is not for keepers, or not from one", type(message).__name__)
        return []

    def _on_attach(self, peer: Peer, message: Attach) -> list[Event]:
        """Which run is this? Known once the plane has said it; until then the client asks again."""
        known, version = self.session.attached, self.session.policy_version
        if known is None:
            return []
        answer = msgspec.structs.replace(known, ticket=message.ticket, policy_version=version, keepers=())
        return [ToClient(peer, answer)]

    def _on_other_run(self, peer: Peer) -> list[Event]:
        """A keeper that restarted does not know its run until the plane has said it: the client may well be of it."""
        if self.session.attached is None:
            return []
        return [ToClient(peer, Foreign(reason="this keeper is of another run; open the plane anew"))]

    def on_plane(self, message: FromPlane, frames: Frames, now: float) -> list[Event]:
        if isinstance(message, (Accepted, Rejected, Missing, Room)):
            return self.puts.on_plane(message, now)
        return self.session.on_message(message, frames, now)

    def on_peer(self, message: FromPlane, now: float) -> list[Event]:
        """What another keeper answers."""
        return self.puts.on_copied(message, now) if isinstance(message, Copied) else []

    # -------------------------------------------------------------- work that is done

    def kept(self, asked: KeepFrame, found: int | PenstockError, now: float) -> list[Event]:
        """A frame is synced, under the number `found`; or why it cannot be."""
        if isinstance(asked.work, int):
            if isinstance(found, int):
                return self.puts.kept(asked.work, found, now)
            return self.puts.not_kept(asked.work, found)
        if isinstance(found, int):
            return self._copies.kept(asked.work, found)
        return self._copies.not_kept(asked.work, found)

    def taken(
        self, asked: TakeFrame, frames: Frames, missing: dict[int, str], damaged: Collection[int], now: float
    ) -> list[Event]:
        """Samples are gathered. The plane hears at once of frames that cannot be read."""
        self.session.damaged.update(damaged)
        events = self._takes.taken(asked.peer, asked.ticket, frames, missing)
        return [*events, *(self.session.beat(now) if damaged else ())]

    def _has_room(self, size: int) -> bool:
        return self._quota is None or self._store.num_bytes + size <= self._quota
