"""What a keeper is: it keeps frames durably and gives slices of them.

Decisions are made elsewhere, from facts; a keeper knows nothing of tables, steps or ranks. It names each frame it
keeps by a *location*, which whoever decides writes down. `keep/in_memory.py` is the one to read first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from penstock.encode.gathering import OpenFrame, gather, open_frame
from penstock.encode.layout import Allocate, Buffer
from penstock.errors import CorruptFrame


@dataclass(frozen=True, slots=True)
class Pick:
    """Some samples of one group."""

    location: str
    group: str
    rows: tuple[int, ...]
    """Which samples of its frame, ascending."""


class Keeper(Protocol):
    """Keeps frames. Used by one thread at a time, but for `forget` and `sweep`, which any thread may call."""

    def keep(self, frames: Sequence[Buffer]) -> list[str]:
        """The location of each frame; all of them are durable when this returns, or it raises and none is kept."""

    def read(self, location: str) -> Buffer:
        """A frame, as it was kept; raises CorruptFrame when it is not there."""

    def take(self, requests: Sequence[Sequence[Pick]], allocate: Allocate | None = None) -> list[memoryview]:
        """For each request one frame of exactly those samples, in that order."""

    def forget(self, locations: Iterable[str]) -> None:
        """These frames are wanted no more, and count no more; `sweep` gives their space back."""

    def sweep(self) -> None:
        """Give the space of forgotten frames back: as slow as the disk is, so done beside whoever decides."""

    def retain(self, locations: Iterable[str]) -> None:
        """These are all the frames that are still wanted: what else is here was never acknowledged, or is forgotten."""

    @property
    def num_bytes(self) -> int:
        """What the frames take."""

    def close(self) -> None: ...


def take_from(
    read: Callable[[str], Buffer], requests: Sequence[Sequence[Pick]], allocate: Allocate | None
) -> list[memoryview]:
    """`take` for a keeper that can `read`: every frame is opened once, however many requests want some of it."""
    opened: dict[str, OpenFrame] = {}
    for pick in (pick for request in requests for pick in request):
        if pick.location not in opened:
            try:
                opened[pick.location] = open_frame(read(pick.location))
            except CorruptFrame as error:
                raise DamagedFrame(pick.group, str(error)) from None
    return [
        gather([(opened[pick.location], np.array(pick.rows, np.intp)) for pick in request], allocate)
        if request
        else memoryview(b"")
        for request in requests
    ]


class DamagedFrame(CorruptFrame):
    """A frame that was kept cannot be read any more."""

    def __init__(self, group: str, reason: str) -> None:
        super().__init__(f"group {group!r}: its frame is damaged or gone: {reason}")
        self.group = group

    def __reduce__(self) -> tuple[type[CorruptFrame], tuple[str]]:
        return CorruptFrame, (str(self),)
