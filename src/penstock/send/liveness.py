"""Who has been silent, or deaf, for too long."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.send.members import Members, Place
from penstock.send.timeouts import Timeouts


@dataclass(frozen=True, slots=True)
class Overdue:
    """A process that does not do its part."""

    place: Place
    step: int | None
    """The step it is about; None for whichever is next."""
    reason: str


def overdue(members: Members, timeouts: Timeouts, now: float) -> Overdue | None:
    """The first process that did not speak, listen or acknowledge in time; None if all is well."""
    for place in members:
        member = members[place]
        silent = now - member.heard
        if silent > timeouts.peer_s:
            return Overdue(place, None, f"silent for {silent:.1f} s; it died, stopped or was cut off")
        # Two heartbeats more than for silence: a pulse is confirmed by the beat after next at the latest, and a
        # process that stood still for less than `peer_s` must have the time to do so.
        if member.unheard is not None and now - member.unheard[1] > timeouts.peer_s + 2 * timeouts.heartbeat_s:
            deaf = now - member.unheard[1]
            return Overdue(place, None, f"has not heard the plane for {deaf:.1f} s; the way to it is cut")
        for step, sent in member.sent.items():
            if now - sent > timeouts.delivery_s:
                reason = f"did not acknowledge step {step} within {timeouts.delivery_s:g} s of its delivery"
                return Overdue(place, step, reason)
    return None
