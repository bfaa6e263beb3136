"""A recorded run put into a plane again: the same groups, under the same ids, in the order in which they arrived."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from penstock.client.plane import Plane
from penstock.errors import InvalidInput
from penstock.log import GroupRow
from penstock.runs import RecordedRun
from penstock.storage import Gone


@dataclass(slots=True)
class Fed:
    """What became of the groups of a recorded run."""

    groups: int = 0
    """Put and accepted."""
    known: int = 0
    """Known to the plane from before: a replay that was interrupted may be started again."""
    gone: int = 0
    """Freed by the run they come from while it was read."""
    num_bytes: int = 0
    late_s: float = 0.0
    """How far the last group was behind its time."""


def feed(
    recorded: RecordedRun,
    plane: Plane,
    *,
    speed: float | None = 1.0,
    each: Callable[[GroupRow, Fed], None] = lambda _entry, _fed: None,
) -> Fed:
    """Put every group whose frame the run still has.

    `speed` 1 keeps the times between arrivals as they were, 2 halves them; None waits for nothing but the plane. A
    group that the plane knows is not taken twice.
    """
    if speed is not None and not 0 < speed < float("inf"):
        raise InvalidInput(f"speed {speed}: must be a positive number")
    fed, began, first = Fed(), time.monotonic(), 0.0
    for entry in recorded.in_order():
        first = first or entry.at
        due = began + (entry.at - first) / speed if speed is not None and entry.at else began
        try:
            frame = recorded.frame(entry.op)
        except Gone:
            fed.gone += 1
            continue
        time.sleep(max(due - time.monotonic(), 0.0))
        fed.late_s = time.monotonic() - due if speed is not None else 0.0
        is_new = plane.put_frame(entry.id, frame, evaluation=entry.is_evaluation)
        fed.groups += is_new
        fed.known += not is_new
        fed.num_bytes += len(frame)
        each(entry, fed)
    return fed
