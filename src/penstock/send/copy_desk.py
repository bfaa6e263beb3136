"""A keeper's side of `CopyFrame`: each frame that a peer sends is kept once, and answered as often as it is asked."""

from __future__ import annotations

from collections.abc import Callable

from penstock.errors import PenstockError
from penstock.send.carrier import Peer
from penstock.send.keeper_events import Event, KeepFrame, ToClient, WorkId
from penstock.send.keeper_messages import Copied, CopyFrame
from penstock.send.messages import Frames

_REMEMBERED = 4096


class CopyDesk:
    """Keeps copies for peers."""

    def __init__(self, has_room: Callable[[int], bool]) -> None:
        self._has_room = has_room
        self._under_way: set[tuple[Peer, int]] = set()
        self._answers: dict[tuple[Peer, int], Copied] = {}
        """To the last questions."""

    def on_copy(self, peer: Peer, message: CopyFrame, frames: Frames) -> list[Event]:
        key = (peer, message.ticket)
        if key in self._under_way:
            return []
        if key in self._answers:
            return [ToClient(peer, self._answers[key])]
        if len(frames) != 1 or not self._has_room(len(frames[0])):
            words = f"{len(frames)} frames" if len(frames) != 1 else "its quota is full"
            return [ToClient(peer, Copied(ticket=message.ticket, error=words))]
        self._under_way.add(key)
        return [KeepFrame(key, message.group, message.digest, frames[0])]

    def kept(self, work: WorkId, number: int) -> list[Event]:
        return self._answer(work, number, "")

    def not_kept(self, work: WorkId, error: PenstockError) -> list[Event]:
        return self._answer(work, 0, str(error)[:200])

    def _answer(self, work: WorkId, number: int, error: str) -> list[Event]:
        assert isinstance(work, tuple)
        peer, ticket = work
        self._under_way.discard(work)
        answer = self._answers[work] = Copied(ticket=ticket, number=number, error=error)
        while len(self._answers) > _REMEMBERED:
            self._answers.pop(next(iter(self._answers)))
        return [ToClient(peer, answer)]
