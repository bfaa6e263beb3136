"""Which object holds which bytes of a segment, and the requests that read many ranges with little waiting.

Objects begin at multiples of 8 MiB of their segment's offsets and are named by that: the frame at 8396800 begins in
object 000001, at byte 8192. A frame above 8 MiB has an object for itself.
"""

from __future__ import annotations

import re
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


_OBJECT = re.compile(r"segments/([0-9a-f]{16})/(?:begin|\d{6})")


def object_name(segment: str, number: int) -> str:
    return f"segments/{segment}/{number:06}"


def begin_name(segment: str) -> str:
    """The object that is written first: who has it has the segment."""
    return f"segments/{segment}/begin"


def segment_in(name: str) -> str:
    """The segment that an object belongs to; empty for anything else.

    >>> segment_in("segments/3f9c21d07b6a4e58/000001"), segment_in("segments/../marker")
    ('3f9c21d07b6a4e58', '')
    """
    found = _OBJECT.fullmatch(name)
    return "" if found is None else found[1]


def following(name: str, count: int) -> list[str]:
    """An object of a segment, and those that are written after it.

    >>> following("segments/3f9c21d07b6a4e58/begin", 2)
    ['segments/3f9c21d07b6a4e58/begin', 'segments/3f9c21d07b6a4e58/000000']
    """
    segment, last = name.split("/")[1:]
    number = -1 if last == "begin" else int(last)
    return [name, *(object_name(segment, number + i) for i in range(1, count))]


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
