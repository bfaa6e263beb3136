"""How long anybody may be silent."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeouts:
    """How long silence may last. All waits in the protocol are bounded by one of these, or by a live peer."""

    heartbeat_s: float = 2.0
    peer_s: float = 11.0
    """Silence after which a process counts as dead: three missed heartbeats and five seconds of grace."""
    delivery_s: float = 30.0
    """From sending a step to the rank's word that it has it."""
    plane_s: float = 30.0
    """How long ranks and producers wait for a lost plane to come back."""
    resend_s: float = 1.0
    """An unanswered question is asked again after this, then after twice as long, and so on."""

    def __post_init__(self) -> None:
        for name in ("heartbeat_s", "peer_s", "delivery_s", "plane_s", "resend_s"):
            if not 0 < getattr(self, name) < float("inf"):
                raise ConfigError(f"timeouts.{name}: {getattr(self, name)}; must be a positive number of seconds")
        if self.peer_s < 2 * self.heartbeat_s:
            raise ConfigError(
                f"timeouts: peer_s {self.peer_s} with heartbeat_s {self.heartbeat_s}; "
                "allow at least two heartbeats, or live peers will be called dead"
            )
