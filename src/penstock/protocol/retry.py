"""What ranks and producers have in common: questions that are asked again, and a plane that may fall silent.

Every message may be lost, doubled or late. So a question stays open until it is answered; it is asked again after
`patience` seconds, then after twice as long, up to a limit. A client that hears nothing for `plane_s` seconds gives up;
time in which it stood still itself does not count, for what was said meanwhile is still to be read.
"""

from __future__ import annotations

from dataclasses import dataclass

from penstock.errors import PenstockError
from penstock.protocol.messages import Frames, FromClient


@dataclass(frozen=True, slots=True)
class Out:
    """Give this to the transport."""

    message: FromClient
    frames: Frames = ()


@dataclass(frozen=True, slots=True)
class Failed:
    """It is over."""

    error: PenstockError


@dataclass(slots=True, eq=False)
class Pending:
    """A question that waits for its answer."""

    message: FromClient
    sent: float
    patience: float
    frames: Frames = ()

    def is_due(self, now: float) -> bool:
        return now - self.sent >= self.patience

    def asked(self, now: float, most_patience: float) -> None:
        """It was asked again."""
        self.sent, self.patience = now, min(self.patience * 2, most_patience)

    def ask_anew(self, now: float, patience: float) -> None:
        self.sent, self.patience = now, patience


class Contact:
    """When the plane was heard last."""

    def __init__(self, stall_s: float) -> None:
        """A client that ticks less often than every `stall_s` seconds stood still."""
        self._stall_s = stall_s
        self._heard = float("-inf")
        self._ticked: float | None = None

    def hear(self, now: float) -> None:
        self._heard = now

    def tick(self, now: float) -> float:
        """How long the plane has been silent."""
        if self._ticked is not None and now - self._ticked > self._stall_s:
            self._heard += now - self._ticked
        self._ticked = now
        return now - self._heard
