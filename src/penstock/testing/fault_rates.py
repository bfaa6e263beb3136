"""How much trouble a simulated run has, and of which kinds."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random


@dataclass(frozen=True, slots=True, kw_only=True)
class Faults:
    """How bad the world is while faults last."""

    drop: float = 0.0
    """Share of messages that are lost."""
    duplicate: float = 0.0
    delay_s: float = 0.01
    """Mean time a message travels; each one differs, so they overtake each other."""
    rank_crash: float = 0.0
    """Ends of each rank per second, half of them crashes and half in order; crashes, for the plane."""
    plane_crash: float = 0.0
    pause: float = 0.0
    slow_fill: float = 0.0
    """Share of steps that a rank needs longer to fill than a delivery may take."""
    fill_failure: float = 0.0
    """Share of steps that a rank fails to unpack."""
    disk_full: float = 0.0
    producer_crash: float = 0.0
    give_up: float = 0.0
    """Share of puts that do not wait long for room."""

    @staticmethod
    def drawn(rng: Random) -> Faults:
        """Each kind of trouble in half of the runs."""

        def maybe(most: float) -> float:
            return rng.random() * most if rng.random() < 0.5 else 0.0

        return Faults(
            drop=maybe(0.3),
            duplicate=maybe(0.3),
            delay_s=rng.choice([0.001, 0.01, 0.1]),
            rank_crash=maybe(0.3),
            plane_crash=maybe(0.6),
            pause=maybe(0.3),
            fill_failure=maybe(0.1),
            disk_full=maybe(0.3),
            producer_crash=maybe(0.3),
            give_up=maybe(0.3),
        )
