"""Samples picked out of stored groups, as frames of their own, for ranks that cannot read storage."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from penstock.encode.gathering import OpenFrame, gather, open_frame
from penstock.encode.layout import Buffer
from penstock.errors import CorruptFrame
from penstock.storage.interface import Storage, Wanted, parse_location


@dataclass(frozen=True, slots=True)
class Pick:
    """Some samples of one group."""

    location: str
    group: str
    rows: tuple[int, ...]
    """Which samples of its frame, ascending."""


class DamagedFrame(CorruptFrame):
    """A group's frame cannot be read from storage."""

    def __init__(self, group: str, reason: str) -> None:
        super().__init__(f"group {group!r}: its frame is damaged or gone: {reason}")
        self.group = group

    def __reduce__(self) -> tuple[type[CorruptFrame], tuple[str]]:
        return CorruptFrame, (str(self),)


def gather_picks(storage: Storage, requests: Sequence[Sequence[Pick]]) -> list[memoryview]:
    """For each request one frame of exactly those samples, in that order. Every stored frame is opened once.

    Raises DamagedFrame, which names the group; Away while storage does not answer.
    """
    picks = {pick.location: pick for request in requests for pick in request}
    frames = _read_all(storage, picks)
    opened: dict[str, OpenFrame] = {}
    for location, pick in picks.items():
        try:
            opened[location] = open_frame(frames[location])
        except CorruptFrame as error:
            raise DamagedFrame(pick.group, str(error)) from None
    return [
        gather([(opened[pick.location], np.array(pick.rows, np.intp)) for pick in request])
        if request
        else memoryview(b"")
        for request in requests
    ]


def _read_all(storage: Storage, picks: dict[str, Pick]) -> dict[str, Buffer]:
    """The frames at these locations."""
    frames: dict[str, Buffer] = {}
    wanted: list[Wanted] = []
    try:
        for location in picks:
            at = parse_location(location)
            frames[location] = view = np.empty(at.size, np.uint8).data
            wanted.append((at, at.offset, view))
        storage.read_into(wanted)
    except CorruptFrame as error:  # of which group is found out one by one
        for location, pick in picks.items():
            try:
                frames[location] = storage.read(location)[0]
            except CorruptFrame as own:
                raise DamagedFrame(pick.group, str(own)) from error
    return frames
