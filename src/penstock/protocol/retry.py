"""Retries: what ranks and producers share. Requests that are repeated, and a plane that may fall silent.

Every message may be lost, duplicated or late. So a request stays open until it is answered. It is repeated after
`patience` seconds, then after twice as long, up to a limit. With `resend_s` 1 and a limit of 2 that is after 1, 3, 5, 7
seconds. A client that hears nothing for `plane_s` seconds gives up. Time in which the client itself was paused does not
count, because messages that arrived meanwhile are still unread.
"""

from __future__ import annotations

from dataclasses import dataclass

from penstock.errors import PenstockError
from penstock.protocol.messages import Frames, FromClient


@dataclass(frozen=True, slots=True)
class Out:
    """Send this message."""

    message: FromClient
    frames: Frames = ()


@dataclass(frozen=True, slots=True)
class Failed:
    """The session is over."""

    error: PenstockError


@dataclass(slots=True, eq=False)
class Pending:
    """A request without an answer yet."""

    message: FromClient
    sent: float
    patience: float
    frames: Frames = ()

    def is_due(self, now: float) -> bool:
        return now - self.sent >= self.patience

    def asked(self, now: float, most_patience: float) -> None:
        """Note that it was repeated: double the patience."""
        self.sent, self.patience = now, min(self.patience * 2, most_patience)

    def restart(self, now: float, patience: float) -> None:
        """Start over, as if it was sent for the first time."""
        self.sent, self.patience = now, patience


class Contact:
    """Measures how long the plane has been silent."""

    def __init__(self, stall_s: float) -> None:
        """A gap of more than `stall_s` seconds between two ticks means that the client itself was paused."""
        self._stall_s = stall_s
        self._heard = float("-inf")
        self._ticked: float | None = None

    def hear(self, now: float) -> None:
        self._heard = now

    def tick(self, now: float) -> float:
        """Return the seconds of silence, without time in which this process was paused."""
        if self._ticked is not None and now - self._ticked > self._stall_s:
            # Example: heard at 10, ticks at 12 and 60 (suspended in between): 58 seconds would look like a lost plane.
            # Moving `heard` to 10 + 48 leaves 2 seconds of silence.
            self._heard += now - self._ticked
        self._ticked = now
        return now - self._heard
