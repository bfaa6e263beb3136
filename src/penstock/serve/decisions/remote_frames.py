"""Frames that keepers on other nodes have, as the engine sees them: it names them, and lets them be forgotten."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from penstock.encode.layout import Allocate, Buffer
from penstock.errors import StorageError
from penstock.keep.keeper import Pick
from penstock.send.roster import Roster


class RemoteFrames:
    """A `Keeper` whose frames are elsewhere: nothing is kept or read through the plane."""

    def __init__(self, roster: Roster) -> None:
        self.roster = roster

    def keep(self, frames: Sequence[Buffer]) -> list[str]:
        raise self._elsewhere(len(frames))

    def read(self, location: str) -> Buffer:
        raise self._elsewhere(location)

    def take(self, requests: Sequence[Sequence[Pick]], allocate: Allocate | None = None) -> list[memoryview]:
        raise self._elsewhere(len(requests), allocate)

    def _elsewhere(self, *_what: object) -> StorageError:
        return StorageError("this plane's frames are with keepers; put through one, take from them")

    def forget(self, locations: Iterable[str]) -> None:
        self.roster.forget(locations)

    def sweep(self) -> None:
        """Keepers do that."""

    def retain(self, locations: Iterable[str]) -> None:
        self.roster.retain(locations)

    @property
    def num_bytes(self) -> int:
        """Nothing of it is on the plane's disk."""
        return 0

    def close(self) -> None:
        """Nothing is left to do."""
