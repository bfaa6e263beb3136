"""Samples picked out of stored groups, as frames of their own, for ranks that cannot read storage."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from penstock.encode.gathering import OpenFrame, gather, open_frame
from penstock.errors import CorruptFrame
from penstock.storage.interface import Storage


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
    opened: dict[str, OpenFrame] = {}
    for pick in (pick for request in requests for pick in request):
        if pick.location not in opened:
            try:
                opened[pick.location] = open_frame(storage.read(pick.location)[0])
            except CorruptFrame as error:
                raise DamagedFrame(pick.group, str(error)) from None
    return [
        gather([(opened[pick.location], np.array(pick.rows, np.intp)) for pick in request])
        if request
        else memoryview(b"")
        for request in requests
    ]
