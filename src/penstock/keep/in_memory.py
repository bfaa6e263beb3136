"""A keeper in memory: the specification of the others, for tests, notebooks and simulations. Nothing is durable."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from penstock.encode.layout import Allocate, Buffer
from penstock.errors import CorruptFrame
from penstock.keep.keeper import Pick, take_from


class MemoryKeeper:
    """Frames in a dictionary."""

    def __init__(self) -> None:
        self._frames: dict[str, bytes] = {}
        self._count = 0

    def keep(self, frames: Sequence[Buffer]) -> list[str]:
        locations = [str(self._count + i) for i in range(1, len(frames) + 1)]
        self._count += len(frames)
        self._frames.update(zip(locations, map(bytes, frames), strict=True))
        return locations

    def read(self, location: str) -> Buffer:
        try:
            return self._frames[location]
        except KeyError:
            raise CorruptFrame(f"location {location!r}: no frame is kept there") from None

    def replace(self, location: str, frame: bytes) -> None:
        """Put another frame in place of one that is kept, as a failing disk would."""
        self._frames[location] = frame

    def take(self, requests: Sequence[Sequence[Pick]], allocate: Allocate | None = None) -> list[memoryview]:
        return take_from(self.read, requests, allocate)

    def forget(self, locations: Iterable[str]) -> None:
        for location in locations:
            self._frames.pop(location, None)

    def sweep(self) -> None:
        """Nothing is left to do."""

    def retain(self, locations: Iterable[str]) -> None:
        wanted = set(locations)
        self._frames = {location: frame for location, frame in self._frames.items() if location in wanted}

    @property
    def num_bytes(self) -> int:
        return sum(map(len, self._frames.values()))

    def close(self) -> None:
        """Nothing is left to do."""
