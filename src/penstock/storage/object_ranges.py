"""Which object holds which bytes of a segment, and how to read many ranges with few requests.

Objects begin at multiples of 8 MiB of their segment's offsets and are numbered accordingly: the frame at 8396800 lies
in object 000001, at byte 8192. A frame above 8 MiB has an object of its own.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from penstock.storage.interface import Wanted

OBJECT_BYTES = 8 << 20
"""The most that frames sharing an object may take. A larger frame has an object of its own."""
_JOIN_BYTES = 256 << 10
"""Ranges of an object that are this close are read with one request: 50 ms of latency cost more than these bytes."""
READ_BYTES = 8 << 20
"""The most bytes of one request, unless a single range is larger: several concurrent requests are faster than one."""


@dataclass(slots=True)
class Fetch:
    """One request: a range of an object, and the buffers to fill from it (offset in the range, buffer)."""

    name: str
    start: int
    end: int
    parts: list[tuple[int, memoryview]]


_OBJECT = re.compile(r"segments/([0-9a-f]{16})/(?:begin|\d{6})")


def object_name(segment: str, number: int) -> str:
    return f"segments/{segment}/{number:06}"


def begin_name(segment: str) -> str:
    """Return the name of a segment's first object. The process that wrote it owns the segment."""
    return f"segments/{segment}/begin"


def segment_in(name: str) -> str:
    """Return the segment that an object belongs to, or "" for any other name.

    >>> segment_in("segments/3f9c21d07b6a4e58/000001"), segment_in("segments/../marker")
    ('3f9c21d07b6a4e58', '')
    """
    found = _OBJECT.fullmatch(name)
    return "" if found is None else found[1]


def following(name: str, count: int) -> list[str]:
    """Return the names of an object of a segment and of those that are written after it, `count` in total.

    >>> following("segments/3f9c21d07b6a4e58/begin", 2)
    ['segments/3f9c21d07b6a4e58/begin', 'segments/3f9c21d07b6a4e58/000000']
    """
    segment, last = name.split("/")[1:]
    number = -1 if last == "begin" else int(last)
    return [name, *(object_name(segment, number + i) for i in range(1, count))]


def fetches_for(wanted: Sequence[Wanted]) -> list[Fetch]:
    """Return the requests that read these ranges. Ranges of an object that lie close together share one.

    Of ranges (0, 10), (1000, 1100) and (5000000, 5000010) in one object, the first two share a request: reading the 990
    bytes between them is cheaper than a second round trip.
    """
    found: list[Fetch] = []
    for at, offset, view in sorted(wanted, key=lambda one: (one[0].segment, one[0].offset, one[1])):
        if not len(view):
            continue
        # By the frame's offset, not by the range's: a frame above 8 MiB lies in the one object that it begins in.
        number = at.offset // OBJECT_BYTES
        name, start = object_name(at.segment, number), offset - number * OBJECT_BYTES
        end, last = start + len(view), found[-1] if found else None
        is_near = last is not None and last.name == name and start - last.start >= 0 and start - last.end <= _JOIN_BYTES
        if last is not None and is_near and end - last.start <= READ_BYTES:
            last.parts.append((start - last.start, view))
            last.end = max(last.end, end)
        else:
            found.append(Fetch(name, start, end, [(0, view)]))
    return found
