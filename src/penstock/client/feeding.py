"""Puts a recorded run into a plane again: the same groups, with the same ids, in order of arrival."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

from penstock.client.encoded_group import EncodedGroup
from penstock.client.plane import Plane
from penstock.errors import InvalidInput
from penstock.log import Awaited, GroupRow, State
from penstock.runs import RecordedRun
from penstock.storage import Gone

_BATCH, _BATCH_BYTES = 64, 64 << 20
"""Groups and bytes put at once, where recorded times do not matter."""


@dataclass(slots=True)
class Fed:
    """Counts of a feed."""

    groups: int = 0
    """Groups put and accepted."""
    known: int = 0
    """Groups the plane already had, so an interrupted feed can be started again."""
    gone: int = 0
    """Groups the recorded run freed while it was read, or dropped when their late values came."""
    num_bytes: int = 0
    late_s: float = 0.0
    """How late the last group was put."""


def feed(
    recorded: RecordedRun,
    plane: Plane,
    *,
    speed: float | None = 1.0,
    each: Callable[[GroupRow, Fed], None] = lambda _entry, _fed: None,
) -> Fed:
    """Put every group whose frame the run still has.

    `speed` 1 keeps the recorded times between arrivals, 2 halves them, None puts as fast as the plane accepts. A group
    the plane already has is not taken twice.
    """
    if speed is not None and not 0 < speed < float("inf"):
        raise InvalidInput(f"speed {speed}: must be a positive number")
    fed, began, first, awaited = Fed(), time.monotonic(), 0.0, recorded.awaited()
    for batch in _batches(recorded.in_order(), most=1 if speed is not None else _BATCH):
        first = first or batch[0].at
        due = began + (batch[0].at - first) / speed if speed is not None and batch[0].at else began
        frames = _frames(recorded, batch)
        fed.gone += len(batch) - len(frames)
        time.sleep(max(due - time.monotonic(), 0.0) if frames else 0.0)
        fed.late_s = time.monotonic() - due if speed is not None else 0.0
        encoded = [_encoded(row, frame, awaited) for row, frame in frames]
        for (entry, frame), is_new in zip(frames, plane.put_many(encoded), strict=True):
            fed.groups += is_new
            fed.known += not is_new
            fed.num_bytes += len(frame)
            each(entry, fed)
    return fed


def _encoded(row: GroupRow, frame: bytes, awaited: Mapping[str, Awaited]) -> EncodedGroup:
    """Return a group to put. If it still waits for columns, it will wait for them in the new plane too."""
    made = EncodedGroup.of_frame(row.id, frame, evaluation=row.is_evaluation)
    if row.state is not State.WAITING:
        return made
    return replace(made, advantage=awaited[row.id].advantage, filters=awaited[row.id].filters)


def _batches(entries: Iterable[GroupRow], most: int) -> Iterator[list[GroupRow]]:
    """Yield groups that are put together."""
    batch: list[GroupRow] = []
    for entry in entries:
        if batch and (len(batch) == most or sum(one.size for one in batch) + entry.size > _BATCH_BYTES):
            yield batch
            batch = []
        batch.append(entry)
    if batch:
        yield batch


def _frames(recorded: RecordedRun, batch: Sequence[GroupRow]) -> list[tuple[GroupRow, bytes]]:
    """Return the frames of groups. Those that are gone are left out."""
    found = []
    for entry in batch:
        with suppress(Gone):
            found.append((entry, recorded.complete_frame(entry.op)))
    return found
