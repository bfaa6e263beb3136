"""A keeper's side of `Take`: each question is worked at once, and answered again only if its answer was lost."""

from __future__ import annotations

from penstock.send.carrier import Peer
from penstock.send.keeper_events import Event, TakeFrame, ToClient
from penstock.send.keeper_messages import Take, Taken, Taking
from penstock.send.messages import BEHIND, Frames

_REMEMBERED = 4096


class TakeDesk:
    """Gives slices. No I/O: `TakeFrame` is done by others, who then call `taken`."""

    def __init__(self) -> None:
        self._under_way: set[tuple[Peer, int]] = set()
        self._sent: dict[tuple[Peer, int], int] = {}
        """How many answers were sent to each of the last questions."""

    def on_take(self, peer: Peer, message: Take) -> list[Event]:
        key = (peer, message.ticket)
        if key in self._under_way:
            return [ToClient(peer, Taking(ticket=message.ticket))]
        sent = self._sent.get(key, 0)
        if message.lost < sent:  # on its way, perhaps: what follows it will tell
            return [ToClient(peer, Taking(ticket=message.ticket, sent=sent), BEHIND), self._lives(peer, message)]
        self._under_way.add(key)
        return [TakeFrame(peer, message.ticket, message.picks), self._lives(peer, message)]

    def _lives(self, peer: Peer, message: Take) -> ToClient:
        return ToClient(peer, Taking(ticket=message.ticket))

    def taken(self, peer: Peer, ticket: int, frames: Frames, missing: dict[int, str]) -> list[Event]:
        key = (peer, ticket)
        self._under_way.discard(key)
        self._sent[key] = self._sent.pop(key, 0) + 1
        while len(self._sent) > _REMEMBERED:
            self._sent.pop(next(iter(self._sent)))
        reasons = tuple((i, reason[:200]) for i, reason in sorted(missing.items()))
        return [ToClient(peer, Taken(ticket=ticket, missing=reasons), frames)]
