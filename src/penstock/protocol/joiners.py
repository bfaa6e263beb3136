"""Joiners: processes that want a place which another process holds. They wait until it answers or counts as dead.

    plane  <- hello rank 0 (pid 8)          rank 0 is pid 7: is pid 7 alive?
    plane  -> pid 7: pulse(probe 3)
    plane  <- pid 7: beat(probe 3)          yes: pid 8 is refused
              ... or two heartbeats of silence: no, pid 8 replaces it

An ordinary beat proves nothing: it may have been sent before the process died. The answer to a probe is newer than the
probe.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from penstock.protocol.effects import Effect, Note, Send
from penstock.protocol.members import Member, Members, Place, another
from penstock.protocol.messages import MAX_REASON, Beat, Hello, Peer, Refused
from penstock.protocol.timeouts import Timeouts


@dataclass(slots=True, kw_only=True)
class Joiner:
    """A process that waits for a place."""

    peer: Peer
    hello: Hello
    heard: float
    until: float
    """When the holder of the place counts as dead."""
    probe: int
    """The number the holder is asked to repeat."""
    holder: str
    """The holder's incarnation."""

    @staticmethod
    def at_once(peer: Peer, hello: Hello, now: float) -> Joiner:
        """Return a joiner that does not wait for any holder."""
        return Joiner(peer=peer, hello=hello, heard=now, until=now, probe=0, holder="")


class Joiners:
    """Waiting processes, at most one per place: the one heard last."""

    def __init__(self, members: Members, timeouts: Timeouts, is_gone: Callable[[str, int], bool]) -> None:
        self._members, self._timeouts, self._is_gone = members, timeouts, is_gone
        self._waiting: dict[Place, Joiner] = {}
        self._probes = 0

    def must_wait(self, place: Place, joiner: Joiner) -> bool:
        """Return whether the place is held by another process that may be alive.

        A holder that the joiner has already waited for counts as dead, so this returns False for it.
        """
        known, hello = self._members.get(place), joiner.hello
        if known is None or known.incarnation == joiner.holder:
            return False
        # A process may join again: a source that was not closed, or a container that restarts under the same name.
        joins_again = bool(hello.process) and hello.process == known.process
        return not joins_again and not self._is_gone(known.pid_space, known.pid)

    def wait(self, place: Place, joiner: Joiner, now: float) -> tuple[Peer, int]:
        """Keep a process waiting. Returns the peer to probe and the probe's number."""
        holder = self._members[place]
        found = self._waiting.get(place)
        if found is None or found.holder != holder.incarnation:
            # A new number per holder: an old answer must not prove that a later holder is alive.
            self._probes += 1
            found = replace(
                joiner,
                until=now + 2 * self._timeouts.heartbeat_s,
                probe=self._probes,
                holder=holder.incarnation,
            )
            self._waiting[place] = found
        found.peer, found.hello, found.heard = joiner.peer, joiner.hello, joiner.heard
        return holder.peer, found.probe

    def leave(self, peer: Peer) -> bool:
        """Remove a process that left. Returns whether it waited for a place."""
        found = [place for place, one in self._waiting.items() if one.peer == peer]
        for place in found:
            del self._waiting[place]
        return bool(found)

    def answered(self, place: Place, beat: Beat, epoch: int) -> list[Effect]:
        """Handle a beat of a place's holder. If it answers the probe, the holder is alive and the joiner is refused."""
        found = self._waiting.get(place)
        if found is None or not beat.probe or beat.probe != found.probe:
            return []
        del self._waiting[place]
        name = self._members.name(place)
        reason = f"{another(self._members[place].process)} already joined as {name}; stop one of the two"
        refused = Refused(epoch=epoch, reason=reason[:MAX_REASON])
        return [Note(f"refused {found.hello.process or 'a process'}: {reason}"), Send(found.peer, refused)]

    def probes(self) -> list[tuple[Peer, int]]:
        """Return the peers to probe again, because a probe may be lost."""
        return [(self._members[place].peer, one.probe) for place, one in self._waiting.items() if self._holds(place)]

    def excuse(self, gap_s: float) -> None:
        """Extend all deadlines: for `gap_s` seconds the plane itself could not receive."""
        for one in self._waiting.values():
            one.until += gap_s

    def due(self, now: float) -> list[tuple[Place, Joiner]]:
        """Remove and return the joiners that may join: the holder has left, or did not answer."""
        found = [(place, one) for place, one in self._waiting.items() if now >= one.until or not self._holds(place)]
        for place, _ in found:
            del self._waiting[place]
        return found

    def _holds(self, place: Place) -> bool:
        """Return whether the holder that a joiner waits for still has the place."""
        holder: Member | None = self._members.get(place)
        return holder is not None and holder.incarnation == self._waiting[place].holder
