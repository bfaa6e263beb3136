"""Reads many frames from storage, and picks samples out of them for ranks that cannot read storage themselves."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass

import numpy as np

from penstock.errors import CorruptFrame, PenstockError
from penstock.frames import Buffer, OpenFrame, gather, open_frame
from penstock.storage.interface import Storage, Wanted, parse_location

_BATCH_BYTES = 64 << 20
"""The most bytes of frames read at the same time."""


@dataclass(frozen=True, slots=True)
class Pick:
    """Some samples of one group."""

    location: str
    group: str
    rows: tuple[int, ...]
    """Indices of samples in its frame, ascending."""


class DamagedFrame(CorruptFrame):
    """A group's frame cannot be read from storage."""

    def __init__(self, group: str, reason: str) -> None:
        super().__init__(f"group {group!r}: its frame is damaged or gone: {reason}")
        self.group = group

    def __reduce__(self) -> tuple[type[CorruptFrame], tuple[str]]:
        return CorruptFrame, (str(self),)


def gather_picks(storage: Storage, requests: Sequence[Sequence[Pick]]) -> Iterator[memoryview]:
    """Yield one frame per request, with exactly its samples, in its order. Every stored frame is opened once.

    Raises DamagedFrame, which names the group, or Away if the storage does not answer. It raises before it yields the
    first frame, so that a caller has nothing to undo.
    """
    # By location: ranks of one step often need different samples of the same group.
    picks = {pick.location: pick for request in requests for pick in request}
    opened: dict[str, OpenFrame] = {}
    for pick, frame in zip(picks.values(), read_each(storage, picks), strict=True):
        try:
            if isinstance(frame, PenstockError):
                raise frame
            opened[pick.location] = open_frame(frame)
        except CorruptFrame as error:
            raise DamagedFrame(pick.group, str(error)) from None
    for request in requests:
        picked = [(opened[pick.location], np.array(pick.rows, np.intp)) for pick in request]
        yield gather(picked) if picked else memoryview(b"")


def read_each(storage: Storage, locations: Iterable[str]) -> Iterator[Buffer | PenstockError]:
    """Yield each frame, or the error why it cannot be read. Reads many at the same time if that is faster."""
    batch: list[str] = []
    size = 0
    for location in locations:
        batch.append(location)
        with suppress(CorruptFrame):  # not a location: reported for this one when it is read
            size += parse_location(location).size
        if size >= _BATCH_BYTES:
            yield from _read_batch(storage, batch)
            batch, size = [], 0
    yield from _read_batch(storage, batch)


def _read_batch(storage: Storage, locations: Sequence[str]) -> list[Buffer | PenstockError]:
    wanted: list[Wanted] = []
    try:
        for location in locations:
            at = parse_location(location)
            wanted.append((at, at.offset, np.empty(at.size, np.uint8).data))
        storage.read_into(wanted)
    except PenstockError:  # read them one by one to find out which failed
        return [_read_one(storage, location) for location in locations]
    return [view for _, _, view in wanted]


def _read_one(storage: Storage, location: str) -> Buffer | PenstockError:
    try:
        return storage.read(location)[0]
    except PenstockError as error:
        return error
