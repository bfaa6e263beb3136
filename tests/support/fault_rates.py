"""How often, and what, goes wrong in a simulated run."""

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


@dataclass(frozen=True, slots=True, kw_only=True)
class StorageFaults:
    """Faults of storage and of its writers, while faults last."""

    sync_fails: float = 0.0
    """Share of writes whose sync fails."""
    late: float = 0.0
    """Share of writes that others see a moment later."""
    slow: float = 0.0
    """Share of jobs and writes that take a while."""
    delete_fails: float = 0.0
    """Share of deletions that stop in the middle."""
    marker_fails: float = 0.0
    """Share of moves of the marker that fail."""
    away: float = 0.0
    """Outages per second; so are the following."""
    full: float = 0.0
    damage: float = 0.0
    """Stored frames that are altered."""
    power_cut: float = 0.0
    """The host of plane, producers and storage loses its power."""
    commit_fails: float = 0.0
    """Transactions whose sync fails; some of them are on disk after a restart."""
    two_planes: float = 0.0
    """A plane is taken for dead and replaced, and wakes up."""
    time_jumps: float = 0.0
    """A process stands still while minutes, or a week, pass for the plane."""

    @staticmethod
    def drawn(rng: Random) -> StorageFaults:
        """Each kind of trouble in half of the runs."""

        def maybe(most: float) -> float:
            return rng.random() * most if rng.random() < 0.5 else 0.0

        return StorageFaults(
            sync_fails=maybe(0.2),
            late=maybe(0.2),
            slow=maybe(0.5),
            delete_fails=maybe(0.3),
            marker_fails=maybe(0.3),
            away=maybe(0.4),
            full=maybe(0.2),
            damage=maybe(0.4),
            power_cut=maybe(0.3),
            commit_fails=maybe(0.4),
            two_planes=maybe(0.4),
            time_jumps=maybe(0.5),
        )
