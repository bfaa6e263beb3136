"""Which object holds which bytes of a segment, and the requests that read many ranges with little waiting.

Objects begin at multiples of 8 MiB of their segment's offsets and are named by that: the frame at 8396800 begins in
object 000001, at byte 8192. A frame above 8 MiB has an object for itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from penstock.storage.interface import Wanted

OBJECT_BYTES = 8 << 20
"""Frames that share an object take at most this; a larger frame has one for itself."""
_JOIN_BYTES = 256 << 10
"""Ranges of an object that are this close are read with one request: 50 ms of waiting cost more than these bytes."""
READ_BYTES = 8 << 20
"""Bytes of one request, unless a single range is larger: several at a time are faster than one."""


@dataclass(slots=True)
class Fetch:
    """One request: bytes of an object, and which of them go where."""

    name: str
    start: int
    end: int
    parts: list[tuple[int, memoryview]]


def object_name(segment: str, number: int) -> str:
    return f"segments/{segment}/{number:06}"


def fetches_for(wanted: Sequence[Wanted]) -> list[Fetch]:
    """The requests for these bytes: ranges of an object that lie close together are one."""
    found: list[Fetch] = []
    for at, offset, view in sorted(wanted, key=lambda one: (one[0].segment, one[0].offset, one[1])):
        if not len(view):
            continue
        number = at.offset // OBJECT_BYTES  # of the frame: one above 8 MiB lies in the object that it begins in
        name, start = object_name(at.segment, number), offset - number * OBJECT_BYTES
        end, last = start + len(view), found[-1] if found else None
        is_near = last is not None and last.name == name and start - last.start >= 0 and start - last.end <= _JOIN_BYTES
        if last is not None and is_near and end - last.start <= READ_BYTES:
            last.parts.append((start - last.start, view))
            last.end = max(last.end, end)
        else:
            found.append(Fetch(name, start, end, [(0, view)]))
    return found
