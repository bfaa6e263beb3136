"""Where the copies of a frame are, as the log writes it down: `node-a.3f9c21#12,node-b.77ab01#7`.

Each keeper numbers the frames it keeps and never uses a number twice, so a copy that was forgotten can never be taken
for one that was kept since.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

import numpy as np

from penstock.errors import CorruptFrame
from penstock.send.keeper_messages import Copy
from penstock.send.messages import Buffer, Frames

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,99}")
"""Of a keeper."""
_COPY = re.compile(r"([A-Za-z0-9][A-Za-z0-9_.-]{0,99})#(\d{1,18})")


def location_of(copies: Iterable[Copy]) -> str:
    """
    >>> location_of([("a.1", 12), ("b.2", 7)])
    'a.1#12,b.2#7'
    """
    return ",".join(f"{name}#{number}" for name, number in copies)


def copies_of(location: str) -> tuple[Copy, ...]:
    """
    >>> copies_of("a.1#12,b.2#7")
    (('a.1', 12), ('b.2', 7))
    """
    found = [_COPY.fullmatch(part) for part in location.split(",")]
    if not all(found):
        raise CorruptFrame(f"location {location[:80]!r}: not one of keepers")
    return tuple((match[1], int(match[2])) for match in found if match is not None)


def numbers_to_bytes(numbers: Iterable[int]) -> bytes:
    return np.fromiter(numbers, "<i8").tobytes()


def numbers_of(frames: Frames) -> list[int]:
    """The numbers that a payload lists; raises CorruptFrame."""
    data: Buffer = frames[0] if frames else b""
    if len(frames) > 1 or len(data) % 8:
        raise CorruptFrame(f"numbers: {len(frames)} buffers, {len(data)} bytes; one buffer of 8 bytes per number")
    found: list[int] = np.frombuffer(data, "<i8").tolist()
    return found
