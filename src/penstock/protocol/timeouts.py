"""Timeouts of the protocol."""

from __future__ import annotations

import numbers
from dataclasses import dataclass
from typing import Annotated, Any

from msgspec import Meta

from penstock.config import check
from penstock.errors import ConfigError, InvalidInput

_FOREVER_S = 1e9
"""Seconds from which a wait has no limit: locks and event loops of some platforms reject longer ones."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeouts:
    """How long silence may last. Every wait in the protocol is bounded by one of these, or by a live peer."""

    heartbeat_s: Annotated[
        float, Meta(gt=0, description="seconds between two signs of life of a rank or the plane")
    ] = 2.0
    peer_s: Annotated[
        float,
        Meta(
            gt=0,
            description="seconds of silence after which a process counts as dead: three missed heartbeats and five "
            "seconds of grace; every other rank then fails with the same error",
        ),
    ] = 11.0
    delivery_s: Annotated[
        float, Meta(gt=0, description="seconds from sending a step until the rank confirms that it has it or fills it")
    ] = 30.0
    plane_s: Annotated[
        float, Meta(gt=0, description="seconds that ranks and producers wait for a lost plane to come back")
    ] = 30.0
    log_s: Annotated[
        float,
        Meta(
            gt=0,
            description="seconds that the database of the log may be away before the plane ends; until then "
            "heartbeats continue and puts and steps wait",
        ),
    ] = 60.0
    resend_s: Annotated[
        float,
        Meta(
            gt=0,
            description="seconds after which an unanswered request is repeated; then after twice as long, and so on",
        ),
    ] = 1.0

    def __post_init__(self) -> None:
        check(self, "timeouts")
        if self.peer_s < 2 * self.heartbeat_s:
            raise ConfigError(
                f"timeouts: peer_s {self.peer_s} with heartbeat_s {self.heartbeat_s}; "
                "allow at least two heartbeats, or live peers will count as dead"
            )


def seconds_of(timeout: Any) -> float | None:
    """Check the `timeout` of a call. Returns None for a wait without limit. Raises InvalidInput."""
    if timeout is None:
        return None
    if isinstance(timeout, bool) or not isinstance(timeout, numbers.Real) or timeout != timeout:
        raise InvalidInput(f"timeout: {timeout!r:.60}; give seconds, or None to wait without limit")
    return float(timeout) if timeout < _FOREVER_S else None
